"""Writes an image to a file, block by block: straight from memory where it can, through a buffer elsewhere.

A block is checksummed, or put together, while those before it are in flight. What lies on CUDA devices is on its way to the
buffers of the next blocks meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fastpersist.archive.layout import ArchivePlan
from fastpersist.engines import Engine, File, Memory, Request, Write
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.transfer.cuda import Piece
from fastpersist.transfer.device import LOOK_AHEAD, Copies, Transfer
from fastpersist.transfer.extents import Assembled, Direct, Extent
from fastpersist.transfer.image import ArchiveImage
from fastpersist.transfer.pipeline import Pipeline


class Watcher:
    """Told what becomes of the memory that a save reads. This one does not care; others may wait or raise."""

    def planned(self, plan: ArchivePlan, blocks: Sequence[Extent]) -> None:
        """These blocks of this file will be written, in this order."""

    def before(self, block: Extent) -> None:
        """The memory behind ``block`` is looked at from now on."""

    def released(self, block: Extent) -> None:
        """The memory behind ``block`` is not needed any more: its bytes were copied, or written."""

    def publishing(self) -> None:
        """All is written: the file gets its name now."""


NOBODY = Watcher()


@dataclass(frozen=True, slots=True)
class DeviceSources:
    """The storages of an object, the CUDA device of each (-1 for others), and the copies out of these devices."""

    storages: Sequence[torch.UntypedStorage]
    devices: Sequence[int]
    copies: Copies


def write_blocks(
    blocks: Iterable[Extent],
    image: ArchiveImage,
    engine: Engine,
    file: File,
    pool: BufferPool,
    *,
    queue_depth: int,
    path: str,
    moved: Callable[[int], None],
    watcher: Watcher = NOBODY,
    on_devices: DeviceSources | None = None,
) -> int:
    """Write all blocks, which come in file order; returns how many bytes of payload went through a buffer.

    When it returns, each block has been completed, and checked. Raises TransferError with the errno of the first transfer
    that failed (``path`` is the name it uses), and what reading the memory raises.
    """

    def failure(request: Request, code: int, hint: str) -> TransferError:
        record = image.record_at(request.file_offset)
        return TransferError(
            code, "cannot write", path, offset=request.file_offset, nbytes=request.nbytes, record=record, hint=hint
        )

    copied_nbytes = 0
    copies = None if on_devices is None else on_devices.copies
    with Pipeline(engine, pool, queue_depth=queue_depth, failure=failure, moved=moved, copies=copies) as pipeline:
        ready = (
            _with_buffers(blocks, pipeline, watcher)
            if on_devices is None
            else _with_device_bytes(blocks, image, pipeline, watcher, on_devices)
        )
        for group, buffer in ready:
            if isinstance(group, Assembled):
                assert buffer is not None
                copied_nbytes += image.fill(buffer, group.file_offset, group.nbytes)
                watcher.released(group)
                pipeline.submit(Write(file, buffer.address, group.nbytes, group.file_offset, owner=buffer), buffer=buffer)
            else:
                by_end = {block.file_offset + block.nbytes: block for block in group}
                pipeline.submit(*(_write_direct(file, block) for block in group), finished=partial(_release, watcher, by_end))
                # Before anything is waited for: who may change the memory once it is written must not change what is summed.
                image.checksum_direct(group[0], sum(block.nbytes for block in group))
        pipeline.finish()
    return copied_nbytes


Group = Assembled | list[Direct]
"""What is looked at in one go: blocks from the memory of one storage that adjoin each other, or one that is put together."""


def _with_buffers(
    blocks: Iterable[Extent], pipeline: Pipeline, watcher: Watcher
) -> Iterator[tuple[Group, AlignedBuffer | None]]:
    """All blocks in their order, with a buffer for each that is to be put together."""
    group: list[Direct] = []
    for block in blocks:
        if group and (isinstance(block, Assembled) or block.record != group[0].record or len(group) == pipeline.together):
            yield group, None
            group = []
        watcher.before(block)
        if isinstance(block, Direct):
            group.append(block)
        else:
            yield block, pipeline.borrow(block.nbytes)
    if group:
        yield group, None


def _with_device_bytes(
    blocks: Iterable[Extent], image: ArchiveImage, pipeline: Pipeline, watcher: Watcher, on_devices: DeviceSources
) -> Iterator[tuple[Group, AlignedBuffer | None]]:
    """The same, with the bytes of devices in place; those of the blocks that follow are on their way.

    Blocks get their buffers in their order, and none waits for a buffer while others hold one that nobody writes yet: saves
    that share a pool cannot wait for each other.
    """
    copies = on_devices.copies
    ahead: deque[tuple[Extent, AlignedBuffer | None, Transfer | None]] = deque()

    def next_ready() -> tuple[Group, AlignedBuffer | None]:
        block, buffer, transfer = ahead.popleft()
        if transfer is not None:
            copies.finish(transfer)
        return [block] if isinstance(block, Direct) else block, buffer

    for block in blocks:
        while len(ahead) >= LOOK_AHEAD:
            yield next_ready()
        buffer, transfer = None, None
        if not isinstance(block, Direct):
            while (buffer := pipeline.try_borrow(block.nbytes)) is None and ahead:
                yield next_ready()
            buffer = buffer or pipeline.borrow(block.nbytes)
        watcher.before(block)
        if buffer is not None:
            transfer = copies.to_host(_pieces(block, image, on_devices, buffer), buffer)
        ahead.append((block, buffer, transfer))
    while ahead:
        yield next_ready()


def _pieces(block: Extent, image: ArchiveImage, on_devices: DeviceSources, buffer: AlignedBuffer) -> list[Piece]:
    storages, devices = on_devices.storages, on_devices.devices
    return [
        Piece(storages[storage], devices[storage], start, nbytes, buffer.address + place)
        for storage, start, nbytes, place in image.without_address(block.file_offset, block.nbytes)
        if devices[storage] >= 0
    ]


def _write_direct(file: File, block: Direct) -> Write:
    if block.device < 0:
        return Write(file, block.address, block.nbytes, block.file_offset)
    memory, device = Memory.DEVICE, block.device
    return Write(file, block.address, block.nbytes, block.file_offset, memory=memory, device_index=device)


def _release(watcher: Watcher, blocks: Mapping[int, Direct], reached: int) -> None:
    watcher.released(blocks[reached])
