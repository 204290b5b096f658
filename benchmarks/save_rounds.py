"""Ways to save in paired rounds, each with fio's rate of writing the same number of bytes in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fio import Ceiling
from measuring import GB, Series
from room import remove_and_settle
from saving import FILE_AND_FOLDER, NOTHING, Saver, measure_save, verify_saved
from tables import Cells, fio_cells, rate_cells
from verifying import payload_nbytes
from workloads import MIB

import fastpersist


@dataclass(slots=True, kw_only=True)
class Saves(Series):
    """The rounds of one saver.

    ``ceiling``: fio's way of doing the same. ``retired``: the file that each round writes over, if it does. ``zero_copy``:
    a share of the payload; None where nobody counts it.
    """

    saver: Saver
    ceiling: Ceiling | None = None
    retired: Path | None = None
    zero_copy: float | None = None
    file_nbytes: int = 0
    verified: str = "no file"

    def run(self, obj: object, nbytes: int, path: Path) -> None:
        """One round. The file of the first is compared bit for bit; none stays but as the retired one of the next."""
        reports: list[object] = []
        recorded = dataclasses.replace(self.saver, save=lambda obj, path: reports.append(self.saver.save(obj, path)))
        first = not self.costs
        self.costs.append(measure_save(recorded, obj, path, nbytes))
        if isinstance(reports[0], fastpersist.SaveReport):
            self.zero_copy = reports[0].zero_copy_nbytes / nbytes
        if not self.saver.writes:
            return
        if first:
            self.verified = verify_saved(self.saver, obj, nbytes, path)
        self.file_nbytes = path.stat().st_size
        if self.retired is not None:
            path.rename(self.retired)
        remove_and_settle(path)

    def file_cells(self) -> Cells:
        """What there is to say about the file."""
        return {
            "zero-copy": "-" if self.zero_copy is None else f"{self.zero_copy:.1%}",
            "file, GB": f"{self.file_nbytes / GB:.4f}" if self.saver.writes else "-",
            "verified": self.verified,
        }

    def rate_cells(self, nbytes: int, baselines: Mapping[str, Series]) -> Cells:
        """Speed by bytes, and what there is to say about the file."""
        fio_rates = self.ceiling.best_rates if self.ceiling else []
        return rate_cells(self, nbytes, fio_rates, baselines) | self.file_cells()


def our_saver(tag: str, *, writes: bool = True, **options: Any) -> Saver:
    """fastpersist.save with these options."""

    def save(obj: object, path: Path) -> fastpersist.SaveReport:
        return fastpersist.save(obj, path, **options)

    return Saver(tag, save, synced=FILE_AND_FOLDER if writes else NOTHING, writes=writes)


def recycling_refusal(folder: Path) -> str | None:
    """Why the filesystem does not let a file be recycled; None if it does."""
    retired, path = folder / "retired.trial", folder / "new.trial"
    fastpersist.save(0, retired)
    try:
        fastpersist.save(0, path, recycle=retired)
    except fastpersist.RecycleRefusedError as error:
        return error.reason
    finally:
        retired.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    return None


def measure_rounds(saves: Sequence[Saves], obj: object, path: Path, rounds: int) -> None:
    """Everything once per round, so that a change of the disk's mood meets all of them."""
    nbytes = payload_nbytes(obj)
    for _ in range(rounds):
        for ceiling in ceilings_of(saves):
            ceiling.run(path)
        for series in saves:
            series.run(obj, nbytes, path)


def ceilings_of(saves: Sequence[Saves]) -> list[Ceiling]:
    """Each once."""
    return list({id(series.ceiling): series.ceiling for series in saves if series.ceiling}.values())


def save_lines(saves: Sequence[Saves], nbytes: int, baselines: Mapping[str, Series]) -> list[Cells]:
    """The lines of a table: fio first."""
    ceilings = [fio_cells(_ceiling_tag(c), c.best_rates, nbytes, baselines) for c in ceilings_of(saves)]
    return ceilings + [series.rate_cells(nbytes, baselines) for series in saves]


def _ceiling_tag(ceiling: Ceiling) -> str:
    block = f"{ceiling.best_block_nbytes / MIB:g} MiB blocks"
    return f"fio, {block}, overwriting" if ceiling.allocated else f"fio, {block}"
