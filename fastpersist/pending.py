"""A save in the background, as its caller sees it: how it goes, how it ended, and failures that nobody has asked about."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from fastpersist.errors import EngineStateError, SaveCancelledError
from fastpersist.reports import SaveReport
from fastpersist.saving_thread import saving_thread
from fastpersist.transfer.device import WorkSoFar, work_so_far
from fastpersist.transfer.saving import SaveJob
from fastpersist.transfer.snapshot import Snapshot, cancelled

log = logging.getLogger("fastpersist")

Callback = Callable[["PendingSave"], object]
_Work = tuple[SaveJob, contextvars.Context, WorkSoFar]


class PendingSave:
    """A save that another thread carries out. ``path`` is the file that it will replace.

    It can be awaited, and used as a context manager that waits at its end. Safe to use from several threads; a process made
    by fork cannot ask about the saves of its parent.
    """

    def __init__(
        self, job: SaveJob, snapshot: Snapshot, started: float, afterwards: Callable[[], object] | None = None
    ) -> None:
        """Made by async_save."""
        self.path = job.target
        # What the caller's streams are still to do comes before the thread's copies from devices.
        self._work: _Work | None = (job, contextvars.copy_context(), work_so_far(snapshot.flat))
        self._snapshot = snapshot
        self._started = started
        self._afterwards = afterwards
        self._process = os.getpid()
        self._lock = threading.RLock()  # entered itself: Ctrl-C inside Condition.__exit__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._done = False
        self._report: SaveReport | None = None
        self._error: BaseException | None = None
        self._askers = 0  # who will be told how it ended: they wait for that
        self._told = False
        self._logged = False
        self._callbacks: list[Callback] = []

    def done(self) -> bool:
        """True once it has ended, well or not."""
        return self._done

    def staged(self) -> bool:
        """True once every byte is in memory of ours or written: the tensors may be changed."""
        return self._process != os.getpid() or self._snapshot.is_free()

    def succeeded(self) -> bool:
        """True once the file is published, and durable if that was asked for."""
        return self._done and self._error is None

    def cancelled(self) -> bool:
        """True if it ended because of ``cancel``."""
        return isinstance(self._error, SaveCancelledError)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended; False if that takes longer than ``timeout`` seconds. Raises its failure."""
        if not self._wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def result(self, timeout: float | None = None) -> SaveReport:
        """The report, as soon as the file is published (and durable). Raises its failure, and TimeoutError."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._report is not None
        return self._report

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Its failure, None if it ended well: SaveCancelledError after ``cancel``. Raises TimeoutError."""
        if not self._wait(timeout):
            raise TimeoutError(f"{self.path}: the save has not ended within {timeout} seconds")
        return self._error

    def cancel(self) -> bool:
        """Stop it between two blocks, with the old file left in place. False if it has ended, or is being published."""
        self._check_process()
        if saving_thread().forget(self._run):
            self._end_before_it_began()
            return True
        return self._snapshot.stop(lambda: cancelled(self.path))

    def add_done_callback(self, fn: Callback) -> None:
        """Call ``fn(self)`` when it has ended, in the saving thread; at once if it has already."""
        self._check_process()
        with self._lock:
            if not self._done:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def __await__(self) -> Generator[Any, None, SaveReport]:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell(_: PendingSave) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody awaits any more
                loop.call_soon_threadsafe(end)

        with self._asking():
            self.add_done_callback(tell)
            yield from ended
            return self.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.wait()
        elif (failure := self.exception()) is not None:
            error.add_note(f"The background save to {self.path} failed as well: {failure!r}")

    def __repr__(self) -> str:
        state = "pending" if not self._done else "saved" if self._error is None else f"failed: {self._error!r}"
        return f"<PendingSave {self.path}: {state}>"

    def _wait(self, timeout: float | None) -> bool:
        self._check_process()
        with self._asking(), self._lock:
            if not self._changed.wait_for(lambda: self._done, timeout):
                return False
            self._told = True
        _forget_failure(self)
        return True

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Whoever is in the block will be told how it ended, and leaves it to the others if that does not come to pass."""
        counted = 0
        try:
            with self._lock:
                self._askers += 1
                counted = 1  # no call in between, so no interrupt
            yield
        finally:
            with self._lock:
                self._askers -= counted
            self._log_unless_asked()

    def _wait_until_staged(self) -> None:
        if self._process == os.getpid():  # a child made by fork has copies of its own
            self._snapshot.wait_until_free()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise EngineStateError(f"{self.path}: this save belongs to the parent process, which alone knows how it ends")

    def _run(self) -> None:
        """The whole save: what the thread carries out."""
        assert self._work is not None
        (job, context, devices_work), self._work = self._work, None
        snapshot = self._snapshot
        try:
            report = context.run(job.run, snapshot.flat, started=self._started, watcher=snapshot, work=devices_work)
        except BaseException as error:
            _forget_frames(error)  # they hold the tensors
            snapshot.end()
            self._finish(None, error)
        else:
            snapshot.end()
            zero_copy_nbytes = snapshot.zero_copy_nbytes
            copied_nbytes = report.nbytes - zero_copy_nbytes
            if self._afterwards is not None:
                try:
                    self._afterwards()
                except Exception:
                    log.exception("%s: what follows on the background save failed; the file is published", self.path)
            self._finish(replace(report, zero_copy_nbytes=zero_copy_nbytes, copied_nbytes=copied_nbytes), None)

    def _end_before_it_began(self) -> None:
        self._work = None
        self._snapshot.end()
        self._finish(None, cancelled(self.path))

    def _finish(self, report: SaveReport | None, error: BaseException | None) -> None:
        with self._asking():  # the callbacks may ask
            with self._lock:
                self._report, self._error, self._done = report, error, True
                if error is not None and not self.cancelled():
                    _failures.append(self)
                callbacks, self._callbacks = self._callbacks, []
                self._changed.notify_all()
            for fn in callbacks:
                self._call(fn)

    def _log_unless_asked(self) -> None:
        with self._lock:
            if self._told or self._logged or self._askers or self not in _failures:
                return
            self._logged = True
        log.error("%s: the background save failed, and nobody has asked about it yet", self.path, exc_info=self._error)

    def _call(self, fn: Callback) -> None:
        try:
            fn(self)
        except (Exception, SystemExit):  # which would end the saving thread, and no more
            log.exception("%s: a callback of the background save failed", self.path)


_failures: list[PendingSave] = []  # that nobody has asked about


def raise_what_nobody_asked_about() -> None:
    """The failure of an earlier save, if there is one that nobody will be told of otherwise."""
    for pending in _failures.copy():
        if pending._askers or not _forget_failure(pending):
            continue  # somebody else will be told, or has been
        error = pending.exception()
        assert error is not None
        error.add_note(f"This is the failure of an earlier async_save, to {pending.path}; the save asked for now was not begun")
        raise error


def _forget_failure(pending: PendingSave) -> bool:
    with contextlib.suppress(ValueError):
        _failures.remove(pending)
        return True
    return False


def _forget_frames(error: BaseException | None) -> None:
    """Drop the local variables of the frames that an exception went through, and those of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _print_failures() -> None:
    for pending in _failures:
        print(f"fastpersist: the background save to {pending.path} failed: {pending._error!r}", file=sys.stderr)


atexit.register(_print_failures)
os.register_at_fork(after_in_child=_failures.clear)
