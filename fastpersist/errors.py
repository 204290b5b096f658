"""Every exception that fastpersist raises on purpose; all of them are FastPersistError."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from errno import EIO

MAX_QUOTE_LENGTH = 200


class FastPersistError(Exception):
    """Base of all errors of this package."""


class EngineUnavailableError(FastPersistError):
    """A named engine cannot run on this machine. ``reason`` says why, ``remedy`` what to do about it."""

    def __init__(self, engine: str, reason: str, remedy: str) -> None:
        super().__init__(f"engine {engine!r} cannot run here: {reason}. Remedy: {remedy}")
        self.engine = engine
        self.reason = reason
        self.remedy = remedy


class RecycleRefusedError(FastPersistError, ValueError):
    """The file at ``path`` cannot be recycled: ``reason`` says why, ``remedy`` what to do. It and the target are untouched."""

    def __init__(self, path: str, reason: str, remedy: str) -> None:
        super().__init__(f"{path} cannot be recycled: {reason}. Nothing was changed. Remedy: {remedy}")
        self.path = path
        self.reason = reason
        self.remedy = remedy


class SaveCancelledError(FastPersistError):
    """A background save ended because it was cancelled. What was at its path before is still there."""


class CheckpointerBusyError(FastPersistError):
    """Another Checkpointer saves to the same directory under the same prefix."""


class EngineStateError(FastPersistError):
    """An engine was used after close, from a second thread, in a forked child, or after an interrupt."""


class AlignmentError(FastPersistError, ValueError):
    """An address, length or offset is no multiple of what direct I/O on this file demands."""


class QueueFull(FastPersistError):
    """The engine already has ``queue_depth`` requests in flight: reap completions, then submit again."""


class PoolExhausted(FastPersistError):
    """No staging buffer became free within the pool's bound in the time allowed."""


class TransferError(FastPersistError, OSError):
    """A transfer, or a system call around it, failed. ``errno`` is the true one.

    ``path`` is the file the caller asked for; ``offset`` and ``nbytes`` locate the transfer in it, ``record`` names
    the zip record at that offset, where they are known.
    """

    def __init__(
        self,
        errno: int,
        action: str,
        path: str,
        *,
        offset: int | None = None,
        nbytes: int | None = None,
        record: str | None = None,
        hint: str = "",
    ) -> None:
        where = "" if offset is None else f" at offset {offset}"
        amount = "" if nbytes is None else f" ({nbytes} bytes)"
        inside = "" if record is None else f" in record {record!r}"
        message = f"{action}{where}{amount}{inside}: {os.strerror(errno)}" + (f". {hint}" if hint else "")
        super().__init__(errno, message, path)
        self.path = path
        self.offset = offset
        self.nbytes = nbytes
        self.record = record


def brief(value: str | bytes | BaseException) -> str:
    """``value`` for a message: printable, on one line, and of bounded length whatever a hostile file put into it."""
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {brief(str(value)[:MAX_QUOTE_LENGTH])}"
    return ascii(value[:MAX_QUOTE_LENGTH]) + ("..." if len(value) > MAX_QUOTE_LENGTH else "")


@contextlib.contextmanager
def as_transfer_error(action: str, path: str, *, nbytes: int | None = None) -> Iterator[None]:
    """Raise the OSError of a system call within the block as a TransferError that says what was done to which file."""
    try:
        yield
    except TransferError:
        raise
    except OSError as error:
        raise TransferError(error.errno or EIO, action, path, nbytes=nbytes) from error


class NotDurableError(TransferError):
    """The new file is published under its name, but the directory's fsync failed: it may not survive a power cut."""


class CheckpointFormatError(FastPersistError, ValueError):
    """The file is no checkpoint, is truncated, or uses what is not supported: the message says which and where."""


class CorruptCheckpointError(CheckpointFormatError):
    """Stored bytes contradict their checksum or each other; the message names the record."""
