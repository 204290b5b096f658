"""Reading a zip's directory, and believing none of it: every length and offset is checked against the file before use.

Sans-I/O: the functions take bytes and the file's length. They accept what torch can load (torch 1.6 to today, zip64,
comments) and raise CheckpointFormatError, with what and where, for everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpersist.archive.zipformat import CENTRAL, LIMIT_32, LOCAL_HEADER_NBYTES
from fastpersist.errors import CheckpointFormatError

Int64Array = npt.NDArray[np.int64]

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LENGTHS, _LENGTHS_PLACE = struct.Struct("<HHH"), 28  # name, extra, comment; in a central entry
_LOCAL_LENGTHS_PLACE = 26  # name, extra; in a local header
_END = struct.Struct("<IHHHHIIH")
_LOCATOR_64 = struct.Struct("<IIQI")
_END_64 = struct.Struct("<IQHHIIQQQQ")
_MAX_COMMENT_NBYTES = 0xFFFF
_ENCRYPTED = 0x1
_CENTRAL_SIGNATURE = 0x02014B50

TAIL_NBYTES = _MAX_COMMENT_NBYTES + _END.size + _LOCATOR_64.size + _END_64.size
"""Reading this much of the file's end is certain to cover the end records, whatever the comment."""

PICKLE = "data.pkl"
_TORCHSCRIPT_RECORD = "constants.pkl"


@dataclass(frozen=True, slots=True)
class EndRecord:
    """Where the central directory lies, in bytes of the file, and how many records it lists."""

    directory_offset: int
    directory_nbytes: int
    records: int


@dataclass(frozen=True)
class Directory:
    """All records in the order of their place in the file, as parallel sequences.

    names lack the prefix. limits[i] is where the next thing begins: record i's header, data and descriptor end there at
    the latest. checksums are as stored: 0 stands for "none" where a writer had its checks off.
    """

    prefix: str
    names: list[str]
    nbytes: Int64Array
    checksums: list[int]
    header_offsets: Int64Array
    limits: Int64Array
    index: dict[str, int]
    file_nbytes: int
    directory_offset: int

    def storages(self) -> list[int]:
        """Indices of the records that hold storages (``data/KEY``), in file order."""
        return [index for index, name in enumerate(self.names) if name.startswith("data/")]


def find_end(tail: bytes, file_nbytes: int) -> EndRecord:
    """Locate the central directory from the file's last bytes (all of a file shorter than TAIL_NBYTES)."""
    base = file_nbytes - len(tail)
    position = _end_position(tail)
    if position < 0:
        raise CheckpointFormatError(
            f"no zip end record in the last {len(tail)} of {file_nbytes} bytes: the file is truncated, or was never finished"
        )
    _, disk, first_disk, here, records, nbytes, offset, _ = _END.unpack_from(tail, position)
    if disk not in (0, 0xFFFF) or first_disk not in (0, 0xFFFF) or here != records:
        raise CheckpointFormatError(f"the end record at offset {base + position} describes an archive of several disks")
    limit = base + position
    located = _end_64(tail, base, position)
    if located is not None:
        if records not in (0xFFFF, located[1]):
            raise CheckpointFormatError(f"the end records at offset {limit} give {records} and {located[1]} records")
        limit, records, nbytes, offset = located
    elif LIMIT_32 in (nbytes, offset) or records == 0xFFFF:
        raise CheckpointFormatError(f"the end record at offset {base + position} needs a zip64 record, which is missing")
    if offset + nbytes > limit:
        raise CheckpointFormatError(
            f"the central directory (offset {offset}, {nbytes} bytes) runs into the end record at offset {limit}"
        )
    if records * CENTRAL.itemsize > nbytes:
        raise CheckpointFormatError(f"{records} records cannot stand in a central directory of {nbytes} bytes")
    return EndRecord(offset, nbytes, records)


def _end_position(tail: bytes) -> int:
    """Position of the end record; -1 if there is none.

    It is the one whose comment reaches to the end of the file or, where bytes were appended later, the last whole one.
    """
    last, position = -1, tail.rfind(b"PK\5\6", 0, max(len(tail) - _END.size + 4, 0))
    while position >= 0:
        comment_nbytes = _END.unpack_from(tail, position)[-1]
        if position + _END.size + comment_nbytes == len(tail):
            return position
        if last < 0 and position + _END.size + comment_nbytes < len(tail):
            last = position
        position = tail.rfind(b"PK\5\6", 0, position)
    return last


