"""Memory for copies of whole models: kept from save to save, and not inherited by forked children."""

from __future__ import annotations

import os
import threading
import weakref

from fastpersist.memory.alignment import PAGE_NBYTES
from fastpersist.memory.buffers import AlignedBuffer


class StagingMemory:
    """Lends buffers of any size, and keeps those given back for the next that fits. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[AlignedBuffer] = []
        self._lent: weakref.WeakSet[AlignedBuffer] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def free_nbytes(self) -> int:
        """Bytes that are held and lent to nobody."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self._free)

    def acquire(self, nbytes: int) -> AlignedBuffer:
        """At least ``nbytes``: what is there if it is neither too small nor more than twice as large, else fresh memory."""
        with self._lock:
            fitting = [buffer for buffer in self._free if nbytes <= buffer.nbytes <= 2 * nbytes + PAGE_NBYTES]
            if fitting:
                buffer = min(fitting, key=lambda candidate: candidate.nbytes)
                self._free.remove(buffer)
            else:
                self._free.clear()  # of other sizes: two models in turn would hold the memory of both
        if not fitting:
            buffer = AlignedBuffer(nbytes)
        self._lent.add(buffer)
        return buffer

    def release(self, buffer: AlignedBuffer) -> None:
        """Keep ``buffer`` for the next save. Nothing reads or writes it any more."""
        with self._lock:
            self._lent.discard(buffer)
            self._free.append(buffer)

    def trim(self) -> None:
        """Give what is lent to nobody back to the system."""
        with self._lock:
            self._free.clear()

    def buffers(self) -> list[AlignedBuffer]:
        """All that there are, lent and free."""
        return [*self._lent, *self._free]


_shared: StagingMemory | None = None
_left_to_the_parent: list[AlignedBuffer] = []


def shared_staging() -> StagingMemory:
    """The staging memory of this process, made at first use."""
    global _shared
    if _shared is None:
        _shared = StagingMemory()
    return _shared


def _forget_in_child() -> None:
    # The pages do not exist here. The objects are kept, so that no destructor unmaps what has their addresses later.
    global _shared
    if _shared is not None:
        _left_to_the_parent.extend(_shared.buffers())
    _shared = None


os.register_at_fork(after_in_child=_forget_in_child)
