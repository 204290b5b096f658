"""The one file that a probe works on: hidden, bounded, and gone however the probe ends.

It has no name while it is used, so that not even SIGKILL or a power cut leaves it behind: O_TMPFILE where the filesystem
has it, else a hidden name that is removed as soon as the file is open. Engines open it again through /proc/self/fd.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from fastpersist.errors import FastPersistError

SMALLEST_FILE_NBYTES = 1 << 20
FREE_SHARE = 10
"""The file takes at most one part in so many of what is free."""

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)


class ProbeError(FastPersistError):
    """Nothing can be measured there. ``reason`` says why, ``remedy`` what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}. Remedy: {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Scratch:
    """The file: its descriptor, and the path by which it can be opened again while that is open."""

    fileno: int
    path: str


def check_directory(path: Path) -> None:
    """Raises ProbeError unless ``path`` is a directory."""
    if path.is_dir():
        return
    if path.exists():
        raise ProbeError(f"{path} is a file: a probe needs a directory to write in", f"fastpersist probe {path.parent}")
    raise ProbeError(f"{path} does not exist", f"mkdir -p {path}")


def bound_nbytes(free_nbytes: int, budget_nbytes: int, memory_nbytes: int | None = None) -> int:
    """The most that the file may take: a tenth of what is free, and never more than the budget.

    ``memory_nbytes`` is the memory available, for a filesystem that lies in it. Raises ProbeError if that is too little.
    """
    free_nbytes = free_nbytes if memory_nbytes is None else min(free_nbytes, memory_nbytes)
    bound = min(free_nbytes // FREE_SHARE, budget_nbytes)
    if free_nbytes // FREE_SHARE < SMALLEST_FILE_NBYTES:
        raise ProbeError(
            f"only {free_nbytes / 1e6:.1f} MB are free, of which a probe may take a tenth",
            f"free at least {FREE_SHARE * SMALLEST_FILE_NBYTES / 1e6:.0f} MB there, or probe another directory",
        )
    if bound < SMALLEST_FILE_NBYTES:
        raise ProbeError("the budget is less than 1 MiB", "give a larger --budget-gb")
    return bound


@contextlib.contextmanager
def scratch_file(directory: Path) -> Iterator[Scratch]:
    """An empty file in ``directory``. Raises ProbeError where none can be made."""
    try:
        fileno = _open_nameless(directory)
    except OSError as error:
        raise _explained(directory, error) from error
    try:
        path = f"/proc/self/fd/{fileno}"
        if not os.path.exists(path):
            raise ProbeError("/proc is not mounted", "mount -t proc proc /proc")
        yield Scratch(fileno, path)
    finally:
        os.close(fileno)


def _open_nameless(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name = directory / f".fastpersist-{secrets.token_hex(8)}.tmp"
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        name.unlink(missing_ok=True)


def _explained(directory: Path, error: OSError) -> ProbeError:
    reason = f"no file can be made in {directory} ({error.strerror})"
    remedies = {
        errno.EROFS: f"mount -o remount,rw {_mountpoint(directory)}, or probe another directory",
        errno.ENOSPC: "free some space (df, df -i), or probe another directory",
        errno.EDQUOT: "free some of your quota, or probe another directory",
    }
    return ProbeError(reason, remedies.get(error.errno or 0, "probe a directory that you may write to"))


def _mountpoint(directory: Path) -> Path:
    absolute = directory.resolve()
    return next((path for path in (absolute, *absolute.parents) if path.is_mount()), absolute)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit(128 + number) meanwhile, so that transfers end in order and the terminal is restored.

    A signal that the process ignores stays ignored (nohup).
    """
    heeded = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, _exit) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
