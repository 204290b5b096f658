"""Where each record goes: from names and sizes to file offsets, before a single byte is written.

A record's data is placed at an offset that leaves a chosen residue modulo an alignment. With the residue of the data's
own memory address, file offset and address run in step, and all but the ends of a storage can be written straight from
where it lies. The offsets follow from sizes and residues alone, so equal inputs give equal plans everywhere.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass

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

_BYTE_ORDER = sys.byteorder.encode()
_Contents = dict[str, bytes | None]


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


def plan(prefix: str, pickle_bytes: bytes, storage_nbytes: Int64Array, residues: Int64Array, layout: str) -> ArchivePlan:
    """Place data.pkl, the metadata records and the storages ``data/0``, ``data/1``, ... under ``prefix``.

    storage_nbytes, residues: one number per storage; a residue (0..4095, a multiple of 64) is the remainder modulo 4096
    that the offset of a large storage shall leave. Layout "torch" takes torch's own order and places everything at
    multiples of 4096, as torch.save does under ``storage_alignment = 4096``; it ignores the residues. Layout "auto" rounds
    the file's length up to whole pages by a comment: to cut the last block afterwards, a filesystem reads it again.
    """
    head, tail = metadata_records(pickle_bytes, layout)
    order = storage_order(storage_nbytes, layout)
    start, end = len(head), len(head) + len(order)  # of the storages among the records
    names = [f"{prefix}/{name}".encode() for name in head]
    names += [b"%b/data/%d" % (prefix.encode(), storage) for storage in order.tolist()]
    names += [f"{prefix}/{name}".encode() for name in tail]
    nbytes = np.empty(len(names), np.int64)
    nbytes[:start], nbytes[start:end], nbytes[end:] = _sizes(head), storage_nbytes[order], _sizes(tail)
    storages = np.full(len(names), -1, np.int64)
    storages[start:end] = order
    wanted = np.zeros(len(names), np.int64)
    if layout == "torch":
        alignments, first_large = np.full(len(names), PAGE_NBYTES), 0
    else:
        first_large = end - int(np.count_nonzero(storage_nbytes >= LARGE_NBYTES))  # they come last
        wanted[start:end] = residues[order]  # a multiple of the small ones' alignment, to which it is as good as 0
        alignments = np.full(len(names), DATA_ALIGNMENT)
        alignments[first_large:end] = PAGE_NBYTES
    name_nbytes = np.fromiter(map(len, names), np.int64, len(names))
    headers, datas, zip64, directory_offset = _place(name_nbytes, nbytes, alignments, wanted, first_large)
    directory_nbytes = zipformat.central_header_nbytes(0, 0, 0) * len(names) + int((name_nbytes + zip64).sum())
    exact_nbytes = directory_offset + directory_nbytes + zipformat.END_NBYTES
    metadata = {**dict(enumerate(head.values())), **dict(enumerate(tail.values(), start=end))}
    return ArchivePlan(
        names, nbytes, headers, datas, storages, metadata, directory_offset, directory_nbytes,
        comment_nbytes=0 if layout == "torch" else -exact_nbytes % PAGE_NBYTES,
    )  # fmt: skip


def storage_order(storage_nbytes: Int64Array, layout: str) -> Int64Array:
    """Indices of the storages in the order in which they come in the file."""
    if layout == "torch":
        return np.arange(len(storage_nbytes))
    return (storage_nbytes >= LARGE_NBYTES).argsort(kind="stable")


def metadata_records(pickle_bytes: bytes, layout: str) -> tuple[_Contents, _Contents]:
    """The metadata records before the storages, and those behind them. The serialization id, known last, is None."""
    head: _Contents = {"data.pkl": pickle_bytes}
    if layout == "torch":
        # With .format_version present torch computes offsets, from exactly this order and this alignment.
        head |= {".format_version": b"1", ".storage_alignment": str(PAGE_NBYTES).encode(), "byteorder": _BYTE_ORDER}
        return head, {"version": b"3\n", SERIALIZATION_ID: None}
    # Neither .format_version nor .storage_alignment: torch then reads each offset from its header, wherever it lies.
    head |= {"byteorder": _BYTE_ORDER, "version": b"3\n"}
    return head, {SERIALIZATION_ID: None}


def serialization_id(names: list[bytes], checksums: bytes, nbytes: bytes) -> bytes:
    """40 digits that differ between different contents: a hash of the names and one of the rest, as torch has it.

    names, nbytes (64 bits each): of all records; checksums (32 bits each): of those before this one.
    """
    of_names = int.from_bytes(hashlib.blake2b(b"\0".join(names), digest_size=8).digest(), "little")
    of_content = int.from_bytes(hashlib.blake2b(checksums + nbytes, digest_size=8).digest(), "little")
    return b"%020d%020d" % (of_names, of_content)


def _sizes(contents: _Contents) -> list[int]:
    return [SERIALIZATION_ID_NBYTES if content is None else len(content) for content in contents.values()]


def _place(
    name_nbytes: Int64Array, nbytes: Int64Array, alignments: Int64Array, residues: Int64Array, first_large: int
) -> tuple[Int64Array, Int64Array, Int64Array, int]:
    """(header offsets, data offsets, bytes of zip64 fields, end): ``data offset % alignment == residue`` holds for each.

    Each data offset is known modulo its alignment, so the gaps are known before any offset is, and one running sum gives
    them all. Only what precedes the first of larger alignment is not known well enough: its gap is put right afterwards.
    Whether a record needs zip64 depends on its offset: far ones are found by placing until none is new.
    """
    turns = residues.copy()  # from one residue to the next
    turns[1:] -= residues[:-1]
    zip64 = np.zeros(len(nbytes), np.int64)
    while True:
        header_nbytes = zipformat.LOCAL_HEADER_NBYTES + zipformat.FILLER_HEADER_NBYTES + name_nbytes + zip64
        tails = nbytes + _descriptor_nbytes(nbytes, zip64)
        steps = header_nbytes.copy()  # from data to data
        steps[1:] += tails[:-1]
        gaps = (turns - steps) % alignments
        steps += gaps
        data_offsets = steps.cumsum()
        gap = (gaps[first_large] + residues[first_large] - data_offsets[first_large]) % alignments[first_large]
        data_offsets[first_large:] += gap - gaps[first_large]
        gaps[first_large] = gap
        header_offsets = data_offsets - gaps - header_nbytes
        end = int(data_offsets[-1] + tails[-1])
        if end < zipformat.LIMIT_32:  # neither does any size or offset reach it
            return header_offsets, data_offsets, zip64, end
        needed = _zip64_extra_nbytes(nbytes, header_offsets)
        if np.array_equal(needed, zip64):
            return header_offsets, data_offsets, zip64, end
        zip64 = needed


def _zip64_extra_nbytes(nbytes: Int64Array, header_offsets: Int64Array) -> Int64Array:
    fields = 2 * (nbytes >= zipformat.LIMIT_32) + (header_offsets >= zipformat.LIMIT_32)
    return np.where(fields > 0, 4 + 8 * fields, 0)


def _descriptor_nbytes(nbytes: Int64Array, zip64: Int64Array) -> Int64Array:
    sizes = np.where(zip64 > 0, zipformat.DESCRIPTOR_64_NBYTES, zipformat.DESCRIPTOR_NBYTES)
    return np.where(nbytes > 0, sizes, 0)
