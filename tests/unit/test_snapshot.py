"""Which storages are staged, when a save waits for which copies, and when the caller may change what."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch

from fastpersist import SaveCancelledError
from fastpersist.archive.layout import LARGE_NBYTES, ArchivePlan, plan
from fastpersist.archive.pickling import flatten
from fastpersist.memory.alignment import PAGE_NBYTES
from fastpersist.memory.staging import StagingMemory
from fastpersist.transfer.extents import Direct, Extent, cut_into_blocks, plan_extents
from fastpersist.transfer.snapshot import Snapshot, cancelled
from tests.gated import Call

# A hang is a failure like any other here: it must end the test, and not the run.
pytestmark = pytest.mark.timeout(60)

SIZES = (1000, 300_000, 77, 0, 400_001)  # small, large, small, empty, large


def tensors() -> list[torch.Tensor]:
    return [torch.full((size,), index + 1, dtype=torch.uint8) for index, size in enumerate(SIZES)]


def staged(snapshot: Snapshot, sources: Sequence[torch.Tensor]) -> set[int]:
    """Indices of the storages that a save would not read from the caller's memory."""
    return {index for index, tensor in enumerate(sources) if snapshot.flat.addresses[index] != tensor.data_ptr()}


def make(
    sources: Sequence[torch.Tensor], keep: Collection[int] = (), *, layout: str = "auto", limit: int = 1 << 30
) -> Snapshot:
    return Snapshot(flatten(list(sources)), keep, StagingMemory(), layout=layout, limit=lambda _: limit)


def planned(snapshot: Snapshot, layout: str = "auto", block_nbytes: int = 65536) -> tuple[ArchivePlan, list[Extent]]:
    """Tell the snapshot what a save would."""
    flat = snapshot.flat
    addresses = np.array(flat.addresses, np.int64)
    archive = plan("archive", flat.pickle_bytes, np.array(flat.storage_nbytes, np.int64), addresses % 4096, layout)
    extents = plan_extents(archive, addresses, memory_alignment=512, cut_nbytes=PAGE_NBYTES)
    blocks = list(cut_into_blocks(extents, block_nbytes, block_nbytes))
    snapshot.planned(archive, blocks)
    return archive, blocks


def copied_bytes(snapshot: Snapshot, index: int) -> set[int]:
    return set(ctypes.string_at(snapshot.flat.addresses[index], SIZES[index]))


def test_all_storages_are_copied_and_large_ones_lie_on_pages() -> None:
    sources = tensors()
    snapshot = make(sources)
    assert staged(snapshot, sources) == {0, 1, 2, 4}
    assert snapshot.staged_nbytes == sum(SIZES)
    addresses = snapshot.flat.addresses
    assert [addresses[index] % PAGE_NBYTES for index in (1, 4)] == [0, 0]
    assert [addresses[index] % 64 for index in (0, 2)] == [0, 0]
    ranges = sorted((addresses[index], addresses[index] + SIZES[index]) for index in (0, 1, 2, 4))
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    snapshot.copy()
    assert [copied_bytes(snapshot, index) for index in (0, 1, 2, 4)] == [{1}, {2}, {3}, {5}]


@pytest.mark.parametrize(
    ("layout", "limit", "expected"),
    [
        ("auto", 1 << 30, {0, 1, 2, 4}),
        ("auto", 0, set()),
        ("auto", 76, set()),
        ("auto", 400_000, set()),  # what comes last in the file does not fit, nor is anything before it taken instead
        ("auto", 400_001, {4}),
        ("auto", 500_000, {4}),
        ("auto", 401_408 + 300_000, {1, 4}),
        ("auto", 401_408 + 300_000 - 1, {4}),
        ("auto", 401_408 + 300_032 + 77, {1, 2, 4}),
        ("torch", 400_100, {4}),
        ("torch", 400_064 + 77, {2, 4}),
    ],
)
def test_the_last_storages_of_the_file_are_staged_as_far_as_they_fit(layout: str, limit: int, expected: set[int]) -> None:
    sources = tensors()
    snapshot = make(sources, layout=layout, limit=limit)
    assert staged(snapshot, sources) == expected
    assert snapshot.staged_nbytes == sum(SIZES[index] for index in expected)


def test_what_the_caller_leaves_alone_is_not_staged() -> None:
    sources = tensors()
    snapshot = make(sources, keep={1, 2})
    assert staged(snapshot, sources) == {0, 4}


def test_nothing_to_stage_takes_no_memory() -> None:
    memory = StagingMemory()
    for obj in ({}, {"x": torch.zeros(0)}):
        snapshot = Snapshot(flatten(obj), (), memory, layout="auto", limit=lambda _: 1 << 30)
        snapshot.copy()
        snapshot.wait_until_copied()
        assert snapshot.is_free()
        snapshot.end()
    assert memory.buffers() == []


