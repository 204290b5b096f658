"""The table of loads: torch.load, fastpersist.load and safetensors beside the disk's own speed, in paired rounds of one run.

python benchmarks/load_against_ceiling.py --folder /mnt/nvme0
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import fio
import script_options
import torch
import typer
from measuring import GB, Cost, Spread, machine_line, measure, paired_ratios
from reading import OURS, Loader, drop_from_cache, loaders, measure_load, remove_files, write_files
from room import require_room, scratch_folder
from workloads import MIB, random_tensors

from fastpersist.memory.pages import Pages

FIO_BLOCK_NBYTES = 8 * MIB
LARGE_TENSORS = 64
SMALL_NBYTES = 1024

Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, everything is measured once.")]
MbSize = Annotated[int, typer.Option("--mb_size", "--mb-size", min=64, help=f"MiB in the {LARGE_TENSORS} large tensors.")]
SmallTensors = Annotated[int, typer.Option("--small_tensors", "--small-tensors", min=1, help="Number of small tensors.")]


@dataclass(slots=True)
class Row:
    """The rounds of one loader."""

    loader: Loader
    costs: list[Cost] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Round by round."""
        return [cost.seconds for cost in self.costs]


@dataclass(slots=True)
class Outcome:
    """What some rounds gave: a row per loader, and fio's bytes per second, empty where fio is not to be had."""

    rows: list[Row]
    fio_rates: list[float] = field(default_factory=list)


def main(
    folder: script_options.Folder, rounds: Rounds = 7, mb_size: MbSize = 2048, small_tensors: SmallTensors = 20_000
) -> None:
    """Print the figures of large and of small tensors, cold and warm, as Markdown tables."""
    with script_options.plain_errors():
        require_room(folder, file_nbytes=3 * mb_size * MIB, memory_nbytes=3 * mb_size * MIB)
        with scratch_folder(folder) as scratch:
            print(machine_line(scratch))
            engine, remark = fio.usable_engine(scratch)
            print(remark)
            print(f"faulting memory in, on huge pages where they are to be had: {faulting_cost():.3f} CPU s/GB", flush=True)
            large = random_tensors(LARGE_TENSORS, mb_size * MIB // LARGE_TENSORS)
            title = f"{mb_size / 1024:g} GiB in {LARGE_TENSORS} tensors"
            run_workload(title, large, scratch, rounds, engine, weights_only=True, warm=True)
            del large
            small = random_tensors(small_tensors, SMALL_NBYTES)
            for weights_only in (True, False):
                title = f"{small_tensors} tensors of 1 KiB, weights_only={weights_only}"
                run_workload(title, small, scratch, rounds, None, weights_only=weights_only, warm=False)


def faulting_cost() -> float:
    """CPU seconds that the kernel takes for 1e9 bytes of new memory."""
    return statistics.median(measure(Pages(GB).populate).cpu_seconds for _ in range(5))


def run_workload(
    title: str,
    tensors: dict[str, torch.Tensor],
    scratch: Path,
    rounds: int,
    engine: str | None,
    *,
    weights_only: bool,
    warm: bool,
) -> None:
    """Write the files, measure cold rounds and perhaps warm ones, print the tables, delete the files."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    try:
        write_files(tensors, scratch)
        print_table(f"{title}, cold", measure_rounds(scratch, rounds, engine, weights_only=weights_only, cold=True), nbytes)
        if warm:
            print_table(f"{title}, warm", measure_rounds(scratch, rounds, None, weights_only=weights_only, cold=False), nbytes)
    finally:
        remove_files(scratch)


def measure_rounds(scratch: Path, rounds: int, engine: str | None, *, weights_only: bool, cold: bool) -> Outcome:
    """Everything once per round, so that a change of the disk's mood meets all of them."""
    result = Outcome([Row(loader) for loader in loaders(scratch, weights_only=weights_only)])
    for _ in range(rounds):
        if engine:
            drop_from_cache(scratch / OURS)
            result.fio_rates.append(fio.read_rate(scratch / OURS, FIO_BLOCK_NBYTES, engine))
        for row in result.rows:
            row.costs.append(measure_load(row.loader, scratch / row.loader.file, cold=cold))
    return result


def print_table(title: str, result: Outcome, nbytes: int) -> None:
    """One Markdown table. GB is 1e9 bytes; ratios are medians of paired rounds, with their range."""
    baseline = result.rows[0]
    print(f"\n**{title}, random bfloat16, {len(baseline.costs)} paired rounds** (GB = 1e9 bytes)\n")
    print("| loader | median s | GB/s (range) | x torch.load (range) | of fio (range) | CPU s/GB |")
    print("|---|---|---|---|---|---|")
    if result.fio_rates:
        seconds = [nbytes / rate for rate in result.fio_rates]
        rate = Spread.of([rate / GB for rate in result.fio_rates])
        print(
            f"| fio, {FIO_BLOCK_NBYTES // MIB} MiB blocks | {statistics.median(seconds):.3f} | {rate} "
            f"| {paired_ratios(baseline.seconds, seconds)} | 1 | - |"
        )
    for row in result.rows:
        print(_line(row, baseline, nbytes, result.fio_rates), flush=True)


def _line(row: Row, baseline: Row, nbytes: int, fio_rates: Sequence[float]) -> str:
    rates = [nbytes / seconds for seconds in row.seconds]
    cpu = statistics.median(cost.cpu_seconds for cost in row.costs) / (nbytes / GB)
    cells = (
        row.loader.tag,
        f"{statistics.median(row.seconds):.3f}",
        str(Spread.of([rate / GB for rate in rates])),
        str(paired_ratios(baseline.seconds, row.seconds)),
        str(paired_ratios(rates, fio_rates)) if fio_rates else "-",
        f"{cpu:.3f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    typer.run(main)
