"""Ways to load in paired rounds, with fio's rate of reading the same file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import fio
from measuring import Series
from reading import OURS, TORCH, Loader, drop_from_cache, measure_load
from tables import Cells, fio_cells, rate_cells
from verifying import Fingerprint, compare_fingerprints, fingerprints
from workloads import MIB

FIO_BLOCK_NBYTES = 8 * MIB


@dataclass(slots=True, kw_only=True)
class Loads(Series):
    """The rounds of one loader."""

    loader: Loader

    def run(self, folder: Path, expected: Mapping[str, Fingerprint], *, cold: bool) -> None:
        """One round. What the first one loads is compared with what was saved; DifferenceError if it is something else."""

        def check(loaded: object) -> None:
            compare_fingerprints(fingerprints(loaded), expected, self.tag)

        first = not self.costs
        self.costs.append(measure_load(self.loader, folder / self.loader.file, cold=cold, check=check if first else None))


@dataclass(slots=True)
class Outcome:
    """What some rounds gave: the loads, torch's first, and fio's bytes per second, empty where it was not asked for."""

    loads: list[Loads]
    fio_rates: list[float]

    @property
    def baseline(self) -> Loads:
        """torch.load."""
        return self.loads[0]

    def rate_lines(self, nbytes: int) -> list[Cells]:
        """The lines of a table of speeds by bytes: fio first."""
        baselines = {TORCH: self.baseline}
        lines = [rate_cells(series, nbytes, self.fio_rates, baselines) for series in self.loads]
        if not self.fio_rates:
            return lines
        return [fio_cells(f"fio, {FIO_BLOCK_NBYTES // MIB} MiB blocks", self.fio_rates, nbytes, baselines), *lines]


def measure_rounds(
    loaders: Sequence[Loader],
    expected: Mapping[str, Fingerprint],
    folder: Path,
    rounds: int,
    *,
    cold: bool = True,
    fio_engine: str | None = None,
) -> Outcome:
    """Everything once per round, so that a change of the disk's mood meets all of them. The files lie in ``folder``."""
    outcome = Outcome([Loads(loader.tag, loader=loader) for loader in loaders], [])
    ours = folder / OURS
    for _ in range(rounds):
        if fio_engine:
            drop_from_cache(ours)
            outcome.fio_rates.append(fio.read_rate(ours, min(FIO_BLOCK_NBYTES, _whole_pages(ours)), fio_engine))
        for series in outcome.loads:
            series.run(folder, expected, cold=cold)
    return outcome


def _whole_pages(path: Path) -> int:
    """fio reads no file that is shorter than a block."""
    return path.stat().st_size // 4096 * 4096
