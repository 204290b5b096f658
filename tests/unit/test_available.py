"""How much memory may still be taken, told by trees of control groups made for the purpose."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from fastpersist.memory.available import available_nbytes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine itself has 1000 MiB left."""

    class Memory:
        available = 1000 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)


class Tree:
    """The files that tell a process about its groups."""

    def __init__(self, root: Path) -> None:
        self.process = root / "cgroup"
        self.groups = root / "fs"
        self.groups.mkdir()

    def group(self, name: str, limit: object, used: int, cache: int = 0) -> None:
        """A group of version 2."""
        self.write(name, {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {cache}\nslab 7"})

    def group_v1(self, name: str, limit: object, used: int, cache: int = 0) -> None:
        """A group of version 1."""
        stat = f"cache 1\ninactive_file 3\ntotal_inactive_file {cache}"
        self.write(f"memory/{name}", {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat})

    def write(self, name: str, files: dict[str, object]) -> None:
        folder = self.groups / name.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(f"{content}\n")

    def available(self, *lines: str) -> int:
        self.process.write_text("".join(f"{line}\n" for line in lines))
        return available_nbytes(self.process, self.groups)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_the_machine_where_no_group_limits(tree: Tree, tmp_path: Path) -> None:
    assert tree.available("0::/") == 1000 * MIB
    assert available_nbytes(tmp_path / "missing", tmp_path / "missing") == 1000 * MIB
    assert available_nbytes() > 0


def test_a_limit_less_what_is_used(tree: Tree) -> None:
    tree.group("/a/b", 300 * MIB, 100 * MIB)
    assert tree.available("0::/a/b") == 200 * MIB


def test_page_cache_that_can_be_dropped_is_free(tree: Tree) -> None:
    tree.group("/a", 300 * MIB, 250 * MIB, cache=40 * MIB)
    assert tree.available("0::/a") == 90 * MIB


def test_more_used_than_allowed_leaves_nothing(tree: Tree) -> None:
    tree.group("/a", 300 * MIB, 350 * MIB)
    assert tree.available("0::/a") == 0


def test_a_group_without_a_limit(tree: Tree) -> None:
    tree.group("/a", "max", 350 * MIB)
    assert tree.available("0::/a") == 1000 * MIB


def test_the_tightest_of_the_groups_above_counts(tree: Tree) -> None:
    tree.group("/a", 150 * MIB, 100 * MIB)
    tree.group("/a/b", "max", 90 * MIB)
    tree.group("/a/b/c", 300 * MIB, 80 * MIB)
    assert tree.available("0::/a/b/c") == 50 * MIB
    tree.group("/a/b/c", 100 * MIB, 80 * MIB)
    assert tree.available("0::/a/b/c") == 20 * MIB


def test_other_groups_do_not_count(tree: Tree) -> None:
    tree.group("/a", 300 * MIB, 0)
    tree.group("/a/other", 10 * MIB, 0)
    tree.group("/a/b/below", 10 * MIB, 0)
    assert tree.available("0::/a/b") == 300 * MIB


def test_a_container_whose_group_is_mounted_at_the_top(tree: Tree) -> None:
    tree.group("/", 300 * MIB, 100 * MIB)
    assert tree.available("0::/docker/0123456789") == 200 * MIB
    assert tree.available("0::/../../elsewhere") == 200 * MIB


def test_version_1(tree: Tree) -> None:
    tree.group_v1("a/b", 300 * MIB, 250 * MIB, cache=10 * MIB)
    lines = ("3:cpu,cpuacct:/other", "2:memory:/a/b", "1:name=systemd:/other")
    assert tree.available(*lines) == 60 * MIB
    tree.group_v1("a", 280 * MIB, 250 * MIB)
    assert tree.available(*lines) == 30 * MIB
    tree.group_v1("", 270 * MIB, 250 * MIB)
    assert tree.available(*lines) == 20 * MIB


def test_version_1_without_a_limit(tree: Tree) -> None:
    tree.group_v1("a", 0x7FFFFFFFFFFFF000, 250 * MIB)
    assert tree.available("2:memory:/a") == 1000 * MIB


def test_both_versions_at_once(tree: Tree) -> None:
    tree.group_v1("a", 300 * MIB, 250 * MIB)
    tree.group("a", 100 * MIB, 60 * MIB)
    assert tree.available("4:memory,hugetlb:/a", "0::/a") == 40 * MIB


def test_colons_in_a_groups_name(tree: Tree) -> None:
    tree.group("a:b", 300 * MIB, 100 * MIB)
    assert tree.available("0::/a:b") == 200 * MIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_a_missing_file_is_no_limit(tree: Tree, missing: str) -> None:
    tree.group("/a", 300 * MIB, 100 * MIB)
    (tree.groups / "a" / missing).unlink()
    assert tree.available("0::/a") == 1000 * MIB


def test_content_that_makes_no_sense_is_no_limit(tree: Tree) -> None:
    tree.write("a", {"memory.max": 300 * MIB, "memory.current": "much", "memory.stat": "inactive_file 1"})
    tree.write("b", {"memory.max": "", "memory.current": 1, "memory.stat": "inactive_file 1"})
    assert tree.available("0::/a") == tree.available("0::/b") == 1000 * MIB
