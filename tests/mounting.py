"""Small real filesystems for tests: made in sparse image files, mounted on loop devices, and taken away again.

Where that cannot be done (no root, no loop device, no mkfs for the kind) the test is skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest

MEBIBYTE = 1 << 20
_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
SMALLEST_NBYTES = {"ext4": 64 * MEBIBYTE, "xfs": 300 * MEBIBYTE, "btrfs": 128 * MEBIBYTE}
"""Images are sparse: the size costs nothing. xfs and btrfs refuse to be made smaller than about this."""


@dataclass(frozen=True)
class Mounted:
    """A mounted filesystem: its root, and the image and the loop device below it (None for one in memory)."""

    root: Path
    image: Path | None = None
    device: str | None = None


class Mounts:
    """Mounts filesystems below ``base``; leaving the context unmounts them all, the last first."""

    def __init__(self, base: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("mounting a filesystem needs root")
        base.mkdir(parents=True)
        self._base = base
        self._mounted: list[Mounted] = []
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for mounted in reversed(self._mounted[:]):
            self.unmount(mounted)
        for image in self._base.glob("*.img"):  # pytest keeps the directories of its last runs
            image.unlink()

    def make(self, kind: str, *, sector_nbytes: int = 512, nbytes: int | None = None) -> Mounted:
        """A new filesystem of ``kind`` on a loop device whose logical sectors have ``sector_nbytes``."""
        command = _MAKE[kind]
        if shutil.which(command[0]) is None:
            pytest.skip(f"{command[0]} is not installed")
        image = self._new_path("img")
        with image.open("wb") as file:
            file.truncate(nbytes or SMALLEST_NBYTES[kind])
        # Made on the device and not on the file: only the device knows its sectors.
        device = _attach(image, sector_nbytes)
        try:
            _run([*command, device])
            return self._mount(Mounted(self._new_directory(), image, device), ["-t", kind, device])
        except BaseException:
            _run(["losetup", "--detach", device], check=False)
            raise

    def mount_copy(self, kind: str, image: Path, *, sector_nbytes: int = 512) -> Mounted:
        """Mount an image as a machine would after a power cut: its journal is replayed.

        The filesystem that it was copied from must be unmounted: btrfs would take the two for one.
        """
        device = _attach(image, sector_nbytes)
        try:
            return self._mount(Mounted(self._new_directory(), image, device), ["-t", kind, device])
        except BaseException:
            _run(["losetup", "--detach", device], check=False)
            raise

    def tmpfs(self, *options: str) -> Mounted:
        """A new filesystem in memory, of 16 MiB unless the options say otherwise."""
        return self._mount(Mounted(self._new_directory()), ["-t", "tmpfs", "-o", ",".join(("size=16m", *options)), "tmpfs"])

    def overlay(self, below: Mounted) -> Mounted:
        """An overlay whose lower and upper directories both lie on ``below``."""
        for name in ("lower", "upper", "work"):
            (below.root / name).mkdir()
        directories = f"lowerdir={below.root}/lower,upperdir={below.root}/upper,workdir={below.root}/work"
        return self._mount(Mounted(self._new_directory()), ["-t", "overlay", "-o", directories, "overlay"])

    def remount(self, mounted: Mounted, option: str) -> None:
        """Change an option of a mounted filesystem: "ro" or "rw"."""
        _run(["mount", "-o", f"remount,{option}", str(mounted.root)])

    def copy_image(self, mounted: Mounted) -> Path:
        """A copy of what the device holds now, while the filesystem stays mounted: what a power cut would leave."""
        assert mounted.image is not None
        copy = self._new_path("img")
        _run(["cp", "--sparse=always", "--reflink=auto", str(mounted.image), str(copy)])
        return copy

    def unmount(self, mounted: Mounted) -> None:
        """Unmount it and free its loop device; harmless when repeated."""
        if mounted not in self._mounted:
            return
        self._mounted.remove(mounted)
        if _run(["umount", str(mounted.root)], check=False).returncode != 0:
            _run(["umount", "--lazy", str(mounted.root)], check=False)
        if mounted.device is not None:
            _run(["losetup", "--detach", mounted.device], check=False)
        with contextlib.suppress(OSError):
            mounted.root.rmdir()

    def _mount(self, mounted: Mounted, arguments: Sequence[str]) -> Mounted:
        done = _run(["mount", *arguments, str(mounted.root)], check=False)
        if done.returncode != 0 and _cannot_mount(done.stderr):
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        if done.returncode != 0:
            raise RuntimeError(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
        self._mounted.append(mounted)
        return mounted

    def _new_path(self, suffix: str) -> Path:
        self._count += 1
        return self._base / f"{self._count}.{suffix}"

    def _new_directory(self) -> Path:
        directory = self._new_path("mount")
        directory.mkdir()
        return directory


def _cannot_mount(message: str) -> bool:
    """Whether the machine is to blame: a kernel without the filesystem, a container without the right."""
    return any(words in message for words in ("unknown filesystem type", "permission denied", "Operation not permitted"))


def _attach(image: Path, sector_nbytes: int) -> str:
    done = _run(["losetup", "--find", "--show", "--sector-size", str(sector_nbytes), str(image)], check=False)
    if done.returncode != 0:
        pytest.skip(f"no loop device: {done.stderr.strip()}")
    return done.stdout.strip()


def _run(command: Sequence[str], *, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if check and done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done
