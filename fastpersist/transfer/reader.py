"""Reads records straight into the memory of new storages: a deep queue, pages faulted in ahead, checksums in flight."""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import repeat

import numpy as np

from fastpersist.archive.directory import Directory, data_offsets
from fastpersist.archive.pickling import garbage_collector_paused
from fastpersist.archive.unpickling import Raw
from fastpersist.archive.zipformat import LOCAL_HEADER_NBYTES
from fastpersist.engines import Engine, File, Read, Request
from fastpersist.errors import CheckpointFormatError, CorruptCheckpointError, TransferError
from fastpersist.memory.alignment import PAGE_NBYTES, round_down, round_up
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.memory.checksum import crc32, crc32_combine
from fastpersist.memory.pages import Pages
from fastpersist.transfer.device import Copies
from fastpersist.transfer.pipeline import Pipeline
from fastpersist.transfer.regions import LARGE_STORAGE_NBYTES, Region, is_large, plan_regions

DTYPE_ALIGNMENT = 16
"""The widest element (complex128): data at other offsets, which no torch writes, is copied to where it is aligned."""
HEADER_WINDOW_NBYTES = 2 * PAGE_NBYTES
"""A header's fixed part may lie across a page boundary."""

KEY_PLACE = len("data/")

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

    def read_storages(self, wanted: Sequence[int], *, verify: bool) -> Storages:
        """The storages of the records ``wanted`` (places in the directory, ascending), by key.

        Raises CheckpointFormatError for headers that contradict the directory, CorruptCheckpointError with ``verify`` for
        data that contradicts its checksum, TransferError for a read that fails.
        """
        data_offsets = self._read_data_offsets(wanted)
        regions = plan_regions(self._directory, wanted, data_offsets)
        memory = [Pages(region.nbytes) for region in regions]
        sums = BlockSums() if verify else None
        with _PopulatedAhead(memory) as ready, self._pipeline(self._moved) as pipeline:
            for number, (region, pages) in enumerate(zip(regions, memory, strict=True)):
                ready(number)
                self._submit_region(pipeline, region, pages, data_offsets, sums)
            pipeline.finish()
        storages: Storages = {}
        memory.reverse()
        with garbage_collector_paused():
            for region in regions:  # pages that no storage views are free as soon as they have been looked at
                self._take_storages(region, memory.pop(), data_offsets, sums, storages)
        return storages

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
                    raise _cut_meanwhile(self._path, reached, header + LOCAL_HEADER_NBYTES)
                offsets[record] = self._data_offsets((record,), view, header)[0]

            pipeline.submit(Read(self._file, buffer.address, nbytes, start, owner=buffer), buffer=buffer, finished=finished)
        pipeline.finish()
        return offsets

    def _data_offsets(self, records: Sequence[int], content: memoryview, file_offset: int) -> list[int]:
        try:
            return [int(start) for start in data_offsets(self._directory, records, content, file_offset)]
        except CheckpointFormatError as error:
            raise CheckpointFormatError(f"{self._path}: {error}") from None

    def _submit_region(
        self, pipeline: Pipeline, region: Region, pages: Pages, data_offsets: dict[int, int], sums: BlockSums | None
    ) -> None:
        for start in range(0, region.nbytes, self._block_nbytes):
            nbytes = min(self._block_nbytes, region.nbytes - start)
            file_offset = region.file_offset + start
            summed = None
            if sums is not None and is_large(int(self._directory.nbytes[region.records[0]])):
                record = region.records[0]
                data_start = data_offsets[record]
                low = max(file_offset, data_start)
                high = min(file_offset + nbytes, data_start + int(self._directory.nbytes[record]))
                data = pages.view[low - region.file_offset : high - region.file_offset]
                summed = partial(sums.add, record, low, data)
            finished = partial(self._finish_block, min(file_offset + nbytes, self._directory.file_nbytes), summed)
            pipeline.submit(Read(self._file, pages.address + start, nbytes, file_offset, owner=pages), finished=finished)

    def _finish_block(self, expected: int, summed: Callable[[], None] | None, reached: int) -> None:
        if reached < expected:
            raise _cut_meanwhile(self._path, reached, expected)
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
    ctypes.memmove(copy.address, pages.address + place, nbytes)
    return copy.view, 0, nbytes


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
        self._memory = memory
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
        for pages in self._memory:
            if self._stop:
                break
            pages.populate()
            with self._progress:
                self._done += 1
                self._progress.notify()

    def _wait(self, number: int) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._done > number)


def stream_blocks(
    engine: Engine,
    file: File,
    nbytes: int,
    pool: BufferPool,
    *,
    path: str,
    block_nbytes: int,
    queue_depth: int,
    moved: Callable[[int], None],
) -> Generator[memoryview, None, None]:
    """The whole file of ``nbytes``, block by block in order, each valid until the next is asked for; reads run ahead."""

    def failure(request: Request, code: int, hint: str) -> TransferError:
        return TransferError(code, "cannot read", path, offset=request.file_offset, nbytes=request.nbytes, hint=hint)

    with Pipeline(engine, pool, queue_depth=queue_depth, failure=failure, moved=moved) as pipeline:
        arrived: set[int] = set()
        ahead: list[tuple[int, AlignedBuffer]] = []
        offsets = iter(range(0, nbytes, block_nbytes))
        upcoming = next(offsets, None)
        while upcoming is not None or ahead:
            while upcoming is not None and len(ahead) < queue_depth:
                size = min(block_nbytes, round_up(nbytes - upcoming, PAGE_NBYTES))
                if ahead and pool.max_nbytes - pool.lent_nbytes < size:
                    break
                buffer = pipeline.borrow(size)
                request = Read(file, buffer.address, size, upcoming, owner=buffer)
                pipeline.submit(request, finished=partial(_arrive, arrived, upcoming, min(upcoming + size, nbytes), path))
                ahead.append((upcoming, buffer))
                upcoming = next(offsets, None)
            offset, buffer = ahead.pop(0)
            while offset not in arrived:
                pipeline.reap()
            yield buffer.view[: min(block_nbytes, nbytes - offset)]
            pipeline.give_back(buffer)


def _arrive(arrived: set[int], offset: int, expected: int, path: str, reached: int) -> None:
    if reached < expected:
        raise _cut_meanwhile(path, reached, expected)
    arrived.add(offset)


def _cut_meanwhile(path: str, reached: int, expected: int) -> TransferError:
    hint = "the file was cut meanwhile"
    return TransferError(errno.EIO, "cannot read", path, offset=reached, nbytes=expected - reached, hint=hint)
