"""Checks an archive as it streams by: local headers and descriptors against the directory, data against its checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from fastpersist.archive.directory import Directory, check_local_header, data_offset
from fastpersist.archive.zipformat import DESCRIPTOR_64_NBYTES, DESCRIPTOR_NBYTES, LOCAL_HEADER_NBYTES
from fastpersist.errors import CheckpointFormatError, CorruptCheckpointError
from fastpersist.memory.checksum import crc32

_HAS_DESCRIPTOR = 0x8


class ByteStream:
    """Bytes of a file in order, from blocks of any size; each byte is looked at once."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks = blocks
        self._block = memoryview(b"")
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        """The next ``nbytes``, as a copy."""
        return b"".join(bytes(piece) for piece in self._pieces(nbytes))

    def checksum(self, nbytes: int) -> int:
        """CRC-32 of the next ``nbytes``."""
        total = 0
        for piece in self._pieces(nbytes):
            total = crc32(piece, total)
        return total

    def skip_to(self, position: int) -> None:
        """Pass over what lies before ``position``."""
        for _ in self._pieces(position - self.position):
            pass

    def _pieces(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes > 0:
            if not self._block:
                self._block = next(self._blocks, memoryview(b""))
                if not self._block:
                    raise CheckpointFormatError(f"the file ends at offset {self.position}, {nbytes} bytes early")
            piece, self._block = self._block[:nbytes], self._block[nbytes:]
            self.position += len(piece)
            nbytes -= len(piece)
            yield piece


@dataclass(frozen=True, slots=True)
class CheckedRecord:
    """A record without fault. ``checksummed`` is False where the writer stored no checksum."""

    name: str
    nbytes: int
    checksummed: bool


def check_records(directory: Directory, stream: ByteStream) -> Iterator[CheckedRecord]:
    """Check record after record, in file order.

    Raises CheckpointFormatError for a header or a descriptor that contradicts the directory, CorruptCheckpointError for
    data that contradicts its checksum; both name the record and the offset.
    """
    for record, name in enumerate(directory.names):
        stream.skip_to(int(directory.header_offsets[record]))
        header = stream.take(LOCAL_HEADER_NBYTES)
        start = data_offset(directory, record, header)
        header += stream.take(start - stream.position)
        check_local_header(directory, record, header)
        found = _check_data(directory, record, start, stream)
        if struct.unpack_from("<H", header, 6)[0] & _HAS_DESCRIPTOR:
            _check_descriptor(directory, record, stream)
        expected = directory.checksums[record]
        yield CheckedRecord(name, int(directory.nbytes[record]), checksummed=expected == found)


def _check_data(directory: Directory, record: int, start: int, stream: ByteStream) -> int:
    nbytes, expected = int(directory.nbytes[record]), directory.checksums[record]
    found = stream.checksum(nbytes)
    if expected not in (0, found):  # 0: written without a checksum
        raise CorruptCheckpointError(
            f"record {directory.names[record]!r} (offset {start}, {nbytes} bytes) has the checksum {found:08x}, "
            f"the directory says {expected:08x}"
        )
    return found


def _check_descriptor(directory: Directory, record: int, stream: ByteStream) -> None:
    nbytes, expected, offset = int(directory.nbytes[record]), directory.checksums[record], stream.position
    room = int(directory.limits[record]) - offset
    content = stream.take(min(room, DESCRIPTOR_64_NBYTES))
    plain, wide = (
        struct.pack("<4sIII", b"PK\7\x08", expected, nbytes & 0xFFFFFFFF, nbytes & 0xFFFFFFFF),
        struct.pack("<4sIQQ", b"PK\7\x08", expected, nbytes, nbytes),
    )
    if content[:DESCRIPTOR_NBYTES] != plain and content != wide:
        raise CheckpointFormatError(
            f"record {directory.names[record]!r}: the data descriptor at offset {offset} contradicts the directory"
        )
