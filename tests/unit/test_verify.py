"""verify: a sound file is reported as such, and each kind of damage is found, named and placed."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.serialization import config

import fastpersist
from fastpersist import CheckpointFormatError, CorruptCheckpointError
from fastpersist.archive.checking import ByteStream
from tests.archives import Place, big_endian, flip, places_of, rewrite

MIB = 1 << 20
WRITERS = ("auto", "torch", "torch.save", "zipfile", "zipfile streaming")


def state() -> dict[str, Any]:
    """Storages of many blocks, of one, of some bytes and of none."""
    return {"large": torch.arange(300_001, dtype=torch.float32), "small": torch.arange(9), "none": torch.empty(0), "n": 1}


class Pipe(io.RawIOBase):
    """A target that cannot seek: zipfile then writes sizes and checksums behind the data."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        return int(self._file.write(content))


def save(path: Path, writer: str, **options: Any) -> Path:
    """Save the state as one of WRITERS does."""
    if writer in ("auto", "torch"):
        fastpersist.save(state(), path, layout=writer, durable=False, **options)
    else:
        torch.save(state(), path)
    if writer == "zipfile":
        return rewrite(path, path.with_suffix(".zip"))
    if writer == "zipfile streaming":
        target = path.with_suffix(".zip")
        with zipfile.ZipFile(path) as old, target.open("wb") as file, zipfile.ZipFile(Pipe(file), "w") as new:  # type: ignore[call-overload]
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
        return target
    return path


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The state as each writer saves it."""
    return save(tmp_path / "model.pt", request.param)


@pytest.mark.parametrize("engine", ["auto", "posix", "io_uring"])
def test_a_sound_file_is_reported(path: Path, engine: str) -> None:
    report = fastpersist.verify(path, engine=engine)
    assert (report.path, report.nbytes) == (str(path), path.stat().st_size)
    assert report.records == len(places_of(path))
    assert report.records_without_checksum == 0
    assert report.engine in ("posix", "io_uring") if engine == "auto" else report.engine == engine
    assert report.seconds > 0
    assert report.gb_per_s == pytest.approx(report.nbytes / 1e9 / report.seconds)
    assert str(path) in str(report)
    assert "sound" in str(report)
    assert "\n" not in str(report)


@pytest.mark.parametrize("writer", ["auto", "torch"])
def test_records_without_a_checksum_are_counted(writer: str, tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", writer, checksum=False)
    report = fastpersist.verify(path)
    assert report.records_without_checksum == 2  # of the three storages one is empty: nothing to be checked
    assert "2 of them without a checksum" in str(report)


def test_torchs_files_without_checksums(tmp_path: Path) -> None:
    with config.patch("save.compute_crc32", False):
        torch.save(state(), tmp_path / "m.pt")
    assert fastpersist.verify(tmp_path / "m.pt").records_without_checksum >= 2


def test_files_of_other_machines(tmp_path: Path) -> None:
    path = big_endian(save(tmp_path / "m.pt", "torch.save"), tmp_path / "big.pt")
    assert fastpersist.verify(path).records_without_checksum == 0


def test_progress_rises_to_the_whole_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", "65536")
    calls: list[tuple[int, int]] = []
    fastpersist.verify(path, progress=lambda *call: calls.append(call))
    nbytes = path.stat().st_size
    assert calls == sorted(calls)
    assert calls[-1] == (nbytes, nbytes)
    assert len(calls) > 10


@pytest.mark.parametrize("block_nbytes", ["4096", "12288", str(8 * MIB)])
def test_records_may_lie_across_blocks(path: Path, block_nbytes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", block_nbytes)
    assert fastpersist.verify(path).records == len(places_of(path))
    place = places_of(path)["data/0"]
    flip(path, place.data_offset + place.nbytes // 2)
    with pytest.raises(CorruptCheckpointError, match="'data/0'"):
        fastpersist.verify(path)


def test_blocks_larger_than_the_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What save and load take, verify takes: here a sparse file, for its buffers to be as large as the blocks."""
    with torch.serialization.skip_data():
        torch.save(torch.empty(80 * MIB, dtype=torch.uint8), tmp_path / "m.pt")
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", str(128 * MIB))
    assert fastpersist.load(tmp_path / "m.pt").shape == (80 * MIB,)
    assert fastpersist.verify(tmp_path / "m.pt").records_without_checksum == 1


