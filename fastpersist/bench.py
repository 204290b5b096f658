"""The command ``fastpersist bench``: torch.save with fsync against each engine, on one tensor, in a folder of the user."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

from fastpersist.checkpoint import save
from fastpersist.engines import available, engine_class
from fastpersist.errors import FastPersistError

MIB = 1 << 20
TORCH = "torch.save + fsync"
_SPARE_NBYTES = 256 * MIB


def bench(
    path: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="An existing folder on the disk to measure.")],
    mb_size: Annotated[int, typer.Option("--mb-size", "--mb_size", min=1, help="MiB of the tensor.")] = 1024,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; in each, every way to save runs once.")] = 5,
) -> None:
    """Save one tensor of random bytes to PATH with torch.save and with each engine, and compare. Nothing stays there.

    Exit status: 0 measured, 1 a save failed, 2 no room for it.
    """
    nbytes = mb_size * MIB
    shortage = _shortage(path, nbytes)
    if shortage:
        typer.echo(f"error: {shortage}: choose a smaller --mb-size or another folder", err=True)
        raise typer.Exit(2)
    obj = {"tensor": torch.randint(-(1 << 63), (1 << 63) - 1, (nbytes // 8,), dtype=torch.int64)}
    ways = _ways()
    try:
        seconds = _measure(ways, obj, path, repeat)
    except (FastPersistError, OSError, RuntimeError) as error:  # RuntimeError: how torch.save reports a full disk
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    Console().print(_table(seconds, nbytes, repeat))


def _shortage(folder: Path, nbytes: int) -> str | None:
    for what, free_nbytes in (("disk", shutil.disk_usage(folder).free), ("memory", psutil.virtual_memory().available)):
        if free_nbytes < nbytes + _SPARE_NBYTES:
            return f"{nbytes // MIB} MiB and some to spare are needed, and {free_nbytes // MIB} MiB of {what} are free"
    return None


def _ways() -> dict[str, Callable[[object, Path], object]]:
    """torch's first, then each engine that writes and can run here; for the others a line says why not."""
    ways: dict[str, Callable[[object, Path], object]] = {TORCH: _torch_save_fsync}
    for name, verdict in available().items():
        if not engine_class(name).capabilities.persistent:
            continue
        if verdict.usable:
            ways[f"fastpersist, {name}"] = _saver(name)
        else:
            typer.echo(f"{name} left out: {verdict.reason} ({verdict.remedy})")
    return ways


def _saver(engine: str) -> Callable[[object, Path], object]:
    return lambda obj, path: save(obj, path, engine=engine)


def _torch_save_fsync(obj: object, path: Path) -> None:
    torch.save(obj, path)
    fileno = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fileno)
    finally:
        os.close(fileno)


def _measure(
    ways: dict[str, Callable[[object, Path], object]], obj: object, folder: Path, repeat: int
) -> dict[str, list[float]]:
    """Seconds of each way, round by round: a disk that slows down slows all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix=".fastpersist-bench-", dir=folder) as scratch:
        path = Path(scratch) / "checkpoint.pt"
        for way in ways.values():
            way({"tensor": torch.zeros(MIB)}, path)  # what a process does once is no part of the first round
            path.unlink()
        for _ in range(repeat):
            for name, way in ways.items():
                started = time.perf_counter()
                way(obj, path)
                seconds[name].append(time.perf_counter() - started)
                path.unlink()
    return seconds


def _table(seconds: dict[str, list[float]], nbytes: int, repeat: int) -> Table:
    title = f"{nbytes // MIB} MiB, median of {repeat} interleaved rounds; all files on stable storage"
    table = Table("way to save", "seconds", "GB/s (1e9 bytes)", f"x {TORCH}", title=title)
    for name, rounds in seconds.items():
        median = statistics.median(rounds)
        ratio = statistics.median(torchs / ours for torchs, ours in zip(seconds[TORCH], rounds, strict=True))
        table.add_row(name, f"{median:.3f}", f"{nbytes / 1e9 / median:.2f}", f"{ratio:.2f}")
    return table
