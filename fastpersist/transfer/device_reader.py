"""Reads records to a CUDA device, through page-locked buffers: the device empties one while the next ones fill.

An engine that reaches device memory reads whole pages of large storages there; their ends take the other way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from fastpersist.engines import DEFAULT_BLOCK_NBYTES, Memory, Read
from fastpersist.memory.alignment import PAGE_NBYTES, round_down, round_up
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.memory.checksum import crc32
from fastpersist.transfer.cuda import CUDA, Piece
from fastpersist.transfer.device import Copies, Transfer
from fastpersist.transfer.pipeline import Pipeline
from fastpersist.transfer.reader import KEY_PLACE, BlockSums, RecordReader
from fastpersist.transfer.regions import Region, is_large, plan_regions


class DeviceReader(RecordReader):
    """A RecordReader whose storages come to lie on a device. Memory on the host: buffers of the pool, and no more."""

    def read_to_device(self, wanted: Sequence[int], device: int, *, verify: bool) -> dict[str, torch.UntypedStorage]:
        """The storages of the records ``wanted`` (places in the directory, ascending), by key. Raises as read_storages does.

        All copies are done when it returns.
        """
        data_offsets = self._read_data_offsets(wanted)
        sizes = self._directory.nbytes.tolist()
        storages = {record: CUDA.allocate(device, sizes[record]) for record in wanted}
        allocated = CUDA.record(CUDA.current_stream(device))  # whoever had this memory before is done with it then
        reaches = not verify and Memory.DEVICE in self._engine.capabilities.memory
        if reaches:
            CUDA.synchronize(allocated)  # an engine knows no streams
        copies = Copies({device: allocated})
        with self._pipeline(self._moved, copies) as pipeline:
            run = _Run(self, pipeline, copies, storages, device, BlockSums() if verify else None)
            for region in plan_regions(self._directory, wanted, data_offsets):
                record = region.records[0]
                if is_large(sizes[record]):
                    run.read_large(record, data_offsets[record], sizes[record], directly=reaches)
                else:
                    run.read_small(region)
            run.finish(data_offsets)
        names = self._directory.names
        return {names[record][KEY_PLACE:]: storage for record, storage in storages.items()}


class _Run:
    """The reads and copies of one call. Each buffer is read into, copied from, and given back when that copy is done."""

    def __init__(
        self,
        reader: DeviceReader,
        pipeline: Pipeline,
        copies: Copies,
        storages: dict[int, torch.UntypedStorage],
        device: int,
        sums: BlockSums | None,
    ) -> None:
        self._reader = reader
        self._pipeline = pipeline
        self._copies = copies
        self._storages = storages
        self._device = device
        self._sums = sums
        self._copying: deque[tuple[Transfer, AlignedBuffer]] = deque()

    def read_large(self, record: int, data_offset: int, nbytes: int, *, directly: bool) -> None:
        """Read a record, all of it through buffers or, ``directly``, but for its whole pages."""
        for on_device, file_offset, length in _parts(data_offset, nbytes, directly, self._reader._block_nbytes):
            if on_device:
                self._read_directly(record, file_offset - data_offset, file_offset, length)
            else:
                self._read(file_offset, length, partial(self._copy_large, record, data_offset, nbytes, file_offset, length))

    def read_small(self, region: Region) -> None:
        """Read the records of a region, in one transfer, and cut them apart on the device."""
        self._read(region.file_offset, region.nbytes, partial(self._copy_small, region))

    def finish(self, data_offsets: dict[int, int]) -> None:
        """Wait for all reads, begin all copies, and check the sums of large records."""
        self._pipeline.finish()
        while self._copying:
            self._finish_copy()
        if self._sums is not None:
            for record, start in data_offsets.items():
                self._reader._check_sum(record, start, self._sums.total(record))

    def _read_directly(self, record: int, start: int, file_offset: int, nbytes: int) -> None:
        storage, file = self._storages[record], self._reader._file
        request = Read(
            file, storage.data_ptr() + start, nbytes, file_offset,
            memory=Memory.DEVICE, device_index=self._device, owner=storage,
        )  # fmt: skip
        finished = partial(self._reader._finish_block, file_offset + nbytes, None)
        self._pipeline.submit(request, finished=finished)

    def _read(self, file_offset: int, nbytes: int, copy: partial[Transfer]) -> None:
        buffer = self._borrow(nbytes)
        expected = min(file_offset + nbytes, self._reader._directory.file_nbytes)

        def arrived(reached: int) -> None:
            self._reader._finish_block(expected, None, reached)
            self._copying.append((copy(buffer), buffer))

        request = Read(self._reader._file, buffer.address, nbytes, file_offset, owner=buffer)
        self._pipeline.submit(request, finished=arrived)

    def _borrow(self, nbytes: int) -> AlignedBuffer:
        while (buffer := self._pipeline.try_borrow(nbytes)) is None:
            if self._copying:
                self._finish_copy()
            elif self._reader._engine.in_flight:
                self._pipeline.reap()
            else:
                return self._pipeline.borrow(nbytes)  # others have all of the pool, and this one nothing
        return buffer

    def _finish_copy(self) -> None:
        transfer, buffer = self._copying[0]
        self._copies.finish(transfer)
        self._copying.popleft()
        self._pipeline.give_back(buffer)

    def _copy_large(
        self, record: int, data_offset: int, nbytes: int, file_offset: int, length: int, buffer: AlignedBuffer
    ) -> Transfer:
        low, high = max(file_offset, data_offset), min(file_offset + length, data_offset + nbytes)
        place = low - file_offset
        piece = Piece(self._storages[record], self._device, low - data_offset, high - low, buffer.address + place)
        transfer = self._copies.to_device(piece, buffer)
        if self._sums is not None:  # while the device copies
            self._sums.add(record, low, buffer.view[place : place + high - low])
        return transfer

    def _copy_small(self, region: Region, buffer: AlignedBuffer) -> Transfer:
        sizes = self._reader._directory.nbytes[list(region.records)].tolist()
        starts = self._reader._data_offsets(region.records, buffer.view[: region.nbytes], region.file_offset)
        pieces: list[Piece] = []
        for record, start, nbytes in zip(region.records, starts, sizes, strict=True):
            place = start - region.file_offset
            if self._sums is not None:
                self._reader._check_sum(record, start, crc32(buffer.view[place : place + nbytes]))
            if nbytes:
                pieces.append(Piece(self._storages[record], self._device, 0, nbytes, buffer.address + place))
        return self._copies.scatter(pieces, buffer, region.nbytes)


def _parts(data_offset: int, nbytes: int, directly: bool, block_nbytes: int) -> Iterator[tuple[bool, int, int]]:
    """(to device memory, file offset, length) of each read of a large record, in whole pages."""
    start, stop = round_down(data_offset, PAGE_NBYTES), round_up(data_offset + nbytes, PAGE_NBYTES)
    first, last = (
        (round_up(data_offset, PAGE_NBYTES), round_down(data_offset + nbytes, PAGE_NBYTES)) if directly else (stop, stop)
    )
    for on_device, low, high in ((False, start, first), (True, first, last), (False, last, stop)):
        step = block_nbytes if on_device else min(block_nbytes, DEFAULT_BLOCK_NBYTES)  # of the pool
        for offset in range(low, high, step):
            yield on_device, offset, min(step, high - offset)