def _end_64(tail: bytes, base: int, position: int) -> tuple[int, int, int, int] | None:
    """(its own offset, records, directory bytes, directory offset) from a zip64 end record, where one is announced."""
    locator = position - _LOCATOR_64.size
    if locator < 0 or tail[locator : locator + 4] != b"PK\6\7":
        return None
    _, disk, end_offset, disks = _LOCATOR_64.unpack_from(tail, locator)
    start = end_offset - base
    if disk != 0 or disks > 1 or start != locator - _END_64.size or tail[start : start + 4] != b"PK\6\6":
        raise CheckpointFormatError(
            f"the zip64 locator at offset {base + locator} points to {end_offset}, where no end record is"
        )
    _, own_nbytes, _, _, disk, first_disk, here, records, nbytes, offset = _END_64.unpack_from(tail, start)
    if own_nbytes != _END_64.size - 12 or disk or first_disk or here != records:
        raise CheckpointFormatError(f"the zip64 end record at offset {end_offset} contradicts itself")
    return end_offset, records, nbytes, offset


def parse_directory(content: bytes, end: EndRecord, file_nbytes: int) -> Directory:
    """Decode and check the central directory, whose bytes are ``content``.

    Only what cannot be avoided is done entry by entry: checkpoints have 100 000 of them.
    """
    positions, raw_names, names = _find_entries(content, end)
    entries = _decode_entries(content, positions)
    sizes, offsets = entries["nbytes"].astype(np.int64), entries["header_offset"].astype(np.int64)
    stored = entries["stored_nbytes"].astype(np.int64)
    for entry in np.flatnonzero((sizes == LIMIT_32) | (stored == LIMIT_32) | (offsets == LIMIT_32)).tolist():
        extra_start = positions[entry] + CENTRAL.itemsize + len(raw_names[entry])
        extra = content[extra_start : extra_start + int(entries["extra_nbytes"][entry])]
        values = _resolve_zip64(extra, int(sizes[entry]), int(stored[entry]), int(offsets[entry]), names[entry])
        if max(values) > file_nbytes:
            raise CheckpointFormatError(f"record {names[entry]!r} has a size or an offset beyond the file: {max(values)}")
        sizes[entry], stored[entry], offsets[entry] = values
    _check_entries(names, entries, sizes, stored, offsets, end.directory_offset)
    return _arrange(names, entries["checksum"], sizes, offsets, end, file_nbytes)


def _find_entries(content: bytes, end: EndRecord) -> tuple[list[int], list[bytes], list[str]]:
    """(position, raw name, name) of each entry, as three lists."""
    positions, raw_names = [], []
    position = 0
    try:
        for _ in range(end.records):
            name_nbytes, extra_nbytes, comment_nbytes = _LENGTHS.unpack_from(content, position + _LENGTHS_PLACE)
            positions.append(position)
            start = position + CENTRAL.itemsize
            raw_names.append(content[start : start + name_nbytes])
            position = start + name_nbytes + extra_nbytes + comment_nbytes
    except struct.error:
        position = len(content) + 1
    if position != len(content):
        raise CheckpointFormatError(
            f"the central directory at offset {end.directory_offset} does not hold {end.records} entries: number "
            f"{len(positions)} is cut off, or more follow"
        )
    try:
        names = [name.decode() for name in raw_names]
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(f"the name of a record is no UTF-8: {error.object[:80]!r}") from None
    return positions, raw_names, names


def _decode_entries(content: bytes, positions: list[int]) -> npt.NDArray[Any]:
    """The fixed parts of all entries, as an array of CENTRAL."""
    raw = np.frombuffer(content, np.uint8)
    places = np.array(positions, np.int64).reshape(-1, 1) + np.arange(CENTRAL.itemsize)
    return raw[places].view(CENTRAL).reshape(-1) if positions else np.zeros(0, CENTRAL)


