"""Anonymous memory, mapped for I/O: page-aligned, on huge pages where the system has them, faulted in when it is told to."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

from fastpersist.memory.alignment import PAGE_NBYTES, round_up

HUGE_PAGE_NBYTES = 2 << 20
MADV_POPULATE_WRITE = 23  # Linux 5.14, <linux/mman.h>; the mmap module does not name it

_madvise = ctypes.CDLL(None).madvise  # releases the GIL, which mmap.madvise holds
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


SHORT_COPY_NBYTES = 64 << 10  # some 5 us

_move, _move_at_once = ctypes.CDLL(None).memmove, ctypes.PyDLL(None).memmove
for _function in (_move, _move_at_once):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None


def copy_memory(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses. Long copies let go of the GIL; a short one would wait for it longer than it takes (of memory,
    that is: pages of a mapped file may have to be read first).
    """
    (_move if nbytes > SHORT_COPY_NBYTES else _move_at_once)(target, source, nbytes)


def view_memory(address: int, nbytes: int) -> memoryview:
    """A writable byte view of raw memory. The caller keeps that memory alive for as long as the view is used."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")


class Pages:
    """``nbytes`` of zeroed memory at a page-aligned ``address`` (huge-page-aligned from 2 MiB on), private to the process.

    Every holder of an address keeps a reference to the object, or to its ``view``: the mapping goes away with the last.
    """

    __slots__ = ("__weakref__", "_mapping", "address", "nbytes", "view")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = round_up(nbytes, PAGE_NBYTES)
        alignment = HUGE_PAGE_NBYTES if self.nbytes >= HUGE_PAGE_NBYTES else mmap.PAGESIZE
        slack = alignment if alignment > mmap.PAGESIZE else 0
        # Python's default would be MAP_SHARED, which gets no huge pages.
        self._mapping = mmap.mmap(-1, self.nbytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._mapping))
        start = round_up(base, alignment) - base
        self.address = base + start
        self.view = memoryview(self._mapping)[start : start + self.nbytes]
        if slack:
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small pages serve as well
                self._mapping.madvise(mmap.MADV_HUGEPAGE)

    def populate(self) -> None:
        """Fault all pages in now, without the GIL. Content is kept, so it may run beside a first use."""
        # Before Linux 5.14 it is refused; the pages are then faulted in one by one as they are used.
        _madvise(self.address, self.nbytes, MADV_POPULATE_WRITE)

    def keep_from_children(self) -> None:
        """Leave the pages out of forked children: a device may be reading or writing them at that moment."""
        self._mapping.madvise(mmap.MADV_DONTFORK)
