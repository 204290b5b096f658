"""Save a model through DeepSpeed's save_checkpoint, with DeepSpeed's own writer and with fastpersist in its place.

python benchmarks/deepspeed_save_model.py --folder /mnt/nvme0 --model gpt2-large --optimizer

One process, on CPU or GPU. Every checkpoint is loaded back through DeepSpeed, by the writer that saved it, and compared.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import fio
import script_options
import torch
import typer
from comparison import Comparison, Result, print_table, result_line, speed_up
from measuring import Machine, measure
from models import ModelName, Recipe, build_model, choose_model, describe, needs, tiny_loss
from outputs import Outputs
from peer_deepspeed import prepare_environment, quieten
from room import ready_page_cache, remove_and_settle, require_room, scratch_folder
from saving import FILE_AND_FOLDER, NOTHING, THE_FILE, sync_file, unusable_engines
from verifying import compare_fingerprints, fingerprints, payload_nbytes, tensors_in
from workloads import MIB

BASELINE = "test_ds_save_fsync"
FIO_BLOCK_NBYTES = 8 * MIB
_TAG = "benchmark"

Model = Annotated[ModelName, typer.Option(help="Built with random weights. auto: gpt2-large, or smaller if it does not fit.")]
ZeroStage = Annotated[int, typer.Option("--zero_stage", "--zero-stage", min=0, max=2, help="ZeRO; 1 and 2 need --optimizer.")]


@dataclass(frozen=True, slots=True)
class Writer:
    """A test. ``install`` puts its writer into a DeepSpeed engine and returns what takes it out again."""

    tag: str
    synced: str
    install: Callable[[Any], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Options:
    """What the script's options say about saving. None leaves a choice to fastpersist."""

    engines: tuple[str, ...]
    block_nbytes: int | None
    queue_depth: int | None
    checksum: bool
    rounds: int
    verify: bool
    statistics: bool
    zero_stage: int


def main(
    folder: script_options.Folder,
    model: Model = ModelName.AUTO,
    optimizer: script_options.Optimizer = False,
    fused: script_options.Fused = False,
    half: script_options.Half = False,
    gpu: script_options.Gpu = False,
    zero_stage: ZeroStage = 0,
    io_buffer_mb: script_options.BlockMb = None,
    queue_depth: script_options.QueueDepth = None,
    engine: script_options.Engines = None,
    repeat: script_options.Repeat = 3,
    no_statistics: script_options.NoStatistics = False,
    verify: script_options.Verify = True,
    checksum: script_options.Checksum = True,
    json: script_options.JsonPath = None,
    plot: script_options.PlotPath = None,
) -> None:
    """Save a model through DeepSpeed's save_checkpoint, with its own writer and with fastpersist, and compare."""
    script_options.require_optimizer(fused=fused, optimizer=optimizer)
    if zero_stage and not optimizer:
        raise typer.BadParameter("ZeRO divides the optimizer's state: add --optimizer", param_hint="--zero_stage")
    options = Options(
        engines=script_options.engine_names(engine, but=("memory", "null")),  # nothing could be loaded back
        block_nbytes=None if io_buffer_mb is None else io_buffer_mb * MIB,
        queue_depth=queue_depth,
        checksum=checksum,
        rounds=repeat,
        verify=verify,
        statistics=not no_statistics,
        zero_stage=zero_stage,
    )
    outputs = script_options.outputs(json, plot)
    device = script_options.device_name(gpu)
    if importlib.util.find_spec("deepspeed") is None:
        typer.echo("error: deepspeed is not installed: pip install deepspeed", err=True)
        raise typer.Exit(1)
    if model is ModelName.AUTO:
        model, why = choose_model(folder, half=half, optimizer=optimizer)
        typer.echo(f"model auto is {model}: {why}")
    with script_options.plain_errors():
        recipe = Recipe(model, half=half, optimizer=optimizer, fused=fused)
        wanted = needs(recipe)
        # A checkpoint is loaded back while the engine keeps its own; ZeRO keeps a flat copy of the weights besides.
        memory_nbytes = wanted.memory_nbytes + (2 if zero_stage else 1) * wanted.file_nbytes
        require_room(folder, file_nbytes=wanted.file_nbytes, memory_nbytes=memory_nbytes)
        run(recipe, device, folder, options, outputs)


