"""CRC-32 against zlib's."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from fastpersist.memory.checksum import crc32, crc32_combine

pieces = st.binary(max_size=2000)


@given(pieces, pieces)
def test_it_is_the_checksum_of_zip_files(first: bytes, second: bytes) -> None:
    assert crc32(first) == zlib.crc32(first)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


@given(pieces, pieces)
def test_combining_equals_continuing(first: bytes, second: bytes) -> None:
    assert crc32_combine(crc32(first), crc32(second), len(second)) == crc32(first + second)
