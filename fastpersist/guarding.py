"""The guard of a background save: an optimizer's next step waits until the save has let go of what the step changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

_hooks: list[tuple[Callable[[], bool], Any]] = []  # (whether it is idle, its handle)


def as_optimizers(guard: Optimizers) -> list[torch.optim.Optimizer]:
    """One or several. Raises TypeError for anything else."""
    optimizers = [guard] if isinstance(guard, torch.optim.Optimizer) else list(guard)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"guard must be a torch.optim.Optimizer or several, not {type(optimizer).__name__}")
    return optimizers


def guarded_storages(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Handles (``_cdata``) of the storages that only a step changes: those of the parameters and of the optimizers' state.

    Other tensors of a param group, a learning rate say, are changed by schedulers, between steps.
    """
    found: set[int] = set()
    for optimizer in optimizers:
        _collect([group["params"] for group in optimizer.param_groups], found)
        _collect(list(optimizer.state.values()), found)
    return found


def _collect(value: Any, found: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        # Of a kind without a single storage (sparse, a wrapper of others): left out, so it will be copied.
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            found.add(value.untyped_storage()._cdata)
    elif isinstance(value, dict):
        for member in value.values():
            _collect(member, found)
    elif isinstance(value, (list, tuple, set)):
        for member in value:
            _collect(member, found)


def hold_next_step(optimizers: Iterable[torch.optim.Optimizer], wait: Callable[[], object], idle: Callable[[], bool]) -> None:
    """Make each optimizer's next step call ``wait`` first, until ``idle()``. Hooks of earlier saves are taken away."""
    remove_idle_hooks()
    for optimizer in optimizers:
        handle = optimizer.register_step_pre_hook(_Hook(wait))
        _hooks.append((idle, handle))


def remove_idle_hooks() -> None:
    """Remove the hooks of saves that hold nothing any more. Not from within a hook: a step may be going through them."""
    for entry in [entry for entry in _hooks if entry[0]()]:
        with contextlib.suppress(ValueError):  # another thread was faster
            _hooks.remove(entry)
        entry[1].remove()


class _Hook:
    """Only waits: whoever removed it here would change what the step is iterating over."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._wait()
