"""Ways to load a checkpoint, each from a file that it could have been saved to, and files in or out of the page cache."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from measuring import Cost, measure
from peers import distinct_tensors
from room import ready_memory, remove_and_settle

import fastpersist
from fastpersist.engines import available

TORCH = "torch.load"
DEFAULT_ENGINES = ("io_uring", "posix")
OURS, TORCHS, SAFETENSORS = "ours.pt", "torchs.pt", "peer.safetensors"


@dataclass(frozen=True, slots=True)
class Loader:
    """One way to load; ``file`` is the name of the file that it reads.

    ``shares``: tensors that shared memory do so again. ``reads``: the tensors have memory of their own; False where they
    lie in a mapping of the file, so that whoever looks at them first still waits for the page cache or the disk.
    """

    tag: str
    file: str
    load: Callable[[Path], object]
    shares: bool = True
    reads: bool = True


def write_files(obj: object, folder: Path, *, peers: bool = True) -> None:
    """``obj`` as a fastpersist file, a torch file and, where safetensors is installed, one of those with its tensors."""
    fastpersist.save(obj, folder / OURS)
    torch.save(obj, folder / TORCHS)
    if not peers:
        return
    try:
        from safetensors.torch import save_file
    except ImportError:
        return
    save_file(distinct_tensors(obj), folder / SAFETENSORS)


def remove_files(folder: Path) -> None:
    """Delete what write_files wrote."""
    for name in (OURS, TORCHS, SAFETENSORS):
        remove_and_settle(folder / name)


def loaders(
    folder: Path,
    *,
    weights_only: bool,
    engines: Sequence[str] = DEFAULT_ENGINES,
    device: str | None = None,
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
    variants: bool = True,
) -> Iterator[Loader]:
    """torch.load first, to which the others are compared; then those that can run here.

    ``device``: where the tensors are to be; None leaves them where they were saved. ``block_nbytes`` and ``queue_depth``
    are fastpersist's. ``variants``: those with verify=True and from torch's file as well.
    """

    def ours(engine: str, *, verify: bool = False) -> Callable[[Path], object]:
        return lambda path: fastpersist.load(
            path,
            map_location=device,
            weights_only=weights_only,
            verify=verify,
            engine=engine,
            block_nbytes=block_nbytes,
            queue_depth=queue_depth,
        )

    yield Loader(TORCH, TORCHS, lambda path: torch.load(path, weights_only=weights_only, map_location=device))
    for engine in engines:
        if engine == "auto" or available()[engine].usable:
            yield Loader(f"fastpersist, {engine}", OURS, ours(engine))
    if variants:
        yield Loader("fastpersist, verify=True", OURS, ours("auto", verify=True))
        yield Loader("fastpersist, torch's file", TORCHS, ours("auto"))
    if (folder / SAFETENSORS).exists():
        from safetensors.torch import load_file

        def theirs(path: Path) -> dict[str, torch.Tensor]:
            return load_file(path, device=device or "cpu")

        def theirs_copied(path: Path) -> dict[str, torch.Tensor]:
            return {name: tensor.clone() for name, tensor in theirs(path).items()}

        if device in (None, "cpu"):
            yield Loader("safetensors load_file, mapped", SAFETENSORS, theirs, shares=False, reads=False)
            yield Loader("safetensors load_file, copied", SAFETENSORS, theirs_copied, shares=False)
        else:
            yield Loader("safetensors load_file", SAFETENSORS, theirs, shares=False)


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


def measure_load(loader: Loader, path: Path, *, cold: bool, check: Callable[[object], None] | None = None) -> Cost:
    """Load ``path`` once, and show what was loaded to ``check``, which is not part of the time."""
    (drop_from_cache if cold else fill_cache)(path)
    ready_memory(path.stat().st_size)
    loaded: list[object] = []
    cost = measure(lambda: loaded.append(loader.load(path)))
    if check:
        check(loaded[0])
    loaded.clear()  # giving the memory back is not part of a load
    gc.collect()
    return cost
