"""A full disk, on tiny real filesystems: the true errno, the old file untouched, and a smaller save fits again."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastpersist
from fastpersist import TransferError
from fastpersist.engines import _libc
from tests.faults.scene import Scene, content
from tests.mounting import MEBIBYTE, Mounted, Mounts

KINDS = ("ext4", "xfs", "btrfs", "tmpfs")
ENGINES = ("posix", "io_uring")
FREE_NBYTES = 6 * MEBIBYTE  # room for the old file, a small new one, and not for a large one
LARGE_NBYTES = 24 * MEBIBYTE

pytestmark = pytest.mark.mounts


@pytest.fixture(params=KINDS)
def mounted(request: pytest.FixtureRequest, mounts: Mounts) -> Mounted:
    """An empty filesystem of each kind."""
    return mounts.tmpfs() if request.param == "tmpfs" else mounts.make(request.param)


@pytest.fixture
def full(mounted: Mounted) -> Iterator[Scene]:
    """A good checkpoint on a filesystem with little room left."""
    directory = mounted.root / "checkpoints"
    directory.mkdir()
    scene = Scene(directory)
    fill(mounted.root)
    yield scene
    (mounted.root / "filler").unlink()


def fill(root: Path) -> None:
    """Allocate all but FREE_NBYTES: no data is written, so the image below stays small."""
    with (root / "filler").open("wb") as filler:
        # What a filesystem counts as free is not all to be had (metadata, reserves): ask for less until it is given.
        wanted = free_nbytes(root) - FREE_NBYTES
        while wanted > 0:
            try:
                os.posix_fallocate(filler.fileno(), 0, wanted)
                return
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                wanted -= MEBIBYTE


def free_nbytes(root: Path) -> int:
    status = os.statvfs(root)
    return status.f_bavail * status.f_frsize


def large() -> dict[str, torch.Tensor]:
    """More than fits, in several tensors."""
    return {f"tensor{index}": torch.ones(LARGE_NBYTES // 16) for index in range(4)}


def assert_full_and_unharmed(full: Scene, engine: str) -> None:
    """A save that does not fit fails like one, and one that fits succeeds after it."""
    for path in (full.path, full.directory / "new.pt"):
        with full.unharmed(), pytest.raises(TransferError, match="No space left on device") as caught:
            fastpersist.save(large(), path, engine=engine, block_nbytes=MEBIBYTE)
        assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, str(path))
    fastpersist.save(content(2), full.path, engine=engine)
    full.assert_holds(2)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_room_is_noticed_before_the_first_write(full: Scene, engine: str) -> None:
    assert_full_and_unharmed(full, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_room_for_a_write(full: Scene, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    # Where nothing can be reserved the disk is found to be full in the middle of the file, by a real write.
    def refuse(fileno: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(_libc, "fallocate", refuse)
    assert_full_and_unharmed(full, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_inode_for_the_temporary_file(mounts: Mounts, engine: str) -> None:
    mounted = mounts.tmpfs("nr_inodes=12")
    scene = Scene(mounted.root)
    fillers = [mounted.root / f"filler{index}" for index in range(20)]
    with pytest.raises(OSError, match="No space left"):
        touch_all(fillers)
    with scene.unharmed(), pytest.raises(OSError, match=r"cannot create a temporary file .*No space left") as caught:
        fastpersist.save(content(2), scene.path, engine=engine)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(scene.directory))
    for filler in fillers:
        filler.unlink(missing_ok=True)
    fastpersist.save(content(2), scene.path, engine=engine)
    scene.assert_holds(2)


def touch_all(paths: list[Path]) -> None:
    """Make them, one after the other."""
    for path in paths:
        path.touch()
