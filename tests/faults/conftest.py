"""Fixtures of the fault tests."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scene import Scene
from tests.mounting import Mounts


@pytest.fixture(autouse=True, scope="module")
def all_in_one_thread(one_thread: None) -> None:
    """For every test here."""


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A directory of its own with a good checkpoint in it."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    return Scene(directory)


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    """Makes and mounts filesystems, and takes them away after the test."""
    with Mounts(tmp_path / "mounts") as mounts:
        yield mounts


@pytest.fixture
def run_victim(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Run a scenario of victim.py in a process of its own; returns what it saw."""

    def run(scenario: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.faults.victim", scenario, str(tmp_path)]
        root = Path(__file__).parents[2]
        # The limit is there for hangs alone: they fail the test instead of stopping the run.
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    return run
