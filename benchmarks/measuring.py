"""What one save costs, and what several rounds of saves say about each other."""

from __future__ import annotations

import gc
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def process_cpu_seconds() -> float:
    """User and system time of this process and its threads, kernel workers of io_uring included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(action: Callable[[], object]) -> Cost:
    """Run ``action`` once. Garbage is collected first, so that nobody pays for what others left."""
    gc.collect()
    cpu_before = process_cpu_seconds()
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    return Cost(seconds, process_cpu_seconds() - cpu_before)


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Round by round, one divided by the other: a disk that slows down slows both sides of a round."""
    return Spread.of([above / below for above, below in zip(numerators, denominators, strict=True)])


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

    @classmethod
    def here(cls, folder: Path) -> Self:
        """This machine and the filesystem of ``folder``."""
        return cls(platform.release(), filesystem_type(folder), torch.__version__, len(os.sched_getaffinity(0)))

    def __str__(self) -> str:
        return f"machine: Linux {self.kernel}, {self.filesystem}, torch {self.torch}, {self.cores} cores"


def machine_line(folder: Path) -> str:
    """The machine in one line."""
    return str(Machine.here(folder))
