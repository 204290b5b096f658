"""Ways to save an object, torch's and fastpersist's, and what is done around a save so that its time means something."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from comparison import LeftOut
from measuring import Cost, measure
from room import SPARE_MEMORY_NBYTES, available_memory_nbytes, ready_page_cache, remove_and_settle
from verifying import verify_file

import fastpersist
from fastpersist.engines import engine_class

BASELINE = "test_save_fsync"
DEFAULT_ENGINES = ("posix", "io_uring")
NOTHING, THE_FILE, FILE_AND_FOLDER = "no", "file", "file, folder"


@dataclass(frozen=True, slots=True)
class Saver:
    """One way to save.

    ``synced``: what is on stable storage when ``save`` returns. ``writes``: there is a file (or folder) afterwards, which
    ``verify`` compares with the object; it keeps ``copies`` of the object in memory meanwhile.
    """

    tag: str
    save: Callable[[object, Path], object]
    synced: str = THE_FILE
    writes: bool = True
    verify: Callable[[Path, object], None] = verify_file
    copies: int = 0

    @property
    def durable(self) -> bool:
        """Whether the content outlives a power cut."""
        return self.synced != NOTHING


def torch_save(obj: object, path: Path) -> None:
    """torch.save as it is: part of the file is still in the page cache when it returns."""
    torch.save(obj, path)


def torch_save_fsync(obj: object, path: Path) -> None:
    """torch.save, then the file's data on stable storage."""
    torch.save(obj, path)
    sync_file(path)


def torch_save_published(obj: object, path: Path) -> None:
    """torch.save under another name, synced, renamed, the folder synced: as safe as fastpersist.save."""
    temporary = path.with_suffix(".temporary")
    torch_save_fsync(obj, temporary)
    temporary.rename(path)
    sync_file(path.parent)


def sync_file(path: Path) -> None:
    """The file's data, or the folder's names, on stable storage."""
    fileno = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fileno)
    finally:
        os.close(fileno)


def fastpersist_saver(
    engine: str, *, block_nbytes: int | None = None, queue_depth: int | None = None, checksum: bool = True
) -> Saver:
    """fastpersist.save with an engine opened for each save, as a program would have it."""

    def save(obj: object, path: Path) -> fastpersist.SaveReport:
        return fastpersist.save(obj, path, engine=engine, block_nbytes=block_nbytes, queue_depth=queue_depth, checksum=checksum)

    writes = engine_class(engine).capabilities.persistent
    return Saver(f"test_fastpersist_{engine}", save, synced=FILE_AND_FOLDER if writes else NOTHING, writes=writes)


def unusable_engines(names: Sequence[str]) -> Iterator[LeftOut]:
    """Those that cannot run here. Raises ValueError for an unknown name."""
    for name in dict.fromkeys(names):
        verdict = engine_class(name).availability()
        if not verdict.usable:
            yield LeftOut(f"test_fastpersist_{name}", f"{verdict.reason} ({verdict.remedy})")


def usable_engines(names: Sequence[str]) -> Iterator[str]:
    """Those that can run here, each once; for the others a line says why not. Raises ValueError for an unknown name."""
    for left_out in unusable_engines(names):
        print(left_out, flush=True)
    yield from (name for name in dict.fromkeys(names) if engine_class(name).availability().usable)


@contextlib.contextmanager
def crc32_of_torch(enabled: bool) -> Iterator[None]:
    """Whether torch.save computes checksums meanwhile."""
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(enabled)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)


def warm_up(savers: Iterable[Saver], path: Path) -> None:
    """What a process does once (imports, pools, the first use of a library) is no part of the first round."""
    for saver in savers:
        saver.save({"tensor": torch.zeros(1 << 20)}, path)
        remove_and_settle(path)


def measure_save(saver: Saver, obj: object, path: Path, nbytes: int) -> Cost:
    """Save ``obj``, of ``nbytes``, to a fresh file and leave it there."""
    remove_and_settle(path)
    ready_page_cache(path, nbytes)  # for every saver alike, though only a buffered one gains by it
    return measure(lambda: saver.save(obj, path))


def verify_saved(saver: Saver, obj: object, nbytes: int, path: Path) -> str:
    """ "yes", or that memory does not hold what the comparison takes. Raises DifferenceError."""
    if saver.copies * nbytes + SPARE_MEMORY_NBYTES > available_memory_nbytes():
        return "no (memory)"
    saver.verify(path, obj)
    return "yes"
