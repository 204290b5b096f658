"""Save one tensor of random bytes with torch.save, with fastpersist and with others, and compare.

python benchmarks/torch_save_tensor.py --folder /mnt/nvme0 --mb_size 1024
"""

from __future__ import annotations

from typing import Annotated

import script_options
import typer
from room import require_room
from save_comparison import run
from workloads import MIB, random_tensor

MbSize = Annotated[int, typer.Option("--mb_size", "--mb-size", min=1, help="MiB of the tensor.")]


def main(
    folder: script_options.Folder,
    mb_size: MbSize,
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
    """Save one tensor of random bytes with torch.save, with fastpersist and with others, and compare."""
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
    with script_options.plain_errors():
        require_room(folder, file_nbytes=mb_size * MIB, memory_nbytes=mb_size * MIB)
        tensor = random_tensor(mb_size * MIB // 2).to(device)
        run({"tensor": tensor}, f"one tensor of {mb_size} MiB, random bfloat16, from {device}", folder, options, outputs)


if __name__ == "__main__":
    typer.run(main)
