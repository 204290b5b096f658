"""A small file in one piece: the bytes that a plan, its blocks and its image amount to, put together from front to back.

For a few small tensors arrays of records, extents and a queue would take longer than the disk does. What is written is the
same, and goes through the same engine.
"""

from __future__ import annotations

import bisect
from array import array
from errno import EIO

from fastpersist.archive import zipformat
from fastpersist.archive.layout import (
    DATA_ALIGNMENT,
    LARGE_NBYTES,
    SERIALIZATION_ID,
    SERIALIZATION_ID_NBYTES,
    metadata_records,
    serialization_id,
)
from fastpersist.archive.pickling import FlatObject
from fastpersist.engines import Engine, File, Request, Write
from fastpersist.errors import TransferError
from fastpersist.memory.alignment import PAGE_NBYTES, round_up
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.memory.checksum import crc32
from fastpersist.memory.pages import copy_memory
from fastpersist.progress import Progress, ProgressCounter
from fastpersist.transfer.pipeline import Pipeline
from fastpersist.transfer.staging import without_address

MAX_NBYTES = 1 << 20
MAX_STORAGES = 32  # more of them are encoded faster all together, as ArchiveImage does it
_RECORD_NBYTES = 256  # more than is written of a record beside its data and, twice, the archive's prefix


def is_small(flat: FlatObject, prefix: str, file: File, block_nbytes: int) -> bool:
    """Whether all is in host memory, to be copied, and the file of layout "auto" one transfer of at most ``block_nbytes``."""
    return (
        len(flat.storages) <= MAX_STORAGES
        and file.offset_alignment <= PAGE_NBYTES
        and _bound(flat, prefix) <= min(block_nbytes, MAX_NBYTES)
        and max(flat.storage_nbytes, default=0) < LARGE_NBYTES
        and not without_address(flat)
    )


def _bound(flat: FlatObject, prefix: str) -> int:
    """More bytes than the file has."""
    records = len(flat.storages) + 4
    return flat.nbytes + len(flat.pickle_bytes) + records * (2 * len(prefix) + _RECORD_NBYTES) + PAGE_NBYTES


def write_small(
    flat: FlatObject,
    prefix: str,
    engine: Engine,
    file: File,
    pool: BufferPool,
    *,
    checksum: bool,
    path: str,
    report: Progress,
) -> tuple[int, int]:
    """Write the file of an object that ``is_small``; returns (its length, its number of records).

    Raises TransferError, for ``path``, where space is lacking and where the transfer fails.
    """

    def failure(request: Request, code: int, hint: str) -> TransferError:
        record = archive.record_at(request.file_offset)
        return TransferError(
            code, "cannot write", path, offset=request.file_offset, nbytes=request.nbytes, record=record, hint=hint
        )

    def moved(nbytes: int) -> None:
        progress.add(nbytes)

    with Pipeline(engine, pool, queue_depth=1, failure=failure, moved=moved) as pipeline:
        buffer = pipeline.borrow(_bound(flat, prefix))
        archive = _Archive(buffer, prefix.encode())
        nbytes = archive.fill(flat, checksum=checksum)
        progress = ProgressCounter(report, nbytes)
        try:
            engine.reserve(file, nbytes)
        except OSError as error:
            raise TransferError(error.errno or EIO, "cannot reserve space for", path, nbytes=nbytes) from error
        pipeline.submit(Write(file, buffer.address, nbytes, 0, owner=buffer), buffer=buffer)
        pipeline.finish()
    return nbytes, archive.records


class _Archive:
    """Writes record after record into ``buffer``."""

    def __init__(self, buffer: AlignedBuffer, prefix: bytes) -> None:
        self._view = buffer.view
        self._address = buffer.address
        self._prefix = prefix
        self._end = 0  # of what has been written
        self._names: list[bytes] = []
        self._headers: list[int] = []
        self._nbytes: list[int] = []
        self._checksums: list[int] = []

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self._names)

    def record_at(self, file_offset: int) -> str:
        """Name of the record that the file's byte at ``file_offset`` belongs to, for messages."""
        if file_offset >= self._end:
            return "central directory"
        return self._names[bisect.bisect_right(self._headers, file_offset) - 1].decode()

    def fill(self, flat: FlatObject, *, checksum: bool) -> int:
        """The whole file; returns its length, a multiple of 4096."""
        head, _ = metadata_records(flat.pickle_bytes, "auto")
        for name, content in head.items():
            assert content is not None
            self._add(name.encode(), content)
        for index, (address, nbytes) in enumerate(zip(flat.addresses, flat.storage_nbytes, strict=True)):
            self._add_storage(b"data/%d" % index, address, nbytes, checksum=checksum)
        self._add_serialization_id()
        entries = map(zipformat.central_header, self._names, self._checksums, self._nbytes, self._headers)
        directory = b"".join(entries)
        exact_nbytes = self._end + len(directory) + zipformat.END_NBYTES
        comment_nbytes = -exact_nbytes % PAGE_NBYTES
        end = zipformat.end_of_archive(self.records, len(directory), self._end, comment_nbytes)
        self._view[self._end : exact_nbytes + comment_nbytes] = directory + end
        return exact_nbytes + comment_nbytes

    def _add(self, name: bytes, content: bytes) -> None:
        data = self._begin(name, len(content))
        self._view[data : self._end] = content
        self._finish(crc32(content))

    def _add_storage(self, name: bytes, address: int, nbytes: int, *, checksum: bool) -> None:
        data = self._begin(name, nbytes)
        copy_memory(self._address + data, address, nbytes)
        self._finish(crc32(self._view[data : self._end]) if checksum else 0)

    def _add_serialization_id(self) -> None:
        name = SERIALIZATION_ID.encode()
        checksums = array("I", self._checksums).tobytes()
        data = self._begin(name, SERIALIZATION_ID_NBYTES)
        content = serialization_id(self._names, checksums, array("q", self._nbytes).tobytes())
        self._view[data : self._end] = content
        self._finish(crc32(content))

    def _begin(self, name: bytes, nbytes: int) -> int:
        """Write the header; returns where the data goes, which ends at ``_end`` then."""
        name = b"%b/%b" % (self._prefix, name)
        header = self._end
        data = round_up(header + zipformat.LOCAL_HEADER_NBYTES + zipformat.FILLER_HEADER_NBYTES + len(name), DATA_ALIGNMENT)
        self._view[header:data] = zipformat.local_header(name, nbytes, header, data)
        self._names.append(name)
        self._headers.append(header)
        self._nbytes.append(nbytes)
        self._end = data + nbytes
        if self._end > len(self._view):  # before anything is copied there
            raise AssertionError("no file is longer than its bound")
        return data

    def _finish(self, checksum: int) -> None:
        """Write what follows the data."""
        self._checksums.append(checksum)
        descriptor = zipformat.descriptor(checksum, self._nbytes[-1], self._headers[-1])
        self._view[self._end : self._end + len(descriptor)] = descriptor
        self._end += len(descriptor)
