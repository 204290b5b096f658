"""Whatever ends a Checkpointer, and whenever: what is listed is complete, and what is to be kept is there."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastpersist import Checkpointer
from fastpersist.engines import Engine
from tests.faults.checkpointing import LEDGER, LOCK, SPARE, WAYS, assert_complete, renewed, state
from tests.faults.test_recycle import BLOCK_NBYTES, PowerCuts
from tests.mounting import Mounts

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).parents[2]
_SAVE_AND_END = """
import sys, torch, fastpersist
checkpointer = fastpersist.Checkpointer(sys.argv[1], keep_last=2)
for step in range(1, 5):
    checkpointer.save({"step": step, "large": torch.full((3_000_000,), step)}, step)
"""


@pytest.fixture
def run_scenario(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Run a scenario of checkpointing.py in a process of its own; returns what it saw."""

    def run(scenario: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.faults.checkpointing", scenario, str(tmp_path)]
        # The limit is there for hangs alone: they fail the test instead of stopping the run.
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        seen: dict[str, Any] = json.loads(done.stdout)
        return seen

    return run


@pytest.mark.slow
def test_killed_at_random_moments_while_another_process_reads(run_scenario: Callable[[str], dict[str, Any]]) -> None:
    seen = run_scenario("killed_at_random")
    assert seen["kills"] == 60
    for name in ("left", "spares", "unpublished", "listings", "loads"):  # else it was not what was to be tested
        assert seen[name] > 0, name


@pytest.mark.slow
def test_killed_before_and_after_each_step(run_scenario: Callable[[str], dict[str, Any]]) -> None:
    left = run_scenario("killed_at_each_step")
    assert len(left) == 2 * 2 * sum(map(len, WAYS.values()))  # blocking or not; before and after; steps
    for case, names in left.items():
        way, _, moment = case.split(", ")
        assert names == sorted(_expected(way, *moment.split(" ", 1))), case


def _expected(way: str, when: str, point: str) -> set[str]:
    """What a killed save leaves beside the checkpoints."""
    points = WAYS[way]
    done = points.index(point) + (when == "after")  # so many steps were taken

    def is_after(other: str) -> bool:
        return other in points and done > points.index(other)

    names = {LOCK, LEDGER}
    if not is_after("ledger rename"):  # it was open before its sync
        names.add(f"{LEDGER}.tmp")
    if is_after("take the spare") and not is_after("publish"):
        names.add(".fastpersist-N.tmp")
    if not (is_after("take the spare") or is_after("remove the spare")) or is_after("retire"):
        names.add(SPARE)
    return names


def test_one_process_saves_at_a_time_and_any_may_read(run_scenario: Callable[[str], dict[str, Any]]) -> None:
    ends = ("closed", "ended", "killed")
    expected = {f"before it {end}": "busy" for end in ends} | {f"after it {end}": "saved" for end in ends}
    assert run_scenario("one_saver") == expected


def test_a_forked_child_holds_nothing(run_scenario: Callable[[str], dict[str, Any]]) -> None:
    assert run_scenario("forked_while_saving") == {
        "beside its parent": "busy",
        "another, beside the parent": "busy",
        "another, when the parent is gone": "saved",
        "when its parent is gone": "saved",
        "another, beside the orphan": "busy",
        "once more": "saved",
    }


def test_the_latest_loads_while_another_process_saves_and_removes(run_scenario: Callable[[str], dict[str, Any]]) -> None:
    seen = run_scenario("loaded_while_pruned")
    assert seen["different"] > 1  # else nothing was saved meanwhile


def test_the_interpreter_ends_after_the_last_save(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _SAVE_AND_END, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=True)
    assert done.stderr == ""
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        assert checkpointer.steps() == [3, 4]
        loaded = checkpointer.load(verify=True)
        assert loaded["step"] == 4
        assert bool((loaded["large"] == 4).all())
        checkpointer.save(loaded, 5, blocking=True)
        assert checkpointer.steps() == [4, 5]


class CutsWhileSaving:
    """Power cuts before and after all that a Checkpointer's save does, and which step was durable then."""

    def __init__(self, cuts: PowerCuts, patch: pytest.MonkeyPatch, newest: int) -> None:
        self.durable: list[int] = []
        self._cuts = cuts
        self._newest = newest  # on stable storage
        self._published = newest
        calls = itertools.count()
        for owner, name in ((os, "rename"), (os, "link"), (os, "fsync"), (os, "unlink"), (Engine, "reserve")):
            patch.setattr(owner, name, self._cutting(name, getattr(owner, name)))
        self.progress = lambda done, total: self.cut("while it is written") if next(calls) % 8 == 3 else None

    def cut(self, moment: str) -> None:
        self.durable.append(self._newest)
        self._cuts.cut(moment)

    def _cutting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            what = " to ".join(os.path.basename(str(argument)) for argument in arguments)
            if name == "unlink" and not os.path.lexists(arguments[0]):
                return real(*arguments, **options)  # there is no spare
            self.cut(f"before {name} {what}")
            result = real(*arguments, **options)
            if name in ("rename", "link") and os.path.basename(arguments[1]).startswith("step-"):
                self._published = int(os.path.basename(arguments[1])[5:15])
            if name == "fsync" and os.path.isdir(f"/proc/self/fd/{arguments[0]}"):
                self._newest = max(self._newest, self._published)
            self.cut(f"after {name} {what}")
            return result

        return call


@pytest.mark.mounts
@pytest.mark.parametrize("disk", ["ext4", "xfs"])
@pytest.mark.parametrize(("recycle", "blocking"), [(True, False), (True, True), (False, False)])
def test_a_power_cut_leaves_complete_checkpoints_and_the_newest_of_them(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, disk: str, recycle: bool, blocking: bool
) -> None:
    cuts = PowerCuts(mounts, disk)
    run = cuts.root / "run"
    options: dict[str, Any] = {"keep_last": 1, "recycle": recycle, "block_nbytes": BLOCK_NBYTES}
    with Checkpointer(run, **options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(state(step), step, blocking=True)
    saved = state(2)
    with monkeypatch.context() as patch:
        watch = CutsWhileSaving(cuts, patch, newest=2)
        with Checkpointer(run, progress=watch.progress, **options) as checkpointer:
            checkpointer.save(renewed(saved, 3), 3, blocking=blocking)
            checkpointer.wait()
            watch.cut("in the end")
    found: list[tuple[str, list[int]]] = []
    for (moment, root), durable in zip(cuts.survivors(), watch.durable, strict=True):
        copy = root / "run"
        steps = assert_complete(copy)
        assert steps[-1] >= durable, f"{moment}: {steps} are left, and {durable} was durable"
        assert set(steps) <= {2, 3}, moment
        assert set(steps) <= set(json.loads((copy / LEDGER).read_text())["written"]), moment
        with Checkpointer(copy, **options) as checkpointer:  # the next run
            checkpointer.save(state(steps[-1] + 1), steps[-1] + 1, blocking=True)
            assert assert_complete(copy) == [steps[-1] + 1], moment
        spare = {SPARE} if recycle else set()
        assert set(os.listdir(copy)) == {os.path.basename(checkpointer.path(steps[-1] + 1)), LOCK, LEDGER, *spare}, moment
        found.append((moment, steps))
    assert found[0][1] == [2]
    assert found[-1][1][-1] == 3
    moments = [moment for moment, _ in found]
    for name in ("rename", "link", "fsync", "unlink") if not recycle else ("rename", "fsync", f"rename {SPARE} to", "reserve"):
        assert any(moment.startswith(f"before {name}") for moment in moments), name
    assert "while it is written" in moments
