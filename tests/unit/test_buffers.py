"""Aligned buffers and the pool that lends them."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from pathlib import Path

import pytest
import torch

from fastpersist.errors import PoolExhausted
from fastpersist.memory.buffers import AlignedBuffer, BufferPool, shared_pool
from fastpersist.memory.pages import SHORT_COPY_NBYTES, Pages, copy_memory, view_memory

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("nbytes", [1, 4096, 65536, 2 * MIB, 3 * MIB])
def test_a_buffer_is_aligned_zeroed_and_large_enough(nbytes: int) -> None:
    buffer = AlignedBuffer(nbytes)
    assert buffer.nbytes >= nbytes
    assert buffer.address % (2 * MIB if nbytes >= 2 * MIB else mmap.PAGESIZE) == 0
    assert not any(buffer.view)
    buffer.view[-1] = 7
    assert view_memory(buffer.address, buffer.nbytes)[-1] == 7


def test_pages_are_resident_before_first_use() -> None:
    buffer = AlignedBuffer(4 * MIB)
    assert _mapped_kib(buffer.address, "Rss") >= 4 * KIB


def test_pages_are_private_huge_where_possible_and_not_inherited() -> None:
    flags = _flags_of_mapping(AlignedBuffer(4 * MIB))
    assert "sh" not in flags
    assert "dc" in flags  # MADV_DONTFORK
    assert "hg" in flags  # MADV_HUGEPAGE


def test_a_kernel_that_cannot_populate_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastpersist.memory.pages.MADV_POPULATE_WRITE", 9999)
    buffer = AlignedBuffer(MIB)
    buffer.view[:] = b"x" * MIB
    assert bytes(buffer.view) == b"x" * MIB


def test_pages_are_inherited_unless_kept_from_children() -> None:
    assert "dc" not in _flags_of_mapping(Pages(4 * MIB))


def test_populating_keeps_what_was_written() -> None:
    pages = Pages(MIB)
    pages.view[:3] = b"abc"
    pages.populate()
    assert bytes(pages.view[:3]) == b"abc"


def test_the_pool_reuses_what_was_released() -> None:
    pool = BufferPool(MIB)
    first = pool.acquire(100 * KIB)
    address = first.address
    pool.release(first)
    assert pool.acquire(128 * KIB).address == address


def test_the_pool_never_holds_more_than_its_bound() -> None:
    pool = BufferPool(256 * KIB)
    held = [pool.acquire(64 * KIB) for _ in range(4)]
    assert pool.try_acquire(1) is None
    assert pool.held_nbytes == pool.lent_nbytes == 256 * KIB
    for buffer in held:
        pool.release(buffer)
    assert pool.lent_nbytes == 0


def test_free_buffers_of_another_size_make_room() -> None:
    pool = BufferPool(256 * KIB)
    for buffer in [pool.acquire(64 * KIB) for _ in range(4)]:
        pool.release(buffer)
    large = pool.try_acquire(256 * KIB)
    assert large is not None
    assert pool.held_nbytes == 256 * KIB


def test_a_buffer_that_can_never_fit_is_refused_with_the_bound() -> None:
    with pytest.raises(ValueError, match="exceeds the pool of 65536 bytes"):
        BufferPool(64 * KIB).try_acquire(65 * KIB)


def test_waiting_is_bounded() -> None:
    pool = BufferPool(64 * KIB)
    lent = pool.acquire(1)
    with pytest.raises(PoolExhausted, match="65536 of 65536 bytes are lent"):
        pool.acquire(1, timeout_seconds=0.05)
    pool.release(lent)


def test_a_waiter_gets_what_another_thread_releases() -> None:
    pool = BufferPool(64 * KIB)
    lent = pool.acquire(1)
    timer = threading.Timer(0.05, pool.release, (lent,))
    timer.start()
    assert pool.acquire(1, timeout_seconds=30.0) is lent
    timer.join()


def test_a_dropped_buffer_gives_its_share_back() -> None:
    pool = BufferPool(64 * KIB)
    dropped = pool.acquire(1)
    del dropped
    gc.collect()
    assert pool.try_acquire(1) is not None


def test_a_buffer_cannot_be_released_twice_or_to_a_stranger() -> None:
    pool = BufferPool(64 * KIB)
    buffer = pool.acquire(1)
    pool.release(buffer)
    with pytest.raises(ValueError, match="not lent by this pool"):
        pool.release(buffer)


def test_trim_gives_free_memory_back() -> None:
    pool = BufferPool(MIB)
    pool.release(pool.acquire(1))
    pool.trim()
    assert pool.held_nbytes == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_with_a_pool_of_its_own() -> None:
    parent_pool = shared_pool()
    parent_pool.release(parent_pool.acquire(1))
    child = os.fork()
    if child == 0:
        fresh = shared_pool()
        buffer = fresh.acquire(1)
        buffer.view[0] = 1
        os._exit(0 if fresh is not parent_pool else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert shared_pool() is parent_pool


def _mapping_of(address: int) -> list[str]:
    """The lines of /proc/self/smaps that describe the mapping around ``address``."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    for number, line in enumerate(lines):
        low, dash, rest = line.partition("-")
        if dash and " " in rest and ":" not in low:
            start, stop = int(low, 16), int(rest.split()[0], 16)
            if start <= address < stop:
                return lines[number : number + 30]
    raise AssertionError(f"no mapping holds {address:#x}")


def _mapped_kib(address: int, field: str) -> int:
    return next(int(line.split()[1]) for line in _mapping_of(address) if line.startswith(f"{field}:"))


def _flags_of_mapping(buffer: Pages) -> list[str]:
    return next(line for line in _mapping_of(buffer.address) if line.startswith("VmFlags:")).split()[1:]


@pytest.mark.parametrize("nbytes", [0, 1, 4096, SHORT_COPY_NBYTES, SHORT_COPY_NBYTES + 1, 3 << 20])
def test_memory_is_copied_and_no_more_of_it(nbytes: int) -> None:
    source, target = (torch.randint(0, 256, (nbytes + 2,), dtype=torch.uint8) for _ in range(2))
    expected = torch.cat((target[:1], source[1:-1], target[-1:]))
    copy_memory(target.data_ptr() + 1, source.data_ptr() + 1, nbytes)
    assert torch.equal(target, expected)
