"""From the records wanted to regions: which ranges of the file are read into which memory.

A region is a range of the file, rounded out to whole pages, that is read into pages of its own in one piece. Whatever lies
at the same distance from a page in the file lies so in memory: nothing has to be copied out of a region, its storages are
views into it. Large storages get a region each; small ones that lie together share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fastpersist.archive.directory import Directory
from fastpersist.archive.zipformat import LOCAL_HEADER_NBYTES
from fastpersist.memory.alignment import PAGE_NBYTES, round_down, round_up

LARGE_STORAGE_NBYTES = 1 << 20
"""From here on a storage has pages of its own, which are freed with it."""
SHARED_NBYTES = 4 << 20
"""Small storages share regions of at most about this size, for the sake of huge pages: so much stays in memory while one of
them lives."""
GAP_NBYTES = 256 << 10
"""Records that are not wanted are read along with those around them up to here: another request would take as long."""
MAX_HEADER_NBYTES = LOCAL_HEADER_NBYTES + 2 * 0xFFFF
"""A local header with the longest name and the longest extra field."""


@dataclass(frozen=True, slots=True)
class Region:
    """The file's bytes from ``file_offset`` (a multiple of 4096) on, ``nbytes`` of them (up to the file's end).

    records are the places, in the directory, of those that lie in it.
    """

    file_offset: int
    nbytes: int
    records: tuple[int, ...]


def plan_regions(directory: Directory, wanted: Sequence[int], data_offsets: dict[int, int]) -> list[Region]:
    """Regions in file order that hold the records ``wanted`` (places in the directory, ascending).

    data_offsets: where the data of each large record starts; a small record's is read from its header, in the region.
    """
    headers, sizes = directory.header_offsets.tolist(), directory.nbytes.tolist()
    # Where a gap follows a record, no more of it is read than its header and data can take.
    limits = np.minimum(directory.limits, directory.header_offsets + MAX_HEADER_NBYTES + directory.nbytes).tolist()
    regions: list[Region] = []
    together: list[int] = []

    def close() -> None:
        if together:
            regions.append(_region(headers[together[0]], limits[together[-1]], tuple(together), directory.file_nbytes))
            together.clear()

    for record in wanted:
        if sizes[record] >= LARGE_STORAGE_NBYTES:
            close()
            start = data_offsets[record]
            regions.append(_region(start, start + sizes[record], (record,), directory.file_nbytes))
            continue
        if together and (
            limits[record] - headers[together[0]] > SHARED_NBYTES or headers[record] - limits[together[-1]] > GAP_NBYTES
        ):
            close()
        together.append(record)
    close()
    return regions


def is_large(nbytes: int) -> bool:
    """True for a storage that gets pages of its own."""
    return nbytes >= LARGE_STORAGE_NBYTES


def _region(start: int, stop: int, records: tuple[int, ...], file_nbytes: int) -> Region:
    file_offset = round_down(start, PAGE_NBYTES)
    return Region(file_offset, min(round_up(stop, PAGE_NBYTES), round_up(file_nbytes, PAGE_NBYTES)) - file_offset, records)
