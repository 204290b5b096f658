"""The command-line options that the scripts share, and how their mistakes are reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from outputs import Outputs
from room import NoRoomError
from save_comparison import Options
from saving import DEFAULT_ENGINES
from verifying import DifferenceError
from workloads import MIB

from fastpersist import FastPersistError
from fastpersist.engines import available

Folder = Annotated[Path, typer.Option(help="Where to save; created if missing, and then removed afterwards.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Save from GPU memory, or load to it.")]
BlockMb = Annotated[
    int | None, typer.Option("--io_buffer_mb", "--io-buffer-mb", min=1, help="MiB of one transfer of fastpersist.")
]
QueueDepth = Annotated[
    int | None, typer.Option("--queue_depth", "--queue-depth", min=1, help="Transfers of fastpersist in flight.")
]
Engines = Annotated[
    list[str] | None, typer.Option("--engine", help="Engine to test; repeat for several; else posix and io_uring.")
]
Repeat = Annotated[int, typer.Option(min=1, help="Rounds; in each, every test runs once.")]
NoStatistics = Annotated[bool, typer.Option("--no-statistics", "--no_statistics", help="Only the lines, no table.")]
Verify = Annotated[bool, typer.Option(help="Compare each file, or each loaded object, with what was saved.")]
Checksum = Annotated[bool, typer.Option(help="Store CRC-32 checksums, with fastpersist and with torch.save.")]
Peers = Annotated[bool, typer.Option(help="Test other libraries as well, where they are installed.")]
JsonPath = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")]
PlotPath = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw a bar chart; needs the extra fastpersist[plot].")
]
Optimizer = Annotated[bool, typer.Option("--optimizer", help="Add the state of AdamW after one real step.")]
Fused = Annotated[bool, typer.Option("--fused", help="Use the fused AdamW; goes with --optimizer.")]
Half = Annotated[bool, typer.Option("--half", help="Weights in float16.")]


def saving_options(
    *,
    engine: list[str] | None,
    io_buffer_mb: int | None,
    queue_depth: int | None,
    checksum: bool,
    repeat: int,
    verify: bool,
    no_statistics: bool,
    peers: bool,
) -> Options:
    """The options as the tests take them. Raises typer.BadParameter for an engine that does not exist or keeps no file."""
    return Options(
        engines=engine_names(engine, but=("memory",)),  # what that one saves is gone when it is closed
        block_nbytes=None if io_buffer_mb is None else io_buffer_mb * MIB,
        queue_depth=queue_depth,
        checksum=checksum,
        rounds=repeat,
        verify=verify,
        statistics=not no_statistics,
        peers=peers,
    )


def engine_names(names: list[str] | None, *, but: tuple[str, ...]) -> tuple[str, ...]:
    """What --engine gave, or the default. Raises typer.BadParameter for one that does not exist or is among ``but``."""
    known = [name for name in available() if name not in but]
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--engine")
    return tuple(names or DEFAULT_ENGINES)


def outputs(json_path: Path | None, plot_path: Path | None) -> Outputs:
    """Raises typer.BadParameter for what could not be written in the end: the work would be for nothing."""
    wanted = Outputs(json_path, plot_path)
    problem = wanted.problem()
    if problem:
        raise typer.BadParameter(problem)
    return wanted


def require_optimizer(*, fused: bool, optimizer: bool) -> None:
    """Raises typer.BadParameter for --fused without --optimizer."""
    if fused and not optimizer:
        raise typer.BadParameter("there is no optimizer to fuse: add --optimizer", param_hint="--fused")


def device_name(gpu: bool) -> str:
    """Raises typer.BadParameter for --gpu without one."""
    if gpu and not torch.cuda.is_available():
        raise typer.BadParameter("this torch finds no CUDA device", param_hint="--gpu")
    return "cuda" if gpu else "cpu"


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """What went wrong in one line and exit status 1: a traceback through the benchmark would say nothing more."""
    try:
        yield
    except (NoRoomError, DifferenceError, FastPersistError, OSError, torch.OutOfMemoryError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
