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
from collections.abc import Iterator
from types import TracebackType
from typing import Any, ClassVar, Self

from fastpersist.background import async_save, begin_save
from fastpersist.checkpoint import load
from fastpersist.errors import CheckpointerBusyError
from fastpersist.pending import PendingSave

log = logging.getLogger("fastpersist")

_DIGITS = 10
_ATTEMPTS = 8


class Checkpointer:
    """Saves and finds the checkpoints ``PREFIX-STEP.pt`` of one directory, and keeps as many as it is told.

    keep_last: how many of the highest steps to keep; None keeps all. keep_every: steps that are multiples of it are kept for
    good. A checkpoint is removed only when a newer one is on stable storage (with durable=False: when it is published).
    recycle: the blocks of one that is to be removed are written over by the next save, which is faster than having fresh
    ones allocated; between saves it lies there under a hidden name. save_options: those of ``async_save`` for all saves,
    ``snapshot`` and ``guard`` among them.

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
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be at least 1, or None, not {value!r}")
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
        self._process = os.getpid()
        self._pending: list[PendingSave] = []
        self._books = threading.Lock()  # guards what follows
        self._under_way: list[int] = []  # steps whose saves have not ended
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
        spare = self._note(step, path)
        try:
            latest = self.latest()
            if latest is not None and latest > step:
                log.warning("%s: step %d is saved while step %d exists, which stays the latest", self.directory, step, latest)
            options = self._options
            if blocking:  # as fastpersist.save does it
                options = {**options, "snapshot": False, "guard": None, "beside_training": False}
            pending = begin_save(obj, path, recycle=spare, must_recycle=False, afterwards=self._prune, **options)
        except BaseException:
            self._forget(step)
            raise
        pending.add_done_callback(lambda _: self._forget(step))
        self._pending = [*(earlier for earlier in self._pending if not earlier.done()), pending]
        if blocking:
            try:
                pending.wait()
            finally:  # its failure has been raised: wait and close do not raise it again
                self._pending = [other for other in self._pending if other is not pending or not other.done()]
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
                if match and entry.name == os.path.basename(self.path(int(match[1]))) and _is_file(entry):
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
            return self._load(step, load_options)
        for _ in range(_ATTEMPTS):
            latest = self.latest()
            if latest is None:
                continue  # listing a large directory takes several looks, and what is replaced in between is in none of them
            with contextlib.suppress(FileNotFoundError):  # removed just now by whoever saves here: there is a newer one
                return self._load(latest, load_options)
        if latest is None:
            raise FileNotFoundError(f"{self.directory} holds no checkpoint {self._prefix}-STEP.pt")
        raise FileNotFoundError(f"{self.directory}: the latest checkpoint was removed {_ATTEMPTS} times before it was opened")

    def wait(self) -> None:
        """Wait until all saves have ended. Raises the failure of the first that failed."""
        self._begin_anew_in_child()
        pending = list(self._pending)
        failures = [error for save in pending if (error := save.exception()) is not None and not save.cancelled()]
        self._pending = [save for save in self._pending if save not in pending]
        for other in failures[1:]:
            failures[0].add_note(f"Another save failed as well: {type(other).__name__}: {other}")
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Wait for all saves, and let other processes save here. Raises as wait does; harmless when repeated."""
        try:
            self.wait()
        finally:
            if all(save.done() for save in self._pending):  # else the wait was interrupted, and others must not save here yet
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

    def _note(self, step: int, path: str) -> str | None:
        """Note in the ledger that a step will be written, and return what to recycle for it."""
        self._begin_anew_in_child()
        with self._books:
            if self._ledger is None:
                self._ledger = _Ledger(self.directory, self._prefix)
                self._ledger.written.intersection_update(self.steps())  # it may be told of steps that never were written
            if os.path.lexists(path) and step not in self._ledger.written:
                raise FileExistsError(f"{path} was not written by a Checkpointer, and is not replaced: move it away")
            self._ledger.add(step)
            # A save under way may leave a spare at its end, just before this one begins.
            recycles = self._recycle and self._keep_last is not None and (self._under_way or os.path.lexists(self._spare))
            self._under_way.append(step)
        return self._spare if recycles else None

    def _forget(self, step: int) -> None:
        """The save of a step has ended."""
        with self._books:
            self._under_way.remove(step)

    def _begin_anew_in_child(self) -> None:
        """A child made by fork has neither its parent's saves nor its right to save."""
        if self._process != os.getpid():
            self._process, self._pending, self._under_way, self._ledger = os.getpid(), [], [], None
            self._books = threading.Lock()

    def _load(self, step: int, load_options: dict[str, Any]) -> Any:
        with _held_open(self.path(step)):
            return load(self.path(step), **load_options)

    def _prune(self) -> None:
        """Remove what need not be kept, now that a checkpoint is on stable storage. In the saving thread."""
        with self._books:
            if self._ledger is None:
                return
            steps = self.steps()
            kept = {*(steps if self._keep_last is None else steps[-self._keep_last :]), *self._under_way}
            with _failure_logged(self._spare):
                _remove(self._spare)  # it was refused: somebody reads it
            for step in steps:
                if step in kept or step not in self._ledger.written or (self._keep_every and step % self._keep_every == 0):
                    continue
                with _failure_logged(self.path(step)):
                    if self._recycle and not os.path.lexists(self._spare):
                        os.rename(self.path(step), self._spare)
                    else:
                        os.unlink(self.path(step))
                    self._ledger.written.discard(step)  # the file follows when a step is added


