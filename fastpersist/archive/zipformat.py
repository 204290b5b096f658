"""Zip structures as torch's writer encodes them (PKWARE APPNOTE.TXT, and the bytes that torch.save 2.13 produces).

A record is: local header, data, data descriptor. The local header has flag bit 3 set and carries neither CRC nor sizes:
both follow the data, which is what allows data to be written before its checksum is known. Its extra field ``FB`` is
filler that moves the data to the offset wanted; readers skip it.

What checkpoints have many of, records without zip64 fields and with names of one length, is encoded in rows as well: one row
of an array of bytes for each record, the same bytes as the functions for single records give.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

LIMIT_32 = 0xFFFFFFFF
"""Sizes and offsets from here on need a zip64 extra field."""

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_64 = struct.Struct("<IIQI")
_END = struct.Struct("<IHHHHIIH")
_FILLER = struct.Struct("<2sH")
_DESCRIPTOR = struct.Struct("<IIII")
_DESCRIPTOR_64 = struct.Struct("<IIQQ")

LOCAL = np.dtype(
    [
        ("signature", "<u4"), ("needed", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"), ("date", "<u2"),
        ("checksum", "<u4"), ("stored_nbytes", "<u4"), ("nbytes", "<u4"), ("name_nbytes", "<u2"), ("extra_nbytes", "<u2"),
    ]
)  # fmt: skip
"""Fixed part of a local header, as CENTRAL is that of an entry in the central directory."""
CENTRAL = np.dtype(
    [
        ("signature", "<u4"), ("made_by", "<u2"), ("needed", "<u2"), ("flags", "<u2"), ("method", "<u2"), ("time", "<u2"),
        ("date", "<u2"), ("checksum", "<u4"), ("stored_nbytes", "<u4"), ("nbytes", "<u4"), ("name_nbytes", "<u2"),
        ("extra_nbytes", "<u2"), ("comment_nbytes", "<u2"), ("disk", "<u2"), ("internal", "<u2"), ("external", "<u4"),
        ("header_offset", "<u4"),
    ]
)  # fmt: skip

Rows = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]

_LOCAL_SIGNATURE, _DESCRIPTOR_SIGNATURE, _CENTRAL_SIGNATURE = 0x04034B50, 0x08074B50, 0x02014B50
_END_SIGNATURE, _LOCATOR_64_SIGNATURE, _END_64_SIGNATURE = 0x06054B50, 0x07064B50, 0x06064B50
_UTF8_NAME, _HAS_DESCRIPTOR = 0x800, 0x8
_MADE_BY, _VERSION_NEEDED = 0x031E, 45

LOCAL_HEADER_NBYTES = _LOCAL.size
FILLER_HEADER_NBYTES = _FILLER.size
DESCRIPTOR_NBYTES = _DESCRIPTOR.size
DESCRIPTOR_64_NBYTES = _DESCRIPTOR_64.size
END_NBYTES = _END_64.size + _LOCATOR_64.size + _END.size


def zip64_extra_nbytes(nbytes: int, header_offset: int) -> int:
    """Length of the zip64 extra field of a record: 0, 12, 20 or 28 bytes."""
    fields = 2 * (nbytes >= LIMIT_32) + (header_offset >= LIMIT_32)
    return 4 + 8 * fields if fields else 0


def descriptor_nbytes(nbytes: int, header_offset: int) -> int:
    """Length of what follows the data: 0 for an empty record, 24 where the record has a zip64 extra, else 16."""
    if nbytes == 0:
        return 0
    return DESCRIPTOR_64_NBYTES if zip64_extra_nbytes(nbytes, header_offset) else DESCRIPTOR_NBYTES


def local_header(name: bytes, nbytes: int, header_offset: int, data_offset: int) -> bytes:
    """Local header that starts at ``header_offset`` and is padded so that its data starts at ``data_offset``."""
    zip64 = _zip64_extra(nbytes, 0, header_offset)
    filler = data_offset - header_offset - LOCAL_HEADER_NBYTES - len(name) - len(zip64) - FILLER_HEADER_NBYTES
    extra = zip64 + _FILLER.pack(b"FB", filler) + b"Z" * filler
    return _LOCAL.pack(_LOCAL_SIGNATURE, 0, _flags(nbytes), 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(checksum: int, nbytes: int, header_offset: int) -> bytes:
    """Data descriptor: the checksum and the sizes that the local header left out; empty for an empty record."""
    if nbytes == 0:
        return b""
    layout = _DESCRIPTOR_64 if zip64_extra_nbytes(nbytes, header_offset) else _DESCRIPTOR
    return layout.pack(_DESCRIPTOR_SIGNATURE, checksum, nbytes, nbytes)


def central_header(name: bytes, checksum: int, nbytes: int, header_offset: int) -> bytes:
    """The record's entry in the central directory."""
    zip64 = _zip64_extra(nbytes, nbytes, header_offset)
    size, offset = min(nbytes, LIMIT_32), min(header_offset, LIMIT_32)
    return (
        _CENTRAL.pack(
            _CENTRAL_SIGNATURE,
            0,
            0,
            _flags(nbytes),
            0,
            0,
            0,
            checksum,
            size,
            size,
            len(name),
            len(zip64),
            0,
            0,
            0,
            0,
            offset,
        )
        + name
        + zip64
    )


