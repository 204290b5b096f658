"""A directory of checkpoints, one for each step: which are kept, which is the latest, whose blocks are written over.

A checkpoint has its name only when it is complete and durable, so the directory's listing is the truth. What this class has
written is noted in a small file beforehand; nothing else is ever removed. Whenever a process is killed, the next one finds
complete checkpoints only, and clears away the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import inspect
import json
import logging
import os
import re
import threading
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self

from fastpersist.background import PendingSave, async_save, begin_save
from fastpersist.checkpoint import load
from fastpersist.errors import CheckpointerBusyError
from fastpersist.transfer.temporary import new_name, try_lock

log = logging.getLogger("fastpersist")

_DIGITS = 10
_ATTEMPTS = 8


class Checkpointer:
    """Saves and finds the checkpoints ``PREFIX-STEP.pt`` of one directory, and keeps as many as it is told.

    keep_last: how many of the highest steps to keep; None keeps all. keep_every: steps that are multiples of it are kept for
    good. A checkpoint is removed only when a newer one is on stable storage. recycle: the blocks of one that is to be removed
    are written over by the next save, which is faster than having fresh ones allocated; between saves it lies there under a
    hidden name. save_options: those of ``async_save`` for all saves, ``snapshot`` and ``guard`` among them.

    One process at a time may save to a directory under one prefix; any number may read.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        recycle: bool = True,
        prefix: str = "step",
        **save_options: Any,
    ) -> None:
        """The directory is made if it is missing. Raises ValueError for options that make no sense, OSError for a directory
        that cannot be made.
        """
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None, not {value}")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", prefix):
            raise ValueError(f"prefix must consist of letters, digits, '_', '.' and '-', not {prefix!r}")
        known = inspect.signature(async_save).parameters.keys() - {"obj", "path", "recycle"}
        if unknown := sorted(save_options.keys() - known):
            raise TypeError(f"Checkpointer has no option {unknown[0]!r}: beside its own it takes {', '.join(sorted(known))}")
        self.directory = os.path.abspath(os.fsdecode(directory))
        os.makedirs(self.directory, exist_ok=True)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._recycle = recycle
        self._prefix = prefix
        self._options = save_options
        self._name = re.compile(rf"{re.escape(prefix)}-(\d{{{_DIGITS},}})\.pt")
        self._spare = os.path.join(self.directory, f".{prefix}.spare")
        self._pending: list[PendingSave] = []
        self._books = threading.Lock()
        self._ledger: _Ledger | None = None

    def save(self, obj: object, step: int, *, blocking: bool = False) -> PendingSave:
        """Save ``obj`` as the checkpoint of ``step`` in the background, as async_save does; blocking=True waits for its end.

        A checkpoint of that step that this class wrote is replaced. Raises ValueError for a negative step, FileExistsError
        for a file of that name that it did not write, CheckpointerBusyError while another process saves here, and what
        async_save raises.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be a whole number from 0 on, not {step!r}")
        path = self.path(step)
        ledger = self._own_ledger()
        with self._books:
            if os.path.lexists(path) and step not in ledger.written:
                raise FileExistsError(f"{path} was not written by a Checkpointer, and is not replaced: move it away")
            ledger.add(step)
        latest = self.latest()
        if latest is not None and latest > step:
            log.warning("%s: step %d is saved while step %d exists, which stays the latest", self.directory, step, latest)
        options = {**self._options, "snapshot": False, "guard": None} if blocking else self._options
        spare = self._spare if self._recycle and os.path.lexists(self._spare) else None
        prune = partial(self._prune, step)
        pending = begin_save(obj, path, recycle=spare, must_recycle=False, afterwards=prune, **options)
        self._pending = [*(earlier for earlier in self._pending if not earlier.done()), pending]
        if blocking:
            pending.wait()
        return pending

    def path(self, step: int) -> str:
        """The file of a step."""
        return os.path.join(self.directory, f"{self._prefix}-{step:0{_DIGITS}d}.pt")

    def steps(self) -> list[int]:
        """All steps that have a checkpoint, ascending: complete ones only, also of other runs."""
        found: list[int] = []
        with os.scandir(self.directory) as entries:
            for entry in entries:
                match = self._name.fullmatch(entry.name)
                if match and entry.name == os.path.basename(self.path(int(match[1]))) and entry.is_file(follow_symlinks=True):
                    found.append(int(match[1]))
        return sorted(found)

    def latest(self) -> int | None:
        """The highest step that has a checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def load(self, step: int | None = None, **load_options: Any) -> Any:
        """Load a step's checkpoint, the latest by default; options are those of ``fastpersist.load``.

        Raises FileNotFoundError where there is none, and what load raises.
        """
        if step is not None:
            return load(self.path(step), **load_options)
        for _ in range(_ATTEMPTS):
            latest = self.latest()
            if latest is None:
                raise FileNotFoundError(f"{self.directory} holds no checkpoint {self._prefix}-STEP.pt")
            try:
                return load(self.path(latest), **load_options)
            except FileNotFoundError:  # removed just now by whoever saves here: there is a newer one
                continue
        raise FileNotFoundError(f"{self.directory}: the latest checkpoint was removed {_ATTEMPTS} times before it was opened")

    def wait(self) -> None:
        """Wait until all saves have ended. Raises the failure of the first that failed."""
        pending, self._pending = self._pending, []
        failures = [error for save in pending if (error := save.exception()) is not None and not save.cancelled()]
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for all saves, and let other processes save here. Raises as wait does; harmless when repeated."""
        try:
            self.wait()
        finally:
            ledger, self._ledger = self._ledger, None
            if ledger is not None:
                ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"A save in {self.directory} failed as well: {failure!r}")

    def _own_ledger(self) -> _Ledger:
        if self._ledger is None:
            self._ledger = _Ledger(self.directory, self._prefix)
        return self._ledger

    def _prune(self, newest: int) -> None:
        """Remove what need not be kept, now that ``newest`` is on stable storage. In the saving thread."""
        ledger = self._ledger
        if ledger is None:
            return
        with self._books:
            _remove(self._spare)  # it was refused: somebody reads it
            steps = self.steps()
            kept = set(steps if self._keep_last is None else steps[-self._keep_last :]) | {newest}
            for step in steps:
                if step in kept or step not in ledger.written or (self._keep_every and step % self._keep_every == 0):
                    continue
                try:
                    if self._recycle and not os.path.lexists(self._spare):
                        os.rename(self.path(step), self._spare)
                    else:
                        _remove(self.path(step))
                    ledger.written.discard(step)  # the file follows when a step is added
                except OSError as error:
                    log.warning("%s: the checkpoint of step %d cannot be removed (%s)", self.directory, step, error.strerror)


class _Ledger:
    """The steps that were written here, or are about to be, in a file of their own; and the right to add to them."""

    def __init__(self, directory: str, prefix: str) -> None:
        self._directory = directory
        self._path = os.path.join(directory, f".{prefix}.written.json")
        self._lock = _ProcessLock(os.path.join(directory, f".{prefix}.lock"))
        try:
            self.written = self._read()
        except BaseException:
            self._lock.release()
            raise

    def add(self, step: int) -> None:
        """Note a step before it is written: killed in between, it is known all the same."""
        if step not in self.written:
            self.written.add(step)
            self._write()

    def close(self) -> None:
        """Let others save here."""
        self._lock.release()

    def _read(self) -> set[int]:
        try:
            with open(self._path, encoding="utf-8") as file:
                return {int(step) for step in json.load(file)["written"]}
        except FileNotFoundError:
            return set()
        except (ValueError, TypeError, KeyError) as error:
            log.warning("%s cannot be read (%s): no checkpoint of earlier runs will be removed", self._path, error)
            return set()

    def _write(self) -> None:
        temporary = os.path.join(self._directory, new_name())
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                try_lock(file.fileno())  # else a save that clears away what was abandoned could take it for that
                json.dump({"version": 1, "written": sorted(self.written)}, file)
                file.flush()
                os.fsync(file.fileno())
                os.rename(temporary, self._path)
        except BaseException:
            _remove(temporary)
            raise


class _ProcessLock:
    """Held by one process at a time, and gone with it; children made by fork do not inherit it."""

    _held: ClassVar[set[tuple[int, int, int]]] = set()

    def __init__(self, path: str) -> None:
        """Raises CheckpointerBusyError where it is held."""
        # Closing any descriptor of the file would drop the lock of the whole process: so it is looked up before it is opened.
        with contextlib.suppress(FileNotFoundError):
            if self._key_of(os.stat(path)) in self._held:
                raise CheckpointerBusyError(f"{path}: another Checkpointer of this process saves here: close it first")
        self._fileno = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(self._fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(self._fileno)
                message = f"{path}: another process saves here: give each its own directory or prefix"
                raise CheckpointerBusyError(message) from None
            log.info("%s cannot be locked (%s): see to it that no other process saves here", path, error.strerror)
        self._key = self._key_of(os.fstat(self._fileno))
        self._held.add(self._key)

    def release(self) -> None:
        """Let go of it."""
        self._held.discard(self._key)
        os.close(self._fileno)

    @staticmethod
    def _key_of(status: os.stat_result) -> tuple[int, int, int]:
        return os.getpid(), status.st_dev, status.st_ino


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
