"""inspect: every field, compared with what zipfile and torch know of the same file."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.serialization import config

import fastpersist
from fastpersist import CheckpointFormatError, RecordInfo, TensorInfo
from fastpersist.engines import Engine
from fastpersist.transfer.reader import RecordReader
from tests.archives import big_endian, flip, places_of, rewrite, without

LARGE_NUMEL = 300_001
WRITERS = ("auto", "torch", "torch.save", "torch.save at 4096")


def state() -> dict[str, Any]:
    """Tensors at every place that inspect looks into, and values that it passes over."""
    base = torch.arange(12, dtype=torch.float64)
    return {
        "model": {"a.weight": torch.ones(3, 4, dtype=torch.bfloat16), 5: base[2:]},
        "list": [torch.zeros(2, dtype=torch.int8), (base, "text"), {"deep": torch.tensor(True)}],
        "large": torch.zeros(LARGE_NUMEL), "none": torch.empty(0, 3), "number": 1,
        "meta": torch.empty(7, device="meta"), "parameter": torch.nn.Parameter(torch.zeros(2)),
    }  # fmt: skip


def save(obj: object, path: Path, writer: str = "auto") -> Path:
    """Save as one of WRITERS does."""
    if writer in ("auto", "torch"):
        fastpersist.save(obj, path, layout=writer, durable=False)
        return path
    with config.patch("save.storage_alignment", 4096 if writer.endswith("4096") else 64):
        torch.save(obj, path)
    return path


@pytest.fixture(params=WRITERS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The state as each writer saves it."""
    return save(state(), tmp_path / "model.pt", request.param)


def test_records_are_those_of_zipfile(path: Path) -> None:
    info = fastpersist.inspect(path)
    with zipfile.ZipFile(path) as archive:
        listed = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    places = places_of(path)
    assert {record.name for record in info.records} == listed.keys()
    for record in info.records:
        assert record.nbytes == listed[record.name].file_size
        assert record.checksum == listed[record.name].CRC
        assert record.offset == places[record.name].data_offset
        assert record.alignment == max(power for power in (2**n for n in range(13)) if record.offset % power == 0)
    offsets = [record.offset for record in info.records]
    assert offsets == sorted(offsets)


def test_offsets_are_those_of_torch(path: Path) -> None:
    reader = torch._C.PyTorchFileReader(str(path))
    for record in fastpersist.inspect(path).records:
        assert record.offset == reader.get_record_offset(record.name)


def test_tensors_are_those_of_the_object(path: Path) -> None:
    info = fastpersist.inspect(path)
    assert info.note == ""
    assert info.tensors == (
        TensorInfo("model.a.weight", "bfloat16", (3, 4), "data/0"),
        TensorInfo("model.5", "float64", (10,), "data/1"),
        TensorInfo("list.0", "int8", (2,), "data/2"),
        TensorInfo("list.1.0", "float64", (12,), "data/1"),
        TensorInfo("list.2.deep", "bool", (), "data/3"),
        TensorInfo("large", "float32", (LARGE_NUMEL,), "data/4"),
        TensorInfo("none", "float32", (0, 3), "data/5"),
        TensorInfo("meta", "float32", (7,), None),
        TensorInfo("parameter", "float32", (2,), "data/6"),
    )


def test_sums_and_names(path: Path) -> None:
    info = fastpersist.inspect(path)
    assert (info.path, info.prefix, info.byteorder) == (str(path), "model", "little")
    assert info.file_nbytes == path.stat().st_size
    assert info.nbytes == sum(record.nbytes for record in info.records if record.name.startswith("data/"))
    assert info.nbytes == 24 + 96 + 2 + 1 + 4 * LARGE_NUMEL + 0 + 8


def test_a_single_tensor_has_an_empty_path(tmp_path: Path) -> None:
    info = fastpersist.inspect(save(torch.zeros(3), tmp_path / "m.pt"))
    assert info.tensors == (TensorInfo("", "float32", (3,), "data/0"),)


