"""The scripts that measure saves beside training: every way saves what it should, and the tables have all of their lines."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Without DeepSpeed, which would compile its library first.
WAYS = ["none", "bare writes", "torch.save", "fastpersist.save", "async_save snapshot", "async_save guard", "DCP async_save"]
TRIALS = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from overlap_model import Shape
from overlap_trial import run_here
for name in sys.argv[3:]:
    folder = pathlib.Path(sys.argv[2], name)
    folder.mkdir()
    print(f"{name}: {run_here(name, Shape(64, 1, 32), 'cpu', folder).verified}")
"""


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_way_saves_the_state_of_its_step(tmp_path: Path) -> None:
    lines = _run("-c", TRIALS, str(BENCHMARKS), str(tmp_path), *WAYS).splitlines()
    assert lines == [f"{name}: {'no checkpoint' if name in ('none', 'bare writes') else 'yes'}" for name in WAYS]


def test_training_with_and_without_saves_is_compared(tmp_path: Path) -> None:
    folder, plot = tmp_path / "files", tmp_path / "steps.png"
    arguments = ["--hidden", "64", "--layers", "1", "--vocabulary", "32", "--steps", "3", "--rounds", "2"]
    if importlib.util.find_spec("matplotlib"):
        arguments += ["--plot", str(plot)]
    script = str(BENCHMARKS / "overlap_training.py")
    output = _run(script, "--folder", str(folder), "--way", "async_save guard", *arguments)
    assert re.search(r"GB saved after every step; 2 paired rounds of 3 steps", output)
    assert re.findall(r"^\| (none|async_save guard) \|", output, re.MULTILINE) == ["none", "async_save guard"]
    assert "--plot" not in arguments or plot.read_bytes().startswith(b"\x89PNG")
    assert not folder.exists()


def test_counting_is_slowed_by_saves_and_by_memcpy(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    script = str(BENCHMARKS / "gil_interference.py")
    output = _run(script, "--folder", str(folder), "--rounds", "2", "--seconds", "0.1", "--mb_size", "4")
    neighbours = "nothing", "memcpy, as many CPU seconds", "the same saves by another process", "async_save, snapshot=False"
    for neighbour in neighbours:
        assert f"| {neighbour} |" in output
    for other in ("memcpy does", "saves by another process do"):
        pattern = (
            rf"^saves slow the loop by \S+ \(.*\) % more, and keep it waiting for \S+ \(.*\) % more of the time, than {other}$"
        )
        assert re.search(pattern, output, re.MULTILINE)
    assert not folder.exists()
