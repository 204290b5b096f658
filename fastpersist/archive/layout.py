"""Where each record goes: from names and sizes to file offsets, before a single byte is written.

A record's data is placed at an offset that leaves a chosen residue modulo an alignment. With the residue of the data's
own memory address, file offset and address run in step, and all but the ends of a storage can be written straight from
where it lies. The offsets follow from sizes and residues alone, so equal inputs give equal plans everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpersist.archive import zipformat
from fastpersist.memory.alignment import PAGE_NBYTES

Int64Array = npt.NDArray[np.int64]

LAYOUTS = ("auto", "torch")
DATA_ALIGNMENT = 64
"""Every record's data starts at a multiple of this, so that tensors mapped from the file are aligned for every dtype."""
LARGE_NBYTES = 256 << 10
"""From here on a storage of layout "auto" gets a place congruent to its address; smaller ones are packed and copied."""
SERIALIZATION_ID_NBYTES = 40
SERIALIZATION_ID = ".data/serialization_id"


@dataclass(frozen=True)
class ArchivePlan:
    """All records of an archive in file order, as parallel arrays.

    ``names`` are full names, prefix included, in UTF-8. ``storages[i]`` is the index of the storage that record i holds,
    or -1 for a metadata record, whose content is in ``metadata[i]`` (None for the serialization id, known last).
    """

    names: list[bytes]
    nbytes: Int64Array
    header_offsets: Int64Array
    data_offsets: Int64Array
    storages: Int64Array
    metadata: dict[int, bytes | None]
    directory_offset: int
    directory_nbytes: int
    comment_nbytes: int = 0

    @property
    def file_nbytes(self) -> int:
        """Length of the finished file."""
        return self.directory_offset + self.directory_nbytes + zipformat.END_NBYTES + self.comment_nbytes

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self.names)


@dataclass(frozen=True)
class _Group:
    """Consecutive records that share an alignment: ``offset % alignment == residue`` holds for the data of each."""

    names: list[bytes]
    nbytes: Int64Array
    alignment: int
    residues: Int64Array
    storages: Int64Array
    contents: Sequence[bytes | None] = ()


def plan(prefix: str, pickle_bytes: bytes, storage_nbytes: Int64Array, residues: Int64Array, layout: str) -> ArchivePlan:
    """Place data.pkl, the metadata records and the storages ``data/0``, ``data/1``, ... under ``prefix``.

    storage_nbytes, residues: one number per storage; a residue (0..4095, a multiple of 64) is the remainder modulo 4096
    that the offset of a large storage shall leave. Layout "torch" takes torch's own order and places everything at
    multiples of 4096, as torch.save does under ``storage_alignment = 4096``; it ignores the residues. Layout "auto" rounds
    the file's length up to whole pages by a comment: to cut the last block afterwards, a filesystem reads it again.
    """
    if layout == "torch":
        return _place(_torch_order(prefix.encode(), pickle_bytes, storage_nbytes, residues))
    archive = _place(_auto_order(prefix.encode(), pickle_bytes, storage_nbytes, residues))
    return replace(archive, comment_nbytes=-archive.file_nbytes % PAGE_NBYTES)


def storage_order(storage_nbytes: Int64Array, layout: str) -> Int64Array:
    """Indices of the storages in the order in which they come in the file."""
    large = storage_nbytes >= LARGE_NBYTES if layout != "torch" else np.zeros(len(storage_nbytes), bool)
    return np.argsort(large, kind="stable")


def _torch_order(prefix: bytes, pickle_bytes: bytes, storage_nbytes: Int64Array, residues: Int64Array) -> list[_Group]:
    # With .format_version present torch computes offsets, from exactly this order and this alignment.
    head = {
        "data.pkl": pickle_bytes,
        ".format_version": b"1",
        ".storage_alignment": str(PAGE_NBYTES).encode(),
        "byteorder": sys.byteorder.encode(),
    }
    everything = np.arange(len(storage_nbytes))
    return [
        _metadata(prefix, head, PAGE_NBYTES),
        _storages(prefix, everything, storage_nbytes, PAGE_NBYTES, np.zeros_like(residues)),
        _metadata(prefix, {"version": b"3\n", SERIALIZATION_ID: None}, PAGE_NBYTES),
    ]


