"""Offsets, held against a computation that places one record after the other."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from fastpersist.archive import zipformat
from fastpersist.archive.layout import LARGE_NBYTES, SERIALIZATION_ID, SERIALIZATION_ID_NBYTES, ArchivePlan, plan
from fastpersist.archive.zipformat import LIMIT_32

BYTE_ORDER = sys.byteorder.encode()
PICKLE = b"pickled" * 11


def make_plan(sizes: list[int], residues: list[int] | None = None, layout: str = "auto", prefix: str = "model") -> ArchivePlan:
    """A plan from plain lists."""
    return plan(prefix, PICKLE, np.array(sizes, np.int64), np.array(residues or [0] * len(sizes), np.int64), layout)


def placed_naively(archive: ArchivePlan, rules: list[tuple[int, int]]) -> tuple[list[int], list[int], int]:
    """(header offsets, data offsets, end), step by step, from (alignment, residue) of each record."""
    cursor, headers, datas = 0, [], []
    for name, nbytes, (alignment, residue) in zip(archive.names, archive.nbytes.tolist(), rules, strict=True):
        headers.append(cursor)
        extra_nbytes = zipformat.zip64_extra_nbytes(nbytes, cursor) + zipformat.FILLER_HEADER_NBYTES
        data = cursor + zipformat.LOCAL_HEADER_NBYTES + len(name) + extra_nbytes
        data += (residue - data) % alignment
        datas.append(data)
        cursor = data + nbytes + zipformat.descriptor_nbytes(nbytes, cursor)
    return headers, datas, cursor


def rules_of(archive: ArchivePlan, residues: list[int], layout: str) -> list[tuple[int, int]]:
    """What each record's offset has to obey, told from the documented layout."""
    rules = []
    for storage, nbytes in zip(archive.storages.tolist(), archive.nbytes.tolist(), strict=True):
        if layout == "torch":
            rules.append((4096, 0))
        elif storage >= 0 and nbytes >= LARGE_NBYTES:
            rules.append((4096, residues[storage]))
        else:
            rules.append((64, 0))
    return rules


def check_against_naive(sizes: list[int], residues: list[int], layout: str) -> None:
    """Compare every offset, and the length of the file."""
    archive = make_plan(sizes, residues, layout)
    headers, datas, end = placed_naively(archive, rules_of(archive, residues, layout))
    assert archive.header_offsets.tolist() == headers
    assert archive.data_offsets.tolist() == datas
    assert archive.directory_offset == end
    directory_nbytes = sum(
        zipformat.central_header_nbytes(len(name), nbytes, header)
        for name, nbytes, header in zip(archive.names, archive.nbytes.tolist(), headers, strict=True)
    )
    assert archive.directory_nbytes == directory_nbytes
    exact_nbytes = end + directory_nbytes + zipformat.END_NBYTES
    assert archive.file_nbytes == (exact_nbytes if layout == "torch" else -(-exact_nbytes // 4096) * 4096)


SIZES = {
    "none": [],
    "one": [100],
    "empty ones": [0, 0, 0],
    "small": [1, 63, 64, 65, 4096, 0, 17],
    "around the threshold": [LARGE_NBYTES - 1, LARGE_NBYTES, LARGE_NBYTES + 1],
    "mixed": [LARGE_NBYTES * 3, 5, LARGE_NBYTES, 0, 99_999, LARGE_NBYTES + 4095],
    "at the limit": [LIMIT_32 - 1, LIMIT_32, LIMIT_32 + 1, 8],
    "beyond the limit": [3 << 30, 3 << 30, 8, 0, 16, LARGE_NBYTES],
    "terabytes": [1 << 40, 1 << 42, 3],
    "two hundred": [7 * number for number in range(200)],
}


@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_offsets_are_the_naive_ones(sizes, layout):
    generator = random.Random(len(sizes))
    check_against_naive(sizes, [64 * generator.randrange(64) for _ in sizes], layout)


@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("short", range(0, 6000, 37))
def test_records_crossing_the_limit(short, layout):
    """Many records around the offset from which headers grow: each growth moves those behind it."""
    check_against_naive([LIMIT_32 - short - 20_000] + [16] * 40 + [LARGE_NBYTES] * 5, [0] * 46, layout)


@pytest.mark.parametrize("residue", [0, 64, 512, 4032])
def test_large_storages_keep_their_residues(residue):
    archive = make_plan([LARGE_NBYTES, LARGE_NBYTES + 7], [residue, 4032 - residue])
    assert (archive.data_offsets[archive.storages >= 0] % 4096).tolist() == [residue, 4032 - residue]


def test_small_storages_are_packed():
    archive = make_plan([LARGE_NBYTES - 1] * 3 + [10] * 50, [64] * 53)
    gaps = np.diff(archive.header_offsets) - archive.nbytes[:-1]
    assert (gaps < 64 + 64 + zipformat.DESCRIPTOR_NBYTES + 20).all()
    assert (archive.data_offsets % 64 == 0).all()


def test_layout_torch_ignores_residues():
    plain, shifted = make_plan([LARGE_NBYTES] * 3, [0] * 3, "torch"), make_plan([LARGE_NBYTES] * 3, [64, 128, 4032], "torch")
    assert plain.data_offsets.tolist() == shifted.data_offsets.tolist()
    assert (plain.data_offsets % 4096 == 0).all()


def test_torch_order():
    archive = make_plan([LARGE_NBYTES, 3, 0], layout="torch")
    assert archive.names == [
        b"model/data.pkl", b"model/.format_version", b"model/.storage_alignment", b"model/byteorder",
        b"model/data/0", b"model/data/1", b"model/data/2", b"model/version", b"model/.data/serialization_id",
    ]  # fmt: skip
    assert archive.storages.tolist() == [-1, -1, -1, -1, 0, 1, 2, -1, -1]
    assert archive.metadata == {0: PICKLE, 1: b"1", 2: b"4096", 3: BYTE_ORDER, 7: b"3\n", 8: None}


def test_auto_order_says_nothing_of_calculated_offsets():
    archive = make_plan([LARGE_NBYTES, 3, LARGE_NBYTES, 0])
    assert archive.names == [
        b"model/data.pkl", b"model/byteorder", b"model/version", b"model/data/1", b"model/data/3",
        b"model/data/0", b"model/data/2", b"model/.data/serialization_id",
    ]  # fmt: skip
    assert archive.storages.tolist() == [-1, -1, -1, 1, 3, 0, 2, -1]
    assert archive.metadata == {0: PICKLE, 1: BYTE_ORDER, 2: b"3\n", 7: None}


@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_records_know_their_lengths(layout):
    sizes = [5, LARGE_NBYTES, 0]
    archive = make_plan(sizes, layout=layout)
    assert archive.records == len(archive.names) == len(archive.nbytes)
    for record, (storage, nbytes) in enumerate(zip(archive.storages.tolist(), archive.nbytes.tolist(), strict=True)):
        content = archive.metadata.get(record)
        expected = sizes[storage] if storage >= 0 else SERIALIZATION_ID_NBYTES if content is None else len(content)
        assert nbytes == expected
    assert archive.names[-1].endswith(SERIALIZATION_ID.encode())


def test_names_are_utf8():
    assert make_plan([1], prefix="größe").names[0] == "größe/data.pkl".encode()


def test_equal_inputs_give_equal_plans():
    first, second = (make_plan([3, LARGE_NBYTES], [0, 64]) for _ in range(2))
    assert first.names == second.names
    assert first.data_offsets.tolist() == second.data_offsets.tolist()
