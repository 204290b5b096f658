"""Tensors are written from where they lie, or copied to large pages: by argument, environment, and kind of disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import options
from fastpersist.engines.files import File
from fastpersist.memory.buffers import shared_pool
from fastpersist.probing import small_pages
from fastpersist.probing.mounts import Mount
from tests.unit.test_probe_facts import QUEUE, Tree

MIB = 1 << 20


@pytest.fixture
def state() -> dict[str, Any]:
    """Interiors of several blocks, one smaller than a block, a view that begins within a page, small ones."""
    large = torch.randn(3 * MIB)
    return {"large": large, "view": large[77:], "mid": torch.randn(300_001), "small": [torch.randn(7)] * 2, "n": 1}


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTPERSIST_ZERO_COPY", raising=False)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the disk is slowed by small pages, as a test has it."""
    verdict = {"slowed": True}
    monkeypatch.setattr(options, "slowed_by_small_pages", lambda directory: verdict["slowed"])
    return verdict


def assert_loads(path: Path, state: dict[str, Any]) -> None:
    loaded = torch.load(path)
    assert all(torch.equal(loaded[name], state[name]) for name in ("large", "view", "mid"))
    assert torch.equal(loaded["small"][1], state["small"][1])
    assert fastpersist.verify(path).records_without_checksum == 0


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
@pytest.mark.parametrize("block_nbytes", [4096, MIB, 64 * MIB])
@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_copied_or_not_the_file_holds_the_same(
    state: dict[str, Any], tmp_path: Path, engine: str, block_nbytes: int, layout: str
) -> None:
    path = tmp_path / "m.pt"
    report = fastpersist.save(
        state, path, zero_copy=False, engine=engine, block_nbytes=block_nbytes, layout=layout, queue_depth=3
    )
    assert (report.zero_copy_nbytes, report.copied_nbytes) == (0, report.nbytes)
    assert_loads(path, state)
    assert shared_pool().lent_nbytes == 0
    copied = path.read_bytes()
    straight = fastpersist.save(state, path, zero_copy=True, engine=engine, block_nbytes=block_nbytes, layout=layout)
    assert_loads(path, state)
    if layout == "auto":
        assert straight.zero_copy_nbytes > 0.98 * straight.nbytes
    else:
        assert path.read_bytes() == copied


def test_what_nobody_decided_the_disk_decides(state: dict[str, Any], tmp_path: Path, disk: dict[str, bool]) -> None:
    assert fastpersist.save(state, tmp_path / "m.pt").zero_copy_nbytes == 0
    assert fastpersist.save(state, tmp_path / "m.pt", zero_copy=True).zero_copy_nbytes > 0
    disk["slowed"] = False
    assert fastpersist.save(state, tmp_path / "m.pt").zero_copy_nbytes > 0
    assert fastpersist.save(state, tmp_path / "m.pt", zero_copy=False).zero_copy_nbytes == 0


def test_nothing_is_copied_for_an_engine_that_keeps_nothing(
    state: dict[str, Any], tmp_path: Path, disk: dict[str, bool]
) -> None:
    assert fastpersist.save(state, tmp_path / "m.pt", engine="null").zero_copy_nbytes > 0
    assert fastpersist.save(state, tmp_path / "m.pt", engine="null", zero_copy=False).zero_copy_nbytes == 0


