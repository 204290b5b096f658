"""What one save costs, and what several rounds of saves say about each other."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
import torch

GB = 10**9


@dataclass(frozen=True, slots=True)
class Cost:
    """Wall-clock seconds, and the CPU seconds that all threads of this process spent meanwhile (user and system)."""

    seconds: float
    cpu_seconds: float


@dataclass(slots=True)
class Series:
    """The rounds of one way to do the work."""

    tag: str
    costs: list[Cost] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Round by round."""
        return [cost.seconds for cost in self.costs]

    @property
    def cpu_seconds(self) -> list[float]:
        """Round by round."""
        return [cost.cpu_seconds for cost in self.costs]

    def rates(self, nbytes: int) -> list[float]:
        """Bytes per second, round by round."""
        return [nbytes / seconds for seconds in self.seconds]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range. A ratio belongs in here only if its two sides come from the same round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Raises statistics.StatisticsError for no values."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}..{self.high:.2f})"


def middle_half(values: Sequence[float], digits: int = 2) -> str:
    """The median and, in brackets, where half of the values lie: of many rounds the range tells the worst accidents only."""
    low, middle, high = statistics.quantiles(values, method="inclusive") if len(values) > 1 else 3 * [*values]
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


def process_cpu_seconds() -> float:
    """User and system time of this process and its threads, kernel workers of io_uring included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(action: Callable[[], object], *, collect: bool = True) -> Cost:
    """Run ``action`` once. Garbage is collected first, so that nobody pays for what others left, which leaves caches cold."""
    if collect:
        gc.collect()
    cpu_before = process_cpu_seconds()
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return Cost(seconds, process_cpu_seconds() - cpu_before)


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Round by round, one divided by the other: a disk that slows down slows both sides of a round."""
    return Spread.of([above / below for above, below in zip(numerators, denominators, strict=True)])


def processor() -> str:
    """The model of the processor, as /proc/cpuinfo names it; the architecture where it does not."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def filesystem_type(folder: Path) -> str:
    """Type of the filesystem that ``folder`` lies on, "unknown" if the mount table does not say."""
    resolved = folder.resolve()
    mounts = [m for m in psutil.disk_partitions(all=True) if resolved.is_relative_to(m.mountpoint)]
    # Of mounts on top of each other, the last one is seen; max takes the first of equals.
    nearest = max(reversed(mounts), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    return nearest.fstype if nearest else "unknown"


@dataclass(frozen=True, slots=True)
class Machine:
    """What must be known of the machine to read the figures."""

    kernel: str
    filesystem: str
    torch: str
    cores: int
    processor: str

    @classmethod
    def here(cls, folder: Path) -> Self:
        """This machine and the filesystem of ``folder``."""
        return cls(platform.release(), filesystem_type(folder), torch.__version__, len(os.sched_getaffinity(0)), processor())

    def __str__(self) -> str:
        return f"machine: Linux {self.kernel}, {self.filesystem}, torch {self.torch}, {self.cores} cores ({self.processor})"


def machine_line(folder: Path) -> str:
    """The machine in one line."""
    return str(Machine.here(folder))
