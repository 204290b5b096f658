"""The table of figures: torch.save + fsync and fastpersist beside the disk's own speed, in paired rounds of one run.

Fresh files stand beside fio's rate of writing a fresh file, recycled ones (fastpersist.save(recycle=...)) beside its rate of
overwriting an allocated one.

python benchmarks/save_against_ceiling.py --folder /mnt/nvme0
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import fio
import script_options
import torch
import typer
from measuring import GB, Cost, Spread, machine_line, paired_ratios
from memory_growth import peak_growth_nbytes
from room import remove_and_settle, require_room, scratch_folder
from saving import DEFAULT_ENGINES, Saver, fastpersist_saver, measure_save, torch_save_fsync, usable_engines, warm_up
from verifying import payload_nbytes, verify_file
from workloads import MIB, random_tensors

import fastpersist

TORCH = "torch.save + fsync"
LARGE_TENSORS = 64
SMALL_NBYTES = 1024
FIO_BLOCKS_NBYTES = (4 * MIB, 8 * MIB, 16 * MIB)
_COLUMNS = (
    "median s",
    "GB/s (range)",
    "x torch (range)",
    "of fio, same way (range)",
    "CPU s/GB",
    "zero-copy",
    "file",
    "extra MiB",
)

Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, everything is measured once.")]
MbSize = Annotated[int, typer.Option("--mb_size", "--mb-size", min=64, help=f"MiB in the {LARGE_TENSORS} large tensors.")]
SmallTensors = Annotated[int, typer.Option("--small_tensors", "--small-tensors", min=1, help="Number of small tensors.")]


@dataclass(slots=True)
class Row:
    """The rounds of one writer on one workload. ``zero_copy`` is a share of the payload; None where nobody counts it.

    ``ceiling`` is fio's way of doing the same. ``retired`` is the file that each round writes over, if it does.
    """

    saver: Saver
    ceiling: Ceiling | None = None
    retired: Path | None = None
    costs: list[Cost] = field(default_factory=list)
    zero_copy: float | None = None
    file_nbytes: int = 0

    @property
    def seconds(self) -> list[float]:
        """Round by round."""
        return [cost.seconds for cost in self.costs]

    def run(self, tensors: dict[str, torch.Tensor], nbytes: int, path: Path) -> None:
        """One round. The file of the first is compared bit for bit; none stays but as the retired one of the next."""
        reports: list[object] = []
        recorded = Saver(self.saver.tag, lambda obj, to: reports.append(self.saver.save(obj, to)))
        first = not self.costs
        self.costs.append(measure_save(recorded, tensors, path, nbytes))
        if first:
            verify_file(path, tensors)
        self.file_nbytes = path.stat().st_size
        if isinstance(reports[0], fastpersist.SaveReport):
            self.zero_copy = reports[0].zero_copy_nbytes / nbytes
        if self.retired is not None:
            path.rename(self.retired)
        remove_and_settle(path)


@dataclass(slots=True)
class Ceiling:
    """fio's bytes per second, per block size and round: of a fresh file, or of overwriting the file ``allocated``."""

    engine: str
    allocated: Path | None = None
    rates: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in FIO_BLOCKS_NBYTES})

    def run(self, nbytes: int, path: Path) -> None:
        """One round."""
        for block_nbytes, rates in self.rates.items():
            remove_and_settle(path)
            if self.allocated is None:
                rates.append(fio.write_rate(path, nbytes, block_nbytes, self.engine))
            else:
                rates.append(fio.overwrite_rate(self.allocated, nbytes, block_nbytes, self.engine))

    @property
    def best_block_nbytes(self) -> int:
        """The block size with the best median. The best of each round would count chance as speed."""
        return max(self.rates, key=lambda size: statistics.median(self.rates[size]))


def torch_saver() -> Saver:
    """torch.save until the file is on stable storage."""
    return Saver(TORCH, torch_save_fsync)


def recycling_saver(engine: str, retired: Path) -> Saver:
    """fastpersist.save over a retired file."""

    def save(obj: object, path: Path) -> fastpersist.SaveReport:
        return fastpersist.save(obj, path, engine=engine, recycle=retired)

    return Saver(f"test_fastpersist_{engine}, recycling", save)


def can_recycle(retired: Path) -> bool:
    """Whether the filesystem lets a file be recycled; else a line says why not."""
    fastpersist.save(0, retired)
    try:
        fastpersist.save(0, retired.with_suffix(".trial"), recycle=retired)
    except fastpersist.RecycleRefusedError as error:
        print(f"recycling left out: {error.reason}")
        return False
    finally:
        retired.unlink(missing_ok=True)
        retired.with_suffix(".trial").unlink(missing_ok=True)
    return True