class _Ledger:
    """The steps that were written here, or are about to be, in a file of their own; and the right to add to them."""

    def __init__(self, directory: str, prefix: str) -> None:
        self._path = os.path.join(directory, f".{prefix}.written.json")
        self._lock = _ProcessLock(os.path.join(directory, f".{prefix}.lock"))
        try:
            self.written = self._read()
            self._noted = set(self.written)
        except BaseException:
            self._lock.release()
            raise

    def add(self, step: int) -> None:
        """Note a step before it is written: killed in between, it is known all the same."""
        if step not in self.written:
            self._write(self.written | {step})
            self.written.add(step)

    def close(self) -> None:
        """Forget for good what was removed, so that a file put in its place is not taken for ours, and let others save here."""
        try:
            if self.written != self._noted:
                with _failure_logged(self._path, "written"):
                    self._write(self.written)
        finally:
            self._lock.release()

    def _read(self) -> set[int]:
        try:
            with open(self._path, encoding="utf-8") as file:
                return {int(step) for step in json.load(file)["written"]}
        except FileNotFoundError:
            return set()
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            log.warning("%s cannot be read (%s): no checkpoint of earlier runs will be removed", self._path, error)
            return set()

    def _write(self, steps: set[int]) -> None:
        temporary = f"{self._path}.tmp"  # always the same: what a killed process left is written over
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump({"version": 1, "written": sorted(steps)}, file)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self._path)
        except BaseException:
            _remove(temporary)
            raise
        self._noted = set(steps)


class _ProcessLock:
    """Held by one process at a time, and gone with it; children made by fork do not inherit it."""

    _held: ClassVar[set[tuple[int, int, int]]] = set()
    _one_at_a_time: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: str) -> None:
        """Raises CheckpointerBusyError where it is held."""
        with self._one_at_a_time:
            # Closing any descriptor of the file would drop the lock of the whole process: so it is looked up beforehand.
            with contextlib.suppress(FileNotFoundError):
                if self._key_of(os.stat(path)) in self._held:
                    raise CheckpointerBusyError(f"{path}: another Checkpointer of this process saves here: close it first")
            self._fileno = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(path)
            except BaseException:
                os.close(self._fileno)
                raise
            self._key = self._key_of(os.fstat(self._fileno))
            self._held.add(self._key)

    def _lock(self, path: str) -> None:
        try:
            fcntl.lockf(self._fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                message = f"{path}: another process saves here: give each its own directory or prefix"
                raise CheckpointerBusyError(message) from None
            log.info("%s cannot be locked (%s): see to it that no other process saves here", path, error.strerror)

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


@contextlib.contextmanager
def _failure_logged(path: str, what: str = "removed") -> Iterator[None]:
    """What fails in the block may be left undone."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be %s (%s)", path, what, error.strerror)


@contextlib.contextmanager
def _held_open(path: str) -> Iterator[None]:
    """Keep the file of this name open within the block. FileNotFoundError if it was removed.

    An open that the kernel holds up between the look at the name and the file may get what was written over it since. While
    it is open nobody recycles it: whoever opens the name within the block gets what belongs to it, or nothing.
    """
    try:
        fileno = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except BlockingIOError:  # under a lease: it had this name until just now, and is being written over
        raise FileNotFoundError(errno.ENOENT, "the checkpoint was removed while it was opened", path) from None
    try:
        yield
    finally:
        os.close(fileno)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """True for a regular file, or a symlink that leads to one."""
    with contextlib.suppress(OSError):  # a symlink that leads in a circle, or to where nobody may look
        return entry.is_file()
    return False
