"""How much memory may still be taken: the system's, and the process's control group's where it has a limit."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")


def available_nbytes(process: Path = Path("/proc/self/cgroup"), cgroups: Path = CGROUPS) -> int:
    """Bytes that can be had without swapping, as far as the kernel tells; the tightest limit counts."""
    groups = _groups(process, cgroups)
    return min(
        [int(psutil.virtual_memory().available), *(left for group in groups if (left := _left_nbytes(group)) is not None)]
    )


def _groups(process: Path, cgroups: Path) -> list[Path]:
    """Folders of the groups that may limit this process, its own and those above it; v2 and v1.

    In a container the path told may be the host's, while the group itself is mounted at the top: both are looked at.
    """
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        own = root / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder == root or root in folder.parents]
    return folders


def _left_nbytes(group: Path) -> int | None:
    """What a group leaves: its limit without what it uses, the page cache that it could drop counted as free."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most, now = (group / limit).read_text().strip(), int((group / used).read_text())
            droppable = dict(line.split() for line in (group / "memory.stat").read_text().splitlines()).get(cache, "0")
        except (OSError, ValueError):
            continue
        if most.isdigit():
            return max(int(most) - now + int(droppable), 0)
    return None
