"""The bytes of the file: valid zip, torch's records, and with layout "torch" torch's own file."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from compat_files import SERIALIZATION_ID, offsets_of, records_of, without_serialization_id
from compat_zoo import make
from torch.utils.serialization import config

import fastpersist

# torch warns of quantized, nested and sparse tensors and of typed storages; test_warnings.py says which warnings are ours.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

ONLY_WHERE_OFFSETS_ARE_CALCULATED = {".format_version", ".storage_alignment"}


def test_pickle_is_torchs(twins):
    assert records_of(twins.ours)["data.pkl"] == records_of(twins.theirs)["data.pkl"]


def test_records_are_torchs(twins):
    ours, theirs = records_of(twins.ours), records_of(twins.theirs)
    left_out = ONLY_WHERE_OFFSETS_ARE_CALCULATED if twins.layout == "auto" else set()
    expected = {name: content for name, content in theirs.items() if name not in left_out | {SERIALIZATION_ID}}
    assert len(ours.pop(SERIALIZATION_ID)) == len(theirs[SERIALIZATION_ID])
    assert ours == expected


def test_zip_is_intact(twins):
    with zipfile.ZipFile(twins.ours) as archive:
        assert archive.testzip() is None


def test_unzip_finds_no_error(twins):
    if shutil.which("unzip") is None:
        pytest.skip("unzip is not installed")
    result = subprocess.run(["unzip", "-t", twins.ours], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_data_is_aligned_for_every_dtype(twins):
    assert {name: offset for name, offset in offsets_of(twins.ours).items() if offset % 64} == {}


def test_torch_finds_each_record_where_it_is(twins):
    reader = torch._C.PyTorchFileReader(str(twins.ours))
    true_offsets = offsets_of(twins.ours)
    assert {name: reader.get_record_offset(name) for name in true_offsets} == true_offsets


@pytest.mark.parametrize("layout", ["torch"], indirect=True)
def test_layout_torch_is_torchs_file(twins):
    assert without_serialization_id(twins.ours) == without_serialization_id(twins.theirs)


def test_layout_torch_is_deterministic(specimen_name, tmp_path):
    kept = [make(specimen_name), make(specimen_name)]  # both alive: the second lies elsewhere in memory
    contents = []
    for number, obj in enumerate(kept):
        path = tmp_path / str(number) / "model.pt"
        path.parent.mkdir()
        # Blocks of different sizes and another engine must not show in the bytes either.
        fastpersist.save(obj, path, layout="torch", engine="posix", durable=False, block_nbytes=(number + 1) << 16)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_layout_auto_is_deterministic_for_one_object(tmp_path):
    obj, contents = make("large_among_small"), []
    for number in range(2):
        path = tmp_path / str(number) / "model.pt"
        path.parent.mkdir()
        fastpersist.save(obj, path, engine="posix", durable=False)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]


def test_serialization_id_tells_contents_apart(tmp_path, layout):
    ids = set()
    for number, obj in enumerate([torch.zeros(3), torch.ones(3), torch.zeros(4), [torch.zeros(3)]]):
        path = tmp_path / str(number) / "model.pt"
        path.parent.mkdir()
        fastpersist.save(obj, path, layout=layout, engine="posix", durable=False)
        ids.add(records_of(path)[SERIALIZATION_ID])
    assert len(ids) == 4
    assert all(len(identity) == 40 and identity.isdigit() for identity in ids)


@pytest.mark.parametrize("name", ["training_state", "views", "own_classes", "text_and_bytes"])
def test_protocol_3_is_torchs(name, layout, tmp_path):
    ours, theirs = tmp_path / "ours.pt", tmp_path / "theirs.pt"
    fastpersist.save(make(name), ours, layout=layout, engine="posix", durable=False, pickle_protocol=3)
    torch.save(make(name), theirs, pickle_protocol=3)
    assert records_of(ours)["data.pkl"] == records_of(theirs)["data.pkl"]


@pytest.mark.parametrize("name", ["large_among_small", "quantized_per_channel", "empty_between_full"])
def test_without_checksums_storages_carry_what_torch_writes(name, tmp_path):
    ours, theirs = tmp_path / "a" / "x.pt", tmp_path / "b" / "x.pt"
    for path in (ours, theirs):
        path.parent.mkdir()
    fastpersist.save(make(name), ours, layout="torch", engine="posix", durable=False, checksum=False)
    with config.patch({"save.storage_alignment": 4096, "save.compute_crc32": False}):
        torch.save(make(name), theirs)
    assert _storage_checksums(ours) == _storage_checksums(theirs) == {0}
    with zipfile.ZipFile(ours) as archive:  # metadata is verified all the same
        for metadata in ("data.pkl", "version", "byteorder", SERIALIZATION_ID):
            assert archive.read(f"x/{metadata}")


def _storage_checksums(path: Path) -> set[int]:
    with zipfile.ZipFile(path) as archive:
        return {entry.CRC for entry in archive.infolist() if "/data/" in entry.filename}


@pytest.mark.parametrize(
    "name",
    ["model.pt", "step-3.backup.ckpt", "no_extension", "UPPER.PT", "two words.pt", "trailing.", "back\\slash.pt", "große.pt"],
)
def test_prefix_is_torchs(name, tmp_path):
    ours, theirs = tmp_path / "a" / name, tmp_path / "b" / name
    for path in (ours, theirs):
        path.parent.mkdir()
    fastpersist.save(make("views"), ours, layout="torch", engine="posix", durable=False)
    with config.patch("save.storage_alignment", 4096):
        torch.save(make("views"), theirs)
    assert _names(ours) == _names(theirs)


@pytest.mark.parametrize("name", [".pt", "a" * 250 + ".pt", "日本語.pt", "🔥", "%s.pt", "x\udcff.pt"])
def test_any_file_name_loads(name, layout, tmp_path):
    path = tmp_path / name
    fastpersist.save(make("state_dict"), path, layout=layout, engine="posix", durable=False)
    with path.open("rb") as file:
        assert torch.load(file)["first.weight"].shape == (4, 4)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def _names(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_small_tensors_take_no_more_space_than_torchs(tmp_path):
    obj = [torch.zeros(256) for _ in range(500)]
    fastpersist.save(obj, tmp_path / "ours.pt", engine="posix", durable=False)
    torch.save(obj, tmp_path / "theirs.pt")
    assert (tmp_path / "ours.pt").stat().st_size <= 1.01 * (tmp_path / "theirs.pt").stat().st_size
