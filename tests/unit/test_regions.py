"""Regions: each record wanted lies in one of them, whole, at the right distance from a page, and little else does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastpersist.archive.directory import Directory
from fastpersist.memory.alignment import PAGE_NBYTES
from fastpersist.transfer.regions import (
    LARGE_STORAGE_NBYTES,
    MAX_HEADER_NBYTES,
    SHARED_NBYTES,
    Region,
    is_large,
    plan_regions,
)

HEADER_NBYTES = 60  # of each record here: the fixed part and a name
TRAILER_NBYTES = 16


def directory_of(sizes: Sequence[int], gaps: Sequence[int] = ()) -> Directory:
    """Records of these sizes in a row, each after a gap, and a central directory after the last."""
    offset, headers = 0, []
    for place, nbytes in enumerate(sizes):
        offset += gaps[place] if place < len(gaps) else 0
        headers.append(offset)
        offset += HEADER_NBYTES + nbytes + TRAILER_NBYTES
    names = [f"data/{place}" for place in range(len(sizes))]
    limits = [*headers[1:], offset][: len(headers)]
    return Directory(
        "m", names, np.array(sizes, np.int64), [1] * len(sizes), np.array(headers, np.int64), np.array(limits, np.int64),
        {name: place for place, name in enumerate(names)}, offset + 300, offset,
    )  # fmt: skip


def starts_of(directory: Directory, wanted: Sequence[int]) -> dict[int, int]:
    """Where the data of the large records starts."""
    return {
        place: int(directory.header_offsets[place]) + HEADER_NBYTES
        for place in wanted
        if is_large(int(directory.nbytes[place]))
    }


def plan(directory: Directory, wanted: Sequence[int]) -> list[Region]:
    """The regions, checked for what holds for all."""
    regions = plan_regions(directory, wanted, starts_of(directory, wanted))
    check(directory, wanted, regions)
    return regions


def check(directory: Directory, wanted: Sequence[int], regions: list[Region]) -> None:
    """Every record once; whole; aligned; within the file."""
    assert [record for region in regions for record in region.records] == list(wanted)
    for region in regions:
        assert region.file_offset % PAGE_NBYTES == region.nbytes % PAGE_NBYTES == 0
        assert region.nbytes > 0
        assert region.file_offset + region.nbytes < directory.file_nbytes + PAGE_NBYTES
        for record in region.records:
            header = int(directory.header_offsets[record])
            data = header + HEADER_NBYTES
            large = is_large(int(directory.nbytes[record]))
            assert region.file_offset <= (data if large else header)
            assert data + int(directory.nbytes[record]) <= region.file_offset + region.nbytes
        large_ones = [record for record in region.records if is_large(int(directory.nbytes[record]))]
        assert not large_ones or len(region.records) == 1
        if not large_ones:
            assert region.nbytes <= SHARED_NBYTES + MAX_HEADER_NBYTES + 2 * PAGE_NBYTES + LARGE_STORAGE_NBYTES


def test_the_size_from_which_a_storage_has_pages_of_its_own() -> None:
    assert [is_large(nbytes) for nbytes in (0, (1 << 20) - 1, 1 << 20, 1 << 40)] == [False, False, True, True]


def test_nothing_wanted_needs_no_region() -> None:
    assert plan(directory_of([10, 20]), []) == []


def test_small_neighbours_share_a_region() -> None:
    assert len(plan(directory_of([100] * 1000), range(1000))) == 1


def test_large_records_have_regions_of_their_own() -> None:
    regions = plan(directory_of([100, 2 << 20, 100, 100, 3 << 20, 1 << 20]), range(6))
    assert [region.records for region in regions] == [(0,), (1,), (2, 3), (4,), (5,)]
    assert all(region.nbytes <= (3 << 20) + 2 * PAGE_NBYTES for region in regions)


def test_shared_regions_stay_small() -> None:
    regions = plan(directory_of([100_000] * 100), range(100))
    assert len(regions) == 3
    assert max(region.nbytes for region in regions) <= SHARED_NBYTES + 2 * PAGE_NBYTES


def test_small_records_far_apart_do_not_share() -> None:
    """Else the gap between them would be read: here gigabytes of records that nobody asked for."""
    regions = plan(directory_of([100, 5 << 30, 100]), [0, 2])
    assert [region.nbytes for region in regions] == [PAGE_NBYTES, PAGE_NBYTES] or sum(r.nbytes for r in regions) < 1 << 20


def test_of_a_gap_after_a_record_little_is_read() -> None:
    directory = directory_of([100, 100], gaps=[0, 1 << 30])
    assert sum(region.nbytes for region in plan(directory, [0, 1])) < 2 * (MAX_HEADER_NBYTES + 3 * PAGE_NBYTES)


def test_records_that_are_not_wanted_are_passed_over() -> None:
    regions = plan(directory_of([2 << 20] * 5), [1, 3])
    assert [region.records for region in regions] == [(1,), (3,)]


sizes = st.one_of(st.integers(0, 5000), st.integers(0, 3 << 20), st.sampled_from([0, (1 << 20) - 1, 1 << 20, 5 << 32]))


@given(st.lists(sizes, max_size=40), st.lists(st.integers(0, 100_000), max_size=40), st.data())
def test_any_records(nbytes: list[int], gaps: list[int], data: st.DataObject) -> None:
    directory = directory_of(nbytes, gaps)
    wanted = sorted(data.draw(st.sets(st.sampled_from(range(len(nbytes)))))) if nbytes else []
    plan(directory, wanted)


@pytest.mark.parametrize("wanted", [[0], [1], [0, 1]])
def test_the_last_region_ends_with_the_file(wanted: list[int]) -> None:
    directory = directory_of([10, 5])
    assert plan(directory, wanted)[-1].nbytes == PAGE_NBYTES