@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_a_block_waits_for_the_copies_that_lie_in_it(layout: str) -> None:
    sources = tensors()
    snapshot = make(sources, layout=layout)
    archive, blocks = planned(snapshot, layout)
    order = [storage for storage in archive.storages.tolist() if storage >= 0 and SIZES[storage]]
    offsets = {storage: int(archive.data_offsets[archive.storages.tolist().index(storage)]) for storage in order}
    for block in blocks:
        expected = sum(offsets[storage] < block.file_offset + block.nbytes for storage in order)
        for done in range(len(order) + 1):
            snapshot._copied = done
            call = Call(lambda block=block: snapshot.before(block))  # type: ignore[misc]
            if done >= expected:
                call.result()
            else:
                assert not call.returned.wait(0.002)
                snapshot._copied = expected
                with snapshot._lock:
                    snapshot._changed.notify_all()
                call.result()


def test_what_is_not_staged_is_free_with_the_last_block_that_holds_some_of_it() -> None:
    sources = tensors()
    snapshot = make(sources, keep={0, 1, 2})
    snapshot.copy()
    assert not snapshot.is_free()  # it is not known yet which blocks there will be
    archive, blocks = planned(snapshot)
    records = archive.storages.tolist()
    end = max(int(archive.data_offsets[records.index(index)]) + SIZES[index] for index in (0, 1, 2))
    needed = [block for block in blocks if block.file_offset < end]
    assert 1 < len(needed) < len(blocks)
    for block in reversed(needed):  # completions come in any order
        assert not snapshot.is_free()
        snapshot.released(block)
    assert snapshot.is_free()
    for block in blocks[len(needed) :]:
        snapshot.released(block)
    assert snapshot.is_free()


def test_copies_and_blocks_are_both_needed_to_be_free() -> None:
    sources = tensors()
    snapshot = make(sources, keep={1})
    _, blocks = planned(snapshot)
    for block in blocks:
        snapshot.released(block)
    assert not snapshot.is_free()
    snapshot.copy()
    assert snapshot.is_free()


def test_the_caller_waits_for_what_did_not_fit_and_not_for_what_it_leaves_alone() -> None:
    sources = tensors()
    snapshot = make(sources, keep={4}, limit=300_000)
    assert staged(snapshot, sources) == {1}
    snapshot.copy()
    archive, blocks = planned(snapshot)
    call = Call(snapshot.wait_until_copied)
    records = archive.storages.tolist()
    end = max(int(archive.data_offsets[records.index(index)]) + SIZES[index] for index in (0, 2))
    for block in blocks:
        if block.file_offset < end:
            assert not call.returned.wait(0.01)
            snapshot.released(block)
    call.result()
    assert not snapshot.is_free()


def test_zero_copy_counts_the_blocks_written_from_the_callers_memory() -> None:
    sources = tensors()
    snapshot = make(sources, keep={1})
    archive, blocks = planned(snapshot)
    of_kept = [block for block in blocks if isinstance(block, Direct) and archive.storages[block.record] == 1]
    assert snapshot.zero_copy_nbytes == sum(block.nbytes for block in of_kept) > LARGE_NBYTES


def test_stop_ends_the_save_and_the_copying() -> None:
    snapshot = make(tensors())
    _, blocks = planned(snapshot)
    waiting = Call(lambda: snapshot.before(blocks[-1]))
    assert snapshot.stop(lambda: cancelled("a.pt"))
    with pytest.raises(SaveCancelledError, match=r"a\.pt"):
        waiting.result()
    with pytest.raises(SaveCancelledError):
        snapshot.publishing()
    snapshot.copy()
    assert snapshot._copied == 0


def test_it_is_too_late_to_stop_what_is_published_or_over() -> None:
    first, second = make(tensors()), make(tensors())
    first.publishing()
    second.end()
    assert not first.stop(lambda: cancelled("a.pt"))
    assert not second.stop(lambda: cancelled("a.pt"))


@pytest.mark.parametrize("save_ends_first", [True, False])
def test_memory_goes_back_and_tensors_are_let_go_when_both_have_ended(save_ends_first: bool) -> None:
    memory, array = StagingMemory(), np.ones(5000, np.uint8)
    alive = weakref.ref(array)
    gc.disable()
    try:
        snapshot = Snapshot(flatten([torch.from_numpy(array)]), (), memory, layout="auto", limit=lambda _: 1 << 20)
        del array
        ends = [snapshot.end, snapshot.copy]
        for end in ends if save_ends_first else reversed(ends):
            assert memory.free_nbytes == 0
            assert alive() is not None
            end()
        assert memory.free_nbytes > 0
        assert alive() is None
        snapshot.end_copying()
        snapshot.end()
        assert len(memory.buffers()) == 1
    finally:
        gc.enable()


def test_after_the_end_everything_is_free() -> None:
    snapshot = make(tensors(), keep={0})
    waiting = [Call(snapshot.wait_until_copied), Call(snapshot.wait_until_free)]
    assert not any(call.returned.wait(0.01) for call in waiting)
    snapshot.end()
    for call in waiting:
        call.result()
    assert snapshot.is_free()
