"""Keeps a deep queue of requests in an engine: judges every completion, resubmits what is left of short transfers.

Memory is safe on every way out: whatever ends a run, an exception or Ctrl-C, what is in flight is waited for first, and only
then do buffers go back to the pool.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from fastpersist.engines import Completion, Engine, Request
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.transfer.device import Copies

MAX_STALLS = 100
STALL_PAUSE_SECONDS = 0.005

Failure = Callable[[Request, int, str], TransferError]
"""(request, errno, hint): the error to raise for a request that failed."""

Finished = Callable[[int], None]
"""Called when a request has ended well, with the file offset it came to: less than it asked for at the end of a file."""


@dataclass(slots=True)
class _Tag:
    """What the pipeline keeps of a request in flight."""

    finished: Finished | None
    buffer: AlignedBuffer | None
    stalls: int = 0


class Pipeline:
    """Up to ``queue_depth`` requests at a time on one engine. A context manager: leaving it, nothing is in flight.

    A request starts at once while less than half of the queue is in flight. Beyond that requests are held until there are
    enough to fill the other half, and started together: each call of the engine is a moment in which this thread has to get
    the interpreter's lock back, and a program that computes in Python lets it wait for 5 ms then.
    """

    def __init__(
        self,
        engine: Engine,
        pool: BufferPool,
        *,
        queue_depth: int,
        failure: Failure,
        moved: Callable[[int], None],
        copies: Copies | None = None,
        together: int | None = None,
    ) -> None:
        """``moved`` is told the bytes of each completed transfer. ``copies`` use borrowed buffers too. ``together``: how
        many requests are held, at most half of the queue.
        """
        self._engine = engine
        self._pool = pool
        self._queue_depth = queue_depth
        self.together = max(1, queue_depth // 2 if together is None else min(together, queue_depth // 2))
        self._held: list[Request] = []
        self._failure = failure
        self._moved = moved
        self._copies = copies
        self._lent: set[AlignedBuffer] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.clear()  # what was never started; it may refer to whoever has this pipeline
        try:
            self._engine.drain()
        finally:
            try:
                if self._copies is not None:
                    self._copies.drain()
            finally:
                self._release_idle_buffers()

    def _release_idle_buffers(self) -> None:
        # An interrupt may strike before drain has begun. What is in flight then keeps its buffers, and the pool its count.
        if not self._engine.in_flight:
            for buffer in self._lent:
                # Another may have struck just after it was given back.
                if self._pool.lends(buffer) and not (self._copies is not None and self._copies.uses(buffer)):
                    self._pool.release(buffer)
        self._lent.clear()

    def submit(self, *requests: Request, buffer: AlignedBuffer | None = None, finished: Finished | None = None) -> None:
        """Have requests, at most ``together`` of them, started as soon as there is room.

        ``buffer``, if it came from ``borrow``, goes back when its request ends; ``finished`` is told the end of each.
        """
        self._held += [request.tagged(_Tag(finished, buffer)) for request in requests]
        if len(self._held) >= self.together or self._engine.in_flight < self.together:
            self.start_held()

    def start_held(self) -> None:
        """Start what has been submitted, and wait for the room that it takes."""
        if self._held:
            held, self._held = self._held, []
            self.make_room(len(held))
            self._engine.submit(*held)

    def make_room(self, requests: int = 1) -> None:
        """Wait until so many more requests may start."""
        while (missing := self._engine.in_flight + requests - self._queue_depth) > 0:
            self._reap(missing)

    def finish(self) -> None:
        """Wait until every request has ended well. Raises the failure of the first that has not."""
        self.start_held()
        while self._engine.in_flight:
            self._reap(min(self.together, self._engine.in_flight))

    def borrow(self, nbytes: int) -> AlignedBuffer:
        """A buffer from the pool, waiting for requests of this pipeline to give one back where that is needed."""
        while (buffer := self._pool.try_acquire(nbytes)) is None:
            self.start_held()
            if not self._engine.in_flight:
                buffer = self._pool.acquire(nbytes)  # other saves and loads hold the whole pool
                break
            self.reap()
        self._lent.add(buffer)
        return buffer

    def try_borrow(self, nbytes: int) -> AlignedBuffer | None:
        """A buffer from the pool, or None: without waiting, but after a look at which requests have ended."""
        buffer = self._pool.try_acquire(nbytes)
        if buffer is None:
            self.reap(timeout=0.0)
            buffer = self._pool.try_acquire(nbytes)
        if buffer is not None:
            self._lent.add(buffer)
        return buffer

    def give_back(self, buffer: AlignedBuffer) -> None:
        """Return a borrowed buffer that no request uses any more."""
        self._pool.release(buffer)
        self._lent.discard(buffer)

    def reap(self, timeout: float | None = None) -> None:
        """Wait for at least one completion, unless ``timeout`` seconds pass, and act on all that are there."""
        self.start_held()
        self._reap(1, timeout)

    def _reap(self, at_least: int, timeout: float | None = None) -> None:
        for completion in self._engine.wait(min_completions=at_least, timeout=timeout):
            self._settle(completion, completion.request.tag)

    def _settle(self, completion: Completion, tag: _Tag) -> None:
        request = completion.request
        if completion.error is not None:
            raise self._failure(request, completion.error.errno or errno.EIO, "") from completion.error
        self._moved(completion.transferred)
        if completion.residual is not None:
            self._pause_if_stalled(completion, tag)
            self._engine.submit(completion.residual)
            return
        if tag.finished is not None:
            tag.finished(request.file_offset + completion.transferred)
        if tag.buffer is not None:
            self.give_back(tag.buffer)

    def _pause_if_stalled(self, completion: Completion, tag: _Tag) -> None:
        if completion.transferred:
            tag.stalls = 0
            return
        tag.stalls += 1
        if tag.stalls > MAX_STALLS:
            raise self._failure(completion.request, errno.EIO, f"{MAX_STALLS} attempts made no progress")
        if tag.stalls > 1:
            time.sleep(STALL_PAUSE_SECONDS)
