"""What a way to save does in a new process of its own: is the checkpoint right, and what memory does it take."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from overlap_model import Shape, Trainer
from overlap_ways import BARE_WRITES, NONE, WAYS
from verifying import payload_nbytes

_STEPS = 3
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True)
class Trial:
    """``peak_nbytes``: resident memory of the process."""

    verified: str
    peak_nbytes: int
    checkpoint_nbytes: int


def run_trial(name: str, shape: Shape, device: str, folder: Path) -> Trial:
    """Raises DifferenceError if the last checkpoint is not the state of the step after which it was begun."""
    with (
        tempfile.TemporaryDirectory(dir=folder) as own,
        ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process,
    ):
        return process.submit(run_here, name, shape, device, Path(own)).result()


def run_here(name: str, shape: Shape, device: str, folder: Path) -> Trial:
    """The trial, in this process."""
    trainer = Trainer(shape, device)
    saving = WAYS[name](folder, trainer.optimizer)
    trainer.step()
    with contextlib.suppress(OSError):  # if refused, all peaks contain the start of the process
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now; see proc(5)
    for _ in range(_STEPS):
        trainer.step()
        saving.save(trainer.state())
    trainer.step()
    saving.drain()
    peak_nbytes = _peak_nbytes()

    expected = copy.deepcopy(trainer.state())
    saving.save(trainer.state())
    for _ in range(_STEPS):
        trainer.step()
    saving.drain()
    saving.verify(expected)
    return Trial("no checkpoint" if name in (NONE, BARE_WRITES) else "yes", peak_nbytes, payload_nbytes(expected))


def _peak_nbytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