def _in_data(place: Place) -> int:
    return place.data_offset


def _at_the_end_of_data(place: Place) -> int:
    return place.descriptor_offset - 1


def _in_the_header(position: int) -> Callable[[Place], int]:
    return lambda place: place.header_offset + position


def _in_the_directory(position: int) -> Callable[[Place], int]:
    return lambda place: place.central_offset + position


EVERYWHERE = {
    "first byte of data": _in_data,
    "last byte of data": _at_the_end_of_data,
    "header signature": _in_the_header(1),
    "header method": _in_the_header(8),
    "header name length": _in_the_header(26),
    "header name, prefix": _in_the_header(30),
    "directory signature": _in_the_directory(2),
    "directory method": _in_the_directory(10),
    "directory checksum": _in_the_directory(16),
    "directory stored size": _in_the_directory(20),
    "directory size": _in_the_directory(24),
    "directory name length": _in_the_directory(28),
    "directory extra length": _in_the_directory(30),
    "directory header offset": _in_the_directory(42),
    "directory name": _in_the_directory(46),
}


@pytest.mark.parametrize("name", ["data/0", "version"])
@pytest.mark.parametrize("kind", EVERYWHERE)
def test_each_kind_of_damage_is_found(path: Path, kind: str, name: str) -> None:
    flip(path, EVERYWHERE[kind](places_of(path)[name]), 0x08)
    with pytest.raises(CheckpointFormatError, match=str(path)) as caught:
        fastpersist.verify(path)
    # A checksum stands in zipfile's local headers as well: there the contradiction shows before the data is read.
    of_data = kind.endswith("of data")
    assert isinstance(caught.value, CorruptCheckpointError) == of_data or kind == "directory checksum"
    if kind == "directory checksum":
        assert f"'{name}'" in str(caught.value)
    elif of_data:
        place = places_of(path)[name]
        assert f"'{name}' (offset {place.data_offset}, {place.nbytes} bytes)" in str(caught.value)
    elif kind.startswith("header"):
        assert name in str(caught.value)
        assert f"offset {places_of(path)[name].header_offset}" in str(caught.value) or "length" in kind


@pytest.mark.parametrize("name", ["data/0", "data/1", "data.pkl", "version"])
@pytest.mark.parametrize("position", [0, 4, 8, 12])
@pytest.mark.parametrize("writer", ["auto", "torch", "torch.save", "zipfile streaming"])
def test_a_damaged_descriptor_is_found(writer: str, name: str, position: int, tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", writer)
    offset = places_of(path)[name].descriptor_offset
    flip(path, offset + position)
    with pytest.raises(CheckpointFormatError, match=f"'{name}'.* descriptor at offset {offset} contradicts"):
        fastpersist.verify(path)


@pytest.mark.parametrize("name", ["data/0", "version"])
@pytest.mark.parametrize("position", [14, 18, 22])
def test_sizes_and_checksums_in_local_headers_are_compared(name: str, position: int, tmp_path: Path) -> None:
    """Where there is no descriptor, the header has them. The stored size (18) says nothing more than the other."""
    path = save(tmp_path / "m.pt", "zipfile")
    flip(path, places_of(path)[name].header_offset + position)
    with pytest.raises(CheckpointFormatError, match=f"'{name}'"):
        fastpersist.verify(path)


@pytest.mark.parametrize("writer", ["auto", "torch", "torch.save"])
def test_damaged_padding_is_found(writer: str, tmp_path: Path) -> None:
    """The filler before the data is part of the header: a bit that fell there tells of a medium that fails."""
    path = save(tmp_path / "m.pt", writer)
    content = path.read_bytes()
    name, place = next(item for item in places_of(path).items() if content[item[1].data_offset - 1 :][:1] == b"Z")
    flip(path, place.data_offset - 1)
    with pytest.raises(CheckpointFormatError, match=f"'{name}'"):
        fastpersist.verify(path)


def test_a_gap_between_records_is_passed_over(tmp_path: Path) -> None:
    """Bytes that belong to no record, as programs leave them that delete from a zip, are nobody's damage."""
    content = save(tmp_path / "m.pt", "zipfile").read_bytes()
    path = tmp_path / "gap.pt"
    start = places_of(tmp_path / "m.zip")["data/1"].header_offset
    shifted = bytearray(content[:start] + b"left over" * 100 + content[start:])
    directory = content.index(b"PK\1\2") + 900
    for place in places_of(tmp_path / "m.zip").values():
        if place.header_offset >= start:
            struct.pack_into("<I", shifted, place.central_offset + 900 + 42, place.header_offset + 900)
    struct.pack_into("<I", shifted, len(shifted) - 6, directory)
    path.write_bytes(shifted)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    assert fastpersist.verify(path).records == len(places_of(path))
    assert torch.equal(fastpersist.load(path, verify=True)["small"], state()["small"])


@pytest.mark.parametrize("position", range(4, 20))
def test_a_damaged_end_record_is_found(position: int, tmp_path: Path) -> None:
    """zipfile's, which has no zip64 record above it that would count instead."""
    path = save(tmp_path / "m.pt", "zipfile")
    flip(path, path.stat().st_size - 22 + position)
    with pytest.raises(CheckpointFormatError, match=str(path)):
        fastpersist.verify(path)


def test_the_first_bad_record_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "m.pt", "auto")
    places = places_of(path)
    for name in ("data/1", "data/0", "version"):
        flip(path, places[name].data_offset)
    first = min(("data/1", "data/0", "version"), key=lambda name: places[name].data_offset)
    with pytest.raises(CorruptCheckpointError, match=f"'{first}'"):
        fastpersist.verify(path)


