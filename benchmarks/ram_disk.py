"""A disk in memory: xfs on a loop device over a file on tmpfs. It takes direct I/O, and no drive slows it down."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
# mkfs.xfs refuses less than 300 MiB.
_SMALLEST_NBYTES = 320 * MIB
_TOOLS = ("losetup", "mkfs.xfs", "mount", "umount")
_TIMEOUT_SECONDS = 120


class NoRamDiskError(Exception):
    """It cannot be made here; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class RamDisk:
    """A mounted one. ``description``: what it is made of, in words."""

    root: Path
    description: str


def ram_disk_nbytes(file_nbytes: int) -> int:
    """Memory that the disk takes for one file of ``file_nbytes``: the file, its deleted predecessor, the filesystem's own."""
    return max(_SMALLEST_NBYTES, file_nbytes * 22 // 10 // MIB * MIB)


@contextlib.contextmanager
def ram_disk(folder: Path, nbytes: int) -> Iterator[RamDisk]:
    """A disk of ``nbytes``, mounted below ``folder``, and taken away however the block ends. Raises NoRamDiskError.

    All of its memory is taken beforehand, so that no write pays for that.
    """
    _require_tools()
    with contextlib.ExitStack() as cleanup:
        memory = _mount_point(folder / "memory", cleanup)
        # A page more for the file's own bookkeeping.
        _mount(["-t", "tmpfs", "-o", f"size={nbytes + MIB},mode=0700", "tmpfs"], memory, cleanup)
        image = memory / "image"
        _fill(image, nbytes)
        device, direct = _attach(image)
        cleanup.callback(_run, "losetup", "--detach", device)
        _run("mkfs.xfs", "-q", "-f", "-K", device)  # -K discards nothing: the memory stays taken
        root = _mount_point(folder / "ram-disk", cleanup)
        _mount(["-t", "xfs", device], root, cleanup)
        yield RamDisk(root, f"xfs on a loop device (direct I/O {direct}) over {nbytes / (1 << 30):.2f} GiB of tmpfs")


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise NoRamDiskError("mounting it needs root: run the script with sudo")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise NoRamDiskError(f"{', '.join(missing)} not found: install util-linux, mount and xfsprogs")


def _mount_point(path: Path, cleanup: contextlib.ExitStack) -> Path:
    path.mkdir()
    cleanup.callback(path.rmdir)
    return path


def _mount(arguments: list[str], path: Path, cleanup: contextlib.ExitStack) -> None:
    _run("mount", *arguments, str(path))
    cleanup.callback(_unmount, path)


def _unmount(path: Path) -> None:
    try:
        _run("umount", str(path))
    except NoRamDiskError:  # busy: it goes when whoever uses it is done
        _run("umount", "--lazy", str(path))


def _fill(image: Path, nbytes: int) -> None:
    chunk = bytes(MIB)
    with image.open("wb", buffering=0) as file:
        for _ in range(0, nbytes, MIB):
            file.write(chunk)


def _attach(image: Path) -> tuple[str, str]:
    """The loop device, and whether it reads and writes the image directly: "on" or "off"."""
    attach = ("losetup", "--find", "--show")
    try:
        return _run(*attach, "--direct-io=on", str(image)), "on"
    except NoRamDiskError:  # tmpfs takes no direct I/O before Linux 6.6
        return _run(*attach, str(image)), "off"


def _run(*command: str) -> str:
    """What the command prints. It is in a session of its own: Ctrl-C must not reach an unmount."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS, start_new_session=True
    )
    if done.returncode != 0:
        raise NoRamDiskError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout.strip()
