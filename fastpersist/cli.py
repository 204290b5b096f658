"""The command ``fastpersist``."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from fastpersist.engines import available

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Checkpoints of PyTorch models at the speed of the disk.")


@app.callback()
def main() -> None:
    """Checkpoints of PyTorch models at the speed of the disk."""


@app.command()
def engines() -> None:
    """List the engines: which can run on this machine, why the others cannot, and what to do about it."""
    table = Table("engine", "usable", "reason", "remedy")
    for name, verdict in available().items():
        table.add_row(name, "yes" if verdict.usable else "no", verdict.reason, verdict.remedy)
    Console().print(table)


if __name__ == "__main__":
    app()
