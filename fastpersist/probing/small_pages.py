"""Is direct I/O slow here because the memory of programs lies scattered over small pages?

A block in such memory is a list of as many pieces as it has pages, 2048 of them in 8 MiB. The controller of a real disk walks
through the list by itself. Below virtio it is a program of the host that takes the list apart, piece by piece: on a machine
where that was measured, 4.2 GB/s from pages of 4 KiB became 5.3 GB/s from huge ones, the time to copy them there included.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from fastpersist.probing.devices import device_chain
from fastpersist.probing.mounts import block_device_of, mount_of, read_mounts

log = logging.getLogger("fastpersist")

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def slowed_by_small_pages(directory: str) -> bool:
    """True for a directory on virtio, where huge pages are for those who ask for them: for our buffers, and not for torch."""
    return _only_ours_are_huge() and _on_virtio(directory, os.stat(directory).st_dev)


@functools.cache
def _only_ours_are_huge() -> bool:
    if os.environ.get("THP_MEM_ALLOC_ENABLE") == "1":  # torch, too, looks but once (c10/core/impl/alloc_cpu.cpp)
        return False
    try:
        return "[madvise]" in _HUGE_PAGES.read_text()
    except OSError:
        return False


@functools.lru_cache(maxsize=64)
def _on_virtio(directory: str, device: int) -> bool:
    """``device`` tells apart what has been mounted at ``directory``."""
    mounts = read_mounts()
    number = block_device_of(mount_of(directory, mounts), mounts)
    slowed = number is not None and any(found.virtio for found in device_chain(number))
    if slowed:  # once: the verdict is kept
        log.info("%s: virtio takes small pages slowly, so save copies tensors to large ones (not if zero_copy=True)", directory)
    return slowed
