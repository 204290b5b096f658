"""Rows of an array encode what the functions for single records encode."""

from __future__ import annotations

import numpy as np
import pytest

from fastpersist.archive import zipformat

NBYTES = np.array([1, 64, 4096, 70_000, zipformat.LIMIT_32 - 1])
NAMES = [b"model/data/%d" % number for number in range(5)]
NAME_ROWS = np.frombuffer(b"".join(NAMES), np.uint8).reshape(5, -1)
CHECKSUMS = np.array([0, 1, 0xDEADBEEF, 0xFFFFFFFF, 7], np.uint32)
HEADERS = np.array([0, 63, 4096, 1 << 31, zipformat.LIMIT_32 - 1])


@pytest.mark.parametrize("filler", [0, 1, 63, 4095])
def test_local_headers(filler):
    rows = zipformat.local_header_rows(NAME_ROWS, NBYTES, np.full(5, filler))
    starts = HEADERS + zipformat.LOCAL_HEADER_NBYTES + zipformat.FILLER_HEADER_NBYTES + len(NAMES[0])
    expected = map(zipformat.local_header, NAMES, NBYTES.tolist(), HEADERS.tolist(), (starts + filler).tolist())
    assert [row.tobytes() + b"Z" * filler for row in rows] == list(expected)


def test_descriptors():
    expected = map(zipformat.descriptor, CHECKSUMS.tolist(), NBYTES.tolist(), HEADERS.tolist())
    assert [row.tobytes() for row in zipformat.descriptor_rows(CHECKSUMS, NBYTES)] == list(expected)


def test_central_headers():
    rows = zipformat.central_header_rows(NAME_ROWS, CHECKSUMS, NBYTES, HEADERS)
    expected = map(zipformat.central_header, NAMES, CHECKSUMS.tolist(), NBYTES.tolist(), HEADERS.tolist())
    assert [row.tobytes() for row in rows] == list(expected)
