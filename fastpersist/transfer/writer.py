"""Writes an image to a file, block by block: straight from memory where it can, through a buffer elsewhere.

A block is checksummed, or put together, while those before it are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from fastpersist.archive.layout import ArchivePlan
from fastpersist.engines import Engine, File, Request, Write
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import BufferPool
from fastpersist.transfer.extents import Direct, Extent
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
    with Pipeline(engine, pool, queue_depth=queue_depth, failure=failure, moved=moved) as pipeline:
        for block in blocks:
            pipeline.make_room()
            watcher.before(block)
            if isinstance(block, Direct):
                written = partial(_release, watcher, block)
                pipeline.submit(Write(file, block.address, block.nbytes, block.file_offset), finished=written)
                image.checksum_direct(block)
            else:
                buffer = pipeline.borrow(block.nbytes)
                copied_nbytes += image.fill(buffer, block.file_offset, block.nbytes)
                watcher.released(block)
                pipeline.submit(Write(file, buffer.address, block.nbytes, block.file_offset, owner=buffer), buffer=buffer)
        pipeline.finish()
    return copied_nbytes


def _release(watcher: Watcher, block: Extent, reached: int) -> None:
    watcher.released(block)
