"""Reads records straight into the memory of new storages: a deep queue, pages faulted in ahead, checksums in flight."""

from __future__ import annotations

import bisect
import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice, repeat

import numpy as np

from fastpersist.archive.directory import Directory, data_offsets
from fastpersist.archive.pickling import garbage_collector_paused
from fastpersist.archive.unpickling import Raw
from fastpersist.archive.zipformat import LOCAL_HEADER_NBYTES
from fastpersist.engines import Engine, File, Read, Request
from fastpersist.errors import CheckpointFormatError, CorruptCheckpointError, TransferError
from fastpersist.memory.alignment import PAGE_NBYTES, round_down, round_up
from fastpersist.memory.buffers import BufferPool
from fastpersist.memory.checksum import crc32, crc32_combine
from fastpersist.memory.pages import Pages, copy_memory
from fastpersist.transfer.device import Copies
from fastpersist.transfer.pipeline import Pipeline
from fastpersist.transfer.regions import LARGE_STORAGE_NBYTES, Region, is_large, plan_regions
from fastpersist.transfer.streaming import cut_meanwhile

DTYPE_ALIGNMENT = 16
"""The widest element (complex128): data at other offsets, which no torch writes, is copied to where it is aligned."""
HEADER_WINDOW_NBYTES = 2 * PAGE_NBYTES
"""A header's fixed part may lie across a page boundary."""

KEY_PLACE = len("data/")

PAUSE_SECONDS = 0.02
"""Other threads of the program may make garbage while a load waits for the disk."""

Storages = dict[str, Raw]
"""By key, the memory that was read; each keeps its pages alive."""


