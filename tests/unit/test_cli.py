"""The command line, driven as a user would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fastpersist
from fastpersist.cli import app


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    fastpersist.save({"encoder": {"weight": torch.randn(300, 1000)}, "bias": torch.ones(3)}, path)
    return path


@pytest.fixture
def damaged(checkpoint: Path) -> Path:
    record = next(record for record in fastpersist.inspect(checkpoint).records if record.nbytes == 1_200_000)
    path = checkpoint.with_name("damaged.pt")
    content = bytearray(checkpoint.read_bytes())
    content[record.offset + 1000] ^= 1
    path.write_bytes(content)
    return path


def _run(*arguments: object, width: int = 200) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def test_engines_lists_every_engine() -> None:
    status, output, _ = _run("engines")
    assert status == 0
    for name in ("posix", "io_uring", "kvikio", "memory", "null"):
        assert name in output


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "fastpersist", "--help"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    for command_name in ("engines", "inspect", "verify"):
        assert command_name in output


def test_inspect_shows_records_with_their_tensors(checkpoint: Path) -> None:
    status, output, _ = _run("inspect", checkpoint)
    assert status == 0
    assert "encoder.weight float32 300x1000" in output
    assert "1.2 MB" in output
    assert "torch's offsets: read" in output


def test_inspect_sorts_by_size(checkpoint: Path) -> None:
    _, output, _ = _run("inspect", checkpoint, "--sort", "size")
    assert output.index("data/0") < output.index("data.pkl") < output.index("data/1") < output.index("version")


def test_inspect_prints_json_that_says_the_same_as_the_library(checkpoint: Path) -> None:
    status, output, _ = _run("inspect", checkpoint, "--json")
    told, info = json.loads(output), fastpersist.inspect(checkpoint)
    assert status == 0
    assert told["nbytes"] == info.nbytes
    assert [record["name"] for record in told["records"]] == [record.name for record in info.records]
    assert [tensor["path"] for tensor in told["tensors"]] == ["encoder.weight", "bias"]


def test_inspect_says_why_tensors_have_no_names(tmp_path: Path) -> None:
    fastpersist.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    status, output, _ = _run("inspect", tmp_path / "module.pt")
    assert status == 0
    assert "the tensors' names are not told" in output


def test_verify_reports_each_sound_file(checkpoint: Path) -> None:
    status, output, _ = _run("verify", checkpoint, checkpoint)
    assert status == 0
    assert output.count("6 records sound") == 2


def test_verify_names_the_damaged_record_and_goes_on(checkpoint: Path, damaged: Path) -> None:
    status, output, errors = _run("verify", damaged, checkpoint)
    assert status == 1
    assert "damaged.pt" in errors
    assert "'data/0'" in errors
    assert "6 records sound" in output


def test_verify_quietly_prints_faults_only(checkpoint: Path, damaged: Path) -> None:
    status, output, errors = _run("verify", "--quiet", checkpoint, damaged)
    assert (status, output) == (1, "")
    assert errors.count("error:") == 1


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_missing_file_is_status_2_and_no_checkpoint_is_status_1(command: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing of the kind")
    status, _, errors = _run(command, tmp_path / "missing.pt")
    assert status == 2
    assert "missing.pt" in errors
    status, _, errors = _run(command, tmp_path / "notes.txt")
    assert status == 1
    assert "no checkpoint" in errors