def test_nothing_is_copied_twice_for_the_page_cache(
    state: dict[str, Any], tmp_path: Path, disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = fastpersist.engines.base.open_file

    def buffered(*arguments: Any, **keywords: Any) -> File:
        return opened(*arguments, **{**keywords, "direct": False})

    monkeypatch.setattr(fastpersist.engines.base, "open_file", buffered)
    assert fastpersist.save(state, tmp_path / "m.pt", engine="posix").zero_copy_nbytes > 0


def test_the_environment_decides_before_the_disk_and_after_the_argument(
    state: dict[str, Any], tmp_path: Path, disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_ZERO_COPY", "1")
    assert fastpersist.save(state, tmp_path / "m.pt").zero_copy_nbytes > 0
    assert fastpersist.save(state, tmp_path / "m.pt", zero_copy=False).zero_copy_nbytes == 0
    disk["slowed"] = False
    monkeypatch.setenv("FASTPERSIST_ZERO_COPY", "0")
    assert fastpersist.save(state, tmp_path / "m.pt").zero_copy_nbytes == 0
    assert fastpersist.save(state, tmp_path / "m.pt", zero_copy=True).zero_copy_nbytes > 0
    monkeypatch.setenv("FASTPERSIST_ZERO_COPY", "")
    assert fastpersist.save(state, tmp_path / "m.pt").zero_copy_nbytes > 0


def test_nonsense_is_refused_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="zero_copy must be True, False or None, not 'no'"):
        fastpersist.save([1], tmp_path / "m.pt", zero_copy="no")  # type: ignore[arg-type]
    monkeypatch.setenv("FASTPERSIST_ZERO_COPY", "yes")
    with pytest.raises(ValueError, match="FASTPERSIST_ZERO_COPY must be 0 or 1, not 'yes'"):
        fastpersist.save([1], tmp_path / "m.pt")
    assert list(tmp_path.iterdir()) == []


def test_beside_a_training_nothing_is_copied_unless_asked_for(
    state: dict[str, Any], tmp_path: Path, disk: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(**given: Any) -> bool:
        with fastpersist.async_save(state, tmp_path / "m.pt", snapshot=False, **given) as pending:
            report = pending.result()
        assert_loads(tmp_path / "m.pt", state)
        return report.zero_copy_nbytes == 0

    assert not copied()
    assert copied(zero_copy=False)
    monkeypatch.setenv("FASTPERSIST_ZERO_COPY", "0")
    assert copied()
    assert not copied(zero_copy=True)
    monkeypatch.setenv("FASTPERSIST_ZERO_COPY", "perhaps")
    with pytest.raises(ValueError, match="FASTPERSIST_ZERO_COPY must be 0 or 1"):
        copied()


def test_a_checkpointer_does_as_save_and_async_save_do(tmp_path: Path, disk: dict[str, bool]) -> None:
    state = [torch.ones(MIB)]
    with fastpersist.Checkpointer(tmp_path, snapshot=False) as checkpointer:
        assert checkpointer.save(state, 1, blocking=True).result().zero_copy_nbytes == 0
        assert checkpointer.save(state, 2).result().zero_copy_nbytes > 0
    with fastpersist.Checkpointer(tmp_path, zero_copy=True) as checkpointer:
        assert checkpointer.save(state, 3, blocking=True).result().zero_copy_nbytes > 0


class TestTheDisk:
    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A disk of a virtual machine with a partition, an NVMe disk, and a logical volume on each."""
        tree = Tree(tmp_path / "sys")
        for place, number in (
            ("pci0000:00/0000:00:02.0/virtio1/block/vda", "254:0"),
            ("pci0000:00/nvme/nvme0/nvme0n1", "259:0"),
        ):
            tree.device(place, number, **QUEUE)
        tree.device("pci0000:00/0000:00:02.0/virtio1/block/vda/vda1", "254:1", partition="1")
        for number, below in (("253:0", "254:0"), ("253:1", "259:0")):
            volume = tree.device(f"virtual/virtiofs-{number[-1]}", number, dm__name="vg-lv")
            (volume / "slaves").mkdir()
            (volume / "slaves" / "below").symlink_to((tree.root / "dev/block" / below).resolve())
        monkeypatch.setattr(
            small_pages, "device_chain", lambda number: fastpersist.probing.devices.device_chain(number, sysfs=tree.root)
        )
        self.huge_pages = tmp_path / "enabled"
        self.huge_pages.write_text("always [madvise] never\n")
        monkeypatch.setattr(small_pages, "_HUGE_PAGES", self.huge_pages)
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
        self.directory = str(tmp_path)
        self.patch = monkeypatch

    def slowed_on(self, device: str) -> bool:
        mounts = [Mount("/", device, "ext4", "/dev/root", ())]
        self.patch.setattr(small_pages, "read_mounts", lambda: mounts)
        small_pages._on_virtio.cache_clear()
        small_pages._only_ours_are_huge.cache_clear()
        try:
            return small_pages.slowed_by_small_pages(self.directory)
        finally:
            small_pages._on_virtio.cache_clear()
            small_pages._only_ours_are_huge.cache_clear()

    @pytest.mark.parametrize(
        ("device", "slowed"),
        [
            ("254:0", True),
            ("254:1", True),
            ("253:0", True),
            ("259:0", False),
            ("253:1", False),
            ("0:33", False),
            ("8:0", False),
        ],
    )
    def test_virtio_anywhere_below_is_slow(self, device: str, slowed: bool) -> None:
        assert self.slowed_on(device) is slowed

    def test_all_pages_are_alike(self) -> None:
        assert self.slowed_on("254:0")
        for setting in ("[always] madvise never\n", "always madvise [never]\n", ""):
            self.huge_pages.write_text(setting)
            assert not self.slowed_on("254:0")
        self.huge_pages.unlink()
        assert not self.slowed_on("254:0")

    def test_torchs_pages_are_huge(self) -> None:
        self.patch.setenv("THP_MEM_ALLOC_ENABLE", "0")
        assert self.slowed_on("254:0")
        self.patch.setenv("THP_MEM_ALLOC_ENABLE", "1")
        assert not self.slowed_on("254:0")
