"""A whole file as a stream of blocks, read ahead by a deep queue; and what to say of a file that ends too early."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from functools import partial

from fastpersist.engines import Engine, File, Read, Request
from fastpersist.errors import TransferError
from fastpersist.memory.alignment import PAGE_NBYTES, round_up
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.transfer.pipeline import Pipeline


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
        raise cut_meanwhile(path, reached, expected)
    arrived.add(offset)


def cut_meanwhile(path: str, reached: int, expected: int) -> TransferError:
    """The error of a read that met the end of the file where bytes are known to have been."""
    hint = "the file was cut meanwhile"
    return TransferError(errno.EIO, "cannot read", path, offset=reached, nbytes=expected - reached, hint=hint)
