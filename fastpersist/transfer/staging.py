"""Storages as sources of bytes: where each lies, and a plain copy for devices that nothing better is known for."""

from __future__ import annotations

import numpy as np
import torch

from fastpersist.archive.layout import DATA_ALIGNMENT, Int64Array
from fastpersist.archive.pickling import FlatObject
from fastpersist.memory.alignment import PAGE_NBYTES
from fastpersist.transfer.cuda import CUDA


def cuda_devices(flat: FlatObject) -> Int64Array:
    """The CUDA device of each storage, -1 for those in host memory, on another device, or without bytes."""
    devices = np.full(len(flat.storages), -1, np.int64)
    for index in without_address(flat):
        devices[index] = CUDA.device_of(flat.storages[index])
    return devices


def without_address(flat: FlatObject) -> list[int]:
    """Indices of the storages that hold bytes, and not in host memory."""
    if 0 not in flat.addresses:  # the usual case is to cost nothing
        return []
    return [index for index, address in enumerate(flat.addresses) if not address and flat.storage_nbytes[index]]


def residues(addresses: Int64Array, memory_alignment: int | Int64Array) -> Int64Array:
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
