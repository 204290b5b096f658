"""Facts are read from made-up mount tables and sysfs trees as the kernel writes them."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from fastpersist.engines import _gds, _libc, available
from fastpersist.probing import devices, facts, gpu, mounts
from fastpersist.probing.devices import device_chain
from fastpersist.probing.facts import collect_facts, read_huge_pages
from fastpersist.probing.gpu import describe_gpu
from fastpersist.probing.mounts import Mount, block_device_of, mount_of, read_mounts
from fastpersist.probing.scratch import scratch_file
from tests.kvikio_double import KvikioDouble

TABLE = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 259:2 / /data rw,noatime shared:5 master:1 - xfs /dev/nvme0n1p2 rw,attr2
29 28 0:40 / /data/with\040space rw - btrfs /dev/null rw,subvolid=5
30 27 0:41 / /merged rw - overlay overlay rw,lowerdir=/,upperdir=/data,workdir=/data/w
31 27 259:3 / /merged rw - ext4 /dev/nvme0n1p3 rw
this line is broken
"""


@pytest.fixture
def table(tmp_path: Path) -> list[Mount]:
    (tmp_path / "mountinfo").write_text(TABLE)
    return read_mounts(tmp_path / "mountinfo")


def test_the_mount_table_is_read(table: list[Mount]) -> None:
    assert len(table) == 6
    assert table[2] == Mount("/data", "259:2", "xfs", "/dev/nvme0n1p2", ("rw", "noatime", "attr2"))
    assert table[3].mountpoint == "/data/with space"
    assert table[4].option("upperdir") == "/data"
    assert table[4].option("redirect_dir") is None


def test_without_a_mount_table_nothing_is_known(tmp_path: Path) -> None:
    assert read_mounts(tmp_path / "missing") == []
    assert mount_of("/", []) is None
    assert block_device_of(None, []) is None


def test_the_deepest_mount_holds_a_directory_and_of_equals_the_last(table: list[Mount]) -> None:
    found = {path: mount_of(path, table) for path in ("/etc", "/data/a", "/data/with space/b", "/merged", "/database")}
    assert {path: mount and mount.source for path, mount in found.items()} == {
        "/etc": "/dev/vda",
        "/data/a": "/dev/nvme0n1p2",
        "/data/with space/b": "/dev/null",
        "/merged": "/dev/nvme0n1p3",
        "/database": "/dev/vda",
    }


def test_the_block_device_below_a_mount(table: list[Mount], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts.os.path, "isdir", lambda path: path == "/data")
    assert block_device_of(table[1], table) == "254:0"
    assert block_device_of(table[4], table) == "259:2"  # the overlay's upper directory
    assert block_device_of(table[3], table) is None  # /dev/null is no block device
    assert block_device_of(Mount("/t", "0:5", "tmpfs", "tmpfs", ()), table) is None
    assert block_device_of(Mount("/n", "0:6", "nfs4", "server:/x", ()), table) is None


def test_an_overlay_whose_upper_directory_is_out_of_sight(table: list[Mount]) -> None:
    hidden = Mount("/", "0:50", "overlay", "overlay", ("rw", "upperdir=/var/lib/of/the/host"))
    assert block_device_of(hidden, [hidden]) is None
    itself = Mount("/", "0:50", "overlay", "overlay", ("rw", "upperdir=/"))
    assert block_device_of(itself, [itself]) is None