def main(
    folder: script_options.Folder, rounds: Rounds = 7, mb_size: MbSize = 2048, small_tensors: SmallTensors = 20_000
) -> None:
    """Print the figures of large and of small tensors as Markdown tables."""
    large_nbytes = mb_size * MIB // LARGE_TENSORS
    with script_options.plain_errors():
        require_room(folder, file_nbytes=2 * mb_size * MIB, memory_nbytes=mb_size * MIB)
        engines = list(usable_engines(DEFAULT_ENGINES))
        makers: list[Callable[[], Saver]] = [torch_saver]
        makers += [functools.partial(fastpersist_saver, name) for name in engines]
        with scratch_folder(folder) as scratch:
            path = scratch / "checkpoint.pt"
            print(machine_line(scratch))
            fio_engine, remark = fio.usable_engine(scratch)
            print(remark, flush=True)
            growths = [peak_growth_nbytes(m, path, tensors=LARGE_TENSORS, nbytes_each=large_nbytes) for m in makers]
            savers = [make() for make in makers]
            warm_up(savers, path)
            fresh = Ceiling(fio_engine) if fio_engine else None
            rows = [Row(saver, fresh) for saver in savers]
            tensors = random_tensors(LARGE_TENSORS, large_nbytes)
            retired = scratch / "retired.pt"
            if can_recycle(retired):
                fastpersist.save(tensors, retired)
                overwriting = Ceiling(fio_engine, retired) if fio_engine else None
                rows += [Row(recycling_saver(name, retired), overwriting, retired) for name in engines]
            measure_rounds(rows, tensors, path, rounds)
            retired.unlink(missing_ok=True)
            print_table(f"{mb_size / 1024:g} GiB in {LARGE_TENSORS} tensors", rows, LARGE_TENSORS * large_nbytes, growths)
            rows = [Row(saver) for saver in savers]
            measure_rounds(rows, random_tensors(small_tensors, SMALL_NBYTES), path, rounds)
            print_table(f"{small_tensors} tensors of 1 KiB", rows, small_tensors * SMALL_NBYTES, [])


def measure_rounds(rows: Sequence[Row], tensors: dict[str, torch.Tensor], path: Path, rounds: int) -> None:
    """Everything once per round, so that a change of the disk's mood meets all of them."""
    nbytes = payload_nbytes(tensors)
    for _ in range(rounds):
        for ceiling in ceilings_of(rows):
            ceiling.run(nbytes, path)
        for row in rows:
            row.run(tensors, nbytes, path)


def ceilings_of(rows: Sequence[Row]) -> list[Ceiling]:
    """Each once."""
    return list({id(row.ceiling): row.ceiling for row in rows if row.ceiling}.values())


def print_table(title: str, rows: Sequence[Row], nbytes: int, growths: Sequence[int]) -> None:
    """One Markdown table. GB is 1e9 bytes; ratios are medians of paired rounds, with their range."""
    print(f"\n**{title}, random bfloat16, {len(rows[0].costs)} paired rounds** (GB = 1e9 bytes; all files on stable storage)\n")
    print(f"| writer | {' | '.join(_COLUMNS)} |")
    print(f"|{'---|' * (len(_COLUMNS) + 1)}")
    for ceiling in ceilings_of(rows):
        print(_ceiling_line(ceiling, nbytes, rows[0]))
    for row, growth in itertools.zip_longest(rows, growths):
        print(_line(row, nbytes, rows[0], "-" if growth is None else f"{growth / MIB:.0f}"), flush=True)


def _ceiling_line(ceiling: Ceiling, nbytes: int, baseline: Row) -> str:
    block_nbytes = ceiling.best_block_nbytes
    rates = ceiling.rates[block_nbytes]
    seconds = [nbytes / rate for rate in rates]
    cells = (
        f"fio, {block_nbytes // MIB} MiB blocks" + (", overwriting" if ceiling.allocated else ""),
        f"{statistics.median(seconds):.3f}",
        str(Spread.of([rate / GB for rate in rates])),
        str(paired_ratios(baseline.seconds, seconds)),
        "1",
        *["-"] * 4,
    )
    return f"| {' | '.join(cells)} |"


def _line(row: Row, nbytes: int, baseline: Row, growth: str) -> str:
    ceiling = row.ceiling
    rates = [nbytes / seconds for seconds in row.seconds]
    cells = (
        row.saver.tag.replace("test_fastpersist_", "fastpersist, "),
        f"{statistics.median(row.seconds):.3f}",
        str(Spread.of([rate / GB for rate in rates])),
        str(paired_ratios(baseline.seconds, row.seconds)),
        str(paired_ratios(rates, ceiling.rates[ceiling.best_block_nbytes])) if ceiling else "-",
        f"{statistics.median(cost.cpu_seconds for cost in row.costs) / (nbytes / GB):.3f}",
        "-" if row.zero_copy is None else f"{row.zero_copy:.1%}",
        f"{row.file_nbytes / baseline.file_nbytes:.4f}",
        growth,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(main)
