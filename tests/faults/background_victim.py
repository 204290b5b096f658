"""Processes that end, are killed or fork while they save; what must never be seen ends them with an exception.

A server imports torch once. Each line that it reads is a JSON list, a scenario and its arguments: a forked child does that
and ends as an interpreter does; the server answers with the child's status and what it wrote to stderr.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import EngineStateError, PendingSave, TransferError
from tests import gated
from tests.faults.scene import content, generation_in, renew

BLOCK_NBYTES = 65536
LIMIT_SECONDS = 60  # for hangs alone


def save(generation: int, path: Path, **options: Any) -> PendingSave:
    """async_save through the gate; the tensors are of another generation when it returns."""
    saved = content(generation)
    pending = fastpersist.async_save(
        saved, path, **{"engine": "gated", "block_nbytes": BLOCK_NBYTES, "max_pending": 2, **options}
    )
    renew(saved, 99)
    return pending


def ends(path: Path, ending: str) -> None:
    """Begin two saves, and come to an end at once."""

    def save_two(**options: Any) -> None:
        save(2, path, **options)
        save(3, path.parent / "second.pt", **options)

    if ending == "atexit":
        atexit.register(save_two)
    elif ending == "atexit without threads":
        atexit.register(save_two, engine="io_uring" if fastpersist.available()["io_uring"].usable else "gated")
        atexit.register(without_threads)  # called first
    elif ending == "thread":
        threading.Thread(target=lambda: (threading.main_thread().join(), save_two())).start()
    else:
        save_two()
        if ending == "exit":
            sys.exit(3)
        if ending == "exception":
            raise RuntimeError("Error")


def without_threads() -> None:
    """Python 3.12 and later refuse new threads when the interpreter shuts down."""
    if not fastpersist.available()["io_uring"].usable:
        return

    def refuse(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threading.Thread.start = refuse  # type: ignore[method-assign,assignment]


def fails(path: Path, how: str) -> None:
    """A save whose writes fail, and whoever asks about it in this way."""
    gate = gated.GatedEngine.gate
    gate.failing = lambda _: errno.EIO
    gate.close()
    pending = save(2, path)
    gate.wait_until_reached()
    asked = {"wait": pending.wait, "result": pending.result, "exception": pending.exception, "with": lambda: _with(pending)}
    if how in asked:
        call = gated.Call(asked[how])
        while not pending._askers:
            assert not call.returned.wait(0.001)
    if how == "callback":
        pending.add_done_callback(PendingSave.exception)
    if how == "cancel":
        assert pending.cancel()
        gate.failing = lambda _: 0
    if how == "await":
        threading.Timer(0.05, gate.open).start()
        with contextlib.suppress(TransferError):
            asyncio.run(_await(pending))
    gate.open()
    if how in asked:
        with contextlib.suppress(TransferError):
            call.result()
    if how == "next call":
        gated.wait_until_idle()
        with contextlib.suppress(TransferError):
            save(3, path)


def _with(pending: PendingSave) -> None:
    with pending:
        pass


async def _await(pending: PendingSave) -> None:
    await pending


def killed(path: Path, moment: str, number: str) -> None:
    """Be killed by a signal while the thread saves."""
    gate = gated.GatedEngine.gate
    if moment.endswith(("write", "writes")):
        gate.close(passes=0 if moment == "first write" else 5)
        save(2, path)
        gate.wait_until_reached()
        os.kill(os.getpid(), int(number))
    real = os.rename

    def rename(*arguments: Any, **options: Any) -> None:
        if moment == "after rename":
            real(*arguments, **options)
        os.kill(os.getpid(), int(number))
        threading.Event().wait()  # the signal may be handled by another thread

    os.rename = rename
    save(2, path)
    threading.Event().wait()


def in_child(work: Callable[[], None]) -> None:
    """Do ``work`` in a child; it must end by itself, well."""
    child = os.fork()
    if not child:
        status = 1
        signal.alarm(LIMIT_SECONDS // 3)  # its own: none is inherited
        try:
            work()
            status = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child failed"


def held_save(path: Path) -> tuple[PendingSave, torch.optim.Optimizer, torch.nn.Module]:
    """A guarded save in the middle of its writes."""
    model = torch.nn.Linear(400, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    gate = gated.GatedEngine.gate
    gate.close(passes=3)
    saved = {**content(2), "model": model.state_dict()}
    pending = fastpersist.async_save(saved, path, engine="gated", block_nbytes=BLOCK_NBYTES, snapshot=False, guard=optimizer)
    gate.wait_until_reached()
    return pending, optimizer, model


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()


def finish(pending: PendingSave, path: Path) -> None:
    """The parent's save goes on, and its file is right."""
    assert not pending.done()
    gated.GatedEngine.gate.open()
    assert pending.wait()
    assert not pending.result().path.endswith("child")
    found = torch.load(path)
    assert torch.load(path)["model"].keys() == {"weight", "bias"}
    del found["model"]
    fastpersist.save(found, path)