def _auto_order(prefix: bytes, pickle_bytes: bytes, storage_nbytes: Int64Array, residues: Int64Array) -> list[_Group]:
    # Neither .format_version nor .storage_alignment: torch then reads each offset from its header, wherever it lies.
    head = {"data.pkl": pickle_bytes, "byteorder": sys.byteorder.encode(), "version": b"3\n"}
    large = storage_nbytes >= LARGE_NBYTES
    return [
        _metadata(prefix, head, DATA_ALIGNMENT),
        _storages(prefix, np.flatnonzero(~large), storage_nbytes, DATA_ALIGNMENT, np.zeros_like(residues)),
        _storages(prefix, np.flatnonzero(large), storage_nbytes, PAGE_NBYTES, residues),
        _metadata(prefix, {SERIALIZATION_ID: None}, DATA_ALIGNMENT),
    ]


def _metadata(prefix: bytes, contents: Mapping[str, bytes | None], alignment: int) -> _Group:
    names = [b"%b/%b" % (prefix, name.encode()) for name in contents]
    sizes = [SERIALIZATION_ID_NBYTES if content is None else len(content) for content in contents.values()]
    nothing = np.zeros(len(names), np.int64)
    return _Group(names, np.array(sizes, np.int64), alignment, nothing, nothing - 1, list(contents.values()))


def _storages(
    prefix: bytes, chosen: npt.NDArray[Any], storage_nbytes: Int64Array, alignment: int, residues: Int64Array
) -> _Group:
    names = [b"%b/data/%d" % (prefix, index) for index in chosen.tolist()]
    return _Group(names, storage_nbytes[chosen], alignment, residues[chosen], chosen.astype(np.int64))


def _place(groups: list[_Group]) -> ArchivePlan:
    cursor = 0
    names: list[bytes] = []
    headers, datas = [], []
    metadata: dict[int, bytes | None] = {}
    for group in groups:
        metadata.update(enumerate(group.contents, start=len(names)))
        header_offsets, data_offsets, cursor = _offsets(cursor, group)
        names += group.names
        headers.append(header_offsets)
        datas.append(data_offsets)
    nbytes = np.concatenate([group.nbytes for group in groups])
    header_offsets = np.concatenate(headers)
    directory_nbytes = sum(map(len, names)) + zipformat.central_header_nbytes(0, 0, 0) * len(names)
    directory_nbytes += int(_zip64_extra_nbytes(nbytes, header_offsets).sum())
    return ArchivePlan(
        names, nbytes, header_offsets, np.concatenate(datas), np.concatenate([group.storages for group in groups]),
        metadata, cursor, directory_nbytes,
    )  # fmt: skip


def _offsets(cursor: int, group: _Group) -> tuple[Int64Array, Int64Array, int]:
    """(header offsets, data offsets, end) of a group that starts at ``cursor``.

    Each data offset is known modulo the alignment, so every gap is known before any offset is, and one running sum
    gives them all. Whether a record needs zip64 depends on its offset: far ones are found by placing until none is new.
    """
    names = group.names
    if not names:
        empty = np.zeros(0, np.int64)
        return empty, empty, cursor
    name_nbytes = np.fromiter(map(len, names), np.int64, len(names))
    header_offsets = np.full(len(names), cursor, np.int64)
    while True:
        zip64 = _zip64_extra_nbytes(group.nbytes, header_offsets)
        header_nbytes = zipformat.LOCAL_HEADER_NBYTES + zipformat.FILLER_HEADER_NBYTES + name_nbytes + zip64
        tails = group.nbytes + _descriptor_nbytes(group.nbytes, zip64)
        previous_ends = np.empty(len(names), np.int64)  # modulo the alignment
        previous_ends[0], previous_ends[1:] = cursor, (group.residues + tails)[:-1]
        gaps = (group.residues - previous_ends - header_nbytes) % group.alignment
        steps = header_nbytes + gaps
        steps[0] += cursor
        steps[1:] += tails[:-1]
        data_offsets = np.cumsum(steps)
        placed = data_offsets - gaps - header_nbytes
        if np.array_equal(_zip64_extra_nbytes(group.nbytes, placed), zip64):
            return placed, data_offsets, int(data_offsets[-1] + tails[-1])
        header_offsets = placed


def _zip64_extra_nbytes(nbytes: Int64Array, header_offsets: Int64Array) -> Int64Array:
    fields = 2 * (nbytes >= zipformat.LIMIT_32) + (header_offsets >= zipformat.LIMIT_32)
    return np.where(fields > 0, 4 + 8 * fields, 0)


def _descriptor_nbytes(nbytes: Int64Array, zip64: Int64Array) -> Int64Array:
    sizes = np.where(zip64 > 0, zipformat.DESCRIPTOR_64_NBYTES, zipformat.DESCRIPTOR_NBYTES)
    return np.where(nbytes > 0, sizes, 0)
