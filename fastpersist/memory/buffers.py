"""Buffers for transfers, lent by a bounded pool that is shared by all saves and loads of the process."""

from __future__ import annotations

import os
import threading
import time
import weakref

from fastpersist.errors import PoolExhausted
from fastpersist.memory.alignment import next_power_of_two
from fastpersist.memory.pages import Pages

SMALLEST_BUFFER_NBYTES = 64 << 10
DEFAULT_POOL_NBYTES = 64 << 20


class AlignedBuffer(Pages):
    """Pages that are resident from the start, and not inherited by forked children."""

    __slots__ = ()

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.keep_from_children()
        self.populate()


class BufferPool:
    """Lends buffers whose sizes are powers of two, never more than ``max_nbytes`` of them in all.

    Released buffers are kept for the next save. Safe to use from several threads. A buffer that is dropped without
    ``release`` (an exception between two lines) gives its share of the bound back when it is collected.
    """

    def __init__(self, max_nbytes: int = DEFAULT_POOL_NBYTES) -> None:
        self.max_nbytes = max_nbytes
        self._free: list[AlignedBuffer] = []
        self._lent: weakref.WeakSet[AlignedBuffer] = weakref.WeakSet()
        self._lock = threading.RLock()  # entered itself, which is done in C
        self._changed = threading.Condition(self._lock)
        self._waiting = 0

    @property
    def lent_nbytes(self) -> int:
        """Bytes in buffers that are lent out now."""
        return sum(buffer.nbytes for buffer in self._lent)

    @property
    def held_nbytes(self) -> int:
        """Bytes in all buffers of the pool, lent or free: never more than ``max_nbytes``."""
        return self.lent_nbytes + sum(buffer.nbytes for buffer in self._free)

    def try_acquire(self, nbytes: int) -> AlignedBuffer | None:
        """A buffer of at least ``nbytes``, or None while the bound does not allow one more.

        Raises ValueError for a buffer that could never fit under the bound.
        """
        wanted = max(next_power_of_two(nbytes), SMALLEST_BUFFER_NBYTES)
        if wanted > self.max_nbytes:
            raise ValueError(f"a buffer of {wanted} bytes exceeds the pool of {self.max_nbytes} bytes: use smaller blocks")
        with self._lock:
            buffer = self._take_free(wanted) or self._allocate(wanted)
            if buffer is not None:
                self._lent.add(buffer)
            return buffer

    def acquire(self, nbytes: int, timeout_seconds: float = 60.0) -> AlignedBuffer:
        """Like try_acquire, but waits for other users of the pool; raises PoolExhausted after ``timeout_seconds``."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            buffer = self.try_acquire(nbytes)
            if buffer is not None:
                return buffer
            with self._lock:
                self._waiting += 1
                try:
                    self._changed.wait(min(0.1, timeout_seconds))
                finally:
                    self._waiting -= 1
            if time.monotonic() > deadline:
                raise PoolExhausted(
                    f"no buffer of {nbytes} bytes became free in {timeout_seconds:.0f} s; {self.lent_nbytes} of "
                    f"{self.max_nbytes} bytes are lent to saves that do not progress"
                )

    def lends(self, buffer: AlignedBuffer) -> bool:
        """True while ``buffer`` is lent out."""
        return buffer in self._lent

    def release(self, buffer: AlignedBuffer) -> None:
        """Take back a buffer of this pool. No request that uses it may be in flight any more."""
        with self._lock:
            try:
                self._lent.remove(buffer)
            except KeyError:
                raise ValueError("this buffer is not lent by this pool") from None
            self._free.append(buffer)
            if self._waiting:
                self._changed.notify_all()

    def trim(self) -> None:
        """Give the memory of all free buffers back to the system."""
        with self._lock:
            self._free.clear()

    def _take_free(self, wanted: int) -> AlignedBuffer | None:
        for index, buffer in enumerate(self._free):
            if buffer.nbytes == wanted:
                return self._free.pop(index)
        return None

    def _allocate(self, wanted: int) -> AlignedBuffer | None:
        while self.held_nbytes + wanted > self.max_nbytes:
            if not self._free:
                return None
            self._free.pop(0)  # another size, unused for the longest time
        return AlignedBuffer(wanted)


_shared_pool: BufferPool | None = None
_left_to_the_parent: list[BufferPool | None] = []


def shared_pool() -> BufferPool:
    """The pool of this process, made at first use and shared by all saves and loads."""
    global _shared_pool
    if _shared_pool is None:
        _shared_pool = BufferPool()
    return _shared_pool


def _forget_pool_in_child() -> None:
    # MADV_DONTFORK: the buffers' pages do not exist here. The objects are kept so that no destructor unmaps, much
    # later, whatever has been mapped at those addresses since.
    global _shared_pool
    _left_to_the_parent.append(_shared_pool)
    _shared_pool = None


os.register_at_fork(after_in_child=_forget_pool_in_child)
