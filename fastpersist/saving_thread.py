"""The one thread in which background saves are carried out, one after another; it ends when there is nothing to do."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

Task = Callable[[], None]
"""What is carried out. It raises nothing."""


class SavingThread:
    """Carries out tasks one after another. Its thread ends when there is nothing to do, and the interpreter waits for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered itself, as in PendingSave
        self._changed = threading.Condition(self._lock)
        self._turn = threading.Lock()  # held by the thread that carries out
        self._carrier = 0  # its identity
        self._queue: deque[Task] = deque()
        self._unfinished = 0  # saves, and calls that prepare one
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def place(self, max_pending: int) -> Iterator[Place]:
        """Wait until fewer saves are unfinished; the place is given up again if the body fails before it is taken."""
        place = Place(self)
        try:
            with self._lock:
                self._changed.wait_for(lambda: self._unfinished < max_pending)
                self._unfinished += 1
                place.held = True  # no call in between, so no interrupt
            yield place
        finally:
            if place.held and not place.taken:
                self._leave()

    def enqueue(self, task: Task, place: Place) -> bool:
        """Have ``task`` carried out; False if no thread is to be had for it (the interpreter ends)."""
        with self._lock:
            place.taken = True  # no call in between, so no interrupt
            self._queue.append(task)
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

    def forget(self, task: Task) -> bool:
        """Take ``task`` out of the queue; False if it has begun."""
        with self._lock:
            if task not in self._queue:
                return False
            self._queue.remove(task)
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
                while (task := self._next()) is not None:
                    task()
                    del task  # whoever waits for the next one keeps nothing of this one alive
                    self._leave()
            finally:
                self._carrier = 0

    def _next(self) -> Task | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._thread = None
            return None

    def _leave(self) -> None:
        with self._lock:
            self._unfinished -= 1
            self._changed.notify_all()


class Place:
    """Room for one more save."""

    def __init__(self, worker: SavingThread) -> None:
        self._worker = worker
        self.held = False
        self.taken = False

    def take(self, task: Task) -> bool:
        """Have ``task`` carried out; False if the caller must do so, after it has made the copies."""
        return self._worker.enqueue(task, self)


_saving_thread = SavingThread()


def saving_thread() -> SavingThread:
    """That of this process."""
    return _saving_thread


def _begin_anew_in_child() -> None:
    # The thread exists in the parent only, and its locks may have been held.
    global _saving_thread
    _saving_thread = SavingThread()


os.register_at_fork(after_in_child=_begin_anew_in_child)
