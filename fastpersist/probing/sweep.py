"""Which settings to try, and how many bytes each may move: coarse over the whole grid, fine over the best, two confirmed.

Each of the three steps writes at most the budget (or one queue of the smallest depth for each engine, where that is more).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fastpersist.engines import DEFAULT_BLOCK_NBYTES, DEFAULT_QUEUE_DEPTH
from fastpersist.probing.trial import Bench, Pass, Settings, Timeline

MIB = 1 << 20
BLOCK_NBYTES = (256 << 10, 512 << 10, 1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
IN_FLIGHT_NBYTES = (8 * MIB, 32 * MIB, 64 * MIB)
COARSE_SECONDS, FINE_SECONDS = 0.4, 0.6
"""Bounds of one pass; a fast disk meets its share of the budget before."""
TOLERANCE = 0.03
"""Rates within this part of the best count as equal to it: then less memory in flight is better."""
FINALISTS = 6
TORCH_SAVE_NBYTES = 1 << 30
TORCH_SAVE_SECONDS = 4.0

Advance = Callable[[str, float], None]
"""Told what is tried next, and the share of the whole (0..1) that is behind."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one trial of the settings gave; the coarse step only writes."""

    step: str
    settings: Settings
    fresh: Pass
    overwrite: Pass | None = None
    read: Pass | None = None


@dataclass(frozen=True, slots=True)
class Sustained:
    """A confirming run: fresh writes for some seconds; rates of its first and its last second in units of 1e9 bytes."""

    settings: Settings
    nbytes: int
    seconds: float
    gb_per_s: float
    first_second_gb_per_s: float
    last_second_gb_per_s: float


@dataclass(frozen=True, slots=True)
class TorchSave:
    """torch.save of incompressible tensors into the same file: seconds of the call, and of the fsync after it."""

    nbytes: int
    seconds: float
    sync_seconds: float

    @property
    def gb_per_s(self) -> float:
        """Units of 1e9 bytes per second, fsync included: what a durable torch.save takes."""
        total = self.seconds + self.sync_seconds
        return self.nbytes / 1e9 / total if total > 0 else 0.0


@dataclass(slots=True)
class Sweep:
    """All that was measured. ``file_nbytes`` is the bound of the file's size."""

    file_nbytes: int
    written_nbytes: int = 0
    read_nbytes: int = 0
    seconds: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    sustained: list[Sustained] = field(default_factory=list)
    torch_save: TorchSave | None = None

    def rates(self) -> dict[Settings, float]:
        """Fresh writes in units of 1e9 bytes per second, by settings; of several measurements the last, which took longest."""
        found = {measurement.settings: measurement.fresh.gb_per_s for measurement in self.measurements}
        return found | {run.settings: run.gb_per_s for run in self.sustained}

    def final_rates(self) -> dict[Settings, float]:
        """Those of the last step that was made: the confirmed ones, else the fine ones, else all."""
        confirmed = {run.settings: run.gb_per_s for run in self.sustained}
        fine = {item.settings: item.fresh.gb_per_s for item in self.measurements if item.step == "fine"}
        return confirmed or fine or self.rates()

    def latest(self, settings: Settings) -> Measurement | None:
        """The last measurement of the settings."""
        return next((item for item in reversed(self.measurements) if item.settings == settings), None)


