"""Zip structures, held against the zipfile module and against files that torch wrote."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

from fastpersist.archive import zipformat

LIMIT = 0xFFFFFFFF
AROUND_THE_LIMIT = [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 2**40]


def _archive(records: dict[str, bytes], alignment: int) -> bytes:
    """A whole archive, built one record after the other."""
    content, directory = bytearray(), bytearray()
    for name, data in records.items():
        raw, header = name.encode(), len(content)
        shortest = zipformat.LOCAL_HEADER_NBYTES + len(raw) + zipformat.FILLER_HEADER_NBYTES
        start = -(-(header + shortest) // alignment) * alignment
        content += zipformat.local_header(raw, len(data), header, start) + data
        content += zipformat.descriptor(zlib.crc32(data), len(data), header)
        directory += zipformat.central_header(raw, zlib.crc32(data), len(data), header)
    return bytes(content + directory + zipformat.end_of_archive(len(records), len(directory), len(content)))


RECORDS = {"x/a": b"hello", "x/empty": b"", "x/ünï/日本": b"\0" * 5000, "x/" + "n" * 300: b"PK\x03\x04" * 9}


@pytest.mark.parametrize("alignment", [1, 64, 4096, 32768])
def test_zipfile_reads_what_was_written(alignment):
    with zipfile.ZipFile(io.BytesIO(_archive(RECORDS, alignment))) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == RECORDS
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}


def test_an_archive_without_records_is_one():
    content = zipformat.end_of_archive(0, 0, 0)
    assert len(content) == zipformat.END_NBYTES
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        assert archive.namelist() == []


def test_flipped_bits_are_found():
    content = bytearray(_archive(RECORDS, 64))
    content[content.index(b"hello")] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(content))) as archive:
        assert archive.testzip() == "x/a"


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("checksum", [True, False])
def test_torchs_file_is_encoded_again_to_the_byte(alignment, checksum, tmp_path):
    path = tmp_path / "model.pt"
    with config.patch({"save.storage_alignment": alignment, "save.compute_crc32": checksum}):
        torch.save({"a": torch.arange(5), "none": torch.empty(0), "b": torch.rand(1000), "ü": [1, 2]}, path)
    theirs = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entries, start_dir = archive.infolist(), archive.start_dir
    content = b"".join(_encode_again(theirs, entry) for entry in entries)
    assert len(content) == start_dir
    directory = b"".join(
        zipformat.central_header(entry.filename.encode(), entry.CRC, entry.file_size, entry.header_offset) for entry in entries
    )
    assert content + directory + zipformat.end_of_archive(len(entries), len(directory), start_dir) == theirs


def _encode_again(theirs: bytes, entry: zipfile.ZipInfo) -> bytes:
    name_nbytes, extra_nbytes = struct.unpack_from("<HH", theirs, entry.header_offset + 26)
    start = entry.header_offset + zipformat.LOCAL_HEADER_NBYTES + name_nbytes + extra_nbytes
    return (
        zipformat.local_header(entry.filename.encode(), entry.file_size, entry.header_offset, start)
        + theirs[start : start + entry.file_size]
        + zipformat.descriptor(entry.CRC, entry.file_size, entry.header_offset)
    )


def _written_by_torch(names: int) -> tuple[bytes, int, int]:
    """(file, its number of records, offset of its directory): torch adds a few records of its own."""
    stream = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(stream)
    for number in range(names):
        writer.write_record(f"{number}", b"", 0)
    writer.write_end_of_file()
    with zipfile.ZipFile(stream) as archive:
        return stream.getvalue(), len(archive.namelist()), archive.start_dir


@pytest.mark.parametrize("records", [65534, 65535, 65536, 70000])
def test_many_records_end_as_torchs(records):
    _, added, _ = _written_by_torch(0)
    theirs, found, start_dir = _written_by_torch(records - added)
    assert found == records
    directory_nbytes = len(theirs) - zipformat.END_NBYTES - start_dir
    assert zipformat.end_of_archive(records, directory_nbytes, start_dir) == theirs[-zipformat.END_NBYTES :]


@pytest.mark.parametrize("nbytes", AROUND_THE_LIMIT)
@pytest.mark.parametrize("header_offset", AROUND_THE_LIMIT)
class TestAroundTheLimit:
    def test_lengths_are_as_announced(self, nbytes, header_offset):
        assert len(zipformat.central_header(b"name", 7, nbytes, header_offset)) == zipformat.central_header_nbytes(
            4, nbytes, header_offset
        )
        assert len(zipformat.descriptor(7, nbytes, header_offset)) == zipformat.descriptor_nbytes(nbytes, header_offset)
        for gap in (0, 1, 4095):
            shortest = zipformat.LOCAL_HEADER_NBYTES + 4 + zipformat.zip64_extra_nbytes(nbytes, header_offset) + 4
            data_offset = header_offset + shortest + gap
            assert len(zipformat.local_header(b"name", nbytes, header_offset, data_offset)) == shortest + gap

    def test_zip64_holds_what_does_not_fit(self, nbytes, header_offset):
        fields = 2 * (nbytes >= LIMIT) + (header_offset >= LIMIT)
        assert zipformat.zip64_extra_nbytes(nbytes, header_offset) == (4 + 8 * fields if fields else 0)

    def test_descriptors_take_long_sizes_where_the_record_has_zip64(self, nbytes, header_offset):
        content = zipformat.descriptor(0xABCDEF01, nbytes, header_offset)
        if nbytes == 0:
            assert content == b""
        elif max(nbytes, header_offset) >= LIMIT:
            assert struct.unpack("<4sIQQ", content) == (b"PK\x07\x08", 0xABCDEF01, nbytes, nbytes)
        else:
            assert struct.unpack("<4sIII", content) == (b"PK\x07\x08", 0xABCDEF01, nbytes, nbytes)

    def test_zipfile_reads_sizes_and_offsets(self, nbytes, header_offset, tmp_path):
        path = tmp_path / "sparse.zip"
        directory = zipformat.central_header(b"x/far", 7, nbytes, header_offset)
        start_dir = max(header_offset, nbytes) + 100
        _write_sparse(path, start_dir, directory + zipformat.end_of_archive(1, len(directory), start_dir))
        with zipfile.ZipFile(path) as archive:
            (entry,) = archive.infolist()
        assert (entry.file_size, entry.compress_size, entry.header_offset, entry.CRC) == (nbytes, nbytes, header_offset, 7)


def _write_sparse(path: Path, offset: int, content: bytes) -> None:
    with path.open("wb") as file:
        file.seek(offset)
        file.write(content)


def test_local_headers_leave_the_compressed_size_open():
    """As torch has it: the size of what follows is known beforehand, its compressed size counts as not known."""
    nbytes, header_offset = 2**33, 2**34
    header = zipformat.local_header(b"n", nbytes, header_offset, header_offset + 128)
    assert struct.unpack_from("<HHQQQ", header, 31) == (1, 24, nbytes, 0, header_offset)
    far = zipformat.local_header(b"n", 5, header_offset, header_offset + 128)
    assert struct.unpack_from("<HHQ2s", far, 31) == (1, 8, header_offset, b"FB")


def test_filler_too_long_for_its_field_is_an_error():
    with pytest.raises(struct.error):
        zipformat.local_header(b"n", 5, 0, 70_000)


def test_data_before_its_header_is_an_error():
    with pytest.raises(struct.error):
        zipformat.local_header(b"n", 5, 0, 20)
