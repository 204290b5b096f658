"""Memory for copies of whole models: what is lent, kept, and given back."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path

import pytest

from fastpersist.memory.alignment import PAGE_NBYTES
from fastpersist.memory.staging import StagingMemory, shared_staging

KIB, MIB = 1 << 10, 1 << 20


def test_a_buffer_is_large_enough_and_lent_until_it_is_released() -> None:
    memory = StagingMemory()
    buffer = memory.acquire(100_001)
    assert buffer.nbytes >= 100_001
    assert buffer.address % PAGE_NBYTES == 0
    assert memory.buffers() == [buffer]
    assert memory.free_nbytes == 0
    memory.release(buffer)
    assert memory.buffers() == [buffer]
    assert memory.free_nbytes == buffer.nbytes


def test_what_was_released_is_lent_again() -> None:
    memory = StagingMemory()
    first = memory.acquire(MIB)
    memory.release(first)
    assert memory.acquire(MIB) is first
    assert memory.acquire(MIB) is not first


@pytest.mark.parametrize(("held", "wanted", "again"), [
    (MIB, MIB - 5, True), (MIB, MIB // 2, True), (MIB, MIB // 4, False), (MIB, MIB + 1, False), (4 * KIB, 1, True),
])  # fmt: skip
def test_only_what_fits_is_lent_again(held: int, wanted: int, again: bool) -> None:
    memory = StagingMemory()
    buffer = memory.acquire(held)
    memory.release(buffer)
    assert (memory.acquire(wanted) is buffer) == again


def test_the_smallest_that_fits_is_taken() -> None:
    memory = StagingMemory()
    large, small = memory.acquire(MIB), memory.acquire(700 * KIB)
    for buffer in (large, small):
        memory.release(buffer)
    assert memory.acquire(650 * KIB) is small
    assert memory.acquire(650 * KIB) is large


def test_what_does_not_fit_is_not_kept() -> None:
    memory = StagingMemory()
    memory.release(memory.acquire(MIB))
    other = memory.acquire(8 * MIB)
    assert memory.buffers() == [other]


def test_trim_keeps_what_is_lent() -> None:
    memory = StagingMemory()
    lent, free = memory.acquire(MIB), memory.acquire(MIB)
    memory.release(free)
    del free
    memory.trim()
    assert memory.buffers() == [lent]
    assert memory.free_nbytes == 0


def test_a_buffer_that_is_dropped_is_forgotten() -> None:
    memory = StagingMemory()
    buffer = memory.acquire(MIB)
    del buffer
    gc.collect()
    assert memory.buffers() == []


def test_a_child_has_memory_of_its_own_and_unmaps_none_of_its_parents() -> None:
    parents = shared_staging()
    assert shared_staging() is parents
    lent = parents.acquire(3 * MIB)
    address = lent.address
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if not child:
        status = 1
        try:
            mapped = f"{address:x}" in Path("/proc/self/maps").read_text()
            own = shared_staging()
            fresh = own.acquire(3 * MIB)
            fresh.view[:4] = b"good"
            del lent, parents  # no destructor runs: something else may lie there by now
            gc.collect()
            good = not mapped and fresh.view[:4] == b"good" and own.buffers() == [fresh]
            status = 0 if good else 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    lent.view[:1] = b"x"
    parents.release(lent)
    parents.trim()
