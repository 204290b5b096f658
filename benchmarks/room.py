"""Room for a benchmark: a folder that is gone afterwards, and disk and memory checked before anything is built."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil

from fastpersist.memory.pages import Pages

GIB = 1 << 30
# Headroom for what the sums leave out: interpreter and libraries, pools and pickles; the filesystem's own blocks.
SPARE_MEMORY_NBYTES = GIB
SPARE_DISK_NBYTES = GIB // 4
_CHUNK_NBYTES = 1 << 20
_CGROUP_ROOT = Path("/sys/fs/cgroup")


class NoRoomError(Exception):
    """The benchmark does not fit here; the message says what is short and what to do."""


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A fresh folder within ``folder``, removed with all its files however the block ends, Ctrl-C and SIGTERM included.

    ``folder`` and its parents are created where they are missing, and only those are removed again, if still empty.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _exit_on_signal) for number in heeded}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="fastpersist-benchmark-", dir=folder))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch)
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit_on_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that the folder is removed on the way out


def remove_and_settle(path: Path) -> None:
    """Delete ``path`` (file or folder), if it exists, and wait until the filesystem has recorded it.

    The next save must not pay for that.
    """
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def ready_page_cache(path: Path, nbytes: int) -> None:
    """Fill ``nbytes`` of page cache (less, if less memory is available) through a file at ``path`` that is deleted again.

    The host of a virtual machine may take back free memory within seconds. Having it given again takes a buffered save up
    to three times as long, in some rounds and not in others: a trait of the machine, and no merit of direct I/O. Only
    memory that was page cache before serves: memory that a program has touched and freed leaves the delay as it was.
    """
    chunk = bytes(_CHUNK_NBYTES)
    ready_nbytes = min(nbytes, available_memory_nbytes() - SPARE_MEMORY_NBYTES)
    with path.open("wb", buffering=0) as file:
        for _ in range(0, ready_nbytes, _CHUNK_NBYTES):
            file.write(chunk)
    remove_and_settle(path)


def ready_memory(nbytes: int) -> None:
    """Touch and free ``nbytes`` of memory, for the same reason: a load must not be the one that has it given again."""
    Pages(max(nbytes, 1)).populate()


def free_disk_nbytes(folder: Path) -> int:
    """Free space where ``folder`` lies or will lie."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return psutil.disk_usage(str(existing)).free


def available_memory_nbytes() -> int:
    """Memory that can be taken without swapping: of the machine or, if that is less, of this process's control group."""
    return min([psutil.virtual_memory().available, *_cgroup_allowances()])


def _cgroup_allowances() -> Iterator[int]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: each ancestor may set a limit
            group = _CGROUP_ROOT / path.lstrip("/")
            for level in (group, *group.parents):
                if level.is_relative_to(_CGROUP_ROOT):
                    yield from _allowance(level, "memory.max", "memory.current", "file")
        elif "memory" in controllers.split(","):  # version 1: within a container its own group is mounted at the root
            for level in (_CGROUP_ROOT / "memory" / path.lstrip("/"), _CGROUP_ROOT / "memory"):
                yield from _allowance(level, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache")


def _allowance(group: Path, limit_name: str, usage_name: str, cache_key: str) -> Iterator[int]:
    """What a group may still take; nothing where it has no limit. Its page cache counts as free, for it is given up."""
    try:
        limit = int((group / limit_name).read_text())
        usage = int((group / usage_name).read_text())
        counters = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # ValueError: the limit is "max"
        return
    yield max(0, limit - usage + int(counters.get(cache_key, 0)))


def require_room(folder: Path, *, file_nbytes: int, memory_nbytes: int) -> None:
    """Raises NoRoomError unless one file of ``file_nbytes`` fits in ``folder`` and ``memory_nbytes`` in memory."""
    shortage = find_shortage(folder, file_nbytes=file_nbytes, memory_nbytes=memory_nbytes)
    if shortage:
        raise NoRoomError(f"{shortage}: choose something smaller or another --folder")


def find_shortage(folder: Path, *, file_nbytes: int, memory_nbytes: int) -> str | None:
    """What is short, in words; None if there is room."""
    disk_nbytes, wanted_disk_nbytes = free_disk_nbytes(folder), file_nbytes + SPARE_DISK_NBYTES
    if disk_nbytes < wanted_disk_nbytes:
        return f"{wanted_disk_nbytes / GIB:.1f} GiB of disk are needed and {disk_nbytes / GIB:.1f} GiB are free in {folder}"
    available_nbytes, wanted_nbytes = available_memory_nbytes(), memory_nbytes + SPARE_MEMORY_NBYTES
    if available_nbytes < wanted_nbytes:
        return f"{wanted_nbytes / GIB:.1f} GiB of memory are needed and {available_nbytes / GIB:.1f} GiB are available"
    return None
