"""SIGKILL at any moment leaves the old complete file or the new one, and nothing that a later save does not clear away."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpersist
from tests.faults.scene import Scene, content, without_nameless_files

ABANDONED = ".fastpersist-0123456789abcdef.tmp"
_HOLD_A_LOCK = (
    "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
)


@pytest.mark.slow
def test_killed_at_random_moments(run_victim: Callable[[str], dict[str, Any]]) -> None:
    seen = run_victim("killed_at_random")
    assert seen["left"] > 0  # else no victim with a named temporary file was hit while it saved


@pytest.mark.slow
def test_killed_before_and_after_each_step(run_victim: Callable[[str], dict[str, Any]]) -> None:
    left = run_victim("killed_at_each_step")
    assert len(left) == 2 * 2 * (8 + 7)  # engines; before and after; nameless files, and named ones without a link
    # A nameless file has a name only between the link and the rename, a named one from the start.
    for case, files in left.items():
        if "nameless" in case:
            assert files == (case.partition(", nameless, ")[2] in ("after os.link", "before os.rename")), case
        else:
            beyond = ("before engine.open", "after os.rename", "before os.fsync", "after os.fsync")
            assert files == (case.partition(", named, ")[2] not in beyond), case


@pytest.mark.slow
def test_killed_while_the_target_is_new(run_victim: Callable[[str], dict[str, Any]]) -> None:
    left = run_victim("killed_while_new")
    assert len(left) == 2 * 2 * 7  # engines; before and after; steps
    assert set(left.values()) == {0}


@pytest.fixture
def abandoned(scene: Scene) -> Path:
    """A temporary file that a killed save could have left beside the checkpoint."""
    path = scene.directory / ABANDONED
    path.write_bytes(b"half a checkpoint")
    return path


@pytest.fixture
def locked(abandoned: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the abandoned file's lock, as a save that is still at work does."""
    command = [sys.executable, "-c", _HOLD_A_LOCK, str(abandoned)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_an_abandoned_file_is_removed(scene: Scene, abandoned: Path) -> None:
    fastpersist.save(content(2), scene.path)
    assert not abandoned.exists()
    scene.assert_holds(2)


def test_a_save_under_another_name_removes_it_too(scene: Scene, abandoned: Path) -> None:
    fastpersist.save(content(2), scene.directory / "other.pt")
    assert sorted(os.listdir(scene.directory)) == ["checkpoint.pt", "other.pt"]


def test_a_file_in_use_by_a_living_process_stays(scene: Scene, abandoned: Path, locked: subprocess.Popen[str]) -> None:
    fastpersist.save(content(2), scene.path)
    assert abandoned.read_bytes() == b"half a checkpoint"
    locked.kill()
    locked.wait()
    fastpersist.save(content(3), scene.path)
    scene.assert_holds(3)


def test_a_save_in_work_survives_the_cleaning_of_another(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    other = scene.directory / "other.pt"
    nested: list[int] = []

    def save_another(done_nbytes: int, total_nbytes: int) -> None:
        if not nested:
            nested.append(done_nbytes)
            fastpersist.save(content(3), other)

    without_nameless_files(monkeypatch)
    fastpersist.save(content(2), scene.path, progress=save_another)
    assert nested
    other.unlink()
    scene.assert_holds(2)


@pytest.mark.parametrize(
    "name",
    [
        ".fastpersist-0123456789abcdef.tmp.pt",
        ".fastpersist-0123456789abcde.tmp",
        ".fastpersist-0123456789abcdeg.tmp",
        "fastpersist-0123456789abcdef.tmp",
        ".fastpersist-.tmp",
        "model.tmp",
    ],
)
def test_files_of_other_names_are_never_removed(scene: Scene, name: str) -> None:
    (scene.directory / name).write_bytes(b"mine")
    fastpersist.save(content(2), scene.path)
    assert (scene.directory / name).read_bytes() == b"mine"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.parent / "kept")])
def test_what_is_no_file_does_not_stop_a_save(scene: Scene, make: Callable[[Path], None]) -> None:
    (scene.directory / "kept").write_bytes(b"mine")
    make(scene.directory / ABANDONED)
    fastpersist.save(content(2), scene.path)
    assert (scene.directory / "kept").read_bytes() == b"mine"
    assert os.path.lexists(scene.directory / ABANDONED)