def run(recipe: Recipe, device: str, folder: Path, options: Options, outputs: Outputs) -> None:
    """Save in every way, round by round, one checkpoint on disk at a time; print lines and table, write the outputs."""
    engine = build_engine(recipe, device, options.zero_stage)
    nbytes = payload_nbytes(state_of(engine))
    workload = f"{describe(recipe, nbytes)}; DeepSpeed, one process, ZeRO stage {options.zero_stage}, {device}"
    print(workload)
    with scratch_folder(folder) as scratch:
        machine = Machine.here(scratch)
        print(machine, flush=True)
        fio_engine, remark = fio.usable_engine(scratch)
        print(remark, flush=True)
        writers = list(_writers(options))
        comparison = Comparison(
            title="DeepSpeed save_checkpoint, from a page cache that was readied",
            state_title="fsync",
            nbytes=nbytes,
            baseline_tag=BASELINE,
            results=[Result(writer.tag, state=writer.synced, equal=writer.synced != NOTHING) for writer in writers],
            left_out=list(unusable_engines(options.engines)),
        )
        for left_out in comparison.left_out:
            print(left_out)
        for _ in range(options.rounds):
            if fio_engine:
                comparison.ceiling.append(fio.write_rate(scratch / "fio", nbytes, FIO_BLOCK_NBYTES, fio_engine))
            for writer, result in zip(writers, comparison.results, strict=True):
                _run_once(writer, result, engine, nbytes, scratch / writer.tag, verify=options.verify)
    engine.destroy()
    if options.statistics:
        print_table(comparison)
        print(speed_up(comparison))
    outputs.write(machine, workload, dataclasses.asdict(options), [comparison])


def build_engine(recipe: Recipe, device: str, zero_stage: int) -> Any:
    """A DeepSpeed engine of one process over the recipe's model, after one step if it has an optimizer."""
    _announce_one_process()
    import deepspeed  # reads the environment when it is imported

    quieten()
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": zero_stage}}
    if recipe.half:
        if not deepspeed.get_accelerator().is_fp16_supported():
            raise typer.BadParameter("DeepSpeed does not take float16 on this device", param_hint="--half")
        config["fp16"] = {"enabled": True}
    if recipe.optimizer:
        settings = {"torch_adam": True, "fused": recipe.fused}
        config["optimizer"] = {"type": "AdamW", "params": settings}
    deepspeed.init_distributed(dist_backend="nccl" if device == "cuda" else "gloo", verbose=False)
    engine, *_ = deepspeed.initialize(model=build_model(recipe, device), config=config)
    if recipe.optimizer:
        engine.backward(tiny_loss(engine.module))
        engine.step()
    return engine


def _announce_one_process() -> None:
    """What a launcher would put into the environment."""
    prepare_environment()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()})


def state_of(engine: Any) -> dict[str, object]:
    """What a checkpoint of the engine must bring back."""
    state: dict[str, object] = {"module": engine.module_state_dict()}
    if engine.optimizer is not None:
        state["optimizer"] = engine.optimizer.state_dict()
    return state


def _writers(options: Options) -> Iterator[Writer]:
    yield Writer("test_ds_save", NOTHING, lambda _: _nothing)
    yield Writer(BASELINE, THE_FILE, lambda _: _nothing)
    refused = {left_out.tag for left_out in unusable_engines(options.engines)}
    for name in dict.fromkeys(options.engines):
        tag = f"test_fastpersist_{name}"
        if tag not in refused:
            yield Writer(tag, FILE_AND_FOLDER, functools.partial(_install, name=name, options=options))


def _nothing() -> None:
    """Taking out what was never put in."""


def _install(engine: Any, *, name: str, options: Options) -> Callable[[], None]:
    from fastpersist.integrations.deepspeed import install  # imports DeepSpeed

    return install(
        engine,
        engine=name,
        block_nbytes=options.block_nbytes,
        queue_depth=options.queue_depth,
        checksum=options.checksum,
    )


def _run_once(writer: Writer, result: Result, engine: Any, nbytes: int, folder: Path, *, verify: bool) -> None:
    remove_and_settle(folder)
    ready_page_cache(folder, nbytes)
    undo = writer.install(engine)
    try:
        cost = measure(lambda: _save(engine, folder, sync=writer.synced == THE_FILE))
        result.costs.append(cost)
        print(result_line(writer.tag, nbytes, cost.seconds), flush=True)
        if verify:
            _load_back(engine, folder, writer.tag)
            result.verified = "yes"
    finally:
        undo()
        remove_and_settle(folder)


def _save(engine: Any, folder: Path, *, sync: bool) -> None:
    """``sync``: each file of the checkpoint, for the writer that does not do it."""
    engine.save_checkpoint(str(folder), tag=_TAG)
    if sync:
        for path in folder.rglob("*"):
            if path.is_file():
                sync_file(path)


def _load_back(engine: Any, folder: Path, tag: str) -> None:
    """Clear all tensors of the engine, load the checkpoint, and compare. Raises DifferenceError."""
    expected = fingerprints(state_of(engine))
    with torch.no_grad():
        for tensor in tensors_in(state_of(engine)):
            tensor.zero_()
    engine.load_checkpoint(str(folder), tag=_TAG)
    compare_fingerprints(fingerprints(state_of(engine)), expected, f"{tag}: what DeepSpeed loaded")


if __name__ == "__main__":
    typer.run(main)
