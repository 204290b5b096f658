"""Real filesystems, made for the test: each is saved to, read by plain torch.load, and cut off from power."""

from __future__ import annotations

import itertools
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from tests.mounting import Mounted, Mounts

DIRECT = {
    "ext4": True,
    "ext4-4096": True,
    "xfs": True,
    "xfs-4096": True,
    "btrfs": None,
    "tmpfs": False,
    "overlay-ext4": True,
    "overlay-tmpfs": None,
}
"""What the report must say. None where the kernel takes O_DIRECT, may buffer all the same, and does not tell: btrfs since
Linux 6.15 for data with checksums, and an overlay on tmpfs."""
ENGINES = ("posix", "io_uring")
LAYOUTS = ("auto", "torch")

pytestmark = pytest.mark.mounts


@pytest.fixture(scope="module")
def module_mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """Filesystems that all tests of a kind share."""
    with Mounts(tmp_path_factory.mktemp("filesystems") / "mounts") as mounts:
        yield mounts


@pytest.fixture(scope="module", params=DIRECT)
def kind(request: pytest.FixtureRequest) -> str:
    """Name of a filesystem, with what lies below it."""
    return str(request.param)


@pytest.fixture(scope="module")
def root(module_mounts: Mounts, kind: str) -> Path:
    """Root of a mounted filesystem of that kind."""
    return mount(module_mounts, kind).root


def mount(mounts: Mounts, kind: str) -> Mounted:
    """kind: "ext4", "ext4-4096" (bytes of a sector), "tmpfs", "overlay-ext4" (an overlay on ext4)."""
    name, _, detail = kind.partition("-")
    if name == "tmpfs":
        return mounts.tmpfs()
    if name == "overlay":
        return mounts.overlay(mount(mounts, detail))
    return mounts.make(name, sector_nbytes=int(detail or 512))


def checkpoint(generation: int) -> dict[str, Any]:
    """Large, small, odd and strided tensors with random values that only the generation decides."""
    generator = torch.Generator().manual_seed(generation)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {f"layer{index}.weight": noise(300, 301 + index) for index in range(4)}
    tensors |= {f"layer{index}.bias": noise(31 + index) for index in range(20)}
    odd = torch.randint(0, 255, (700_001,), generator=generator, dtype=torch.uint8)
    return {
        **tensors,
        "transposed": noise(128, 1024).T,
        "odd": odd,
        "part": odd[3:400_000],
        "empty": noise(0),
        "step": generation,
    }


def assert_holds(path: Path, *generations: int) -> None:
    """The file is complete and equals, bit for bit, the checkpoint of one of the generations."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    found = torch.load(path)
    assert found["step"] in generations
    expected = checkpoint(found["step"])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == value if key == "step" else torch.equal(found[key], value), key


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_is_read_back(root: Path, kind: str, engine: str, layout: str) -> None:
    path = root / "checkpoint.pt"
    for generation in (1, 2):  # a new file, and one that replaces another
        report = fastpersist.save(checkpoint(generation), path, engine=engine, layout=layout, block_nbytes=1 << 18)
        assert_holds(path, generation)
        assert DIRECT[kind] in (report.direct, None)
        assert report.file_nbytes == path.stat().st_size
    assert [name for name in os.listdir(root) if name.endswith(".tmp")] == []
    path.unlink()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_mapped_load(root: Path, engine: str) -> None:
    path = root / "mapped.pt"
    fastpersist.save(checkpoint(3), path, engine=engine)
    found = torch.load(path, mmap=True)
    assert all(torch.equal(found[key], value) for key, value in checkpoint(3).items() if key != "step")
    del found
    path.unlink()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nbytes", [0, 1, 511, 4095, 4096, 4097, (1 << 18) + 511])
def test_any_length(root: Path, engine: str, nbytes: int) -> None:
    path = root / "any.pt"
    tensor = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    fastpersist.save(tensor, path, engine=engine, block_nbytes=1 << 16)
    assert torch.equal(torch.load(path), tensor)
    path.unlink()


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Filesystems for one test alone."""
    with Mounts(tmp_path / "mounts") as mounts:
        yield mounts


class PowerCuts:
    """Copies a device while its filesystem is in use, and later looks at each copy as after a power cut."""

    def __init__(self, mounts: Mounts, kind: str) -> None:
        self._mounts = mounts
        self._kind = kind
        self._mounted = mounts.make(kind)
        self._images: list[tuple[str, Path]] = []
        self.path = self._mounted.root / "checkpoint.pt"

    def cut(self, moment: str) -> None:
        """What the device holds at this moment is what a power cut would leave."""
        self._images.append((moment, self._mounts.copy_image(self._mounted)))

    def survivors(self) -> Iterator[tuple[str, Path]]:
        """(moment, path of the checkpoint) on each copy in turn, mounted; what was copied is unmounted for good."""
        self._mounts.unmount(self._mounted)
        for moment, image in self._images:
            copy = self._mounts.mount_copy(self._kind, image)
            yield moment, copy.root / self.path.name
            self._mounts.unmount(copy)
            image.unlink()


DISKS = ("ext4", "xfs", "btrfs")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("disk", DISKS)
def test_a_power_cut_after_the_save_keeps_the_new_file(mounts: Mounts, disk: str, engine: str) -> None:
    cuts = PowerCuts(mounts, disk)
    fastpersist.save(checkpoint(1), cuts.path, engine=engine)
    cuts.cut("after the first save")
    fastpersist.save(checkpoint(2), cuts.path, engine=engine)
    cuts.cut("after the second save")
    expected = {"after the first save": 1, "after the second save": 2}
    for moment, path in cuts.survivors():
        assert_holds(path, expected[moment])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("disk", DISKS)
def test_a_power_cut_during_the_save_keeps_the_old_file(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, disk: str, engine: str
) -> None:
    cuts = PowerCuts(mounts, disk)
    fastpersist.save(checkpoint(1), cuts.path, engine=engine)
    calls = itertools.count(1)

    def progress(done_nbytes: int, total_nbytes: int) -> None:
        if next(calls) in (1, 6) or done_nbytes == total_nbytes:
            cuts.cut(f"with {done_nbytes} of {total_nbytes} bytes written")

    monkeypatch.setattr(os, "rename", cut_around(os.rename, cuts))
    fastpersist.save(checkpoint(2), cuts.path, engine=engine, block_nbytes=1 << 18, progress=progress)
    moments = []
    for moment, path in cuts.survivors():
        # Between the naming and the directory's sync either file may survive, but never a piece of one.
        assert_holds(path, *((1, 2) if moment == "after the naming" else (1,)))
        moments.append(moment)
    assert len(moments) == 5


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("disk", DISKS)
def test_a_power_cut_during_the_first_save_leaves_a_complete_file_or_none(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, disk: str, engine: str
) -> None:
    cuts = PowerCuts(mounts, disk)
    monkeypatch.setattr(os, "link", cut_around(os.link, cuts))
    fastpersist.save(checkpoint(1), cuts.path, engine=engine)
    cuts.cut("after the save")
    moments = []
    for moment, path in cuts.survivors():
        if path.exists():
            assert_holds(path, 1)
        else:
            assert moment != "after the save"
        moments.append(moment)
    assert len(moments) == 3


def cut_around(naming: Callable[..., None], cuts: PowerCuts) -> Callable[..., None]:
    """A link or a rename with a power cut just before and just after it."""

    def named(*arguments: Any, **options: Any) -> None:
        cuts.cut("before the naming")
        naming(*arguments, **options)
        cuts.cut("after the naming")

    return named
