"""What the caller of a background save may change again, and when: copies of storages, and a watch over the others.

A storage that is staged is copied into memory of ours, in the order of the file, by the caller's thread; the save, in another
thread, follows it and waits where it is ahead. A storage that is not staged is read where it lies; the caller may change it
once its last block has been copied or written. A large storage is staged on whole pages, so that it is written from there.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import replace

import numpy as np
import torch

from fastpersist.archive.layout import DATA_ALIGNMENT, LARGE_NBYTES, ArchivePlan, Int64Array, storage_order
from fastpersist.archive.pickling import FlatObject
from fastpersist.errors import SaveCancelledError
from fastpersist.memory.alignment import PAGE_NBYTES, round_up
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.memory.pages import copy_memory, view_memory
from fastpersist.memory.staging import StagingMemory
from fastpersist.transfer.device import copy_out
from fastpersist.transfer.extents import Direct, Extent
from fastpersist.transfer.writer import Watcher

_PARALLEL_NBYTES = 4 << 20  # from here on torch's threads copy faster than one


class Snapshot(Watcher):
    """The staged part of an object, and the memory that a save still reads of the rest."""

    def __init__(
        self, flat: FlatObject, keep: Collection[int], memory: StagingMemory, *, layout: str, limit: Callable[[int], int]
    ) -> None:
        """``keep``: indices of storages that the caller leaves alone, which are not staged. Of the others those that come
        first in the file are not staged either, if all of them together take more than ``limit`` says, which is told how
        many bytes they take.
        """
        nbytes = np.array(flat.storage_nbytes, np.int64)
        self._order = [index for index in storage_order(nbytes, layout).tolist() if nbytes[index] and index not in keep]
        places, total_nbytes = _arrange(self._order, flat.storage_nbytes, None)
        if places and total_nbytes > (max_nbytes := limit(total_nbytes)):
            places, total_nbytes = _arrange(self._order, flat.storage_nbytes, max_nbytes)
        self._order = [index for index in self._order if index in places]
        self._source = flat
        self._memory = memory
        self._buffer = memory.acquire(total_nbytes) if places else None
        addresses = list(flat.addresses)
        for index, place in places.items():
            assert self._buffer is not None
            addresses[index] = self._buffer.address + place
        self.flat = replace(flat, addresses=addresses)
        self.staged_nbytes = int(sum(flat.storage_nbytes[index] for index in self._order))
        self.zero_copy_nbytes = 0  # of storages that are not staged; known once the file is planned
        unstaged = [index for index, size in enumerate(flat.storage_nbytes) if size and index not in places]
        self._kept = _Unstaged(unstaged)
        self._excess = _Unstaged([index for index in unstaged if index not in keep])
        self._lock = threading.RLock()  # entered itself: Ctrl-C inside Condition.__exit__ would leave it locked
        self._changed = threading.Condition(self._lock)
        self._copied = 0  # storages of self._order
        self._stop: Callable[[], BaseException] | None = None
        self._published = False
        self._over = False
        self._buffer_users = {"copy", "save"}
        self._starts: Sequence[int] = ()

    def copy(self) -> None:
        """Copy what is staged, once; ends early if the save has ended or was told to stop."""
        try:
            with contextlib.closing(_copies(self._source, self._order, self.flat.addresses, self._buffer)) as progress:
                for copied in progress:
                    with self._lock:
                        self._copied = copied
                        self._changed.notify_all()
                    if self._over or self._stop is not None:
                        break
        finally:
            self.end_copying()

    def end_copying(self) -> None:
        """No more copies are made. Harmless when repeated."""
        self._leave_buffer("copy")

    def _leave_buffer(self, user: str) -> None:
        with self._lock:
            if user not in self._buffer_users:
                return
            self._buffer_users.remove(user)
            if self._buffer_users:
                return
            del self._source, self.flat  # whoever keeps the PendingSave keeps no tensor
            buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.release(buffer)

    def wait_until_copied(self) -> None:
        """Wait until the caller may change all storages but those that it leaves alone."""
        with self._lock:
            self._changed.wait_for(lambda: self._over or (self._copied == len(self._order) and self._excess.blocks_left == 0))

    def wait_until_free(self) -> None:
        """Wait until the caller may change all storages again."""
        with self._lock:
            self._changed.wait_for(self._is_free)

    def is_free(self) -> bool:
        """True once the caller may change all storages again."""
        with self._lock:
            return self._is_free()

    def _is_free(self) -> bool:
        return self._over or (self._copied == len(self._order) and self._kept.blocks_left == 0)

    def stop(self, reason: Callable[[], BaseException]) -> bool:
        """Make the save raise ``reason()`` before its next block, or before it is published; False if it is too late."""
        with self._lock:
            if self._published or self._over:
                return False
            self._stop = reason
            self._changed.notify_all()
            return True

    def end(self) -> None:
        """The save has ended, and reads nothing any more. After this and ``copy`` the copies are dropped."""
        with self._lock:
            self._over = True
            self._changed.notify_all()
        self._leave_buffer("save")

    def planned(self, plan: ArchivePlan, blocks: Sequence[Extent]) -> None:
        """Find out which blocks wait for which copies, and up to where the file holds bytes of unstaged storages."""
        record_of = np.zeros(len(self._source.storages), np.int64)
        holding = np.flatnonzero(plan.storages >= 0)
        record_of[plan.storages[holding]] = holding
        staged = set(self._order)
        self.zero_copy_nbytes = sum(
            block.nbytes for block in blocks if isinstance(block, Direct) and int(plan.storages[block.record]) not in staged
        )
        ends = plan.data_offsets[record_of] + plan.nbytes[record_of]
        with self._lock:
            self._starts = plan.data_offsets[record_of[self._order]].tolist()
            for unstaged in (self._kept, self._excess):
                unstaged.planned(ends, blocks)
            self._changed.notify_all()

    def before(self, block: Extent) -> None:
        """Wait until all copies that lie in ``block`` have been made. Raises what ``stop`` was told to."""
        needed = int(np.searchsorted(self._starts, block.file_offset + block.nbytes))
        with self._lock:
            self._changed.wait_for(lambda: self._stop is not None or self._copied >= needed)
            self._raise_if_stopped()

    def released(self, block: Extent) -> None:
        """Count the blocks of unstaged storages."""
        with self._lock:
            for unstaged in (self._kept, self._excess):
                unstaged.released(block)
            if not self._kept.blocks_left or not self._excess.blocks_left:
                self._changed.notify_all()

    def publishing(self) -> None:
        """From now on it is too late to stop."""
        with self._lock:
            self._raise_if_stopped()
            self._published = True

    def _raise_if_stopped(self) -> None:
        if self._stop is not None:
            raise self._stop()


class _Unstaged:
    """Storages that are read where they lie, and how many blocks of the file may still need them (None: not planned yet)."""

    def __init__(self, storages: Sequence[int]) -> None:
        self._storages = storages
        self._boundary = 0
        self.blocks_left = None if storages else 0

    def planned(self, ends: Int64Array, blocks: Sequence[Extent]) -> None:
        if self._storages:
            self._boundary = int(ends[self._storages].max())
            self.blocks_left = sum(block.file_offset < self._boundary for block in blocks)

    def released(self, block: Extent) -> None:
        if self.blocks_left is not None and block.file_offset < self._boundary:
            self.blocks_left -= 1


def cancelled(path: str) -> SaveCancelledError:
    """What a save raises that was cancelled."""
    return SaveCancelledError(f"{path}: the save was cancelled; what was there before is untouched")


def _arrange(order: Sequence[int], sizes: Sequence[int], max_nbytes: int | None) -> tuple[dict[int, int], int]:
    """(place of each storage that is staged, bytes in all): the last ones of the file's order that ``max_nbytes`` can hold."""
    places: dict[int, int] = {}
    cursor = 0
    for index in reversed(order):
        alignment = PAGE_NBYTES if sizes[index] >= LARGE_NBYTES else DATA_ALIGNMENT
        place = round_up(cursor, alignment)
        if max_nbytes is not None and place + sizes[index] > max_nbytes:
            break
        places[index], cursor = place, place + sizes[index]
    return places, cursor


def _copies(
    flat: FlatObject, order: Sequence[int], addresses: Sequence[int], memory: AlignedBuffer | None
) -> Generator[int, None, None]:
    """Copy storages in this order to their addresses in ``memory``; yields how many are there, at first none."""
    yield 0
    done = 0
    for on_host, run in itertools.groupby(order, key=lambda index: bool(flat.addresses[index])):
        indices = list(run)
        if on_host:
            for copied, index in enumerate(indices, start=1):
                _copy(flat, index, addresses[index])
                yield done + copied
        else:
            assert memory is not None
            # Closed with the iteration, whatever ends it: no device copies into memory that is given back.
            with contextlib.closing(copy_out(flat, indices, addresses, memory)) as progress:
                for copied in progress:
                    yield done + copied
        done += len(indices)


def _copy(flat: FlatObject, index: int, address: int) -> None:
    nbytes = flat.storage_nbytes[index]
    if nbytes < _PARALLEL_NBYTES:
        copy_memory(address, flat.addresses[index], nbytes)
    else:
        source, target = view_memory(flat.addresses[index], nbytes), view_memory(address, nbytes)
        torch.frombuffer(target, dtype=torch.uint8).copy_(torch.frombuffer(source, dtype=torch.uint8))
