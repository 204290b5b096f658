"""Extents: every byte of the file is written once, from where it lies or through a buffer."""

from __future__ import annotations

import numpy as np
import pytest

from fastpersist.archive.layout import LARGE_NBYTES, ArchivePlan, plan
from fastpersist.transfer.extents import Assembled, Direct, Extent, cut_into_blocks, plan_extents

BASE = 1 << 40  # any number serves as an address: planning reads no memory
MIB = 1 << 20


def planned(
    sizes: list[int], shifts: list[int], *, follow: bool = True, layout: str = "auto"
) -> tuple[ArchivePlan, np.ndarray]:
    """A plan, and addresses that lie ``shifts`` beyond page boundaries; ``follow`` places storages congruently."""
    addresses = np.array([BASE + index * (1 << 32) + shift for index, shift in enumerate(shifts)], np.int64)
    residues = addresses % 4096 if follow else np.zeros(len(sizes), np.int64)
    return plan("model", b"pickle", np.array(sizes, np.int64), residues, layout), addresses


def check(extents: list[Extent], archive: ArchivePlan, addresses: np.ndarray, memory_alignment: int, cut_nbytes: int) -> None:
    """What the writer relies on."""
    cursor = 0
    for extent in extents:
        assert extent.file_offset == cursor
        assert extent.nbytes > 0
        assert extent.nbytes % cut_nbytes == 0
        if isinstance(extent, Direct):
            data, storage = int(archive.data_offsets[extent.record]), int(archive.storages[extent.record])
            assert extent.address % memory_alignment == 0
            assert extent.address == addresses[storage] + extent.file_offset - data
            assert data <= extent.file_offset
            assert extent.file_offset + extent.nbytes <= data + archive.nbytes[extent.record]
        cursor += extent.nbytes
    assert archive.file_nbytes <= cursor < archive.file_nbytes + cut_nbytes


def direct_nbytes(extents: list[Extent]) -> int:
    """How much is written from where it lies."""
    return sum(extent.nbytes for extent in extents if isinstance(extent, Direct))


@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("memory_alignment", [1, 4, 64, 512, 4096])
@pytest.mark.parametrize("cut_nbytes", [4096, 16384, 65536])
def test_extents_cover_the_file(cut_nbytes, memory_alignment, layout):
    sizes = [100, LARGE_NBYTES, LARGE_NBYTES - 1, 0, MIB + 17, 3 * MIB, LARGE_NBYTES + 1, 9]
    shifts = [0, 64, 128, 192, 4032, 0, 4, 2048]
    archive, addresses = planned(sizes, shifts, layout=layout)
    extents = plan_extents(archive, addresses, memory_alignment=memory_alignment, cut_nbytes=cut_nbytes)
    check(extents, archive, addresses, memory_alignment, cut_nbytes)


@pytest.mark.parametrize("shift", [0, 64, 512, 4032])
def test_congruent_storages_go_straight_but_for_their_ends(shift):
    archive, addresses = planned([MIB, MIB + 5], [shift, shift])
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4096)
    assert direct_nbytes(extents) >= 2 * (MIB - 2 * 4096)


def test_a_lenient_device_takes_any_address():
    archive, addresses = planned([MIB], [64], follow=False)
    assert direct_nbytes(plan_extents(archive, addresses, memory_alignment=4, cut_nbytes=4096)) == MIB
    assert direct_nbytes(plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4096)) == 0


def test_memory_of_a_device_goes_through_buffers():
    archive, addresses = planned([MIB, MIB], [0, 0])
    addresses[0] = 0
    direct = [e for e in plan_extents(archive, addresses, memory_alignment=4, cut_nbytes=4096) if isinstance(e, Direct)]
    assert {int(archive.storages[extent.record]) for extent in direct} == {1}


def test_small_storages_go_through_buffers():
    archive, addresses = planned([LARGE_NBYTES - 1, LARGE_NBYTES], [0, 0])
    direct = [e for e in plan_extents(archive, addresses, memory_alignment=4, cut_nbytes=4096) if isinstance(e, Direct)]
    assert {int(archive.storages[extent.record]) for extent in direct} == {1}


def test_what_lies_between_is_one_extent():
    archive, addresses = planned([100] * 2000 + [MIB], [0] * 2001)
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4096)
    assert [type(extent) for extent in extents] == [Assembled, Direct, Assembled]


def test_a_file_without_storages_is_one_extent():
    archive, addresses = planned([], [])
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4096)
    assert [type(extent) for extent in extents] == [Assembled]
    check(extents, archive, addresses, 512, 4096)


def test_cuts_longer_than_a_storage_leave_nothing_straight():
    archive, addresses = planned([LARGE_NBYTES], [64])
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4 * LARGE_NBYTES)
    assert [type(extent) for extent in extents] == [Assembled]


@pytest.mark.parametrize(("direct_limit", "assembled_limit"), [(4096, 4096), (65536, 4096), (4096, 65536), (1 << 30, 1 << 30)])
def test_blocks_are_the_same_ranges(direct_limit, assembled_limit):
    archive, addresses = planned([100, MIB, LARGE_NBYTES, 5000, 2 * MIB + 123], [0, 64, 0, 0, 512])
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4096)
    blocks = list(cut_into_blocks(extents, direct_limit, assembled_limit))
    check(blocks, archive, addresses, 512, 4096)
    assert direct_nbytes(blocks) == direct_nbytes(extents)
    for block in blocks:
        assert block.nbytes <= (direct_limit if isinstance(block, Direct) else assembled_limit)


def test_no_block_is_cut_without_need():
    archive, addresses = planned([MIB], [0])
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=4096)
    assert list(cut_into_blocks(extents, 1 << 30, 1 << 30)) == extents
