"""Storages as sources of bytes: host memory is read where it lies, device memory is copied slice by slice."""

from __future__ import annotations

import numpy as np
import torch

from fastpersist.archive.layout import DATA_ALIGNMENT, Int64Array
from fastpersist.memory.alignment import PAGE_NBYTES


def residues(addresses: Int64Array, memory_alignment: int) -> Int64Array:
    """The remainder modulo 4096 that each storage's file offset shall leave (see archive.layout.plan).

    0 where the device takes the address as it is, where the data is copied anyway, and where following the address would
    misalign the data of the file for some dtype.
    """
    follow = (addresses % memory_alignment != 0) & (addresses % DATA_ALIGNMENT == 0)
    return np.where(follow, addresses % PAGE_NBYTES, 0)


def copy_from_device(storage: torch.UntypedStorage, start: int, target: memoryview) -> None:
    """Copy len(target) bytes from byte ``start`` of a device storage into host memory; returns when they are there."""
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    torch.frombuffer(target, dtype=torch.uint8).copy_(source[start : start + len(target)])
