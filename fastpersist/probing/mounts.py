"""The mount table: which filesystem a directory lies on, and which block device is below it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOUNT_TABLE = Path("/proc/self/mountinfo")
MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})
_MAX_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the mount table. ``device`` is "major:minor"; a major of 0 means that no block device has the number."""

    mountpoint: str
    device: str
    kind: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """The value of ``name=value`` among the options."""
        return next((text.partition("=")[2] for text in self.options if text.startswith(f"{name}=")), None)


def read_mounts(table: Path = MOUNT_TABLE) -> list[Mount]:
    """All mounts, in the order of mounting; none where the table cannot be read (format: proc_pid_mountinfo(5))."""
    try:
        lines = table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := _parse(line)) is not None]


def mount_of(directory: str | os.PathLike[str], mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a directory lies on: the deepest, and of those on top of each other the last."""
    path = Path(os.path.realpath(directory))
    holding = [mount for mount in mounts if path.is_relative_to(mount.mountpoint)]
    return max(reversed(holding), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)


def block_device_of(mount: Mount | None, mounts: Sequence[Mount]) -> str | None:
    """ "major:minor" of the block device that holds a mount's data: of an overlay, that of its upper directory.

    None where there is none (memory, network) or where it cannot be told.
    """
    for _ in range(_MAX_LAYERS):
        if mount is None:
            return None
        upper = mount.option("upperdir")
        if mount.kind != "overlay" or upper is None:
            break
        below = mount_of(upper, mounts) if os.path.isdir(upper) else None  # a container's upper directory is out of sight
        mount = None if below is mount else below
    if mount is None or mount.kind in MEMORY_FILESYSTEMS:
        return None
    if not mount.device.startswith("0:"):
        return mount.device
    return _number_of(mount.source)  # btrfs numbers its subvolumes itself


def _number_of(source: str) -> str | None:
    try:
        status = os.stat(source)
    except (OSError, ValueError):
        return None
    if not os.path.isabs(source) or not stat.S_ISBLK(status.st_mode):
        return None
    return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def _parse(line: str) -> Mount | None:
    before, separator, after = line.partition(" - ")
    fields, rest = before.split(" "), after.split(" ")
    if not separator or len(fields) < 6 or len(rest) < 3:
        return None
    options = dict.fromkeys([*fields[5].split(","), *rest[2].split(",")])
    return Mount(_unescape(fields[4]), fields[2], rest[0], _unescape(rest[1]), tuple(_unescape(text) for text in options))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