def _check_entries(
    names: list[str],
    entries: npt.NDArray[Any],
    sizes: Int64Array,
    stored: Int64Array,
    offsets: Int64Array,
    directory_offset: int,
) -> None:
    """Raise CheckpointFormatError for the first entry that no checkpoint has."""
    faults = (
        (entries["signature"] != _CENTRAL_SIGNATURE, "has a damaged entry in the central directory"),
        (entries["flags"] & _ENCRYPTED != 0, "is encrypted"),
        ((entries["method"] != 0) | (stored != sizes), "is compressed: torch stores records as they are"),
        (
            offsets + LOCAL_HEADER_NBYTES + sizes > directory_offset,
            f"does not fit before the directory at offset {directory_offset}",
        ),
    )
    for wrong, what in faults:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise CheckpointFormatError(
                f"record {names[first][:200]!r} (header at offset {offsets[first]}, {sizes[first]} bytes) {what}"
            )


def _resolve_zip64(extra: bytes, nbytes: int, stored_nbytes: int, header_offset: int, name: str) -> tuple[int, int, int]:
    """The true values of those fields that say "see the zip64 extra field"."""
    values = iter(_zip64_values(extra))
    try:
        nbytes = next(values) if nbytes == LIMIT_32 else nbytes
        stored_nbytes = next(values) if stored_nbytes == LIMIT_32 else stored_nbytes
        header_offset = next(values) if header_offset == LIMIT_32 else header_offset
    except StopIteration:
        raise CheckpointFormatError(f"record {name!r} lacks the zip64 values that its entry refers to") from None
    return nbytes, stored_nbytes, header_offset


def _zip64_values(extra: bytes) -> tuple[int, ...]:
    position = 0
    while position + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            body = extra[position + 4 : position + 4 + nbytes]
            return struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8])
        position += 4 + nbytes
    return ()


def _arrange(
    names: list[str], checksums: npt.NDArray[Any], sizes: Int64Array, offsets: Int64Array, end: EndRecord, file_nbytes: int
) -> Directory:
    """Put the records into file order, and check their names and that none overlaps the next."""
    # Ordinary zip programs list folders as well.
    listed = [place for place, name in enumerate(names) if not (name.endswith("/") and sizes[place] == 0)]
    order = np.array(listed, np.int64)[np.argsort(offsets[listed], kind="stable")]
    if not listed:
        raise CheckpointFormatError("this zip file is no checkpoint: it holds no records, and no data.pkl")
    prefix = names[int(order[0])].partition("/")[0]
    short_names = _without_prefix([names[place] for place in order.tolist()], prefix)
    index = {name: place for place, name in enumerate(short_names)}
    if len(index) != len(short_names):
        double = next(name for place, name in enumerate(short_names) if index[name] != place)
        raise CheckpointFormatError(f"record {double!r} is listed twice")
    if _TORCHSCRIPT_RECORD in index:
        raise CheckpointFormatError("this is a TorchScript archive, not a checkpoint: load it with torch.jit.load")
    if PICKLE not in index:
        raise CheckpointFormatError(f"this zip file is no checkpoint: it holds no {PICKLE}")
    nbytes, header_offsets = sizes[order], offsets[order]
    limits = np.append(header_offsets[1:], end.directory_offset)
    overlapping = np.flatnonzero(header_offsets + LOCAL_HEADER_NBYTES + nbytes > limits)
    if overlapping.size:
        first = int(overlapping[0])
        raise CheckpointFormatError(
            f"record {short_names[first]!r} at offset {header_offsets[first]} overlaps what begins at offset {limits[first]}"
        )
    return Directory(
        prefix, short_names, nbytes, checksums[order].tolist(), header_offsets, limits, index, file_nbytes, end.directory_offset
    )


def _without_prefix(names: list[str], prefix: str) -> list[str]:
    """The names inside the checkpoint's folder, all of which must lie in it and be ordinary."""
    start = f"{prefix}/"
    for name in names:
        if not name.startswith(start) or name == start:
            raise CheckpointFormatError(f"record {name[:200]!r} does not lie under the checkpoint's folder {prefix!r}")
    short_names = [name[len(start) :] for name in names]
    together = "/".join(short_names)
    if not prefix or "\0" in together or "\\" in together or "/../" in f"/{together}/":
        strange = [name for name in short_names if "\0" in name or "\\" in name or ".." in name.split("/")]
        raise CheckpointFormatError(f"a record has a name that no checkpoint has: {(strange or names)[0][:200]!r}")
    return short_names


