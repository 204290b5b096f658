"""From a plan to extents: which ranges of the file are written straight from a storage, and which through a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastpersist.archive.layout import LARGE_NBYTES, ArchivePlan, Int64Array
from fastpersist.memory.alignment import round_up


@dataclass(frozen=True, slots=True)
class Direct:
    """A range of the file whose bytes lie, in order, at ``address``: the aligned interior of one storage.

    ``device`` is the CUDA device of that memory, -1 for the host's.
    """

    file_offset: int
    nbytes: int
    address: int
    record: int
    device: int = -1


@dataclass(frozen=True, slots=True)
class Assembled:
    """A range of the file that is put together in a buffer: headers, descriptors, small storages, ends of large ones."""

    file_offset: int
    nbytes: int


Extent = Direct | Assembled


def plan_extents(
    plan: ArchivePlan,
    addresses: Int64Array,
    *,
    memory_alignment: int,
    cut_nbytes: int,
    devices: Int64Array | None = None,
) -> list[Extent]:
    """Extents in file order, disjoint, that cover the file from 0 to its length rounded up to ``cut_nbytes``.

    addresses: where the engine can take each storage from, 0 if nowhere; devices: the CUDA device there, -1 for host memory.
    Every extent starts and ends at a multiple of ``cut_nbytes``, and the host address of every Direct one is a multiple of
    ``memory_alignment``; device memory is taken at any address.
    """
    extents: list[Extent] = []
    cursor = 0
    devices = np.full(len(addresses), -1) if devices is None else devices
    for direct in _interiors(plan, addresses, memory_alignment, cut_nbytes, devices):
        if cursor < direct.file_offset:
            extents.append(Assembled(cursor, direct.file_offset - cursor))
        extents.append(direct)
        cursor = direct.file_offset + direct.nbytes
    extents.append(Assembled(cursor, round_up(plan.file_nbytes, cut_nbytes) - cursor))
    return extents


def _interiors(
    plan: ArchivePlan, addresses: Int64Array, memory_alignment: int, cut_nbytes: int, devices: Int64Array
) -> Iterator[Direct]:
    device_of = np.concatenate((devices, [-1]))[plan.storages]
    of_record = np.concatenate((addresses, [0]))[plan.storages]
    starts = -(-plan.data_offsets // cut_nbytes) * cut_nbytes
    stops = (plan.data_offsets + plan.nbytes) // cut_nbytes * cut_nbytes
    interior_addresses = of_record + starts - plan.data_offsets
    eligible = (of_record > 0) & (plan.nbytes >= LARGE_NBYTES) & (starts < stops)
    eligible &= (device_of >= 0) | (interior_addresses % memory_alignment == 0)
    for record in np.flatnonzero(eligible).tolist():
        start = int(starts[record])
        yield Direct(start, int(stops[record]) - start, int(interior_addresses[record]), record, int(device_of[record]))


def cut_into_blocks(extents: list[Extent], direct_nbytes: int, assembled_nbytes: int) -> Iterator[Extent]:
    """The same ranges in pieces of at most so many bytes: each piece is one transfer."""
    for extent in extents:
        limit = direct_nbytes if isinstance(extent, Direct) else assembled_nbytes
        for start in range(0, extent.nbytes, limit):
            nbytes = min(limit, extent.nbytes - start)
            if isinstance(extent, Direct):
                yield Direct(extent.file_offset + start, nbytes, extent.address + start, extent.record, extent.device)
            else:
                yield Assembled(extent.file_offset + start, nbytes)
