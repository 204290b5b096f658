"""What save reports, and what it leaves of a path, its mode, its links and the machine's memory."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import fastpersist
from fastpersist.engines.memory import MemoryEngine
from fastpersist.memory.buffers import shared_pool

MIB = 1 << 20


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return {"large": torch.randn(MIB), "small": torch.randn(10)}


def test_the_report_adds_up(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    report = fastpersist.save(state, path, engine="posix", block_nbytes=MIB, queue_depth=3)
    assert report.path == str(path)
    assert report.nbytes == 4 * MIB + 40
    assert report.zero_copy_nbytes + report.copied_nbytes == report.nbytes
    assert report.zero_copy_nbytes >= 0.99 * report.nbytes
    assert report.file_nbytes == path.stat().st_size
    assert report.records == 6
    assert (report.engine, report.block_nbytes, report.queue_depth) == ("posix", MIB, 3)
    assert 0 <= report.sync_seconds <= report.seconds
    assert report.gb_per_s == pytest.approx(report.nbytes / 1e9 / report.seconds)
    assert "\n" not in str(report)
    assert "posix" in str(report)


def test_progress_rises_to_the_whole_file(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = fastpersist.save(state, tmp_path / "m.pt", block_nbytes=65536, progress=lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (report.file_nbytes, report.file_nbytes)


def test_the_null_engine_writes_nothing(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    report = fastpersist.save(state, tmp_path / "m.pt", engine="null")
    assert os.listdir(tmp_path) == []
    assert report.file_nbytes > report.nbytes


def test_a_memory_engine_holds_the_same_bytes_as_a_disk(tmp_path: Path) -> None:
    state = {"large": torch.randn(MIB), "small": torch.randn(10)}
    fastpersist.save(state, tmp_path / "m.pt", engine="posix", layout="torch")
    with MemoryEngine() as engine:
        fastpersist.save(state, tmp_path / "m.pt", engine=engine, layout="torch")
        assert engine.contents(str(tmp_path / "m.pt")) == (tmp_path / "m.pt").read_bytes()


def test_an_open_engine_serves_many_saves(tmp_path: Path) -> None:
    with fastpersist.open_engine("posix") as engine:
        for generation in range(3):
            fastpersist.save(torch.full((1000,), generation), tmp_path / "m.pt", engine=engine)
            assert torch.load(tmp_path / "m.pt")[0] == generation


def test_a_symlink_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "latest.pt"
    link.symlink_to("folder/real.pt")
    fastpersist.save([1], link)
    assert link.is_symlink()
    assert torch.load(tmp_path / "folder" / "real.pt") == [1]


def test_hard_links_to_the_old_file_keep_the_old_file(tmp_path: Path) -> None:
    fastpersist.save([1], tmp_path / "m.pt")
    os.link(tmp_path / "m.pt", tmp_path / "kept.pt")
    fastpersist.save([2], tmp_path / "m.pt")
    assert torch.load(tmp_path / "kept.pt") == [1]


def test_a_mapped_old_file_stays_readable(tmp_path: Path) -> None:
    fastpersist.save(torch.ones(MIB), tmp_path / "m.pt")
    mapped = torch.load(tmp_path / "m.pt", mmap=True)
    fastpersist.save(torch.zeros(10), tmp_path / "m.pt")
    assert mapped.sum() == MIB


def test_a_new_file_gets_the_mode_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        fastpersist.save([1], tmp_path / "m.pt")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "m.pt").stat().st_mode) == 0o640


def test_a_replaced_file_passes_its_mode_on(tmp_path: Path) -> None:
    fastpersist.save([1], tmp_path / "m.pt")
    (tmp_path / "m.pt").chmod(0o604)
    fastpersist.save([2], tmp_path / "m.pt")
    assert stat.S_IMODE((tmp_path / "m.pt").stat().st_mode) == 0o604


@pytest.mark.parametrize("name", ["m.pt", "a.tar.gz", "noext", ".pt", ".hidden.pt", "ü.pt", "x" * 250 + ".pt"])
def test_any_file_name_can_be_saved_to(tmp_path: Path, name: str) -> None:
    fastpersist.save(torch.arange(3), tmp_path / name)
    assert torch.load(tmp_path / name).tolist() == [0, 1, 2]


def test_a_file_name_that_is_no_utf8_can_be_saved_to(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.pt"
    fastpersist.save(torch.arange(3), os.fsdecode(path))
    with open(path, "rb") as source:
        assert torch.load(source).tolist() == [0, 1, 2]


def test_a_relative_path_is_saved_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fastpersist.save([1], "m.pt").path == str(tmp_path / "m.pt")


def test_without_checksums_storages_carry_none(state: dict[str, torch.Tensor], tmp_path: Path) -> None:

    fastpersist.save(state, tmp_path / "m.pt", checksum=False)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        sums = {info.filename: info.CRC for info in archive.infolist()}
    assert sums["m/data/0"] == sums["m/data/1"] == 0
    assert sums["m/data.pkl"] != 0
    assert torch.equal(torch.load(tmp_path / "m.pt")["large"], state["large"])


def test_a_save_that_is_not_durable_syncs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be synced")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(os, "fdatasync", refuse)
    fastpersist.save([1], tmp_path / "m.pt", durable=False)
    assert torch.load(tmp_path / "m.pt") == [1]


def test_memory_beyond_the_tensors_is_the_pool(tmp_path: Path) -> None:
    script = """
import sys, torch, fastpersist
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) << 10
state = [torch.full((8 << 20,), i, dtype=torch.uint8) for i in range(32)]
fastpersist.save(state[:1], sys.argv[1], layout="torch")  # imports and first allocations
before = peak()
fastpersist.save(state, sys.argv[1], layout="torch")  # every byte goes through a buffer
print(peak() - before)
"""
    output = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "m.pt")], check=True, capture_output=True, text=True, timeout=300
    ).stdout
    assert int(output) <= shared_pool().max_nbytes + 16 * MIB
