"""A small binding of liburing's C API: as much of it as the io_uring engine uses.

The shared object comes from the ``liburing`` wheel (its Python API is not used: it holds the GIL while it waits), or
else from the system's ``liburing-ffi``. Every call goes through ctypes, which releases the GIL, and gives raw results:
negated errno values, as in C.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.util
import os
from pathlib import Path

from fastpersist.errors import EngineUnavailableError

SETUP_R_DISABLED = 1 << 6  # <linux/io_uring.h>
SETUP_COOP_TASKRUN = 1 << 8
SETUP_SINGLE_ISSUER = 1 << 12
SETUP_DEFER_TASKRUN = 1 << 13
SQE_ASYNC = 1 << 4

_RING_NBYTES = 1024  # struct io_uring takes 216 bytes in liburing 2.x; the rest is room for it to grow
_SQ_KHEAD_OFFSET, _CQ_KTAIL_OFFSET = 0, 112  # in struct io_uring; fixed, since programs embed the struct
_BATCH = 64


class _Params(ctypes.Structure):
    _fields_ = [
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("rest", ctypes.c_uint32 * 27),
    ]


class _Completion(ctypes.Structure):
    _fields_ = [("user_data", ctypes.c_uint64), ("result", ctypes.c_int32), ("flags", ctypes.c_uint32)]


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


_void, _int, _unsigned, _pointer, _u64 = None, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint64
_FUNCTIONS = {
    "io_uring_queue_init_params": (_int, (_unsigned, _pointer, _pointer)),
    "io_uring_enable_rings": (_int, (_pointer,)),
    "io_uring_queue_exit": (_void, (_pointer,)),
    "io_uring_get_sqe": (_pointer, (_pointer,)),
    "io_uring_prep_write": (_void, (_pointer, _int, _pointer, _unsigned, _u64)),
    "io_uring_prep_read": (_void, (_pointer, _int, _pointer, _unsigned, _u64)),
    "io_uring_prep_write_fixed": (_void, (_pointer, _int, _pointer, _unsigned, _u64, _int)),
    "io_uring_prep_read_fixed": (_void, (_pointer, _int, _pointer, _unsigned, _u64, _int)),
    "io_uring_sqe_set_data64": (_void, (_pointer, _u64)),
    "io_uring_sqe_set_flags": (_void, (_pointer, _unsigned)),
    "io_uring_submit": (_int, (_pointer,)),
    "io_uring_wait_cqes": (_int, (_pointer, _pointer, _unsigned, _pointer, _pointer)),
    "io_uring_peek_batch_cqe": (_unsigned, (_pointer, _pointer, _unsigned)),
    "io_uring_cq_advance": (_void, (_pointer, _unsigned)),
    "io_uring_register_buffers": (_int, (_pointer, _pointer, _unsigned)),
    "io_uring_unregister_buffers": (_int, (_pointer,)),
}

_WITH_THE_GIL = (
    "io_uring_get_sqe", "io_uring_prep_write", "io_uring_prep_read", "io_uring_prep_write_fixed", "io_uring_prep_read_fixed",
    "io_uring_sqe_set_data64", "io_uring_sqe_set_flags", "io_uring_peek_batch_cqe", "io_uring_cq_advance",
)  # fmt: skip
"""They touch a few bytes and never wait. A thread that lets go of the GIL waits up to 5 ms for another to give it back."""


def _candidates() -> list[str]:
    """Shared objects to try, in order. The wheel's package is located without being imported."""
    found: list[str] = []
    spec = importlib.util.find_spec("liburing")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found += [str(path) for path in sorted(Path(folder).glob("liburing*.so"))]
    return [*found, "liburing-ffi.so.2"]


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its functions declared. Raises EngineUnavailableError naming what was tried."""
    tried: list[str] = []
    for candidate in _candidates():
        try:
            library = ctypes.CDLL(candidate)
        except OSError as error:
            tried.append(f"{candidate}: {error}")
            continue
        missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
        if missing:
            tried.append(f"{candidate}: lacks {', '.join(missing)}")
            continue
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(ctypes.PyDLL(candidate) if name in _WITH_THE_GIL else library, name)
            function.restype, function.argtypes = result, arguments
            setattr(library, name, function)
        return library
    raise EngineUnavailableError(
        "io_uring",
        f"no usable liburing ({'; '.join(tried)})",
        "pip install liburing (x86-64), or install the system's package (Debian: apt-get install liburing2)",
    )


class Ring:
    """One ring: prepare, submit, wait, take. All results are checked here or handed up; nothing is retried."""

    def __init__(self, entries: int, flags: int) -> None:
        """Raises OSError with the kernel's errno."""
        self._library = load()
        self._closed = False
        self._memory = ctypes.create_string_buffer(_RING_NBYTES)
        self.address = ctypes.addressof(self._memory)
        parameters = _Params(flags=flags)
        code = self._library.io_uring_queue_init_params(entries, self.address, ctypes.byref(parameters))
        if code < 0:
            raise OSError(-code, os.strerror(-code))
        self._consumed = ctypes.c_uint32.from_address(ctypes.c_uint64.from_address(self.address + _SQ_KHEAD_OFFSET).value)
        self._produced = ctypes.c_uint32.from_address(ctypes.c_uint64.from_address(self.address + _CQ_KTAIL_OFFSET).value)
        self._batch = (ctypes.c_void_p * _BATCH)()
        self._first = ctypes.c_void_p()

    @property
    def inside_kernel(self) -> int:
        """Requests that the kernel has taken and not yet completed, from the ring's own counters: one completion each."""
        return (self._consumed.value - self._produced.value) & 0xFFFFFFFF

    def enable(self) -> None:
        """Make the calling thread the ring's only submitter (for SETUP_R_DISABLED). Raises OSError."""
        code = self._library.io_uring_enable_rings(self.address)
        if code < 0:
            raise OSError(-code, os.strerror(-code))

    def prepare(
        self,
        write: bool,
        fileno: int,
        address: int,
        nbytes: int,
        file_offset: int,
        ticket: int,
        flags: int,
        buffer: int | None,
    ) -> bool:
        """Fill the next submission entry; False if the ring has none free. ``buffer``: index of a registered one."""
        library = self._library
        entry = library.io_uring_get_sqe(self.address)
        if not entry:
            return False
        kind = "write" if write else "read"
        if buffer is None:
            getattr(library, f"io_uring_prep_{kind}")(entry, fileno, address, nbytes, file_offset)
        else:
            getattr(library, f"io_uring_prep_{kind}_fixed")(entry, fileno, address, nbytes, file_offset, buffer)
        library.io_uring_sqe_set_data64(entry, ticket)
        library.io_uring_sqe_set_flags(entry, flags)
        return True

    def submit(self) -> int:
        """Entries that the kernel took, or a negated errno; entries it did not take stay prepared."""
        return int(self._library.io_uring_submit(self.address))

    def wait(self, timeout: float | None, at_least: int) -> int:
        """0 when so many completions can be taken, else a negated errno (ETIME, EINTR). Submits nothing. No GIL is held."""
        limit = None
        if timeout is not None:
            limit = ctypes.byref(_Timespec(int(timeout), int(timeout % 1 * 1e9)))
        return int(self._library.io_uring_wait_cqes(self.address, ctypes.byref(self._first), at_least, limit, None))

    def take(self) -> list[tuple[int, int]]:
        """(ticket, result) of the completions at hand."""
        count = self._library.io_uring_peek_batch_cqe(self.address, self._batch, _BATCH)
        entries = [_Completion.from_address(self._batch[index] or 0) for index in range(count)]
        taken = [(entry.user_data, entry.result) for entry in entries]
        self._library.io_uring_cq_advance(self.address, count)
        return taken

    def register(self, ranges: list[tuple[int, int]]) -> int:
        """Pin (address, nbytes) ranges for prepare(buffer=index), replacing earlier ones; 0 or a negated errno."""
        self._library.io_uring_unregister_buffers(self.address)
        vector = (_Iovec * len(ranges))(*(_Iovec(address, nbytes) for address, nbytes in ranges))
        return int(self._library.io_uring_register_buffers(self.address, vector, len(ranges)))

    def close(self) -> None:
        """Unmap the ring and close its descriptor; once, however often it is called."""
        if not self._closed:
            self._closed = True  # before: a second call would close whatever has got the descriptor's number since
            self._library.io_uring_queue_exit(self.address)


RETRYABLE = (-errno.EAGAIN, -errno.EBUSY, -errno.EINTR, -errno.ENOMEM)
"""Refusals of submit that pass when completions are reaped or time goes by (io_uring_enter(2), ERRORS)."""
