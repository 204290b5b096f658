"""The command line."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from fastpersist.cli import app


def test_engines_lists_every_engine() -> None:
    result = CliRunner().invoke(app, ["engines"])
    assert result.exit_code == 0
    for name in ("posix", "io_uring", "memory", "null"):
        assert name in result.output


def test_the_package_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "fastpersist", "--help"], capture_output=True, text=True, timeout=300, check=True
    )
    assert "engines" in result.stdout
