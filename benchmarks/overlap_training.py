"""How much a training slows down when it is saved: a small transformer with AdamW, in paired rounds with and without saves.

python benchmarks/overlap_training.py --folder /mnt/nvme0
python benchmarks/overlap_training.py --folder /mnt/nvme0 --step_seconds 2 --way "async_save guard" --rounds 9

none                     no saves: what all others are compared with
bare writes              as many bytes of one buffer, by direct writes in a thread: what the disk itself takes of the machine
torch.save               torch.save, fsync, rename, fsync of the folder
fastpersist.save         the training waits for it
async_save snapshot      copies are made before the training goes on
async_save guard         snapshot=False, guard=optimizer: the next step of the optimizer waits, forward and backward pass do not
DCP async_save           torch.distributed.checkpoint.async_save with copies that keep their memory
DeepSpeed FastFileWriter then rename, fsync of the folder

In each round every way has the same number of steps. A checkpoint is begun after every step (or --every steps) but the last, so
that each has a step to go along with; what is unfinished in the end is waited for within the time of its way. Machines change
their speed within seconds: many rounds of two steps (--steps 2 --rounds 40) tell small effects better than few of many. What
stands in brackets is the middle half of the rounds. Columns:

step s              median; a save call belongs to the step before it
stall s             per checkpoint: within save calls, in hooks before a step of the optimizer, and in the wait at the end
overhead %          what a checkpoint adds, of the time from one to the next without it
added s, CPU s      per checkpoint, more than "none" of the same round
CPU s, alone        of a save while nothing is trained, one in each round: free of what training threads spend on waiting
step / CPU, alone   how long a step lasts, in CPU seconds of a save
GB/s                bytes of a checkpoint, by the time from one to the next
extra MiB           peak of resident memory beyond that of "none", in processes of their own
verified            a checkpoint equals, bit for bit, the state after the step at which it was begun
lacks               what a crash or a power cut can cost that it cannot with the others
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import overlap_plot
import script_options
import typer
from measuring import GB, machine_line, measure, middle_half, process_cpu_seconds
from overlap_model import Shape, Trainer
from overlap_trial import Trial, run_trial
from overlap_ways import NONE, WAYS, Saving, refusal
from room import ready_memory, ready_page_cache, require_room, scratch_folder
from tables import Cells, print_table
from workloads import MIB

# The trial process: the training itself, the copies of a snapshot, the expected state, and what is loaded. This process
# comes after it and holds the copies of two ways.
_COPIES = 3
_FILES = 3


@dataclass(frozen=True, slots=True)
class Stretch:
    """Some steps in a row. ``stall_seconds``: within save calls, hooks of the optimizer, and the wait at the end."""

    every: int
    step_seconds: list[float]
    seconds: float
    cpu_seconds: float
    stall_seconds: float
    saves: int


@dataclass(slots=True)
class Way:
    """A way to save, what its trial gave, and round by round its stretches and the CPU seconds of a save without training."""

    name: str
    saving: Saving
    trial: Trial
    stretches: list[Stretch] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)

    def cells(self, baseline: Way) -> Cells:
        """Its line of the table. Ratios and differences are those of the same round."""
        step_seconds = _median_step_seconds(baseline.stretches)
        cells: Cells = {"": self.name, "step s": f"{_median_step_seconds(self.stretches):.3f}"}
        if self is baseline:
            return cells
        pairs = list(zip(self.stretches, baseline.stretches, strict=True))
        added = [(mine.seconds - other.seconds) / mine.saves for mine, other in pairs]
        cpu = [(mine.cpu_seconds - other.cpu_seconds) / mine.saves for mine, other in pairs]
        intervals = [other.seconds / len(other.step_seconds) * mine.every for mine, other in pairs]
        overheads = [100 * more / interval for more, interval in zip(added, intervals, strict=True)]
        nbytes, alone = self.trial.checkpoint_nbytes, statistics.median(self.alone)
        rates = [nbytes / GB / (more + interval) for more, interval in zip(added, intervals, strict=True)]
        return cells | {
            "stall s": f"{statistics.median(stretch.stall_seconds / stretch.saves for stretch in self.stretches):.3f}",
            "overhead %": middle_half(overheads, 1),
            "added s": middle_half(added, 3),
            "CPU s": middle_half(cpu, 3),
            "added / CPU": _ratio(statistics.median(added), statistics.median(cpu)),
            "CPU s, alone": middle_half(self.alone, 3),
            "added / CPU, alone": _ratio(statistics.median(added), alone),
            "step / CPU, alone": _ratio(step_seconds, alone),
            "GB/s": f"{statistics.median(rates):.2f}",
            "extra MiB": f"{(self.trial.peak_nbytes - baseline.trial.peak_nbytes) / MIB:.0f}",
            "verified": self.trial.verified,
            "lacks": self.saving.lacks or "-",
        }


def _median_step_seconds(stretches: list[Stretch]) -> float:
    return statistics.median(seconds for stretch in stretches for seconds in stretch.step_seconds)


def _ratio(above: float, below: float) -> str:
    return f"{above / below:.2f}" if below > 0 else "-"


def run_stretch(trainer: Trainer, saving: Saving, steps: int, every: int) -> Stretch:
    """Train for ``steps``, save after each ``every`` but not after the last one, and wait for what is unfinished."""
    gc.collect()
    step_seconds: list[float] = []
    stall_seconds, saves = 0.0, 0
    cpu_before = process_cpu_seconds()
    started = before = time.perf_counter()
    for step in range(1, steps + 1):
        trainer.step()
        stall_seconds += trainer.blocked_seconds
        if step % every == 0 and step < steps:
            called = time.perf_counter()
            saving.save(trainer.state())
            stall_seconds += time.perf_counter() - called
            saves += 1
        now = time.perf_counter()
        step_seconds.append(now - before)
        before = now
    saving.drain()
    ended = time.perf_counter()
    cpu_seconds = process_cpu_seconds() - cpu_before
    return Stretch(every, step_seconds, ended - started, cpu_seconds, stall_seconds + ended - before, saves)


def measure_rounds(ways: list[Way], trainer: Trainer, folder: Path, *, rounds: int, steps: int, every: int) -> None:
    """Each round begins with another way; those that write through the page cache find free memory there."""
    for way in ways:
        run_stretch(trainer, way.saving, every + 1, every)  # first uses of memory and libraries
    for index in range(rounds):
        first = index % len(ways)
        for way in ways[first:] + ways[:first]:
            if way.saving.through_page_cache:
                ready_page_cache(folder / "page-cache", trainer.shape.checkpoint_nbytes())
            way.stretches.append(run_stretch(trainer, way.saving, steps, every))
        for way in ways:
            way.alone.append(measure(partial(save_alone, trainer, way.saving)).cpu_seconds)


def save_alone(trainer: Trainer, saving: Saving) -> None:
    """Save while nothing else happens."""
    saving.save(trainer.state())
    saving.drain()


def chosen_ways(names: list[str] | None) -> list[str]:
    """Those that can run here, "none" first; for the others a line says why not. Raises typer.BadParameter."""
    for name in names or ():
        if name not in WAYS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(WAYS)}", param_hint="--way")
    chosen: list[str] = []
    for name in dict.fromkeys([NONE, *(names or WAYS)]):
        reason = refusal(name)
        if reason:
            print(f"{name} left out: {reason}", flush=True)
        else:
            chosen.append(name)
    return chosen


Steps = Annotated[int, typer.Option(min=2, help="Steps of each way in a round.")]
Every = Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")]
WayNames = Annotated[list[str] | None, typer.Option("--way", help=f"Repeat for several; else all: {', '.join(WAYS)}.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, every way has its steps once.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Draw step times over steps; needs the extra fastpersist[plot].")
]
Hidden = Annotated[int, typer.Option(min=64, help="Width of the transformer, a multiple of 64.")]
StepSeconds = Annotated[
    float, typer.Option("--step_seconds", "--step-seconds", min=0, help="Micro-batches are added until a step lasts so long.")
]
Gpu = Annotated[bool, typer.Option("--gpu", help="Train on a GPU.")]


def main(
    folder: script_options.Folder,
    steps: Steps = 6,
    every: Every = 1,
    way: WayNames = None,
    rounds: Rounds = 3,
    plot: Plot = None,
    gpu: Gpu = False,
    hidden: Hidden = 512,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the transformer.")] = 8,
    vocabulary: Annotated[int, typer.Option(min=2, help="Different tokens.")] = 8192,
    step_seconds: StepSeconds = 0.0,
) -> None:
    """Train with and without saves in paired rounds, and print a Markdown table of what the saves cost."""
    if every >= steps:
        raise typer.BadParameter("the last step is not saved after: choose more than --every", param_hint="--steps")
    if hidden % 64:
        raise typer.BadParameter("it must be a multiple of 64", param_hint="--hidden")
    script_options.outputs(None, plot)
    device = script_options.device_name(gpu)
    names = chosen_ways(way)
    shape = Shape(hidden, layers, vocabulary)
    nbytes = shape.checkpoint_nbytes()
    with script_options.plain_errors(), scratch_folder(folder) as scratch:
        memory_nbytes = shape.training_nbytes() + _COPIES * nbytes
        require_room(scratch, file_nbytes=_FILES * nbytes, memory_nbytes=memory_nbytes)
        ready_memory(memory_nbytes)
        trials = {name: run_trial(name, shape, device, scratch) for name in names}
        trainer = Trainer(shape, device)
        trainer.calibrate(step_seconds)
        ways = [Way(name, WAYS[name](_own_folder(scratch, name), trainer.optimizer), trials[name]) for name in names]
        measure_rounds(ways, trainer, scratch, rounds=rounds, steps=steps, every=every)
        what = f"{hidden} wide, {layers} layers, {vocabulary} tokens, on {device}, micro-batches: {trainer.micro_batches}"
        heading = f"{what}; {nbytes / GB:.3f} GB saved {'after every step' if every == 1 else f'every {every} steps'}"
        print(f"**{heading}; {rounds} paired rounds of {steps} steps, GB = 1e9 bytes**\n\n{machine_line(scratch)}")
        print_table([one.cells(ways[0]) for one in ways])
        if plot:
            overlap_plot.draw(plot, heading, {one.name: [s.step_seconds for s in one.stretches] for one in ways})


def _own_folder(scratch: Path, name: str) -> Path:
    own = scratch / name
    own.mkdir()
    return own


if __name__ == "__main__":
    typer.run(main)