def test_sparse_tensors_have_no_record_of_their_own(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    info = fastpersist.inspect(save({"s": sparse}, tmp_path / "m.pt"))
    assert info.tensors == (TensorInfo("s", "float32", (4,), None),)


def test_an_object_without_tensors(tmp_path: Path) -> None:
    info = fastpersist.inspect(save({"a": [1, 2], "b": "x"}, tmp_path / "m.pt"))
    assert (info.tensors, info.nbytes, info.note) == ((), 0, "")


@pytest.mark.parametrize("writer", WRITERS)
def test_more_than_weights_is_told_by_a_note(writer: str, tmp_path: Path) -> None:
    info = fastpersist.inspect(save({"x": torch.zeros(3), "y": Path("a"), "z": np.float32}, tmp_path / "m.pt", writer))
    assert info.tensors is None
    assert "weights_only" in info.note
    assert info.nbytes == 12


def test_nothing_is_executed(tmp_path: Path) -> None:
    class Mark:
        def __reduce__(self) -> Any:
            return (Path.mkdir, (tmp_path / "mark",))

    assert fastpersist.inspect(save([Mark()], tmp_path / "m.pt")).tensors is None
    assert not (tmp_path / "mark").exists()


def test_storages_without_checksums(tmp_path: Path) -> None:
    fastpersist.save(state(), tmp_path / "m.pt", checksum=False, durable=False)
    for record in fastpersist.inspect(tmp_path / "m.pt").records:
        assert (record.checksum is None) == (record.name.startswith("data/") and record.nbytes > 0)


def test_no_tensor_data_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no tensor data is to be read")

    monkeypatch.setattr(RecordReader, "reading", refuse)
    monkeypatch.setattr(Engine, "submit", refuse)
    info = fastpersist.inspect(path)
    for record in info.records:
        if record.name.startswith("data/") and record.nbytes:
            flip(path, record.offset)
    assert fastpersist.inspect(path) == info
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_big_endian_files(tmp_path: Path) -> None:
    plain = save(state(), tmp_path / "m.pt")
    path = big_endian(plain, tmp_path / "big.pt")
    assert fastpersist.inspect(path).byteorder == "big"
    assert fastpersist.inspect(path).tensors == fastpersist.inspect(plain).tensors
    undeclared = big_endian(plain, tmp_path / "undeclared.pt", declared=False)
    assert fastpersist.inspect(undeclared).byteorder == "little"


# What torch makes of the offsets


def calculated_by_torch(path: Path) -> dict[str, int]:
    """The offsets that torch calculates for itself, asked with its own function for fake tensors."""
    loaded = torch.load(path, map_location="meta", weights_only=False)
    tensors: dict[str, int] = {}

    def collect(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor) and hasattr(value.untyped_storage(), "_checkpoint_offset"):
            tensors[name] = value.untyped_storage()._checkpoint_offset
        for key, inner in _items(value):
            collect(inner, f"{name}.{key}" if name else str(key))

    collect(loaded, "")
    return tensors


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    if isinstance(value, list | tuple):
        yield from enumerate(value)


def truth(path: Path) -> str:
    """What torch_offsets must say, told by torch itself."""
    if ".format_version" not in places_of(path):
        return "read"
    offsets = {name: place.data_offset for name, place in places_of(path).items()}
    tensors = fastpersist.inspect(path).tensors
    assert tensors is not None
    records = {tensor.path: tensor.record for tensor in tensors}
    calculated = calculated_by_torch(path)
    assert calculated
    right = all(offsets[records[name] or ""] == offset for name, offset in calculated.items() if records.get(name))
    return "calculated" if right else "wrong"


@pytest.mark.parametrize("writer", WRITERS)
def test_torch_offsets_are_judged_as_torch_calculates_them(writer: str, tmp_path: Path) -> None:
    path = save(state(), tmp_path / "m.pt", writer)
    expected = "read" if writer == "auto" else "calculated"
    assert fastpersist.inspect(path).torch_offsets == truth(path) == expected


@pytest.mark.parametrize("writer", ["auto", "torch", "torch.save"])
def test_offsets_of_rewritten_files(writer: str, tmp_path: Path) -> None:
    path = rewrite(save(state(), tmp_path / "m.pt", writer), tmp_path / "r.pt")
    expected = "read" if writer == "auto" else "wrong"
    assert fastpersist.inspect(path).torch_offsets == truth(path) == expected
    stripped = rewrite(path, tmp_path / "s.pt", without(".format_version", ".storage_alignment"))
    assert fastpersist.inspect(stripped).torch_offsets == "read"


@pytest.mark.parametrize("version", [b"0", b"1", b"2"])
def test_offsets_are_calculated_from_version_1_on(version: bytes, tmp_path: Path) -> None:
    path = rewrite(
        save(state(), tmp_path / "m.pt", "torch.save"), tmp_path / "r.pt",
        lambda name, content: version if name == ".format_version" else content,
    )  # fmt: skip
    assert fastpersist.inspect(path).torch_offsets == ("read" if version == b"0" else "wrong")


def test_one_storage_is_always_found(tmp_path: Path) -> None:
    """torch reads where the first storage is, and calculates from there."""
    path = rewrite(save(torch.zeros(5), tmp_path / "m.pt", "torch.save"), tmp_path / "r.pt")
    assert fastpersist.inspect(path).torch_offsets == "calculated"


def test_an_alignment_that_is_no_number(tmp_path: Path) -> None:
    path = rewrite(
        save(state(), tmp_path / "m.pt", "torch.save"), tmp_path / "r.pt",
        lambda name, content: b"wide" if name == ".storage_alignment" else content,
    )  # fmt: skip
    with pytest.raises(CheckpointFormatError, match=r"storage_alignment.*no number"):
        fastpersist.inspect(path)


@pytest.mark.parametrize("sizes", [[8, (1 << 32) - 1, 8], [(1 << 32) - 2, 8, 8], [5 << 30, 0, 16, 5 << 30, 8]])
def test_files_beyond_4_gib(sizes: list[int], tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():
        torch.save({str(index): torch.empty(nbytes, dtype=torch.uint8) for index, nbytes in enumerate(sizes)}, path)
    info = fastpersist.inspect(path)
    reader = torch._C.PyTorchFileReader(str(path))
    assert info.nbytes == sum(sizes)
    assert [record.offset for record in info.records] == [reader.get_record_offset(record.name) for record in info.records]
    assert info.torch_offsets == truth(path) == "calculated"


def test_far_records_are_told_exactly(tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():
        torch.save([torch.empty(5 << 30, dtype=torch.uint8), torch.empty(3)], path)
    (record,) = [record for record in fastpersist.inspect(path).records if record.name == "data/1"]
    assert record == RecordInfo("data/1", 12, record.offset, record.alignment, None)
    assert record.offset > 5 << 30


# Refusals


def test_the_older_format_is_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointFormatError, match=r"torch before 1\.6"):
        fastpersist.inspect(tmp_path / "old.pt")


@pytest.mark.parametrize("name", ["data/0", "version", "data.pkl"])
def test_a_missing_local_header_is_named(name: str, tmp_path: Path) -> None:
    path = save(state(), tmp_path / "m.pt")
    flip(path, places_of(path)[name].header_offset + (2 if name == "data.pkl" else 0), 0x10)
    with pytest.raises(CheckpointFormatError, match=f"{path}.*"):
        fastpersist.inspect(path)


def test_a_pickle_that_does_not_fit_its_storages(tmp_path: Path) -> None:
    path = rewrite(
        save({"a": torch.zeros(4)}, tmp_path / "m.pt"), tmp_path / "r.pt",
        lambda name, content: content[:12] if name == "data/0" else content,
    )  # fmt: skip
    with pytest.raises(CheckpointFormatError, match=r"'data/0' holds 12 bytes.*4 elements"):
        fastpersist.inspect(path)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["list that contains itself twice", "tree of one branch", "dict that contains itself twice"])
def test_objects_with_more_paths_than_atoms(kind: str, tmp_path: Path) -> None:
    """Some hundred bytes of pickle can have 2**100 paths; walking them would never end."""
    obj: Any
    if kind == "tree of one branch":
        obj = torch.zeros(1)
        for _ in range(60):
            obj = [obj, obj]
    else:
        obj = [] if kind.startswith("list") else {}
        obj.extend([obj, obj]) if isinstance(obj, list) else obj.update(a=obj, b=obj)
    torch.save(obj, tmp_path / "m.pt")
    try:
        info = fastpersist.inspect(tmp_path / "m.pt")
    except CheckpointFormatError:
        return
    assert info.tensors is None or len(info.tensors) < 10_000


def test_the_header_is_what_tells_the_offset(tmp_path: Path) -> None:
    """An extra field that the directory does not mention moves the data; the local header's lengths count."""
    path = rewrite(save(torch.arange(3), tmp_path / "m.pt"), tmp_path / "r.pt", shift=33)
    content = path.read_bytes()
    (record,) = [record for record in fastpersist.inspect(path).records if record.name == "data/0"]
    assert struct.unpack_from("<3q", content, record.offset) == (0, 1, 2)
