"""How much a background save holds up Python code of other threads: a counting loop beside it, and beside plain memcpy.

python benchmarks/gil_interference.py --folder /mnt/nvme0

Two threads that share a machine slow each other even if one holds no lock of the interpreter: caches, memory and, between
cores that are not all there, time. So the loop runs beside a thread of C's memcpy as well, which is given as many CPU seconds
per second as the saves of the same round took, and beside the same saves by another process: what the kernel does for the disk
slows a loop, too, and of all saves only those of its own process can take the interpreter's lock from it. The machine runs a
few per cent faster or slower from one second to the next: many short rounds tell more than few long ones, and the time in which
the loop's thread did not run is measured as well: it waited for the lock, or for a core. In brackets: the middle half of the
rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import script_options
import typer
from measuring import GB, machine_line, middle_half, process_cpu_seconds
from room import require_room, scratch_folder
from tables import Cells, print_table
from workloads import MIB, random_tensors

import fastpersist

# After each copy the thread waits for the interpreter's lock (5 ms): the copy must last longer than that.
_COPY_NBYTES = 64 * MIB
_TENSORS = 16
_COUNTS = 1000  # between two looks at the clock
_SMALLEST_SHARE = 0.001

Beside = Callable[[threading.Event], int]
"""Runs in a thread until the event is set; returns the bytes that it has moved."""


@dataclass(slots=True)
class Neighbour:
    """What ran beside the loop, round by round: counts per second, the share of time in which the loop waited, CPU seconds per
    second of all other threads, bytes per second.
    """

    name: str
    counts: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    cpu_shares: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def slowdowns(self, alone: Neighbour) -> list[float]:
        """Per cent of the counts that the loop lost, round by round."""
        return [100 * (1 - mine / other) for mine, other in zip(self.counts, alone.counts, strict=True)]

    def cells(self, alone: Neighbour) -> Cells:
        """Its line of the table."""
        cells = {"beside": self.name, "million counts/s": f"{statistics.median(self.counts) / 1e6:.1f}"}
        cells["waiting, %"] = middle_half(self.waits)
        if self is not alone:
            cells["slower by %"] = middle_half(self.slowdowns(alone))
            share = statistics.median(self.cpu_shares)
            cells["CPU s per s"] = f"{share:.3f}" if share >= _SMALLEST_SHARE else "-"
            cells["GB/s"] = f"{statistics.median(self.rates) / GB:.2f}"
        return cells

    def run(self, beside: Beside | None, seconds: float) -> None:
        """One round."""
        started, cpu_before, own_before = time.perf_counter(), process_cpu_seconds(), time.thread_time()
        with _running(beside) as moved:
            counts, waited = count_for(seconds)
        self.counts.append(counts)
        self.waits.append(waited)
        own = time.thread_time() - own_before
        elapsed = time.perf_counter() - started
        self.cpu_shares.append(max(0.0, process_cpu_seconds() - cpu_before - own) / elapsed)
        self.rates.append(sum(moved) / elapsed)


@contextlib.contextmanager
def _running(beside: Beside | None) -> Iterator[list[int]]:
    """The bytes that it has moved are in the list at the end."""
    moved: list[int] = []
    if beside is None:
        yield moved
        return
    stop = threading.Event()
    thread = threading.Thread(target=lambda: moved.append(beside(stop)))
    thread.start()
    try:
        yield moved
    finally:
        stop.set()
        thread.join()


def count_for(seconds: float) -> tuple[float, float]:
    """Count in pure Python; returns counts per second, and per cent of the time in which this thread did not run."""
    started, cpu_started = time.perf_counter(), time.thread_time()
    counted = 0
    while time.perf_counter() - started < seconds:
        for _ in range(_COUNTS):
            counted += 1
    elapsed, ran = time.perf_counter() - started, time.thread_time() - cpu_started
    return counted / elapsed, 100 * max(0.0, 1 - ran / elapsed)


class Copier:
    """memcpy from one buffer to another."""

    def __init__(self) -> None:
        self._source, self._target = (ctypes.create_string_buffer(_COPY_NBYTES) for _ in range(2))
        ctypes.memset(self._source, 1, _COPY_NBYTES)  # pages that nobody has written to are all the same one

    def taking(self, cpu_share: float) -> Beside:
        """For ``cpu_share`` CPU seconds per second."""

        def run(stop: threading.Event) -> int:
            moved = 0
            started, cpu_started = time.perf_counter(), time.thread_time()
            while not stop.is_set():
                ctypes.memmove(self._target, self._source, _COPY_NBYTES)
                moved += _COPY_NBYTES
                due = started + (time.thread_time() - cpu_started) / max(cpu_share, _SMALLEST_SHARE)
                stop.wait(max(0.0, due - time.perf_counter()))
            return moved

        return run


def saving(path: Path, nbytes: int, *, snapshot: bool) -> Callable[[Any], int]:
    """async_save, one after another, until the event (all that is asked of it is is_set) is set."""
    tensors = random_tensors(_TENSORS, nbytes // _TENSORS)

    def run(stop: Any) -> int:
        moved = 0
        while not stop.is_set():
            moved += fastpersist.async_save(tensors, path, snapshot=snapshot).result().nbytes
        return moved

    return run


class OtherProcess:
    """The same saves by another process. A context manager."""

    def __init__(self, path: Path, nbytes: int, *, snapshot: bool) -> None:
        self._here, self._there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_save_when_told, args=(self._there, path, nbytes, snapshot), daemon=True)

    def __enter__(self) -> OtherProcess:
        self._process.start()
        self._there.close()  # with it closed here, the death of the process ends our waiting for its answers
        return self

    def __exit__(self, *_: object) -> None:
        self._here.send(None)
        self._process.join()

    def save(self, stop: threading.Event) -> int:
        """Until the event is set."""
        self._here.send("begin")
        stop.wait()
        self._here.send("end")
        moved: int = self._here.recv()
        return moved


def _save_when_told(there: Connection, path: Path, nbytes: int, snapshot: bool) -> None:
    save = saving(path, nbytes, snapshot=snapshot)
    while there.recv() == "begin":
        moved = save(SimpleNamespace(is_set=there.poll))
        there.recv()
        there.send(moved)


def main(
    folder: script_options.Folder,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each, the loop runs once beside everything.")] = 7,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long the loop runs each time.")] = 5.0,
    mb_size: Annotated[int, typer.Option("--mb_size", "--mb-size", min=1, help="MiB of a checkpoint.")] = 1024,
    snapshot: Annotated[bool, typer.Option(help="Make copies before each save.")] = False,
) -> None:
    """Print how much a counting loop slows beside background saves, and beside memcpy with as much CPU time."""
    with script_options.plain_errors(), scratch_folder(folder) as scratch:
        nbytes = mb_size * MIB
        require_room(scratch, file_nbytes=4 * nbytes, memory_nbytes=(4 if snapshot else 2) * nbytes + 2 * _COPY_NBYTES)
        save = saving(scratch / "checkpoint.pt", nbytes, snapshot=snapshot)
        copier = Copier()
        alone, saves = Neighbour("nothing"), Neighbour(f"async_save, snapshot={snapshot}")
        copies, elsewhere = Neighbour("memcpy, as many CPU seconds"), Neighbour("the same saves by another process")
        with OtherProcess(scratch / "elsewhere.pt", nbytes, snapshot=snapshot) as other_process:
            for beside in (save, copier.taking(1.0), other_process.save):
                Neighbour("warming up").run(beside, 0)
            for _ in range(rounds):
                alone.run(None, seconds)
                saves.run(save, seconds)
                copies.run(copier.taking(saves.cpu_shares[-1]), seconds)
                elsewhere.run(other_process.save, seconds)
        print(f"**counting in Python beside saves of {nbytes / GB:.3f} GB; {rounds} paired rounds of {seconds:g} s each**")
        print(f"\n{machine_line(scratch)}")
        print_table([neighbour.cells(alone) for neighbour in (alone, copies, elsewhere, saves)])
        for other, does in ((copies, "memcpy does"), (elsewhere, "saves by another process do")):
            slower = _differences(saves.slowdowns(alone), other.slowdowns(alone))
            waiting = _differences(saves.waits, other.waits)
            print(f"saves slow the loop by {slower} % more, and keep it waiting for {waiting} % more of the time, than {does}")


def _differences(mine: list[float], others: list[float]) -> str:
    return middle_half([one - other for one, other in zip(mine, others, strict=True)])


if __name__ == "__main__":
    typer.run(main)
