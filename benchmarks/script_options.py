"""The command-line options that the torch_save scripts share, and how their mistakes are reported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from room import NoRoomError
from saving import DEFAULT_ENGINES, Options
from verifying import DifferenceError
from workloads import MIB

from fastpersist import FastPersistError
from fastpersist.engines import available

Folder = Annotated[Path, typer.Option(help="Where to save; created if missing, and then removed afterwards.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Save from GPU memory.")]
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
Verify = Annotated[bool, typer.Option(help="Load each file with torch.load and compare it bit for bit.")]
Checksum = Annotated[bool, typer.Option(help="Store CRC-32 checksums, with fastpersist and with torch.save.")]


def saving_options(
    *,
    engine: list[str] | None,
    io_buffer_mb: int | None,
    queue_depth: int | None,
    checksum: bool,
    repeat: int,
    verify: bool,
    no_statistics: bool,
) -> Options:
    """The options as the tests take them. Raises typer.BadParameter for an engine that does not exist or keeps no file."""
    engines = tuple(engine) if engine else DEFAULT_ENGINES
    known = [name for name in available() if name != "memory"]  # what it saves is gone when it is closed
    for name in engines:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--engine")
    return Options(
        engines=engines,
        block_nbytes=None if io_buffer_mb is None else io_buffer_mb * MIB,
        queue_depth=queue_depth,
        checksum=checksum,
        rounds=repeat,
        verify=verify,
        statistics=not no_statistics,
    )


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
