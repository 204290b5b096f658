"""The chain of block devices below a filesystem, as sysfs tells it: partition, loop, device mapper, md, and the disks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
_SECTOR_NBYTES = 512  # sysfs counts sizes in these, whatever the device's own sectors are
_MAX_DEVICES = 64
_VIRTIO = re.compile(r"virtio\d+")

DeviceOf = Callable[[str], str | None]
"""From a path to the "major:minor" of the block device that it lies on."""


@dataclass(frozen=True, slots=True)
class Device:
    """A block device; ``level`` is its distance from the filesystem. What sysfs does not tell is None.

    kind: "disk", "nvme", "partition", "loop", "device-mapper" or "md". backing_file is that of a loop device.
    link and link_at_best are the PCI link as it runs and as it could ("16.0 GT/s PCIe x4"). The limits of the queue are
    those of the whole disk, for a partition too. virtio: a disk of a virtual machine, behind that interface.
    """

    level: int
    name: str
    kind: str
    number: str
    nbytes: int | None
    model: str | None
    backing_file: str | None
    rotational: bool | None
    logical_block_nbytes: int | None
    physical_block_nbytes: int | None
    max_sectors_kb: int | None
    max_hw_sectors_kb: int | None
    nr_requests: int | None
    scheduler: str | None
    write_cache: str | None
    numa_node: int | None
    link: str | None
    link_at_best: str | None
    virtio: bool = False


def device_chain(number: str, device_of: DeviceOf = lambda path: None, sysfs: Path = SYSFS) -> list[Device]:
    """The device ``number`` ("major:minor") and all below it, the nearest first; empty where sysfs does not know it."""
    found: dict[str, Device] = {}
    _collect(number, 0, device_of, sysfs, found)
    return list(found.values())


def _collect(number: str, level: int, device_of: DeviceOf, sysfs: Path, found: dict[str, Device]) -> None:
    folder = sysfs / "dev" / "block" / number
    if number in found or len(found) >= _MAX_DEVICES or not folder.is_dir():
        return
    folder = folder.resolve()
    device = found[number] = _describe(folder, number, level)
    if device.kind == "partition":
        below = [_text(folder.parent / "dev")]
    elif device.backing_file is not None:
        below = [device_of(device.backing_file)]
    else:
        below = [_text(member / "dev") for member in _entries(folder / "slaves")]
    for lower in below:
        if lower:
            _collect(lower, level + 1, device_of, sysfs, found)


def _describe(folder: Path, number: str, level: int) -> Device:
    kind = _kind(folder)
    disk = folder.parent if kind == "partition" else folder
    queue = disk / "queue"
    sectors = _number(folder / "size")
    rotational = _number(queue / "rotational")
    controller = _controller(disk)
    return Device(
        level=level,
        name=folder.name,
        kind=kind,
        number=number,
        nbytes=None if sectors is None else sectors * _SECTOR_NBYTES,
        model=_text(disk / "device" / "model") or _text(disk / "dm" / "name") or _text(disk / "md" / "level"),
        backing_file=_text(folder / "loop" / "backing_file"),
        rotational=None if rotational is None else bool(rotational),
        logical_block_nbytes=_number(queue / "logical_block_size"),
        physical_block_nbytes=_number(queue / "physical_block_size"),
        max_sectors_kb=_number(queue / "max_sectors_kb"),
        max_hw_sectors_kb=_number(queue / "max_hw_sectors_kb"),
        nr_requests=_number(queue / "nr_requests"),
        scheduler=_chosen(_text(queue / "scheduler")),
        write_cache=_text(queue / "write_cache"),
        numa_node=_numa_node(controller),
        link=_link(controller, "current"),
        link_at_best=_link(controller, "max"),
        virtio=any(_VIRTIO.fullmatch(part) for part in folder.parts),
    )


def _kind(folder: Path) -> str:
    marks = {"partition": "partition", "loop": "loop", "dm": "device-mapper", "md": "md"}
    for mark, kind in marks.items():
        if (folder / mark).exists():
            return kind
    return "nvme" if folder.name.startswith("nvme") else "disk"


def _controller(disk: Path) -> Path:
    """The folder from which the PCI device is found upwards: an NVMe disk with several paths lies elsewhere itself."""
    for entry in _entries(disk.parent):
        if entry.name.startswith("nvme") and entry.is_symlink():
            return entry.resolve()
    return disk


def _numa_node(folder: Path) -> int | None:
    for level in (folder, *folder.parents):
        node = _number(level / "numa_node")
        if node is not None:
            return node if node >= 0 else None  # -1: the machine has but one
    return None


def _link(folder: Path, which: str) -> str | None:
    for level in (folder, *folder.parents):
        speed, width = _text(level / f"{which}_link_speed"), _text(level / f"{which}_link_width")
        if speed and width:
            return f"{speed} x{width}"
    return None


def _chosen(text: str | None) -> str | None:
    """The name in brackets: "none [mq-deadline] kyber"."""
    if text is None or "[" not in text:
        return text
    return text.partition("[")[2].partition("]")[0]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder / name for name in os.listdir(folder))
    except OSError:
        return []


def _text(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace").strip() or None
    except OSError:
        return None


def _number(file: Path) -> int | None:
    try:
        return int(_text(file) or "")
    except ValueError:
        return None