@pytest.mark.parametrize("writer", ["auto", "torch.save"])
def test_every_cut_of_the_tail_is_found(writer: str, tmp_path: Path) -> None:
    content = save(tmp_path / "m.pt", writer).read_bytes()
    path = tmp_path / "cut.pt"
    for length in (*range(len(content) - 100, len(content)), len(content) // 2, 30, 4, 1, 0):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointFormatError, match=str(path)):
            fastpersist.verify(path)


def test_every_byte_of_a_small_file(tmp_path: Path) -> None:
    """A bit flipped anywhere is found, but for fields that no reader uses: versions, times, attributes, padding."""
    path = tmp_path / "m.pt"
    torch.save([torch.arange(9.0), torch.arange(3)], path)
    unused = _unused_bytes(path)
    missed = []
    for offset in range(path.stat().st_size):
        flip(path, offset, 0x04)
        try:
            fastpersist.verify(path)
        except CheckpointFormatError:
            pass
        else:
            missed.append(offset)
        flip(path, offset, 0x04)
    assert [offset for offset in missed if offset not in unused] == []


def _unused_bytes(path: Path) -> set[int]:
    """Versions, flags, times, attributes, padding, and the end records' fields that only archives of many disks need."""
    unused: set[int] = set()
    for place in places_of(path).values():
        unused.update(range(place.header_offset + 4, place.header_offset + 8))
        unused.update(range(place.header_offset + 10, place.header_offset + 14))
        unused.update(range(place.header_offset + 18, place.header_offset + 22))
        unused.update(range(place.central_offset + 4, place.central_offset + 10))
        unused.update(range(place.central_offset + 12, place.central_offset + 16))
        unused.update(range(place.central_offset + 34, place.central_offset + 42))
        name_nbytes = struct.unpack_from("<H", path.read_bytes(), place.header_offset + 26)[0]
        unused.update(range(place.header_offset + 30 + name_nbytes, place.data_offset))
    size = path.stat().st_size
    unused.update(range(size - 98 + 12, size - 98 + 16))  # zip64: made by, needed version
    unused.update(range(size - 42, size - 38))  # the locator's signature: without it the classic record serves
    unused.update(range(size - 22 + 12, size))  # classic: zip64's values stand for these, and bytes may follow it
    return unused


def test_the_older_format_is_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointFormatError, match=r"no checksums"):
        fastpersist.verify(tmp_path / "old.pt")


def test_a_stream_gives_each_byte_once() -> None:
    stream = ByteStream(iter([memoryview(b"abc"), memoryview(b"defgh"), memoryview(b"i")]))
    assert stream.take(2) == b"ab"
    assert stream.take(0) == b""
    assert stream.take(4) == b"cdef"
    stream.skip_to(8)
    assert stream.position == 8
    assert stream.checksum(1) == zipfile.crc32(b"i")  # type: ignore[attr-defined]
    with pytest.raises(CheckpointFormatError, match="ends at offset 9, 1 bytes early"):
        stream.take(1)
