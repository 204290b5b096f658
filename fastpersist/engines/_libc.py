"""The few system calls that Python's os module lacks or emulates, through ctypes (which releases the GIL)."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
_SYS_CACHESTAT = 451  # the same number on every architecture
_Answer = ctypes.c_char * 256  # room for struct statx and for struct statfs
_STATX_DIO_OFFSET = 152  # struct statx: u32 stx_dio_mem_align, u32 stx_dio_offset_align (statx(2), Linux 6.1)

for _name in ("pwrite", "pread"):
    _function = getattr(_libc, _name)
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def pwrite(fileno: int, address: int, nbytes: int, file_offset: int) -> int:
    """Bytes written from raw memory, or a negated errno."""
    written: int = _libc.pwrite(fileno, address, nbytes, file_offset)
    return written if written >= 0 else -ctypes.get_errno()


def pread(fileno: int, address: int, nbytes: int, file_offset: int) -> int:
    """Bytes read into raw memory (0 at the end of the file), or a negated errno."""
    read: int = _libc.pread(fileno, address, nbytes, file_offset)
    return read if read >= 0 else -ctypes.get_errno()


def fallocate(fileno: int, nbytes: int) -> None:
    """Reserve blocks for the file's first ``nbytes`` and set its size; OSError where the filesystem cannot.

    Not os.posix_fallocate: glibc emulates that by writing, where the filesystem has no support.
    """
    while _libc.fallocate(fileno, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def statx_direct_alignment(fileno: int) -> tuple[int, int] | None:
    """(memory, offset) alignment in bytes for direct I/O as the kernel states it; zeros mean none, None that it is silent."""
    statx = getattr(_libc, "statx", None)
    if statx is None:  # glibc before 2.28
        return None
    buffer = _Answer()
    if statx(fileno, b"", AT_EMPTY_PATH, STATX_DIOALIGN, buffer) != 0:
        return None
    (mask,) = struct.unpack_from("=I", buffer, 0)
    if not mask & STATX_DIOALIGN:
        return None
    memory, offset = struct.unpack_from("=II", buffer, _STATX_DIO_OFFSET)
    return memory, offset


def filesystem_magic(fileno: int) -> int:
    """``f_type`` of statfs(2): which filesystem the file lies on, 0 if it cannot be told."""
    buffer = _Answer()
    if _libc.fstatfs(fileno, buffer) != 0:
        return 0
    (magic,) = struct.unpack_from("=q", buffer, 0)
    return int(magic) & 0xFFFFFFFF


def cached_nbytes(fileno: int, nbytes: int) -> int | None:
    """How many of the file's first ``nbytes`` lie in the page cache; None where the kernel cannot tell (before 6.5)."""
    span = struct.pack("=QQ", 0, nbytes)
    answer = ctypes.create_string_buffer(40)
    if _libc.syscall(_SYS_CACHESTAT, fileno, span, answer, 0) != 0:
        return None
    (pages,) = struct.unpack_from("=Q", answer, 0)
    return min(int(pages) * os.sysconf("SC_PAGE_SIZE"), nbytes)
