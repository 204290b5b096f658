"""Ways to load a checkpoint, each from a file that it could have been saved to, and files that are not in the page cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from room import remove_and_settle

import fastpersist
from fastpersist.engines import available

TORCH = "torch.load"
OURS, TORCHS, SAFETENSORS = "ours.pt", "torchs.pt", "peer.safetensors"


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to load; ``file`` is the name of the file that it reads."""

    tag: str
    file: str
    load: Callable[[Path], object]


def write_files(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """The same tensors as a fastpersist file, a torch file and, where safetensors is installed, one of those."""
    fastpersist.save(tensors, folder / OURS)
    torch.save(tensors, folder / TORCHS)
    try:
        from safetensors.torch import save_file
    except ImportError:
        return
    save_file(tensors, folder / SAFETENSORS)


def remove_files(folder: Path) -> None:
    """Delete what write_files wrote."""
    for name in (OURS, TORCHS, SAFETENSORS):
        remove_and_settle(folder / name)


def loaders(folder: Path, *, weights_only: bool) -> Iterator[Loader]:
    """torch.load first, to which the others are compared; then those that can run here."""
    yield Loader(TORCH, TORCHS, lambda path: torch.load(path, weights_only=weights_only))
    for engine in ("io_uring", "posix"):
        if available()[engine].usable:
            yield Loader(f"fastpersist, {engine}", OURS, _ours(engine, weights_only=weights_only))
    yield Loader("fastpersist, verify=True", OURS, _ours("auto", weights_only=weights_only, verify=True))
    yield Loader("fastpersist, torch's file", TORCHS, _ours("auto", weights_only=weights_only))
    if (folder / SAFETENSORS).exists():
        from safetensors.torch import load_file

        yield Loader("safetensors load_file", SAFETENSORS, load_file)


def _ours(engine: str, *, weights_only: bool, verify: bool = False) -> Callable[[Path], object]:
    return lambda path: fastpersist.load(path, engine=engine, weights_only=weights_only, verify=verify)


def drop_from_cache(path: Path) -> None:
    """Write back what is dirty, and take the file out of the page cache; root is not needed."""
    fileno = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fileno)
        os.posix_fadvise(fileno, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fileno)


def fill_cache(path: Path) -> None:
    """Read the file once, so that it lies in the page cache."""
    with path.open("rb", buffering=0) as source:
        while source.read(1 << 24):
            pass