def central_header_nbytes(name_nbytes: int, nbytes: int, header_offset: int) -> int:
    """Length of central_header."""
    return _CENTRAL.size + name_nbytes + zip64_extra_nbytes(nbytes, header_offset)


def end_of_archive(records: int, directory_nbytes: int, directory_offset: int, comment_nbytes: int = 0) -> bytes:
    """zip64 end record, its locator, and the classic end record; all three always, as torch writes them.

    A comment of so many spaces follows, at most 65535: it rounds the file's length up, and every reader passes over it.
    """
    end_64_offset = directory_offset + directory_nbytes
    few = min(records, 0xFFFF)
    return (
        _END_64.pack(
            _END_64_SIGNATURE, _END_64.size - 12, _MADE_BY, _VERSION_NEEDED, 0, 0,
            records, records, directory_nbytes, directory_offset,
        )
        + _LOCATOR_64.pack(_LOCATOR_64_SIGNATURE, 0, end_64_offset, 1)
        + _END.pack(
            _END_SIGNATURE, 0, 0, few, few, min(directory_nbytes, LIMIT_32), min(directory_offset, LIMIT_32), comment_nbytes
        )
        + b" " * comment_nbytes
    )  # fmt: skip


def local_header_rows(names: Rows, nbytes: Numbers, filler_nbytes: Numbers) -> Rows:
    """Local headers of records that are not empty, up to the filler: ``filler_nbytes`` times "Z" follow each."""
    fixed = np.zeros(len(names), LOCAL)
    fixed["signature"], fixed["flags"], fixed["name_nbytes"] = _LOCAL_SIGNATURE, _flags(1), names.shape[1]
    fixed["extra_nbytes"] = filler_nbytes + FILLER_HEADER_NBYTES
    filler_headers = np.zeros(len(names), [("id", "S2"), ("nbytes", "<u2")])
    filler_headers["id"], filler_headers["nbytes"] = b"FB", filler_nbytes
    return np.hstack([_rows(fixed), names, _rows(filler_headers)])


def descriptor_rows(checksums: Numbers, nbytes: Numbers) -> Rows:
    """Data descriptors of records that are not empty."""
    fields = np.empty((len(nbytes), 4), "<u4")
    fields[:, 0], fields[:, 1], fields[:, 2], fields[:, 3] = _DESCRIPTOR_SIGNATURE, checksums, nbytes, nbytes
    return _rows(fields)


def central_header_rows(names: Rows, checksums: Numbers, nbytes: Numbers, header_offsets: Numbers) -> Rows:
    """Entries in the central directory of records that are not empty."""
    fixed = np.zeros(len(names), CENTRAL)
    fixed["signature"], fixed["flags"], fixed["name_nbytes"] = _CENTRAL_SIGNATURE, _flags(1), names.shape[1]
    fixed["checksum"], fixed["header_offset"] = checksums, header_offsets
    fixed["nbytes"] = fixed["stored_nbytes"] = nbytes
    return np.hstack([_rows(fixed), names])


def _rows(values: Numbers) -> Rows:
    return values.view(np.uint8).reshape(len(values), -1)


def _flags(nbytes: int) -> int:
    return _UTF8_NAME | (_HAS_DESCRIPTOR if nbytes else 0)


def _zip64_extra(nbytes: int, compressed_nbytes: int, header_offset: int) -> bytes:
    # torch's local headers give the compressed size as 0: it is not known when they are written.
    fields = [nbytes, compressed_nbytes] if nbytes >= LIMIT_32 else []
    if header_offset >= LIMIT_32:
        fields.append(header_offset)
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""