def forks(path: Path) -> None:
    """A child asks about its parent's save, trains, and ends."""
    pending, optimizer, model = held_save(path)

    def work() -> None:
        for ask in (
            pending.wait, pending.result, pending.exception, pending.cancel, lambda: pending.wait(timeout=1),
            lambda: _with(pending), lambda: pending.add_done_callback(print), lambda: asyncio.run(_await(pending)),
        ):  # fmt: skip
            with pytest.raises(EngineStateError, match="parent"):
                ask()
        assert pending.staged()
        assert "pending" in repr(pending)
        train(model, optimizer)

    weight = model.weight.detach().clone()  # type: ignore[operator]
    in_child(work)
    assert torch.equal(model.weight, weight)  # type: ignore[arg-type]
    finish(pending, path)


def saves_in_child(path: Path) -> None:
    """A child saves in the background itself, guarded and not, and exits as a program does."""
    pending, optimizer, model = held_save(path)
    target = path.parent.parent / "child.pt"

    def work() -> None:
        gated.GatedEngine.gate = gated.Gate()  # the parent's may have been locked
        for generation in (5, 6):
            save(generation, target).wait()
            assert generation_in(target) == generation
        guarded = fastpersist.async_save(model.state_dict(), target, snapshot=False, guard=optimizer)
        train(model, optimizer)
        guarded.result()
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        save(7, target, max_pending=3)
        gated.wait_until_idle()
        assert generation_in(target) == 7

    in_child(work)
    finish(pending, path)


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """A data set whose items are computed in workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((400,), float(index)) * 2


def loads_data(path: Path) -> None:
    """Workers of a DataLoader are forked and end in the middle of a save."""
    pending, _, _ = held_save(path)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    assert [batch[0, 0].item() for batch in loader] == [0.0, 4.0, 8.0, 12.0]
    finish(pending, path)


SCENARIOS: dict[str, Callable[..., None]] = {
    "ends": ends,
    "fails": fails,
    "killed": killed,
    "forks": forks,
    "saves_in_child": saves_in_child,
    "loads_data": loads_data,
}


def serve() -> list[str]:
    """In a child: what it is to do. In the server: nothing, at the end."""
    for line in iter(sys.stdin.readline, ""):
        with tempfile.TemporaryFile() as stderr:
            child = os.fork()
            if not child:
                signal.alarm(LIMIT_SECONDS)
                os.dup2(stderr.fileno(), sys.stderr.fileno())
                return json.loads(line)
            _, status = os.waitpid(child, 0)
            stderr.seek(0)
            print(json.dumps([os.waitstatus_to_exitcode(status), stderr.read().decode()]), flush=True)
    return []


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which is what is tried
    torch.set_num_threads(1)  # a process that forks should have no other threads
    gated.install(pytest.MonkeyPatch())
    todo = serve()
    if todo:
        scenario, path, *words = todo
        SCENARIOS[scenario](Path(path), *words)