def plan_grid(engines: Sequence[str], file_nbytes: int, budget_nbytes: int) -> list[Settings]:
    """The settings of the coarse step: as much of the whole grid as the file can hold and the budget can pay for."""
    depths = [nbytes for nbytes in IN_FLIGHT_NBYTES if nbytes <= file_nbytes // 4]
    depths = depths or [1 << max(file_nbytes // 4, BLOCK_NBYTES[0]).bit_length() - 1]
    blocks = [block for block in BLOCK_NBYTES if block <= depths[-1]]
    while True:
        grid = [Settings(engine, block, depth) for engine in engines for depth in depths for block in blocks if block <= depth]
        if sum(settings.in_flight_nbytes for settings in grid) <= budget_nbytes:
            return grid
        if len(depths) > 1:
            depths.pop()
            blocks = [block for block in blocks if block <= depths[-1]]
        elif len(blocks) > 1:
            blocks = blocks[::2]
        else:
            return grid


def best_settings(rates: Mapping[Settings, float]) -> Settings:
    """The settings with the fewest bytes in flight of all within 3% of the best rate; of equals the fastest.

    Raises ValueError for no settings.
    """
    best = max(rates.values())
    near = [settings for settings, rate in rates.items() if rate >= best * (1 - TOLERANCE)]
    return min(near, key=lambda settings: (settings.in_flight_nbytes, -rates[settings]))


def choose_finalists(rates: Mapping[Settings, float], count: int = FINALISTS) -> list[Settings]:
    """The fastest settings, with at least the best of each engine and what engines do by default."""
    ordered = sorted(rates, key=lambda settings: -rates[settings])
    leaders = [next(item for item in ordered if item.engine == engine) for engine in {item.engine for item in ordered}]
    default = (DEFAULT_BLOCK_NBYTES, DEFAULT_BLOCK_NBYTES * DEFAULT_QUEUE_DEPTH)
    usual = [
        item for item in ordered if item.engine == ordered[0].engine and (item.block_nbytes, item.in_flight_nbytes) == default
    ]
    chosen = dict.fromkeys([*leaders, *usual, best_settings(rates), *ordered])
    return sorted(list(chosen)[: max(count, len(leaders))], key=ordered.index)


def choose_two(rates: Mapping[Settings, float]) -> list[Settings]:
    """What to confirm: the best by the rule, and the fastest (or else the second by the rule)."""
    first = best_settings(rates)
    others = {settings: rate for settings, rate in rates.items() if settings != first}
    if not others:
        return [first]
    return [first, max(others, key=lambda settings: others[settings])]


class Sweeper:
    """Runs the steps on a bench, within a budget of bytes written per step."""

    def __init__(self, bench: Bench, file_nbytes: int, budget_nbytes: int, advance: Advance) -> None:
        self._bench = bench
        self._budget_nbytes = budget_nbytes
        self._advance = advance
        self._fastest_bytes_per_s = 0.0
        self.sweep = Sweep(file_nbytes)

    def run(self, engines: Sequence[str], seconds: float) -> Sweep:
        """All steps; ``seconds`` bounds each confirming run. Raises OSError where the file cannot be written."""
        started = time.perf_counter()
        try:
            self._coarse(plan_grid(engines, self.sweep.file_nbytes, self._budget_nbytes))
            self._fine(choose_finalists(self.sweep.rates()))
            self._confirm(choose_two(self.sweep.final_rates()), seconds)
            self._advance("torch.save", 0.95)
            self.sweep.torch_save = self._torch_save()
        finally:
            self.sweep.seconds = time.perf_counter() - started
            self.sweep.written_nbytes, self.sweep.read_nbytes = self._bench.written_nbytes, self._bench.read_nbytes
        return self.sweep

    def _coarse(self, grid: Sequence[Settings]) -> None:
        share = self._budget_nbytes // len(grid)
        self._bench.fresh(grid[0], grid[0].in_flight_nbytes, COARSE_SECONDS)  # whatever is slow once is slow here
        # In any order: a disk that slows down with time must not look like one that dislikes large blocks.
        for index, settings in enumerate(random.Random(0).sample(grid, len(grid))):
            self._advance(_words(settings), 0.5 * index / len(grid))
            self._keep(Measurement("coarse", settings, self._fresh(settings, share, COARSE_SECONDS)))

    def _fine(self, finalists: Sequence[Settings]) -> None:
        share = self._budget_nbytes // (2 * len(finalists))
        for index, settings in enumerate(finalists):
            self._advance(_words(settings), 0.5 + 0.3 * index / len(finalists))
            fresh = self._fresh(settings, share, FINE_SECONDS)
            overwrite = self._bench.overwrite(settings, FINE_SECONDS)
            self._keep(Measurement("fine", settings, fresh, overwrite, self._bench.read(settings, FINE_SECONDS)))

    def _confirm(self, chosen: Sequence[Settings], seconds: float) -> None:
        for index, settings in enumerate(chosen):
            self._advance(f"confirming {_words(settings)}", 0.8 + 0.15 * index / len(chosen))
            self.sweep.sustained.append(self._sustain(settings, self._budget_nbytes // len(chosen), seconds))

    def _fresh(self, settings: Settings, share_nbytes: int, seconds: float) -> Pass:
        wanted = max(share_nbytes, settings.in_flight_nbytes)
        if self._fastest_bytes_per_s:  # through the page cache, bytes are taken fast and the sync makes up for it
            wanted = min(wanted, max(int(self._fastest_bytes_per_s * seconds), settings.in_flight_nbytes))
        return self._bench.fresh(settings, min(wanted, self.sweep.file_nbytes), seconds)

    def _keep(self, measurement: Measurement) -> None:
        self._fastest_bytes_per_s = max(self._fastest_bytes_per_s, measurement.fresh.gb_per_s * 1e9)
        self.sweep.measurements.append(measurement)

    def _sustain(self, settings: Settings, share_nbytes: int, seconds: float) -> Sustained:
        timeline, passes = Timeline(), list[Pass]()
        left_nbytes, left_seconds = share_nbytes, seconds
        while not passes or (left_nbytes >= settings.in_flight_nbytes and left_seconds > 0.1 * seconds):
            likely_nbytes = int(self._fastest_bytes_per_s * left_seconds) or share_nbytes
            wanted = max(min(left_nbytes, likely_nbytes, self.sweep.file_nbytes), settings.block_nbytes)
            passes.append(self._bench.fresh(settings, wanted, left_seconds, timeline))
            left_nbytes -= passes[-1].nbytes
            left_seconds -= passes[-1].seconds
        nbytes, spent = sum(item.nbytes for item in passes), sum(item.seconds for item in passes)
        first, last = timeline.first_and_last_gb_per_s()
        return Sustained(settings, nbytes, spent, nbytes / 1e9 / spent, first, last)

    def _torch_save(self) -> TorchSave:
        likely_nbytes = int(self._fastest_bytes_per_s * TORCH_SAVE_SECONDS / 4)  # a fourth: it is slower than what ran before
        piece = self._bench.source.view[: min(self._bench.source.nbytes, self.sweep.file_nbytes // 4)]
        nbytes = min(TORCH_SAVE_NBYTES, self.sweep.file_nbytes // 2, max(likely_nbytes, len(piece)))
        tensors = [torch.frombuffer(piece, dtype=torch.uint8) for _ in range(max(1, nbytes // len(piece)))]
        scratch = self._bench.scratch
        self._bench.forget()
        started = time.perf_counter()
        torch.save(tensors, scratch.path)
        saved = time.perf_counter()
        os.fsync(scratch.fileno)
        ended = time.perf_counter()
        written_nbytes = os.fstat(scratch.fileno).st_size
        self._bench.written_nbytes += written_nbytes
        return TorchSave(written_nbytes, saved - started, ended - saved)


def _words(settings: Settings) -> str:
    block = f"{settings.block_nbytes // MIB} MiB" if settings.block_nbytes >= MIB else f"{settings.block_nbytes >> 10} KiB"
    return f"{settings.engine}, {block} x {settings.queue_depth}"
