"""The command ``fastpersist``."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from fastpersist.bench import bench
from fastpersist.checkpoint import inspect as inspect_checkpoint
from fastpersist.checkpoint import verify as verify_checkpoint
from fastpersist.engines import available
from fastpersist.errors import CheckpointFormatError, FastPersistError
from fastpersist.reports import CheckpointInfo

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

CORRUPT, UNREADABLE = 1, 2
"""Exit statuses: the file is damaged or no checkpoint; the file could not be read at all."""


@app.callback()
def main() -> None:
    """Checkpoints of PyTorch models at the speed of the disk."""


class Sort(enum.StrEnum):
    """Orders of the table of ``inspect``."""

    OFFSET = "offset"
    NAME = "name"
    SIZE = "size"


@app.command()
def engines() -> None:
    """List the engines: which can run on this machine, why the others cannot, and what to do about it."""
    table = Table("engine", "usable", "reason", "remedy")
    for name, verdict in available().items():
        table.add_row(name, "yes" if verdict.usable else "no", verdict.reason, verdict.remedy)
    Console().print(table)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A checkpoint: a zip file as torch.save and fastpersist.save write it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    sort: Annotated[Sort, typer.Option(help="Order of the records.")] = Sort.OFFSET,
) -> None:
    """Show what a checkpoint holds: its records with their tensors, sizes, places and checksums. Reads metadata only.

    Exit status: 0 shown, 1 no checkpoint or damaged, 2 could not be read.
    """
    try:
        info = inspect_checkpoint(file)
    except (FastPersistError, OSError) as error:
        raise typer.Exit(_complain(error)) from None
    if as_json:
        print(json.dumps(dataclasses.asdict(info), indent=2))
    else:
        _show(info, sort)


@app.command()
def verify(
    files: Annotated[list[Path], typer.Argument(help="Checkpoints to read from beginning to end.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print faults only, and no progress bar.")] = False,
) -> None:
    """Check every header and every checksum of the files.

    Exit status: 0 all sound, 1 one is damaged or no checkpoint, 2 one could not be read.
    """
    status = 0
    for file in files:
        try:
            report = verify_checkpoint(file, progress=not quiet)
        except (FastPersistError, OSError) as error:
            status = max(status, _complain(error))
            continue
        if not quiet:
            print(report)
    raise typer.Exit(status)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, add_help_option=False)
def probe(context: typer.Context) -> None:
    """Measure how fast a directory's drive can take a checkpoint, with which engine and sizes, and what is in the way."""
    from fastpersist.probe import app as command  # the other commands do without what it imports

    command(context.args, prog_name="fastpersist probe")


app.command()(bench)


def _complain(error: Exception) -> int:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", style="red", markup=False)
    return CORRUPT if isinstance(error, CheckpointFormatError) else UNREADABLE


def _show(info: CheckpointInfo, sort: Sort) -> None:
    tensors: dict[str | None, list[str]] = {}
    for tensor in info.tensors or ():
        shape = "x".join(map(str, tensor.shape)) or "scalar"
        tensors.setdefault(tensor.record, []).append(f"{tensor.path} {tensor.dtype} {shape}")
    keys = {
        Sort.OFFSET: lambda record: record.offset,
        Sort.NAME: lambda record: record.name,
        Sort.SIZE: lambda record: -record.nbytes,
    }
    table = Table(title=info.path, title_justify="left")
    table.add_column("record", overflow="fold")
    table.add_column("tensors", overflow="fold")
    for column in ("size", "offset", "aligned to", "crc-32"):
        table.add_column(column, justify="right", no_wrap=True)
    for record in sorted(info.records, key=keys[sort]):
        checksum = "none" if record.checksum is None else f"{record.checksum:08x}"
        inside = "\n".join(tensors.get(record.name, []))
        table.add_row(record.name, inside, decimal(record.nbytes), str(record.offset), str(record.alignment), checksum)
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{decimal(info.file_nbytes)} in the file, {decimal(info.nbytes)} of it tensors; {len(info.records)} records; "
        f"{info.byteorder}-endian; torch's offsets: {info.torch_offsets}",
        soft_wrap=True,
    )
    if info.note:
        console.print(info.note, soft_wrap=True, markup=False)


if __name__ == "__main__":
    app()
