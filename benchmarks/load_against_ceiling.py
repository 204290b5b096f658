"""The table of loads: torch.load, fastpersist.load and safetensors beside the disk's own speed, in paired rounds of one run.

python benchmarks/load_against_ceiling.py --folder /mnt/nvme0
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import fio
import script_options
import torch
import typer
from load_rounds import measure_rounds
from measuring import GB, machine_line, measure
from reading import loaders, remove_files, write_files
from room import require_room, scratch_folder
from tables import print_table
from verifying import fingerprints, payload_nbytes
from workloads import MIB, random_tensors

from fastpersist.memory.pages import Pages

LARGE_TENSORS = 64
SMALL_NBYTES = 1024

Rounds = Annotated[int, typer.Option(min=1, help="Rounds; in each, everything is measured once.")]
MbSize = Annotated[int, typer.Option("--mb_size", "--mb-size", min=64, help=f"MiB in the {LARGE_TENSORS} large tensors.")]
SmallTensors = Annotated[int, typer.Option("--small_tensors", "--small-tensors", min=1, help="Number of small tensors.")]


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
    expected = fingerprints(tensors)
    try:
        write_files(tensors, scratch)
        for state in ("cold", "warm") if warm else ("cold",):
            cold = state == "cold"
            ways = list(loaders(scratch, weights_only=weights_only))
            outcome = measure_rounds(ways, expected, scratch, rounds, cold=cold, fio_engine=engine if cold else None)
            print(f"\n**{title}, {state}, random bfloat16, {rounds} paired rounds** (GB = 1e9 bytes)")
            print_table(outcome.rate_lines(payload_nbytes(tensors)))
    finally:
        remove_files(scratch)


if __name__ == "__main__":
    typer.run(main)
