"""Writes an image to a file, block by block: straight from memory where it can, through a buffer elsewhere.

A block is checksummed, or put together, while those before it are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastpersist.engines import Engine, File, Request, Write
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import BufferPool
from fastpersist.transfer.extents import Direct, Extent
from fastpersist.transfer.image import ArchiveImage
from fastpersist.transfer.pipeline import Pipeline


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
            if isinstance(block, Direct):
                pipeline.submit(Write(file, block.address, block.nbytes, block.file_offset))
                image.checksum_direct(block)
            else:
                buffer = pipeline.borrow(block.nbytes)
                copied_nbytes += image.fill(buffer, block.file_offset, block.nbytes)
                pipeline.submit(Write(file, buffer.address, block.nbytes, block.file_offset, owner=buffer), buffer=buffer)
        pipeline.finish()
    return copied_nbytes