class RecordReader:
    """Reads records of one open file. ``path`` is the name that errors use; ``moved`` is told the bytes of transfers."""

    def __init__(
        self,
        engine: Engine,
        file: File,
        directory: Directory,
        pool: BufferPool,
        *,
        path: str,
        block_nbytes: int,
        queue_depth: int,
        moved: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._file = file
        self._directory = directory
        self._pool = pool
        self._path = path
        self._block_nbytes = block_nbytes
        self._queue_depth = queue_depth
        self._moved = moved

    @contextlib.contextmanager
    def reading(self, wanted: Sequence[int], *, verify: bool) -> Iterator[Arriving]:
        """The storages of the records ``wanted`` (places in the directory, ascending), on their way while the block runs.

        When it is left without an exception, all have arrived, and been checked. Raises, in the block or at its end,
        CheckpointFormatError for headers that contradict the directory, CorruptCheckpointError with ``verify`` for data that
        contradicts its checksum, TransferError for a read that fails.
        """
        data_offsets = self._read_data_offsets(wanted)
        regions = plan_regions(self._directory, wanted, data_offsets)
        memory = [Pages(region.nbytes) for region in regions]
        with _PopulatedAhead(memory) as ready, self._pipeline(self._moved) as pipeline:
            arriving = Arriving(self, pipeline, regions, memory, data_offsets, BlockSums() if verify else None, ready)
            del memory
            try:
                yield arriving
                arriving.finish()
            finally:
                arriving.close()

    def _pipeline(self, moved: Callable[[int], None], copies: Copies | None = None) -> Pipeline:
        return Pipeline(
            self._engine, self._pool, queue_depth=self._queue_depth, failure=self._failure, moved=moved, copies=copies
        )

    def _failure(self, request: Request, code: int, hint: str) -> TransferError:
        return TransferError(code, "cannot read", self._path, offset=request.file_offset, nbytes=request.nbytes, hint=hint)

    def _read_data_offsets(self, wanted: Sequence[int]) -> dict[int, int]:
        """Where the data of each large record starts: only its header tells, and all headers are asked for at once."""
        sizes = self._directory.nbytes.tolist()
        with self._pipeline(lambda nbytes: None) as pipeline:
            return self._read_headers(pipeline, [record for record in wanted if sizes[record] >= LARGE_STORAGE_NBYTES])

    def _read_headers(self, pipeline: Pipeline, large: Sequence[int]) -> dict[int, int]:
        offsets: dict[int, int] = {}
        for record in large:
            buffer = pipeline.borrow(HEADER_WINDOW_NBYTES)
            header = int(self._directory.header_offsets[record])
            start = round_down(header, PAGE_NBYTES)
            nbytes = min(HEADER_WINDOW_NBYTES, round_up(self._directory.file_nbytes, PAGE_NBYTES) - start)
            view = buffer.view[header - start :]

            def finished(reached: int, record: int = record, header: int = header, view: memoryview = view) -> None:
                if reached < header + LOCAL_HEADER_NBYTES:
                    raise cut_meanwhile(self._path, reached, header + LOCAL_HEADER_NBYTES)
                offsets[record] = self._data_offsets((record,), view, header)[0]

            pipeline.submit(Read(self._file, buffer.address, nbytes, start, owner=buffer), buffer=buffer, finished=finished)
        pipeline.finish()
        return offsets

    def _data_offsets(self, records: Sequence[int], content: memoryview, file_offset: int) -> list[int]:
        try:
            return [int(start) for start in data_offsets(self._directory, records, content, file_offset)]
        except CheckpointFormatError as error:
            raise CheckpointFormatError(f"{self._path}: {error}") from None

    def _finish_block(self, expected: int, summed: Callable[[], None] | None, reached: int) -> None:
        if reached < expected:
            raise cut_meanwhile(self._path, reached, expected)
        if summed is not None:
            summed()

    def _take_storages(
        self, region: Region, pages: Pages, data_offsets: dict[int, int], sums: BlockSums | None, storages: Storages
    ) -> None:
        """Find the storages of a region that has been read: they stay where they are in its pages."""
        records = region.records
        names, sizes = self._directory.names, self._directory.nbytes[list(records)].tolist()
        if records[0] in data_offsets:
            starts = [data_offsets[records[0]]]
        else:
            starts = self._data_offsets(records, pages.view, region.file_offset)
        places = [start - region.file_offset for start in starts]
        if sums is not None:
            for record, start, place, nbytes in zip(records, starts, places, sizes, strict=True):
                found = sums.total(record) if is_large(nbytes) else crc32(pages.view[place : place + nbytes])
                self._check_sum(record, start, found)
        raws: list[Raw] = list(zip(repeat(pages.view), places, sizes, strict=False))
        for misplaced in np.flatnonzero((pages.address + np.array(places)) % DTYPE_ALIGNMENT).tolist():
            raws[misplaced] = _moved(pages, places[misplaced], sizes[misplaced])
        storages.update(zip([names[record][KEY_PLACE:] for record in records], raws, strict=True))

    def _check_sum(self, record: int, start: int, found: int) -> None:
        expected = self._directory.checksums[record]
        if expected not in (0, found):  # 0: written without a checksum
            raise CorruptCheckpointError(
                f"{self._path}: record {self._directory.names[record]!r} (offset {start}, "
                f"{self._directory.nbytes[record]} bytes) has the checksum {found:08x}, the directory says {expected:08x}"
            )


def _moved(pages: Pages, place: int, nbytes: int) -> Raw:
    """Bytes that do not lie where they can be used, copied to where they are aligned."""
    copy = Pages(max(nbytes, 1))
    copy_memory(copy.address, pages.address + place, nbytes)
    return copy.view, 0, nbytes


class Arriving:
    """Storages on their way. ``take`` waits for one; reads run ahead of it by as much as the queue holds."""

    def __init__(
        self,
        reader: RecordReader,
        pipeline: Pipeline,
        regions: Sequence[Region],
        memory: Sequence[Pages],
        data_offsets: dict[int, int],
        sums: BlockSums | None,
        ready: Callable[[int], None],
    ) -> None:
        """``memory`` is that of each region; ``ready`` waits until that of a region may be read into."""
        self._reader = reader
        self._pipeline = pipeline
        self._regions = regions
        self._memory = dict(enumerate(memory))
        self._data_offsets = data_offsets
        self._sums = sums
        self._ready = ready
        self._missing = [len(range(0, region.nbytes, reader._block_nbytes)) for region in regions]  # blocks of each region
        self._requests = self._all_requests()
        self._under_way = 0
        self._looked_at = 0  # regions whose storages have been found
        self._first_records = [region.records[0] for region in regions]
        self._storages: Storages = {}
        self._collects_garbage = gc.isenabled()

    def take(self, key: str) -> Raw | None:
        """The storage under ``key``, which can be had once; None for any other. Raises what reading raises."""
        if key not in self._storages:
            record = self._reader._directory.index.get(f"data/{key}", -1)
            number = bisect.bisect_right(self._first_records, record) - 1  # of the region that holds it, if any does
            while self._looked_at <= number:
                self._look_at_next_region()
        return self._storages.pop(key, None)

    def finish(self) -> None:
        """Wait for all that nobody has asked for yet."""
        while self._looked_at < len(self._regions):
            self._look_at_next_region()

    def close(self) -> None:
        """Let go of memory that nobody has taken."""
        self._requests.close()  # it refers to this object, and would keep it and all pages until garbage is collected
        self._memory.clear()

    def _look_at_next_region(self) -> None:
        number = self._looked_at
        self._fill_queue()
        while self._missing[number]:
            self._wait()
            self._fill_queue()
        self._looked_at += 1
        # Pages that no storage views are free once they have been looked at.
        pages = self._memory.pop(number)
        with garbage_collector_paused():
            self._reader._take_storages(self._regions[number], pages, self._data_offsets, self._sums, self._storages)

    def _wait(self) -> None:
        """For at least one read, with the garbage collector paused (by who unpickles) for a short time at most."""
        if gc.isenabled() or not self._collects_garbage:
            self._pipeline.reap()
            return
        under_way = self._under_way
        self._pipeline.reap(timeout=PAUSE_SECONDS)
        if self._under_way == under_way:
            gc.enable()
            try:
                self._pipeline.reap()
            finally:
                gc.disable()

    def _fill_queue(self) -> None:
        room = self._reader._queue_depth - self._under_way
        if room >= self._pipeline.together:  # below that it is not worth a call
            for request, finished in islice(self._requests, room):
                self._under_way += 1
                self._pipeline.submit(request, finished=finished)
            self._pipeline.start_held()

    def _all_requests(self) -> Generator[tuple[Read, Callable[[int], None]], None, None]:
        """The reads of all regions, and what is to be told when one has ended."""
        file, block_nbytes, file_nbytes = self._reader._file, self._reader._block_nbytes, self._reader._directory.file_nbytes
        for number, region in enumerate(self._regions):
            self._ready(number)
            pages = self._memory[number]
            for start in range(0, region.nbytes, block_nbytes):
                file_offset, nbytes = region.file_offset + start, min(block_nbytes, region.nbytes - start)
                summed = None if self._sums is None else self._summed(self._sums, region, pages, file_offset, nbytes)
                finished = partial(self._finish_block, number, min(file_offset + nbytes, file_nbytes), summed)
                yield Read(file, pages.address + start, nbytes, file_offset, owner=pages), finished

    def _summed(
        self, sums: BlockSums, region: Region, pages: Pages, file_offset: int, nbytes: int
    ) -> Callable[[], None] | None:
        """What sums this block of a large record when it has arrived; small ones are summed when they are looked at."""
        record, sizes = region.records[0], self._reader._directory.nbytes
        if not is_large(int(sizes[record])):
            return None
        data_start = self._data_offsets[record]
        low, high = max(file_offset, data_start), min(file_offset + nbytes, data_start + int(sizes[record]))
        return partial(sums.add, record, low, pages.view[low - region.file_offset : high - region.file_offset])

    def _finish_block(self, number: int, expected: int, summed: Callable[[], None] | None, reached: int) -> None:
        self._reader._finish_block(expected, summed, reached)
        self._missing[number] -= 1
        self._under_way -= 1


class BlockSums:
    """Checksums of the blocks of large records, which complete in any order."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, record: int, offset: int, data: memoryview) -> None:
        """Account for a part of a record; it is summed here, while other blocks are in flight."""
        self._parts.setdefault(record, []).append((offset, crc32(data), len(data)))

    def total(self, record: int) -> int:
        """Checksum of the whole record."""
        total = 0
        for _, checksum, nbytes in sorted(self._parts.pop(record)):
            total = crc32_combine(total, checksum, nbytes)
        return total


class _PopulatedAhead:
    """A worker that faults memory in, piece by piece, ahead of the reads; ``ready(number)`` waits for one piece.

    Without it the kernel would fault page by page, inside the transfers: several times slower where threads do them.
    """

    def __init__(self, memory: Sequence[Pages]) -> None:
        self._memory = deque(memory)  # no longer held than needed
        self._done = 0
        self._stop = False
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="fastpersist-populate", daemon=True)

    def __enter__(self) -> Callable[[int], None]:
        self._thread.start()
        return self._wait

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()

    def _work(self) -> None:
        while self._memory and not self._stop:
            self._memory.popleft().populate()
            with self._progress:
                self._done += 1
                self._progress.notify()

    def _wait(self, number: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._done > number)