class Tree:
    """A sysfs with the devices that a test needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "dev" / "block").mkdir(parents=True)

    def device(self, place: str, number: str, **files: str) -> Path:
        folder = self.root / "devices" / place
        folder.mkdir(parents=True)
        (self.root / "dev" / "block" / number).symlink_to(folder)
        self.write(folder, dev=number, **files)
        return folder

    def write(self, folder: Path, **files: str) -> None:
        for name, text in files.items():
            file = folder / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


QUEUE = {
    "queue__logical_block_size": "512",
    "queue__physical_block_size": "4096",
    "queue__rotational": "0",
    "queue__max_sectors_kb": "128",
    "queue__max_hw_sectors_kb": "2048",
    "queue__nr_requests": "1023",
    "queue__scheduler": "[none] mq-deadline kyber",
    "queue__write_cache": "write through",
}


def _nvme(tree: Tree) -> None:
    port = "pci0000:00/0000:01:00.0"
    tree.device(f"{port}/nvme/nvme0/nvme0n1", "259:0", size="2048", **QUEUE)
    tree.device(f"{port}/nvme/nvme0/nvme0n1/nvme0n1p2", "259:2", size="1024", partition="2")
    (tree.root / "devices" / port / "nvme/nvme0/nvme0n1/device").symlink_to("..")
    tree.write(tree.root / "devices" / port / "nvme/nvme0", model="Fast SSD 1TB   ", numa_node="1")
    tree.write(
        tree.root / "devices" / port,
        current_link_speed="16.0 GT/s PCIe",
        current_link_width="2",
        max_link_speed="16.0 GT/s PCIe",
        max_link_width="4",
        numa_node="1",
    )


def test_a_partition_of_an_nvme_disk(tree: Tree) -> None:
    _nvme(tree)
    partition, disk = device_chain("259:2", sysfs=tree.root)
    assert (partition.level, partition.kind, partition.name, partition.nbytes) == (0, "partition", "nvme0n1p2", 512 * 1024)
    assert (disk.level, disk.kind, disk.name, disk.model) == (1, "nvme", "nvme0n1", "Fast SSD 1TB")
    assert (disk.link, disk.link_at_best, disk.numa_node) == ("16.0 GT/s PCIe x2", "16.0 GT/s PCIe x4", 1)
    for device in (partition, disk):  # a partition has the limits of its disk
        assert (device.logical_block_nbytes, device.physical_block_nbytes, device.rotational) == (512, 4096, False)
        assert (device.max_sectors_kb, device.max_hw_sectors_kb, device.nr_requests) == (128, 2048, 1023)
        assert (device.scheduler, device.write_cache) == ("none", "write through")


def test_an_nvme_disk_with_several_paths_is_found_through_its_controller(tree: Tree) -> None:
    port = tree.root / "devices/pci0000:00/0000:02:00.0"
    (port / "nvme/nvme1").mkdir(parents=True)
    tree.write(port, current_link_speed="8.0 GT/s PCIe", current_link_width="4", numa_node="0")
    disk = tree.device("virtual/nvme-subsystem/nvme-subsys1/nvme1n1", "259:7", **QUEUE)
    (disk.parent / "nvme1").symlink_to(port / "nvme/nvme1")
    (found,) = device_chain("259:7", sysfs=tree.root)
    assert (found.link, found.link_at_best, found.numa_node) == ("8.0 GT/s PCIe x4", None, 0)


def test_a_stack_of_device_mapper_md_and_partitions(tree: Tree) -> None:
    _nvme(tree)
    tree.device("virtual/sda", "8:0", **QUEUE | {"queue__rotational": "1"})
    array = tree.device("virtual/md0", "9:0", md__level="raid0")
    volume = tree.device("virtual/dm-0", "253:0", dm__name="vg-lv")
    for upper, members in ((array, ("8:0", "259:2")), (volume, ("9:0",))):
        (upper / "slaves").mkdir()
        for member in members:
            (upper / "slaves" / member).symlink_to((tree.root / "dev/block" / member).resolve())
    chain = device_chain("253:0", sysfs=tree.root)
    assert [(device.level, device.kind, device.name) for device in chain] == [
        (0, "device-mapper", "dm-0"),
        (1, "md", "md0"),
        (2, "partition", "nvme0n1p2"),
        (3, "nvme", "nvme0n1"),
        (2, "disk", "sda"),
    ]
    assert (chain[0].model, chain[1].model, chain[4].rotational) == ("vg-lv", "raid0", True)


def test_a_loop_device_leads_to_the_disk_of_its_file(tree: Tree) -> None:
    _nvme(tree)
    tree.device("virtual/block/loop3", "7:3", loop__backing_file="/images/disk.img", **QUEUE)
    chain = device_chain("7:3", {"/images/disk.img": "259:2"}.get, tree.root)
    assert [device.name for device in chain] == ["loop3", "nvme0n1p2", "nvme0n1"]
    assert chain[0].backing_file == "/images/disk.img"


def test_devices_that_lie_on_each_other_end(tree: Tree) -> None:
    tree.device("virtual/block/loop0", "7:0", loop__backing_file="/a")
    tree.device("virtual/block/loop1", "7:1", loop__backing_file="/b")
    chain = device_chain("7:0", {"/a": "7:1", "/b": "7:0"}.get, tree.root)
    assert [device.name for device in chain] == ["loop0", "loop1"]


def test_what_sysfs_does_not_tell_is_unknown(tree: Tree) -> None:
    tree.device("virtual/bare", "1:1", queue__scheduler="none", queue__nr_requests="plenty", numa_node="-1")
    (bare,) = device_chain("1:1", sysfs=tree.root)
    assert (bare.nbytes, bare.model, bare.rotational, bare.nr_requests, bare.numa_node, bare.link) == (None,) * 6
    assert bare.scheduler == "none"
    assert device_chain("9:9", sysfs=tree.root) == []
    assert devices.device_chain("9:9", sysfs=tree.root / "nowhere") == []


def test_huge_pages(tmp_path: Path) -> None:
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "meminfo").write_text(
        "HugePages_Total:      12\nHugePages_Free:        5\nHugepagesize:       2048 kB\nOdd: -\n"
    )
    found = read_huge_pages(tmp_path / "enabled", tmp_path / "meminfo")
    assert (found.transparent, found.reserved, found.free, found.page_nbytes) == ("madvise", 12, 5, 2 << 20)
    nothing = read_huge_pages(tmp_path / "none", tmp_path / "none")
    assert (nothing.transparent, nothing.reserved, nothing.free, nothing.page_nbytes) == (None,) * 4


class FakeDriver:
    """libcuda as ctypes would show it."""

    def __init__(self, code: int, count: int = 2) -> None:
        self._code = code
        self._count = count

    def cuInit(self, _: int) -> int:  # noqa: N802
        return self._code

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = self._count  # type: ignore[arg-type]
        return 0

    def cuDeviceGet(self, _: object, index: int) -> int:  # noqa: N802
        return index  # the second one fails

    def cuDeviceGetName(self, text: ctypes.Array[ctypes.c_char], *_: object) -> int:  # noqa: N802
        text.value = b"A GPU"
        return 0


def test_without_a_driver_nothing_of_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gds, "DRIVER", "libcuda-missing.so.1")
    found = describe_gpu()
    assert found.names == ()
    assert "libcuda-missing.so.1 is not installed" in found.verdict
    assert found.gds == "no: there is no GPU"


def test_a_driver_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gds.ctypes, "CDLL", lambda name: FakeDriver(100))
    assert "cuInit answers 100" in describe_gpu().verdict
    monkeypatch.setattr(_gds.ctypes, "CDLL", lambda name: FakeDriver(0, count=0))
    assert "the driver finds none" in describe_gpu().verdict
    monkeypatch.setattr(_gds.ctypes, "CDLL", lambda name: object())
    assert "no CUDA driver" in describe_gpu().verdict


def test_a_driver_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    monkeypatch.setattr(_gds, "DRIVER", str(tmp_path / "libcuda.so.1"))
    assert "cannot be loaded" in describe_gpu().verdict


def test_gpus_are_named_and_gds_is_not_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gds.ctypes, "CDLL", lambda name: FakeDriver(0))
    monkeypatch.setitem(sys.modules, "kvikio", None)
    found = describe_gpu()
    assert (found.names, found.verdict) == (("A GPU", "GPU 1"), "2 GPUs")
    assert found.gds.startswith("no: kvikio")
    assert "fastpersist[gds]" in found.gds


def test_the_verdict_on_gds_is_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    KvikioDouble().install(monkeypatch)
    assert describe_gpu() == gpu.Gpu(("A GPU",), "1 GPU", available()["kvikio"].reason)
    assert describe_gpu().gds.startswith("unverified: nvidia-fs is not loaded")


def test_facts_of_a_real_directory(tmp_path: Path) -> None:
    with scratch_file(tmp_path) as scratch:
        found = collect_facts(tmp_path, scratch)
    space = os.statvfs(tmp_path)
    assert found.filesystem.total_nbytes == space.f_blocks * space.f_frsize
    assert found.filesystem.kind != "unknown"
    assert set(found.engines) == {"posix", "io_uring"}
    assert found.memcpy_gb_per_s > 0
    assert found.crc_gb_per_s > 0
    assert found.direct_io.found_by


def test_what_only_an_open_file_tells_is_unknown_without_one(tmp_path: Path) -> None:
    found = collect_facts(tmp_path, None).direct_io
    assert (found.supported, found.memory_alignment) == (None, None)
    assert "no file can be made" in found.found_by


@pytest.mark.parametrize(
    ("stated", "kind", "expected"),
    [((512, 512), "ext4", "statx"), (None, "xfs", "XFS_IOC_DIOINFO"), (None, "other", "one page")],
)
def test_who_said_what_direct_io_demands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: tuple[int, int] | None, kind: str, expected: str
) -> None:
    monkeypatch.setattr(_libc, "filesystem_magic", lambda fileno: 0)
    monkeypatch.setattr(_libc, "statx_direct_alignment", lambda fileno: stated)
    with scratch_file(tmp_path) as scratch:
        found = facts._direct_io(scratch, Mount("/", "1:1", kind, "", ()), ())
    if found.supported:
        assert expected in found.found_by
    else:
        assert "refused" in found.found_by