def data_offsets(directory: Directory, records: Sequence[int], content: memoryview, file_offset: int) -> Int64Array:
    """Where the data of each of ``records`` starts, from their local headers in ``content``, the file from file_offset on.

    Raises CheckpointFormatError where no local header is, or where the data would reach into the next record.
    """
    raw = np.frombuffer(content, np.uint8)
    chosen = np.asarray(records, np.int64)
    headers = directory.header_offsets[chosen]
    places = headers - file_offset
    inside = (places >= 0) & (places + LOCAL_HEADER_NBYTES <= len(raw))
    fixed = raw[np.where(inside, places, 0).reshape(-1, 1) + np.arange(min(LOCAL_HEADER_NBYTES, len(raw)))]
    lengths = np.ascontiguousarray(fixed[:, _LOCAL_LENGTHS_PLACE:]).view("<u2").astype(np.int64)
    starts: Int64Array = headers + LOCAL_HEADER_NBYTES + lengths.sum(axis=1)
    missing = ~inside | (fixed[:, :4] != np.frombuffer(b"PK\3\4", np.uint8)).any(axis=1)
    beyond = starts + directory.nbytes[chosen] > directory.limits[chosen]
    if (missing | beyond).any():
        first = int(np.argmax(missing | beyond))
        name = directory.names[int(chosen[first])]
        if missing[first]:
            raise CheckpointFormatError(f"record {name!r}: no local header at offset {headers[first]}")
        raise CheckpointFormatError(
            f"record {name!r}: its data at offset {starts[first]} ({directory.nbytes[chosen[first]]} bytes) would reach beyond "
            f"what begins at offset {directory.limits[chosen[first]]}"
        )
    return starts


def data_offset(directory: Directory, record: int, header: bytes | memoryview) -> int:
    """The same for one record, of whose local header the first 30 bytes suffice."""
    return int(data_offsets(directory, [record], memoryview(header), int(directory.header_offsets[record]))[0])


def _filler_is_damaged(header: bytes) -> bool:
    """True where torch's filler, the extra field FB, holds anything but the Z that torch fills it with."""
    position = LOCAL_HEADER_NBYTES + int(_LOCAL.unpack_from(header)[9])
    while position + 4 <= len(header):
        kind, nbytes = struct.unpack_from("<2sH", header, position)
        body = header[position + 4 : position + 4 + nbytes]
        if kind == b"FB" and body.strip(b"Z"):
            return True
        position += 4 + nbytes
    return position != len(header)


def check_local_header(directory: Directory, record: int, header: bytes) -> None:
    """Compare a whole local header (name included) with the directory; a mismatch is CheckpointFormatError."""
    fields = _LOCAL.unpack_from(header)
    expected = f"{directory.prefix}/{directory.names[record]}".encode()
    found = header[LOCAL_HEADER_NBYTES : LOCAL_HEADER_NBYTES + int(fields[9])]
    offset = int(directory.header_offsets[record])
    if found != expected:
        raise CheckpointFormatError(
            f"record {directory.names[record]!r}: the local header at offset {offset} carries the name {found[:200]!r}"
        )
    if _filler_is_damaged(header):
        raise CheckpointFormatError(
            f"record {directory.names[record]!r}: the padding of its header at offset {offset} is damaged"
        )
    if fields[3] != 0 or fields[2] & _ENCRYPTED:
        raise CheckpointFormatError(
            f"record {directory.names[record]!r}: the local header at offset {offset} says compressed or encrypted"
        )
    for kind, value, listed in (
        ("checksum", fields[6], directory.checksums[record]),
        ("stored size", fields[7], int(directory.nbytes[record])),
        ("size", fields[8], int(directory.nbytes[record])),
    ):
        # 0 (and the zip64 mark) mean "see the descriptor" or "see the extra field".
        if value not in (0, LIMIT_32, listed):
            raise CheckpointFormatError(
                f"record {directory.names[record]!r}: {kind} {value} in the local header at offset {offset}, "
                f"{listed} in the directory"
            )
