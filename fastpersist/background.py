"""``async_save``: the same save beside training, by one thread of its own, with nothing lost on the way.

The object is pickled, and what may change is copied, before ``async_save`` returns; the rest is ``SaveJob.run`` in the thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from fastpersist.archive.pickling import FlatObject, flatten
from fastpersist.engines import Engine
from fastpersist.errors import EngineStateError, SaveCancelledError
from fastpersist.guarding import Optimizers, as_optimizers, guarded_storages, hold_next_step, remove_idle_hooks
from fastpersist.memory.available import available_nbytes
from fastpersist.memory.staging import shared_staging
from fastpersist.progress import Progress
from fastpersist.reports import SaveReport
from fastpersist.transfer.device import WorkSoFar, work_so_far
from fastpersist.transfer.saving import SaveJob
from fastpersist.transfer.snapshot import Snapshot, cancelled

log = logging.getLogger("fastpersist")

Callback = Callable[["PendingSave"], object]
_Work = tuple[SaveJob, contextvars.Context, WorkSoFar]


def async_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    snapshot: bool = True,
    guard: Optimizers | None = None,
    max_staging_nbytes: int | None = None,
    max_pending: int = 1,
    engine: str = "auto",
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
    checksum: bool = True,
    durable: bool = True,
    layout: str = "auto",
    zero_copy: bool | None = True,
    recycle: str | os.PathLike[str] | None = None,
    pickle_protocol: int = 2,
    progress: bool | Progress = False,
) -> PendingSave:
    """Begin to save ``obj`` as ``save`` does, and return as soon as the caller may go on; a thread does the rest.

    snapshot=True: returns once every byte is in memory of ours or written, so that the tensors may be changed at once. Such
    memory is kept for the next save. max_staging_nbytes bounds it (default: half of the available memory, a container's limit
    included); what does not fit is written before the call returns.

    snapshot=False: nothing is copied, and no tensor may be changed until ``PendingSave.staged()`` is true or ``wait()``
    returns. guard, an optimizer or several, sees to that: the storages of its parameters and its state stay where they are,
    and its next step waits for them; all others are copied as above before the call returns (a forward pass changes the
    buffers of BatchNorm; gradients, averages and learning rates change between steps). A step that is replayed from a CUDA
    graph calls no hooks and does not wait: then use snapshot=True.

    max_pending: with so many saves unfinished the call waits for the oldest. Saves are written one after another, in the
    order of the calls. engine: a name; an open engine belongs to one thread. The other options are those of ``save``, and
    ``progress`` is called in the thread.

    zero_copy is True here unless it is given: a training needs the CPU more than the save needs the disk, and copies are on
    huge pages already.

    Raises at once what ``save`` raises before it opens a file; later failures come from the PendingSave. One that nobody has
    asked about is logged, raised by the next call of async_save, and printed when the interpreter exits.
    """
    return begin_save(
        obj, path, snapshot=snapshot, guard=guard, max_staging_nbytes=max_staging_nbytes, max_pending=max_pending,
        pickle_protocol=pickle_protocol, engine=engine, block_nbytes=block_nbytes, queue_depth=queue_depth, checksum=checksum,
        durable=durable, layout=layout, zero_copy=zero_copy, recycle=recycle, progress=progress,
    )  # fmt: skip


def begin_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    snapshot: bool = True,
    guard: Optimizers | None = None,
    max_staging_nbytes: int | None = None,
    max_pending: int = 1,
    pickle_protocol: int = 2,
    zero_copy: bool | None = True,
    afterwards: Callable[[], object] | None = None,
    **job_options: Any,
) -> PendingSave:
    """async_save with all options of SaveJob.check. ``afterwards`` is called in the thread when the file is published, before
    anybody is told.
    """
    started = time.perf_counter()
    if isinstance(job_options.get("engine"), Engine):
        raise TypeError("async_save takes the name of an engine: an open one belongs to the thread that first used it")
    if snapshot and guard is not None:
        raise ValueError("guard is for snapshot=False: with snapshot=True every tensor may be changed at once")
    if _worker.is_this_thread():
        raise RuntimeError("async_save cannot be called from the saving thread (a callback): it would wait for itself")
    if max_pending < 1:
        raise ValueError(f"max_pending must be at least 1, not {max_pending}")
    if max_staging_nbytes is not None and max_staging_nbytes < 0:
        raise ValueError(f"max_staging_nbytes must not be negative, but it is {max_staging_nbytes}")
    optimizers = [] if guard is None else as_optimizers(guard)
    job = SaveJob.check(path, zero_copy=zero_copy, **job_options)
    remove_idle_hooks()
    _raise_what_nobody_asked_about()
    with _worker.place(max_pending) as place:
        _raise_what_nobody_asked_about()  # the save that was waited for may have failed
        flat = flatten(obj, pickle_protocol)
        keep = _left_alone(flat, optimizers) if guard is not None else set() if snapshot else set(range(len(flat.storages)))
        limit = partial(_staging_limit, max_staging_nbytes)
        staged = Snapshot(flat, keep, shared_staging(), layout=job.layout, limit=limit)
        pending = PendingSave(job, staged, started, afterwards)
        try:
            if optimizers:
                hold_next_step(optimizers, pending._wait_until_staged, pending.staged)
            has_thread = place.take(pending)
            staged.copy()
            if not has_thread:
                _worker.carry_out_all()
            staged.wait_until_copied()
        except BaseException:  # Ctrl-C above all: the copies are not complete
            if place.taken:
                pending.cancel()
            else:
                pending._end_before_it_began()
            staged.end_copying()
            staged.wait_until_free()
            raise
    return pending


def _left_alone(flat: FlatObject, optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    guarded = guarded_storages(optimizers)
    return {index for index, storage in enumerate(flat.storages) if storage._cdata in guarded}


def _staging_limit(max_nbytes: int | None, nbytes: int) -> int:
    """How much of ``nbytes`` to stage. By default no more than what is at hand from the last save, or half of all there is."""
    if max_nbytes is not None:
        return max_nbytes
    at_hand = shared_staging().free_nbytes
    return nbytes if nbytes <= at_hand else (available_nbytes() + at_hand) // 2  # (a hundred system calls)


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
        if _worker.forget(self):
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
        """The whole save, in the thread."""
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


class _Worker:
    """Carries out saves one after another. Its thread ends when there is nothing to do, and the interpreter waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered itself, as in PendingSave
        self._changed = threading.Condition(self._lock)
        self._turn = threading.Lock()  # held by the thread that carries out
        self._carrier = 0  # its identity
        self._queue: deque[PendingSave] = deque()
        self._unfinished = 0  # saves, and calls that prepare one
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def place(self, max_pending: int) -> Iterator[_Place]:
        """Wait until fewer saves are unfinished; the place is given up again if the body fails before it is taken."""
        place = _Place(self)
        try:
            with self._lock:
                self._changed.wait_for(lambda: self._unfinished < max_pending)
                self._unfinished += 1
                place.held = True  # no call in between, so no interrupt
            yield place
        finally:
            if place.held and not place.taken:
                self._leave()

    def enqueue(self, pending: PendingSave, place: _Place) -> bool:
        """Have ``pending`` carried out; False if no thread is to be had for it (the interpreter ends)."""
        with self._lock:
            place.taken = True  # no call in between, so no interrupt
            self._queue.append(pending)
            if self._thread is not None:
                return True
            if not threading.main_thread().is_alive():
                return False  # nobody would wait for a new thread any more
            # No daemon: at exit the interpreter waits for its end, and with it for all saves.
            thread = threading.Thread(target=self.carry_out_all, name="fastpersist-save", daemon=False)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
            return True

    def forget(self, pending: PendingSave) -> bool:
        """Take ``pending`` out of the queue; False if it has begun."""
        with self._lock:
            if pending not in self._queue:
                return False
            self._queue.remove(pending)
        self._leave()
        return True

    def is_this_thread(self) -> bool:
        """True in the thread that saves now."""
        return self._carrier == threading.get_ident()

    def carry_out_all(self) -> None:
        """All saves in the queue, in the calling thread."""
        with self._turn:  # one after another, should an interrupt have left a thread behind that is not known here
            self._carrier = threading.get_ident()
            try:
                while (pending := self._next()) is not None:
                    pending._run()
                    del pending  # whoever waits for the next one keeps nothing of this one alive
                    self._leave()
            finally:
                self._carrier = 0

    def _next(self) -> PendingSave | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._thread = None
            return None

    def _leave(self) -> None:
        with self._lock:
            self._unfinished -= 1
            self._changed.notify_all()


class _Place:
    """Room for one more save."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self.held = False
        self.taken = False

    def take(self, pending: PendingSave) -> bool:
        """Have ``pending`` carried out; False if the caller must do so, after it has made the copies."""
        return self._worker.enqueue(pending, self)


_worker = _Worker()
_failures: list[PendingSave] = []  # that nobody has asked about


def _raise_what_nobody_asked_about() -> None:
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


def _begin_anew_in_child() -> None:
    # The thread exists in the parent only, and its locks may have been held.
    global _worker
    _worker = _Worker()
    _failures.clear()


atexit.register(_print_failures)
os.register_at_fork(after_in_child=_begin_anew_in_child)
