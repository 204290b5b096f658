"""pwrite and pread in threads of the engine's own: runs everywhere, and is the baseline that the others are held to."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from fastpersist.engines import _libc
from fastpersist.engines.base import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH, Engine, Request, Write

MAX_THREADS = 16


class PosixEngine(Engine):
    """Each worker thread takes a request, makes one system call without the GIL, and reports the result.

    With a queue depth of 1 there are no threads, and submit makes the call.
    """

    name = "posix"

    def __init__(self, *, block_nbytes: int = DEFAULT_BLOCK_NBYTES, queue_depth: int = DEFAULT_QUEUE_DEPTH) -> None:
        super().__init__(block_nbytes=block_nbytes, queue_depth=queue_depth)
        self._todo: queue.SimpleQueue[tuple[int, Request] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        # Started now: Python >= 3.12 refuses new threads once the interpreter shuts down, when a last save may still run.
        work = (self._todo, self._done, self._transfer)
        self._threads: list[threading.Thread] = []
        try:
            for index in range(min(queue_depth, MAX_THREADS) if queue_depth > 1 else 0):
                thread = threading.Thread(target=_work, args=work, name=f"fastpersist-{self.name}-{index}", daemon=True)
                self._threads.append(thread)
                thread.start()
        except RuntimeError:
            self._threads.pop()  # those that there are do the work
        except BaseException:
            for _ in self._threads:
                self._todo.put(None)
            raise

    @staticmethod
    def _transfer(request: Request) -> int:
        """Make one transfer, in a worker: bytes moved, or a negated errno. Must not raise."""
        return transfer_host_memory(request)

    def _start(self, ticket: int, request: Request) -> None:
        if self._threads:
            self._todo.put((ticket, request))
        else:
            self._done.put((ticket, self._transfer(request)))

    def _collect(self, timeout: float | None, at_least: int) -> list[tuple[int, int]]:
        try:
            results = [self._done.get(timeout=timeout)]
        except queue.Empty:
            return []
        while not self._done.empty():  # nobody else takes any
            results.append(self._done.get_nowait())
        return results

    def _settle(self) -> None:
        # Nothing but the end of the workers proves that no call is using memory, once the bookkeeping is in doubt.
        self._stop_workers()

    def _shut(self) -> None:
        self._stop_workers()

    def _stop_workers(self) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()


def transfer_host_memory(request: Request) -> int:
    """Bytes moved by one system call, or a negated errno."""
    call = _libc.pwrite if isinstance(request, Write) else _libc.pread
    return call(request.file.fileno, request.address, request.nbytes, request.file_offset)


def _work(
    todo: queue.SimpleQueue[tuple[int, Request] | None],
    done: queue.SimpleQueue[tuple[int, int]],
    transfer: Callable[[Request], int],
) -> None:
    while (item := todo.get()) is not None:
        ticket, request = item
        done.put((ticket, transfer(request)))
        del item, request  # an idle worker keeps no tensor alive
