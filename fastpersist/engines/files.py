"""Open files and what direct I/O demands of them.

That an open with O_DIRECT succeeds proves nothing, so the alignment is asked from the kernel, and the first EINVAL of a
real transfer turns a file, and from then on its filesystem, to buffered I/O (see Engine.wait).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct

from fastpersist.engines import _libc
from fastpersist.memory.alignment import PAGE_NBYTES

log = logging.getLogger("fastpersist")

OPEN_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "recycle": os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
    "tmpfile": os.O_RDWR | getattr(os, "O_TMPFILE", 0),
}

_XFS_IOC_DIOINFO = 0x800C581E  # _IOR('X', 30, struct dioattr { u32 mem, miniosz, maxiosz }), xfs_fs.h
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # linux/magic.h: take O_DIRECT and buffer all the same

_refused_devices: set[int] = set()


class File:
    """An open file descriptor. ``direct`` says whether transfers bypass the page cache, as far as is known now.

    ``memory_alignment`` and ``offset_alignment`` (bytes) bind every address, length and offset while ``direct`` holds;
    both are 1 for a buffered file.
    """

    __slots__ = ("direct", "fileno", "memory_alignment", "offset_alignment", "path")

    def __init__(self, path: str, fileno: int, *, direct: bool, memory_alignment: int = 1, offset_alignment: int = 1) -> None:
        self.path = path
        self.fileno = fileno
        self.direct = direct
        self.memory_alignment = memory_alignment
        self.offset_alignment = offset_alignment

    def close(self) -> None:
        """Close the descriptor; harmless when repeated."""
        fileno, self.fileno = self.fileno, -1
        if fileno >= 0:
            os.close(fileno)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # an exception may have struck between open and with

    def use_page_cache(self, reason: str) -> None:
        """Turn to buffered I/O on the same descriptor, for good, and remember the filesystem's refusal."""
        flags = fcntl.fcntl(self.fileno, fcntl.F_GETFL)
        fcntl.fcntl(self.fileno, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        if self.direct:
            _refused_devices.add(os.fstat(self.fileno).st_dev)
            log.warning("%s: %s; buffered I/O is used on this filesystem from now on", self.path, reason)
        self.direct = False


def open_file(path: str, mode: str, *, direct: bool, permissions: int = 0o666) -> File:
    """Open ``path`` in a mode of OPEN_FLAGS; "tmpfile" takes a directory and makes a nameless file in it.

    "recycle" is "r+" that follows no symlink, and raises BlockingIOError instead of waiting for somebody's lease.

    ``direct`` asks for direct I/O: where the path has none the file is opened buffered, and a warning is logged.
    Raises the OSError of open(2).
    """
    if mode not in OPEN_FLAGS:
        raise ValueError(f"unknown open mode {mode!r}: use one of {', '.join(OPEN_FLAGS)}")
    flags = OPEN_FLAGS[mode]
    if not direct:
        return File(path, _open(path, flags, permissions), direct=False)
    try:
        fileno = _open(path, flags | os.O_DIRECT, permissions)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        log.warning("%s: the filesystem refuses to open files for direct I/O; buffered I/O is used", path)
        # Some filesystems create the file before they refuse the flag: a second O_EXCL would then find it.
        return File(path, _open(path, flags & ~os.O_EXCL, permissions), direct=False)
    try:
        return _describe(path, fileno)
    except BaseException:
        os.close(fileno)
        raise


def _open(path: str, flags: int, permissions: int) -> int:
    fileno = os.open(path, flags, permissions)
    if flags & os.O_NONBLOCK:
        os.set_blocking(fileno, True)  # it was meant for the open alone: a ring would fail transfers that have to wait
    return fileno


def _describe(path: str, fileno: int) -> File:
    memory, offset = _direct_alignment(fileno)
    file = File(path, fileno, direct=True, memory_alignment=max(memory, 1), offset_alignment=max(offset, 1))
    filesystem = _MEMORY_FILESYSTEMS.get(_libc.filesystem_magic(fileno))
    if filesystem is not None:
        log.info("%s: lies on %s, which has no disk to be direct with", path, filesystem)
        file.direct = False
    elif offset == 0:
        file.use_page_cache("the kernel states that this file supports no direct I/O")
    elif _refused_devices and os.fstat(fileno).st_dev in _refused_devices:
        file.direct = False
    if not file.direct:
        file.use_page_cache("")
        file.memory_alignment = file.offset_alignment = 1
    return file


def _direct_alignment(fileno: int) -> tuple[int, int]:
    """(memory, offset) alignment in bytes: what statx says, else xfs, else the device's logical block, else a page."""
    stated = _libc.statx_direct_alignment(fileno)
    if stated is not None:
        return stated
    try:
        answer = fcntl.ioctl(fileno, _XFS_IOC_DIOINFO, b"\0" * 12)
        memory, smallest, _ = struct.unpack("=III", answer)
        return memory, smallest
    except OSError:
        pass  # not xfs, or not a file on it: the next source is asked
    block = _logical_block_nbytes(os.fstat(fileno).st_dev)
    return block, block


def _logical_block_nbytes(device: int) -> int:
    base = f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for candidate in (f"{base}/queue", f"{base}/../queue"):  # a partition has no queue of its own
        try:
            with open(f"{candidate}/logical_block_size") as source:
                return int(source.read())
        except (OSError, ValueError):
            continue
    return PAGE_NBYTES
