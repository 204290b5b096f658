"""Save the checkpoint of a model with torch.save, with fastpersist and with others, and compare.

python benchmarks/torch_save_model.py --folder /mnt/nvme0 --model gpt2-large --optimizer
"""

from __future__ import annotations

from typing import Annotated

import script_options
import typer
from models import ModelName, Recipe, build_checkpoint, choose_model, describe, needs
from room import require_room
from save_comparison import run
from verifying import payload_nbytes

Model = Annotated[ModelName, typer.Option(help="Built with random weights. auto: gpt2-large, or smaller if it does not fit.")]


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
    checksum: script_options.Checksum = True,
    peers: script_options.Peers = True,
    json: script_options.JsonPath = None,
    plot: script_options.PlotPath = None,
) -> None:
    """Save the checkpoint of a model with torch.save, with fastpersist and with others, and compare."""
    script_options.require_optimizer(fused=fused, optimizer=optimizer)
    options = script_options.saving_options(
        engine=engine,
        io_buffer_mb=io_buffer_mb,
        queue_depth=queue_depth,
        checksum=checksum,
        repeat=repeat,
        verify=verify,
        no_statistics=no_statistics,
        peers=peers,
    )
    outputs = script_options.outputs(json, plot)
    device = script_options.device_name(gpu)
    if model is ModelName.AUTO:
        model, why = choose_model(folder, half=half, optimizer=optimizer)
        typer.echo(f"model auto is {model}: {why}")
    recipe = Recipe(model, half=half, optimizer=optimizer, fused=fused)
    with script_options.plain_errors():
        wanted = needs(recipe)
        require_room(folder, file_nbytes=wanted.file_nbytes, memory_nbytes=wanted.memory_nbytes)
        checkpoint = build_checkpoint(recipe, device)
        workload = describe(recipe, payload_nbytes(checkpoint))
        typer.echo(workload)
        run(checkpoint, f"{workload}, from {device}", folder, options, outputs)


if __name__ == "__main__":
    typer.run(main)
