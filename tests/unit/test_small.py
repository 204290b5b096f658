"""A small file is put together in one piece: the same bytes as block by block, and the same failures."""

from __future__ import annotations

import collections
import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fastpersist
from fastpersist import TransferError
from fastpersist.archive.layout import LARGE_NBYTES
from fastpersist.archive.pickling import flatten
from fastpersist.engines import File, files, open_engine
from fastpersist.memory.buffers import AlignedBuffer, shared_pool
from fastpersist.testing import Fault, FaultyEngine
from fastpersist.transfer import saving, small
from fastpersist.transfer.small import MAX_NBYTES, MAX_STORAGES, is_small

VIEWED = torch.arange(1000)
OBJECTS: dict[str, Callable[[], object]] = {
    "a number": lambda: 1,
    "no tensor": lambda: {"text": "ä" * 5000, "list": list(range(300))},
    "an empty tensor": lambda: torch.zeros(0),
    "a scalar": lambda: torch.tensor(True),
    "64 KiB": lambda: {"t": torch.randint(0, 256, (65536,), dtype=torch.uint8)},
    "odd sizes": lambda: [torch.full((size,), size % 256, dtype=torch.uint8) for size in (1, 63, 64, 65, 4095, 4097, 0, 7)],
    "views of one storage": lambda: (VIEWED[:10], VIEWED[5:], VIEWED),
    "as many as may be": lambda: [torch.full((size + 1,), float(size)) for size in range(MAX_STORAGES)],
    "a model and its optimizer": lambda: trained().state_dict(),
    "other types": lambda: collections.OrderedDict(half=torch.ones(3).half(), bits=torch.ones(2, 2, dtype=torch.uint16)),
}
NAMES = ("m.pt", "no_extension", "a.b.c", "x" * 251 + ".pt", "ü" * 60 + ".pt")


