"""What tests ask of a checkpoint file, answered by the standard library: records, true offsets, masked bytes."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

SERIALIZATION_ID = ".data/serialization_id"
LOCAL_HEADER_NBYTES, CENTRAL_HEADER_NBYTES = 30, 46


def records_of(path: Path) -> dict[str, bytes]:
    """Content of each record by its name without the prefix, checksums verified by zipfile."""
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def offsets_of(path: Path) -> dict[str, int]:
    """Where the data of each record begins: the local header's own lengths tell."""
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        return {entry.filename.partition("/")[2]: _data_offset(file, entry.header_offset) for entry in archive.infolist()}


def _data_offset(file: object, header_offset: int) -> int:
    file.seek(header_offset + 26)  # type: ignore[attr-defined]
    name_nbytes, extra_nbytes = struct.unpack("<HH", file.read(4))  # type: ignore[attr-defined]
    return header_offset + LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes


def without_serialization_id(path: Path) -> bytes:
    """The file with zeros in place of the serialization id and of both its checksums: hashes differ between writers."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith(SERIALIZATION_ID)]
        # The descriptor is: signature, checksum, sizes. The central header has the checksum at byte 16.
        data = offsets_of(path)[SERIALIZATION_ID]
        central = content.index(entry.filename.encode(), archive.start_dir) - CENTRAL_HEADER_NBYTES
    checksum = struct.pack("<I", entry.CRC)
    for offset in (data + entry.file_size + 4, central + 16):
        assert content[offset : offset + 4] == checksum, "the checksum is not where it belongs"
        content[offset : offset + 4] = bytes(4)
    content[data : data + entry.file_size] = bytes(entry.file_size)
    return bytes(content)
