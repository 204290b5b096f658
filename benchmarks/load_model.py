"""Load the checkpoint of a model with torch.load, with fastpersist and with others, from the disk and from the page cache.

python benchmarks/load_model.py --folder /mnt/nvme0 --model gpt2-large
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import fio
import script_options
import typer
from comparison import Comparison, LeftOut, Result, print_table, result_line, speed_up
from measuring import Machine
from models import ModelName, Recipe, build_checkpoint, choose_model, describe, needs
from outputs import Outputs
from peers import SAFETENSORS_MISSING, distinct_tensors
from reading import OURS, SAFETENSORS, Loader, drop_from_cache, loaders, measure_load, write_files
from room import find_shortage, require_room, scratch_folder
from saving import unusable_engines
from verifying import Fingerprint, compare_fingerprints, fingerprints, payload_nbytes
from workloads import MIB

BASELINE = "test_torch_load"
FIO_BLOCK_NBYTES = 8 * MIB
_FORMATS = 3

Model = Annotated[ModelName, typer.Option(help="Built with random weights. auto: gpt2-large, or smaller if it does not fit.")]


@dataclass(frozen=True, slots=True)
class Options:
    """What the script's options say about loading. None leaves a choice to fastpersist."""

    engines: tuple[str, ...]
    block_nbytes: int | None
    queue_depth: int | None
    device: str
    rounds: int
    verify: bool
    statistics: bool
    peers: bool
    weights_only: bool


@dataclass(frozen=True, slots=True)
class Expected:
    """What the loaders should find: the fingerprints of all tensors, and of those that share no memory."""

    nbytes: int
    tensors: Mapping[str, Fingerprint]
    distinct: Mapping[str, Fingerprint]

    def check(self, loader: Loader) -> Callable[[object], None]:
        """A function that raises DifferenceError unless it is given what was saved."""
        expected = self.tensors if loader.shares else self.distinct
        return lambda loaded: compare_fingerprints(fingerprints(loaded), expected, loader.tag)


def main(
    folder: script_options.Folder,
    model: Model = ModelName.AUTO,
    optimizer: script_options.Optimizer = False,
    fused: script_options.Fused = False,
    half: script_options.Half = False,
    gpu: script_options.Gpu = False,
    io_buffer_mb: script_options.BlockMb = None,
    queue_depth: script_options.QueueDepth = None,
    engine: script_options.Engines = None,
    repeat: script_options.Repeat = 3,
    no_statistics: script_options.NoStatistics = False,
    verify: script_options.Verify = True,
    peers: script_options.Peers = True,
    weights_only: Annotated[bool, typer.Option(help="Load with the restricted unpickler.")] = True,
    json: script_options.JsonPath = None,
    plot: script_options.PlotPath = None,
) -> None:
    """Load the checkpoint of a model with torch.load, with fastpersist and with others, cold and warm."""
    script_options.require_optimizer(fused=fused, optimizer=optimizer)
    options = Options(
        engines=script_options.engine_names(engine, but=("memory", "null")),  # they hold no file to load
        block_nbytes=None if io_buffer_mb is None else io_buffer_mb * MIB,
        queue_depth=queue_depth,
        device=script_options.device_name(gpu),
        rounds=repeat,
        verify=verify,
        statistics=not no_statistics,
        peers=peers,
        weights_only=weights_only,
    )
    outputs = script_options.outputs(json, plot)
    if model is ModelName.AUTO:
        model, why = choose_model(folder, half=half, optimizer=optimizer)
        typer.echo(f"model auto is {model}: {why}")
    with script_options.plain_errors():
        run(Recipe(model, half=half, optimizer=optimizer, fused=fused), folder, options, outputs)


def run(recipe: Recipe, folder: Path, options: Options, outputs: Outputs) -> None:
    """Write the files, load them in every way, cold and warm; print lines and tables, write the outputs. No file is left.

    Raises DifferenceError if something else is loaded than was saved.
    """
    wanted = needs(recipe)
    require_room(folder, file_nbytes=_FORMATS * wanted.file_nbytes, memory_nbytes=wanted.memory_nbytes)
    with scratch_folder(folder) as scratch:
        machine = Machine.here(scratch)
        print(machine)
        fio_engine, remark = fio.usable_engine(scratch)
        print(remark, flush=True)
        workload, expected = _write(recipe, scratch, peers=options.peers)
        print(workload, flush=True)
        comparisons = [_compare(scratch, expected, options, fio_engine, cold=True)]
        # The object, one file in the page cache; while both are there, memory is what may be short.
        shortage = find_shortage(folder, file_nbytes=0, memory_nbytes=2 * expected.nbytes)
        if shortage:
            print(f"warm loads left out: {shortage}")
        else:
            comparisons.append(_compare(scratch, expected, options, None, cold=False))
    if options.statistics:
        for comparison in comparisons:
            print_table(comparison)
            print(speed_up(comparison))
    outputs.write(machine, f"{workload}, to {options.device}", dataclasses.asdict(options), comparisons)


def _write(recipe: Recipe, scratch: Path, *, peers: bool) -> tuple[str, Expected]:
    """Build the checkpoint, write it in every format, and keep no more of it than its fingerprints."""
    checkpoint = build_checkpoint(recipe, "cpu")
    write_files(checkpoint, scratch, peers=peers)
    nbytes = payload_nbytes(checkpoint)
    return describe(recipe, nbytes), Expected(nbytes, fingerprints(checkpoint), fingerprints(distinct_tensors(checkpoint)))


def _compare(scratch: Path, expected: Expected, options: Options, fio_engine: str | None, *, cold: bool) -> Comparison:
    state = "cold" if cold else "warm"
    chosen = list(
        loaders(
            scratch,
            weights_only=options.weights_only,
            engines=[name for name in options.engines if not list(unusable_engines([name]))],
            device=options.device,
            block_nbytes=options.block_nbytes,
            queue_depth=options.queue_depth,
        )
    )
    comparison = Comparison(
        title=f"load, {state}",
        state_title="page cache",
        nbytes=expected.nbytes,
        baseline_tag=BASELINE,
        results=[_result(loader, state) for loader in chosen],
        left_out=_left_out(scratch, options),
    )
    if cold:
        for left_out in comparison.left_out:
            print(left_out)
    for _ in range(options.rounds):
        if fio_engine:
            drop_from_cache(scratch / OURS)
            comparison.ceiling.append(fio.read_rate(scratch / OURS, FIO_BLOCK_NBYTES, fio_engine))
        for loader, result in zip(chosen, comparison.results, strict=True):
            check = expected.check(loader) if options.verify else None
            cost = measure_load(loader, scratch / loader.file, cold=cold, check=check)
            result.costs.append(cost)
            result.verified = "yes" if options.verify else "no"
            print(result_line(f"{result.tag}, {state}", expected.nbytes, cost.seconds), flush=True)
    return comparison


def _result(loader: Loader, state: str) -> Result:
    return Result(_test_name(loader), state=state if loader.reads else f"{state}, mapped", equal=loader.reads)


def _left_out(scratch: Path, options: Options) -> list[LeftOut]:
    left_out = list(unusable_engines(options.engines))
    if options.peers and not (scratch / SAFETENSORS).exists():
        left_out.append(LeftOut("test_safetensors_load_file", SAFETENSORS_MISSING))
    return left_out


def _test_name(loader: Loader) -> str:
    """torch.load is test_torch_load; fastpersist, io_uring is test_fastpersist_io_uring."""
    return "test_" + re.sub(r"\W+", "_", loader.tag.replace("'", "")).lower()


if __name__ == "__main__":
    typer.run(main)