def trained() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(17, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were written in one piece."""
    written: list[str] = []
    real = saving.write_small

    def noted(*arguments: Any, **options: Any) -> tuple[int, int]:
        written.append(options["path"])
        return real(*arguments, **options)

    monkeypatch.setattr(saving, "write_small", noted)
    return written


def block_by_block(obj: object, path: Path, **options: Any) -> fastpersist.SaveReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "MAX_NBYTES", 0)
        return fastpersist.save(obj, path, **options)


def make_pool_dirty() -> None:
    pool = shared_pool()
    buffers = [pool.acquire(nbytes) for nbytes in (64 << 10, 128 << 10, 256 << 10)]
    for buffer in buffers:
        buffer.view[:] = b"\xaa" * buffer.nbytes
        pool.release(buffer)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("build", OBJECTS.values(), ids=OBJECTS)
def test_the_bytes_and_the_report_are_the_same(
    tmp_path: Path, pieces: list[str], build: Callable[[], object], checksum: bool
) -> None:
    obj, path = build(), tmp_path / "m.pt"
    expected = block_by_block(obj, path, checksum=checksum, durable=False)
    content = path.read_bytes()
    assert pieces == []
    make_pool_dirty()
    report = fastpersist.save(obj, path, checksum=checksum, durable=False)
    assert pieces == [str(path)]
    assert path.read_bytes() == content
    same = {"seconds": 0.0, "sync_seconds": 0.0}
    assert replace(report, **same) == replace(expected, **same)
    assert report.copied_nbytes == report.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_whatever_the_name(tmp_path: Path, pieces: list[str], name: str) -> None:
    obj = OBJECTS["odd sizes"]()
    block_by_block(obj, tmp_path / name, durable=False)
    content = (tmp_path / name).read_bytes()
    fastpersist.save(obj, tmp_path / name, durable=False)
    assert len(pieces) == 1
    assert (tmp_path / name).read_bytes() == content
    fastpersist.verify(tmp_path / name)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3000), max_size=MAX_STORAGES),
    st.text(alphabet="abc_", min_size=1, max_size=240),
    st.integers(0, 20_000),
)
@example([1] * MAX_STORAGES, "x" * 240, 0)
def test_no_file_exceeds_its_bound(sizes: list[int], name: str, text_nbytes: int) -> None:
    flat = flatten([torch.zeros(size, dtype=torch.uint8) for size in sizes] + ["x" * text_nbytes])
    bound = small._bound(flat, name)
    with open_engine("null") as engine, engine.open("x", "w") as file:
        nbytes, records = small.write_small(
            flat, name, engine, file, shared_pool(), checksum=True, path="x", report=lambda done, total: None
        )
    assert nbytes <= bound
    assert nbytes % 4096 == 0
    assert records == len(flat.storages) + 4


def test_nothing_is_copied_beyond_the_buffer() -> None:
    archive = small._Archive(AlignedBuffer(8192), b"m")
    with pytest.raises(AssertionError, match="longer than its bound"):
        archive.fill(flatten([torch.zeros(9000, dtype=torch.uint8)]), checksum=True)


FILE = File("f", -1, direct=True, memory_alignment=4, offset_alignment=4096)


@pytest.mark.parametrize(
    ("obj", "suits"),
    [
        ([torch.zeros(LARGE_NBYTES - 1, dtype=torch.uint8)], True),
        ([torch.zeros(LARGE_NBYTES, dtype=torch.uint8)], False),  # is written from where it lies
        ([torch.zeros(size + 1) for size in range(MAX_STORAGES)], True),
        ([torch.zeros(size + 1) for size in range(MAX_STORAGES + 1)], False),
        ("x" * (MAX_NBYTES - 10_000), True),
        ("x" * MAX_NBYTES, False),
    ],
)
def test_what_is_small(obj: object, suits: bool) -> None:
    flat = flatten(obj)
    assert is_small(flat, "m", FILE, 8 << 20) is suits
    assert not is_small(flat, "m", FILE, 8192)
    assert not is_small(flat, "m", File("f", -1, direct=True, memory_alignment=4, offset_alignment=8192), 8 << 20)


def test_what_lies_on_a_device_is_not_small() -> None:
    flat = flatten([torch.ones(10)])
    assert is_small(flat, "m", FILE, 8 << 20)
    assert not is_small(replace(flat, addresses=[0]), "m", FILE, 8 << 20)


def test_other_layouts_and_background_saves_go_block_by_block(tmp_path: Path, pieces: list[str]) -> None:
    fastpersist.save(1, tmp_path / "m.pt", layout="torch")
    fastpersist.save(1, tmp_path / "m.pt", block_nbytes=4096)
    fastpersist.async_save(1, tmp_path / "m.pt").result()
    assert pieces == []
    fastpersist.save(1, tmp_path / "m.pt")
    assert pieces == [str(tmp_path / "m.pt")]


def test_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    report = fastpersist.save(1, tmp_path / "m.pt", progress=lambda done, total: calls.append((done, total)))
    assert calls == [(report.file_nbytes, report.file_nbytes)]


OBJECT = [torch.arange(5000.0), torch.arange(3000)]


def save_with(faults: dict[int, Fault], path: Path, **calls: int) -> None:
    with FaultyEngine(open_engine("posix"), faults, calls) as engine:
        fastpersist.save(OBJECT, path, engine=engine)


def assert_only_the_old_one(path: Path) -> None:
    assert fastpersist.load(path) == "old"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert shared_pool().lent_nbytes == 0


@pytest.mark.parametrize(("after", "record"), [(0, "m/data.pkl"), (8192, "m/data/0"), (40_960, "m/data/1")])
def test_a_failed_transfer_names_the_record(tmp_path: Path, pieces: list[str], after: int, record: str) -> None:
    path = tmp_path / "m.pt"
    fastpersist.save("old", path)
    pieces.clear()
    faults = {1: Fault.error(errno.EIO)} if not after else {1: Fault.short(after), 2: Fault.error(errno.ENOSPC)}
    with pytest.raises(TransferError) as caught:
        save_with(faults, path)
    assert (caught.value.errno, caught.value.offset, caught.value.record) == (
        errno.ENOSPC if after else errno.EIO, after, record,
    )  # fmt: skip
    assert len(pieces) == 1
    assert_only_the_old_one(path)


def test_no_space_to_reserve(tmp_path: Path, pieces: list[str]) -> None:
    path = tmp_path / "m.pt"
    fastpersist.save("old", path)
    with pytest.raises(TransferError, match="cannot reserve space for") as caught:
        save_with({}, path, reserve=errno.ENOSPC)
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, str(path))
    assert caught.value.nbytes
    assert_only_the_old_one(path)


@pytest.mark.parametrize("fault", [Fault.short(4096), Fault.short(5000), Fault.error(errno.EINTR), Fault.error(errno.EINVAL)])
def test_a_transfer_that_stops_short_is_carried_on(
    tmp_path: Path, pieces: list[str], monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    monkeypatch.setattr(files, "_refused_devices", set())  # EINVAL is remembered of a filesystem
    path = tmp_path / "m.pt"
    save_with({1: fault}, path)
    assert len(pieces) == 1
    for mine, found in zip(OBJECT, torch.load(path), strict=True):
        assert torch.equal(mine, found)
    fastpersist.verify(path)


def test_record_names_reach_to_the_directory() -> None:
    buffer = AlignedBuffer(64 << 10)
    archive = small._Archive(buffer, b"m")
    nbytes = archive.fill(flatten(OBJECT), checksum=True)
    assert archive.record_at(0) == "m/data.pkl"
    assert archive.record_at(nbytes - 1) == "central directory"
