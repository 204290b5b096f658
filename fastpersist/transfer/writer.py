"""Drives blocks through an engine: a deep queue, checksums while blocks are in flight, residuals resubmitted.

Memory is safe on every way out: whatever ends the run, an exception or Ctrl-C, what is in flight is waited for first, and
only then do buffers go back to the pool.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fastpersist.engines import Completion, Engine, File, Write
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.transfer.extents import Direct, Extent
from fastpersist.transfer.image import ArchiveImage

MAX_STALLS = 100
STALL_PAUSE_SECONDS = 0.005

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(slots=True)
class _Block:
    """What the writer keeps of a block in flight: the buffer to give back, and how often it made no progress."""

    buffer: AlignedBuffer | None
    stalls: int = 0


class ExtentWriter:
    """Writes one image to one file. ``path`` is the name that error messages use."""

    def __init__(
        self,
        engine: Engine,
        file: File,
        image: ArchiveImage,
        pool: BufferPool,
        *,
        queue_depth: int,
        path: str,
        progress: Progress,
        total_nbytes: int,
    ) -> None:
        self._engine = engine
        self._file = file
        self._image = image
        self._pool = pool
        self._queue_depth = queue_depth
        self._path = path
        self._progress = progress
        self._total_nbytes = total_nbytes
        self._done_nbytes = 0
        self._lent: set[AlignedBuffer] = set()
        self.copied_nbytes = 0

    def write(self, blocks: Iterable[Extent]) -> None:
        """Write all blocks, which come in file order. Returns when each has been completed, and checked.

        Raises TransferError with the errno of the first transfer that failed, and what reading the memory raises.
        """
        try:
            for block in blocks:
                self._make_room()
                if isinstance(block, Direct):
                    self._submit(block.address, block.nbytes, block.file_offset, _Block(None))
                    self._image.checksum_direct(block)
                else:
                    buffer = self._borrow(block.nbytes)
                    self.copied_nbytes += self._image.fill(buffer, block.file_offset, block.nbytes)
                    self._submit(buffer.address, block.nbytes, block.file_offset, _Block(buffer))
            while self._engine.in_flight:
                self._reap()
        finally:
            try:
                self._engine.drain()
            finally:
                for buffer in self._lent:
                    self._pool.release(buffer)

    def _make_room(self) -> None:
        while self._engine.in_flight >= self._queue_depth:
            self._reap()

    def _borrow(self, nbytes: int) -> AlignedBuffer:
        while (buffer := self._pool.try_acquire(nbytes)) is None:
            if self._engine.in_flight:
                self._reap()
            else:  # other saves hold the whole pool
                buffer = self._pool.acquire(nbytes)
                break
        self._lent.add(buffer)
        return buffer

    def _submit(self, address: int, nbytes: int, file_offset: int, block: _Block) -> None:
        self._engine.submit(Write(self._file, address, nbytes, file_offset, owner=block.buffer, tag=block))

    def _reap(self) -> None:
        for completion in self._engine.wait():
            self._settle(completion)

    def _settle(self, completion: Completion) -> None:
        request, block = completion.request, completion.request.tag
        if completion.error is not None:
            raise self._failure(completion.error.errno or errno.EIO, request.file_offset, request.nbytes) from completion.error
        self._advance(completion.transferred)
        if completion.residual is not None:
            self._pause_if_stalled(completion, block)
            self._engine.submit(completion.residual)
        elif block.buffer is not None:
            self._lent.discard(block.buffer)
            self._pool.release(block.buffer)

    def _pause_if_stalled(self, completion: Completion, block: _Block) -> None:
        if completion.transferred:
            block.stalls = 0
            return
        block.stalls += 1
        if block.stalls > MAX_STALLS:
            request = completion.request
            raise self._failure(errno.EIO, request.file_offset, request.nbytes, f"{MAX_STALLS} attempts made no progress")
        if block.stalls > 1:
            time.sleep(STALL_PAUSE_SECONDS)

    def _failure(self, code: int, file_offset: int, nbytes: int, hint: str = "") -> TransferError:
        record = self._image.record_at(file_offset)
        return TransferError(code, "cannot write", self._path, offset=file_offset, nbytes=nbytes, record=record, hint=hint)

    def _advance(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        # The last block is padded beyond the file's end: the padding does not count.
        self._progress(min(self._done_nbytes, self._total_nbytes), self._total_nbytes)
