"""Facts: what is known of the filesystem, the devices below it and the machine, without writing a byte of data."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from fastpersist.engines import Availability, _libc, available
from fastpersist.engines.files import open_file
from fastpersist.memory.checksum import crc32
from fastpersist.memory.pages import Pages
from fastpersist.probing.devices import Device, device_chain
from fastpersist.probing.gpu import Gpu, describe_gpu
from fastpersist.probing.mounts import MEMORY_FILESYSTEMS, Mount, block_device_of, mount_of, read_mounts
from fastpersist.probing.scratch import Scratch

_SPEED_NBYTES = 64 << 20
_SPEED_ATTEMPTS = 4
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The filesystem of the directory. Sizes are bytes; free_nbytes is what this user may take."""

    kind: str
    mountpoint: str
    source: str
    options: tuple[str, ...]
    free_nbytes: int
    total_nbytes: int


@dataclass(frozen=True, slots=True)
class DirectIO:
    """What direct I/O demands there, in bytes, and who said so. ``supported`` is None where it could not be asked."""

    supported: bool | None
    memory_alignment: int | None
    offset_alignment: int | None
    found_by: str


@dataclass(frozen=True, slots=True)
class HugePages:
    """``transparent`` is the kernel's setting (always, madvise, never); the others are the pages reserved by hand."""

    transparent: str | None
    reserved: int | None
    free: int | None
    page_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Facts:
    """All of them. Rates are units of 1e9 bytes per second, of one thread. memlock_nbytes is None where it is unlimited."""

    kernel: str
    architecture: str
    cores: int
    available_memory_nbytes: int
    filesystem: Filesystem
    devices: tuple[Device, ...]
    direct_io: DirectIO
    engines: dict[str, Availability]
    memlock_nbytes: int | None
    huge_pages: HugePages
    gpu: Gpu
    memcpy_gb_per_s: float
    crc_gb_per_s: float

    @property
    def in_memory(self) -> bool:
        """Whether the filesystem has no disk."""
        return self.filesystem.kind in MEMORY_FILESYSTEMS


def collect_facts(directory: Path, scratch: Scratch | None) -> Facts:
    """Look everything up. Without a scratch file what only an open file can tell stays unknown."""
    mounts = read_mounts()
    mount = mount_of(directory, mounts)

    def device_of(path: str) -> str | None:
        return block_device_of(mount_of(os.path.dirname(path), mounts), mounts)

    number = block_device_of(mount, mounts)
    devices = () if number is None else tuple(device_chain(number, device_of))
    return Facts(
        kernel=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        available_memory_nbytes=psutil.virtual_memory().available,
        filesystem=_filesystem(directory, mount),
        devices=devices,
        direct_io=_direct_io(scratch, mount, devices),
        engines={name: verdict for name, verdict in available().items() if name not in ("kvikio", "memory", "null")},
        memlock_nbytes=_memlock_nbytes(),
        huge_pages=read_huge_pages(),
        gpu=describe_gpu(),
        memcpy_gb_per_s=_memcpy_gb_per_s(),
        crc_gb_per_s=_crc_gb_per_s(),
    )


def _filesystem(directory: Path, mount: Mount | None) -> Filesystem:
    space = os.statvfs(directory)
    known = mount or Mount("", "0:0", "unknown", "", ())
    return Filesystem(
        kind=known.kind,
        mountpoint=known.mountpoint,
        source=known.source,
        options=known.options,
        free_nbytes=space.f_bavail * space.f_frsize,
        total_nbytes=space.f_blocks * space.f_frsize,
    )


def _direct_io(scratch: Scratch | None, mount: Mount | None, devices: tuple[Device, ...]) -> DirectIO:
    if scratch is None:
        return DirectIO(None, None, None, "not known: no file can be made there to ask")
    kind = "unknown" if mount is None else mount.kind
    with open_file(scratch.path, "r+", direct=True) as file:
        if not file.direct:
            reason = f"{kind} has no disk" if kind in MEMORY_FILESYSTEMS else "refused by the filesystem"
            return DirectIO(False, None, None, reason)
        if _libc.statx_direct_alignment(file.fileno) is not None:
            found_by = "statx (STATX_DIOALIGN)"
        elif kind == "xfs":
            found_by = "ioctl (XFS_IOC_DIOINFO)"
        elif any(device.logical_block_nbytes for device in devices):
            found_by = "the device's logical block"
        else:
            found_by = "assumed: one page"
        return DirectIO(True, file.memory_alignment, file.offset_alignment, found_by)


def _memlock_nbytes() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def read_huge_pages(setting: Path = _HUGE_PAGES, meminfo: Path = _MEMINFO) -> HugePages:
    """What the kernel says; None for what it does not."""
    values: dict[str, int] = {}
    for line in _lines(meminfo):
        name, _, rest = line.partition(":")
        if rest.split() and rest.split()[0].isdigit():
            values[name] = int(rest.split()[0])
    chosen = next((line.partition("[")[2].partition("]")[0] for line in _lines(setting) if "[" in line), None)
    kibibytes = values.get("Hugepagesize")
    return HugePages(
        transparent=chosen,
        reserved=values.get("HugePages_Total"),
        free=values.get("HugePages_Free"),
        page_nbytes=None if kibibytes is None else kibibytes << 10,
    )


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _memcpy_gb_per_s() -> float:
    source, target = Pages(_SPEED_NBYTES), Pages(_SPEED_NBYTES)
    source.view[:1] = b"\x01"
    source.populate()
    target.populate()
    return _speed(lambda: np.copyto(np.frombuffer(target.view, np.uint8), np.frombuffer(source.view, np.uint8)))


def _crc_gb_per_s() -> float:
    pages = Pages(_SPEED_NBYTES)
    pages.populate()
    return _speed(lambda: crc32(pages.view))


def _speed(action: Callable[[], object]) -> float:
    """Rate of the fastest of a few runs over _SPEED_NBYTES."""
    times: list[float] = []
    for _ in range(_SPEED_ATTEMPTS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return _SPEED_NBYTES / 1e9 / max(min(times), 1e-9)
