"""The central directory: what torch and zipfile write is read as they read it, and every lie in it is found."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fastpersist.archive import zipformat
from fastpersist.archive.directory import (
    TAIL_NBYTES,
    Directory,
    check_local_header,
    data_offset,
    find_end,
    parse_directory,
)
from fastpersist.archive.zipformat import LIMIT_32
from fastpersist.errors import CheckpointFormatError


def read(content: bytes) -> Directory:
    """The directory of a file with this content."""
    end = find_end(content[-TAIL_NBYTES:], len(content))
    listed = content[end.directory_offset : end.directory_offset + end.directory_nbytes]
    return parse_directory(listed, end, len(content))


def zip_of(records: dict[str, bytes], comment: bytes = b"", method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip by Python's own writer."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
        archive.comment = comment
    return target.getvalue()


RECORDS = {"m/data.pkl": b"pickle", "m/data/0": b"12345678", "m/data/1": b"", "m/version": b"3\n"}


def entries(listed: list[tuple[str, int, int, int]], *, claim: int | None = None, gap: int = 0) -> bytes:
    """A file of nothing but zeros and a directory of (name, checksum, bytes, header offset), as torch encodes it."""
    directory = b"".join(
        zipformat.central_header(name.encode(), checksum, nbytes, offset) for name, checksum, nbytes, offset in listed
    )
    end = zipformat.end_of_archive(len(listed) if claim is None else claim, len(directory), gap)
    return bytes(gap) + directory + end


def sparse(listed: list[tuple[str, int, int, int]], directory_offset: int) -> Directory:
    """The directory of a file that is too long to be made: only its end is."""
    content = b"".join(
        zipformat.central_header(name.encode(), checksum, nbytes, offset) for name, checksum, nbytes, offset in listed
    )
    tail = content + zipformat.end_of_archive(len(listed), len(content), directory_offset)
    file_nbytes = directory_offset + len(tail)
    end = find_end(tail, file_nbytes)
    return parse_directory(content, end, file_nbytes)


@pytest.mark.parametrize("comment", [b"", b"by hand", bytes(0xFFFF)])
def test_zipfiles_own_archives(comment: bytes) -> None:
    content = zip_of(RECORDS, comment)
    directory = read(content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        infos = archive.infolist()
        assert [f"m/{name}" for name in directory.names] == [info.filename for info in infos]
        assert directory.checksums == [info.CRC for info in infos]
        assert directory.nbytes.tolist() == [info.file_size for info in infos]
        assert directory.header_offsets.tolist() == [info.header_offset for info in infos]
        assert directory.directory_offset == archive.start_dir
    assert directory.limits.tolist() == [*directory.header_offsets[1:].tolist(), directory.directory_offset]
    assert (directory.prefix, directory.file_nbytes) == ("m", len(content))
    assert directory.index == {name: place for place, name in enumerate(directory.names)}
    assert [directory.names[place] for place in directory.storages()] == ["data/0", "data/1"]


def test_torchs_own_archives() -> None:
    target = io.BytesIO()
    torch.save({"a": torch.arange(5), "b": torch.empty(0)}, target)
    content = target.getvalue()
    directory = read(content)
    reader = torch._C.PyTorchFileReader(io.BytesIO(content))
    assert sorted(directory.names) == sorted(reader.get_all_records())
    for place, name in enumerate(directory.names):
        header = content[int(directory.header_offsets[place]) :][:30]
        assert data_offset(directory, place, header) == reader.get_record_offset(name)


def test_records_come_in_the_order_of_the_file() -> None:
    directory = sparse([("m/data/1", 1, 50, 600), ("m/data.pkl", 2, 10, 0), ("m/data/0", 3, 400, 100)], 10_000)
    assert directory.names == ["data.pkl", "data/0", "data/1"]
    assert directory.checksums == [2, 3, 1]
    assert directory.limits.tolist() == [100, 600, 10_000]


def test_sizes_and_offsets_beyond_32_bits() -> None:
    far = 7 << 32
    directory = sparse([("m/data.pkl", 1, 10, 0), ("m/data/0", 2, far - 5000, 100), ("m/data/1", 3, 8, far)], far + 1000)
    assert directory.nbytes.tolist() == [10, far - 5000, 8]
    assert directory.header_offsets.tolist() == [0, 100, far]


@pytest.mark.parametrize("nbytes", [LIMIT_32 - 1, LIMIT_32, LIMIT_32 + 1])
def test_sizes_at_the_limit_of_32_bits(nbytes: int) -> None:
    assert sparse([("m/data.pkl", 1, 5, 0), ("m/data/0", 2, nbytes, 100)], nbytes + 1000).nbytes.tolist() == [5, nbytes]


def test_folders_are_left_out() -> None:
    directory = read(zip_of({"m/": b"", "m/data/": b"", **RECORDS}))
    assert len(directory.names) == len(RECORDS)


def test_many_records() -> None:
    directory = read(zip_of({"m/data.pkl": b"x"} | {f"m/data/{key}": b"y" for key in range(70_000)}))
    assert len(directory.storages()) == 70_000


def _patched(content: bytes, offset: int, layout: str, *values: int) -> bytes:
    changed = bytearray(content)
    struct.pack_into(layout, changed, offset, *values)
    return bytes(changed)


def _central(content: bytes, name: str = "m/data/0") -> int:
    """Where the entry of a record begins."""
    return content.rindex(name.encode()) - 46


PLAIN = zip_of(RECORDS)
END = len(PLAIN) - 22
DAMAGED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "no zip end record"),
    "no end record": (lambda: PLAIN[:-22], "no zip end record"),
    "cut at the end": (lambda: PLAIN[:-1], "truncated"),
    "comment too short": (lambda: _patched(PLAIN, END + 20, "<H", 5), "no zip end record"),
    "another disk": (lambda: _patched(PLAIN, END + 4, "<H", 1), "several disks"),
    "records on other disks": (lambda: _patched(PLAIN, END + 8, "<H", 3), "several disks"),
    "directory beyond the end": (lambda: _patched(PLAIN, END + 16, "<I", END + 1), "runs into the end record"),
    "directory too long": (lambda: _patched(PLAIN, END + 12, "<I", 1 << 30), "runs into the end record"),
    "more records than fit": (lambda: _patched(PLAIN, END + 8, "<HH", 60_000, 60_000), "60000 records cannot stand"),
    "one record too many": (lambda: entries([("m/data.pkl", 0, 0, 0)] * 3, claim=4, gap=500), "entry 3|cannot stand"),
    "zip64 without its record": (lambda: _patched(PLAIN, END + 16, "<I", LIMIT_32), "zip64 record, which is missing"),
    "an entry's signature": (lambda: _patched(PLAIN, _central(PLAIN), "<I", 7), "'m/data/0'.* damaged entry"),
    "an entry that is cut off": (lambda: _patched(PLAIN, _central(PLAIN, "m/version") + 32, "<H", 9), "directory .*cut off"),
    "encrypted": (lambda: _patched(PLAIN, _central(PLAIN) + 8, "<H", 1), "'m/data/0' .*is encrypted"),
    "compressed": (lambda: zip_of(RECORDS, method=zipfile.ZIP_DEFLATED), "is compressed"),
    "two sizes": (lambda: _patched(PLAIN, _central(PLAIN) + 20, "<I", 7), "'m/data/0' .*is compressed"),
    "lacks zip64 values": (lambda: _patched(PLAIN, _central(PLAIN) + 42, "<I", LIMIT_32), "lacks the zip64 values"),
    "beyond the directory": (lambda: _patched(PLAIN, _central(PLAIN) + 42, "<I", END), "'m/data/0'.* does not fit"),
    "too long": (lambda: _patched(PLAIN, _central(PLAIN) + 20, "<II", 5000, 5000), "'m/data/0' .*5000 bytes. does not fit"),
    "overlapping": (lambda: _patched(PLAIN, _central(PLAIN) + 20, "<II", 60, 60), "'data/0' at offset .* overlaps"),
    "in one place": (lambda: _patched(PLAIN, _central(PLAIN) + 42, "<I", 0), "overlaps what begins at offset 0"),
    "no UTF-8": (lambda: PLAIN.replace(b"m/data/0", b"m/data\xff0"), "no UTF-8"),
    "listed twice": (lambda: PLAIN.replace(b"m/data/1", b"m/data/0"), "'data/0' is listed twice"),
    "no pickle": (lambda: zip_of({"m/data/0": b"x"}), "no checkpoint: it holds no data.pkl"),
    "no record": (lambda: zip_of({}), "no data.pkl"),
    "nothing but folders": (lambda: zip_of({"m/": b"", "m/data/": b""}), "no data.pkl"),
    "TorchScript": (lambda: zip_of(RECORDS | {"m/constants.pkl": b"x"}), "TorchScript archive.* torch.jit.load"),
    "another folder": (lambda: zip_of(RECORDS | {"n/more": b"x"}), "does not lie under the checkpoint's folder 'm'"),
    "no folder": (lambda: zip_of({"data.pkl": b"x"}), "'data.pkl'"),
    "above": (lambda: zip_of(RECORDS | {"m/../../etc/passwd": b"x"}), "a name that no checkpoint has"),
    "absolute": (lambda: zip_of({"/m/data.pkl": b"x"}), "a name that no checkpoint has"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_found_and_named(kind: str) -> None:
    make, message = DAMAGED[kind]
    with pytest.raises(CheckpointFormatError, match=message):
        read(make())


@pytest.mark.parametrize(("position", "value"), [(4, 2), (8, 1 << 40), (16, 9)])
def test_a_damaged_zip64_locator(position: int, value: int) -> None:
    content = entries([("m/data.pkl", 0, 0, 0)], gap=500)
    locator = content.rindex(b"PK\6\7")
    layout = "<Q" if position == 8 else "<I"
    with pytest.raises(CheckpointFormatError, match=r"zip64|cannot stand"):
        read(_patched(content, locator + position, layout, value))


@pytest.mark.parametrize("position", [0, 4, 16, 20, 24, 40, 48])
def test_a_damaged_zip64_end_record(position: int) -> None:
    content = entries([("m/data.pkl", 0, 0, 0)], gap=500)
    end = content.rindex(b"PK\6\6")
    with pytest.raises(CheckpointFormatError):
        read(_patched(content, end + position, "<I", 0x7FFFFFFF))


def test_any_cut_of_the_tail_is_found() -> None:
    target = io.BytesIO()
    torch.save([torch.arange(4)], target)
    content = target.getvalue()
    for length in range(len(content) - 300, len(content)):
        with pytest.raises(CheckpointFormatError):
            read(content[:length])


def directory_of(nbytes: int, limit: int) -> Directory:
    """One record whose header is at 64, and which must end before ``limit``."""
    return Directory(
        "m", ["data/0"], np.array([nbytes], np.int64), [77], np.array([64], np.int64), np.array([limit], np.int64),
        {"data/0": 0}, 10_000, limit,
    )  # fmt: skip


def test_data_begins_where_the_local_header_says() -> None:
    header = zipformat.local_header(b"m/data/0", 100, 64, 512)
    assert data_offset(directory_of(100, 700), 0, header) == 512
    assert data_offset(directory_of(100, 700), 0, memoryview(header)[:30]) == 512
    assert data_offset(directory_of(100, 612), 0, header) == 512


def test_data_that_reaches_into_the_next_record_is_refused() -> None:
    header = zipformat.local_header(b"m/data/0", 100, 64, 512)
    with pytest.raises(CheckpointFormatError, match=r"'data/0'.* offset 512 .*100 bytes.* beyond .* offset 611"):
        data_offset(directory_of(100, 611), 0, header)


@pytest.mark.parametrize("header", [bytes(30), b"PK\1\2" + bytes(40), b"PK\3" + bytes(40)])
def test_no_local_header_is_refused(header: bytes) -> None:
    with pytest.raises(CheckpointFormatError, match="'data/0': no local header at offset 64"):
        data_offset(directory_of(100, 700), 0, header)


def local(name: bytes = b"m/data/0", **fields: int) -> bytes:
    """A local header; fields by the name that zip's description gives them."""
    values = {"flags": 0, "method": 0, "crc": 0, "compressed": 0, "size": 0} | fields
    return (
        struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 20, values["flags"], values["method"], 0, 0, values["crc"], values["compressed"],
            values["size"], len(name), 0,
        )
        + name
    )  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"crc": 77, "size": 100}, {"size": LIMIT_32}, {"flags": 0x808}, {"crc": 77}])
def test_local_headers_that_agree(fields: dict[str, int]) -> None:
    check_local_header(directory_of(100, 700), 0, local(**fields))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (local(b"m/data/1"), "carries the name b'm/data/1'"), (local(b"m/data/00"), "carries the name"),
        (local(b""), "carries the name"),
        (local(method=8), "compressed or encrypted"), (local(flags=1), "compressed or encrypted"),
        (local(crc=78), "checksum 78 .* 77 in the directory"), (local(size=99), "size 99 .* 100 in the directory"),
    ],
    ids=repr,
)  # fmt: skip
def test_local_headers_that_contradict_the_directory(header: bytes, message: str) -> None:
    with pytest.raises(CheckpointFormatError, match=f"'data/0'.*offset 64.*{message}|'data/0'.*{message}"):
        check_local_header(directory_of(100, 700), 0, header)
