"""The scripts in benchmarks/: their options, their smallest runs, and what they write. All in one process, which imports once.

DeepSpeed counts as not installed there: it would compile its library first.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="the scripts need the extra: pip install 'fastpersist[bench]'"
)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COMMON = "--folder --gpu --io_buffer_mb --queue_depth --engine --repeat --no-statistics --verify --json --plot"
MODEL = "--model --half --optimizer --fused"
OPTIONS = {
    "torch_save_tensor.py": f"{COMMON} --checksum --mb_size --peers --no-peers",
    "torch_save_model.py": f"{COMMON} --checksum {MODEL} --peers --no-peers",
    "deepspeed_save_model.py": f"{COMMON} --checksum {MODEL} --zero_stage",
    "load_model.py": f"{COMMON} {MODEL} --peers --no-peers --weights-only",
    "limits.py": "--folder --row --rounds --scale",
    "load_against_ceiling.py": "--folder --rounds --mb_size --small_tensors",
}
# Not here: ram-disk, which mounts, and memory, which starts processes.
LIMITS = ["fresh", "recycled", "null", "small-4k", "small-64", "tiny", "load", "small-load-4k", "small-load-64", "model"]
RUNS = {
    "tensor": "torch_save_tensor.py --mb_size 8 --repeat 2 --engine posix --engine null --json tensor.json",
    "model": "torch_save_model.py --model tiny-t5 --repeat 1 --no-peers --no-statistics --half --optimizer --engine posix",
    "load": "load_model.py --model tiny-t5 --repeat 1 --engine posix --json load.json",
    "deepspeed": "deepspeed_save_model.py --model tiny-t5",
    "limits": f"limits.py --rounds 1 --scale 0.001 --row {' --row '.join(LIMITS)}",
    "unknown_row": "limits.py --row nonesuch",
    "lost_json": "torch_save_tensor.py --mb_size 8 --json nonesuch/x.json",
    "no_matplotlib": "torch_save_tensor.py --mb_size 8 --plot x.png",
    "unknown_engine": "torch_save_tensor.py --mb_size 8 --engine nonesuch",
    "fused_alone": "torch_save_model.py --model tiny-t5 --fused",
    "plot": "torch_save_tensor.py --mb_size 8 --repeat 1 --no-peers --no-verify --engine posix --plot tensor.png",
}
LINE = re.compile(r"^(\S.*) -- +\d+\.\d\d GB, +\d+\.\d\d secs, +\d+\.\d\d GB/s$", re.MULTILINE)

# Runs each line of its input as a script, and prints a JSON object per line: exit status and all that was printed.
DRIVER = """
import contextlib, gc, io, json, os, runpy, sys
benchmarks = sys.argv[1]
sys.path.insert(0, benchmarks)
sys.modules["deepspeed"] = None
for line in sys.stdin:
    name, *arguments = line.split()
    if "x.png" in arguments:
        sys.modules["matplotlib"] = None
    sys.argv = [name, *arguments]
    output, status = io.StringIO(), 0
    gc.freeze()  # or each measurement would first look through all that the scripts before have imported
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(os.path.join(benchmarks, name), run_name="__main__")
        except SystemExit as done:
            status = done.code
    if "x.png" in arguments:
        del sys.modules["matplotlib"]
    print(json.dumps([status or 0, output.getvalue()]), flush=True)
"""

NUMBER, TEXT = (int, float), str
TEST_SCHEMA = {
    "tag": TEXT,
    "verified": TEXT,
    "seconds": [NUMBER],
    "cpu_seconds": [NUMBER],
    "bytes_per_second": NUMBER,
    "ratio_to_baseline": NUMBER,
    "ratio_to_ceiling": (int, float, type(None)),
}
SCHEMA = {
    "format": TEXT,
    "version": int,
    "fastpersist": TEXT,
    "machine": {"kernel": TEXT, "filesystem": TEXT, "torch": TEXT, "cores": int},
    "workload": TEXT,
    "settings": {"rounds": int, "engines": [TEXT], "block_nbytes": (int, type(None)), "queue_depth": (int, type(None))},
    "comparisons": [
        {
            "title": TEXT,
            "nbytes": int,
            "baseline": TEXT,
            "ceiling_bytes_per_second": [NUMBER],
            "tests": [TEST_SCHEMA],
            "left_out": [{"tag": TEXT, "reason": TEXT}],
        }
    ],
}


def _check(value: Any, schema: Any, where: str) -> None:
    """A type or a tuple of them, a list of one schema for all items, or a dict of keys that must be there."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for key, inner in schema.items():
            assert key in value, f"{where}.{key}"
            _check(value[key], inner, f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            _check(item, schema[0], f"{where}[{index}]")
    else:
        assert isinstance(value, schema), f"{where} is {value!r}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the scripts run and leave what they were told to."""
    return tmp_path_factory.mktemp("benchmarks")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, tuple[int, str]]:
    """Exit status and output of every help and of every run."""
    lines = {name: f"{name} --help" for name in OPTIONS} | {name: f"{line} --folder files" for name, line in RUNS.items()}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(BENCHMARKS)],
        input="\n".join(lines.values()),
        cwd=folder,
        env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "NO_COLOR": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {name: (status, output) for name, (status, output) in zip(lines, results, strict=True)}


def _lines(output: str) -> list[str]:
    return LINE.findall(output)


@pytest.mark.parametrize("script", OPTIONS)
def test_help_shows_every_option(outcomes: dict[str, tuple[int, str]], script: str) -> None:
    status, output = outcomes[script]
    assert status == 0
    for option in OPTIONS[script].split():
        assert re.search(rf"{option}\b", output), option


def test_a_tensor_is_saved_in_every_way(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["tensor"]
    assert status == 0, output
    tests = ["test_save", "test_save_fsync", "test_save_tuned", "test_dcp_save"]
    if importlib.util.find_spec("safetensors"):
        tests.append("test_safetensors_save")
    tests += ["test_fastpersist_posix", "test_fastpersist_null"]
    assert _lines(output) == tests * 2
    assert "test_ds_aio_fast_save left out: deepspeed is not installed" in output
    assert "speed-up: test_fastpersist_posix is" in output


def test_the_json_of_a_save_says_what_was_synced_verified_and_left_out(
    outcomes: dict[str, tuple[int, str]], folder: Path
) -> None:
    assert outcomes["tensor"][0] == 0
    document = json.loads((folder / "tensor.json").read_text())
    _check(document, SCHEMA, "document")
    assert (document["format"], document["version"]) == ("fastpersist-benchmark", 1)
    (comparison,) = document["comparisons"]
    assert comparison["nbytes"] == 8 << 20
    tests = {test["tag"]: test for test in comparison["tests"]}
    synced = {tag: test["fsync"] for tag, test in tests.items()}
    assert synced["test_save"] == synced["test_fastpersist_null"] == "no"
    assert synced["test_save_fsync"] == synced["test_save_tuned"] == synced["test_dcp_save"] == "file"
    assert synced["test_fastpersist_posix"] == "file, folder"
    assert {tag for tag, test in tests.items() if test["verified"] != "yes"} == {"test_fastpersist_null"}
    assert all(len(test["seconds"]) == 2 for test in tests.values())
    assert [left_out["tag"] for left_out in comparison["left_out"]] == ["test_ds_aio_fast_save"]


def test_a_model_with_its_optimizer_is_saved_without_peers_and_without_a_table(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["model"]
    assert status == 0, output
    assert _lines(output) == ["test_save", "test_save_fsync", "test_fastpersist_posix"]
    assert "torch.float16, AdamW state after one step" in output
    assert "speed-up" not in output
    assert "fio" not in output


def test_a_model_is_loaded_cold_and_warm(outcomes: dict[str, tuple[int, str]], folder: Path) -> None:
    status, output = outcomes["load"]
    assert status == 0, output
    for state in ("cold", "warm"):
        assert f"test_torch_load, {state}" in _lines(output)
        assert f"test_fastpersist_posix, {state}" in _lines(output)
    document = json.loads((folder / "load.json").read_text())
    _check(document, SCHEMA, "document")
    assert [comparison["title"] for comparison in document["comparisons"]] == ["load, cold", "load, warm"]
    tests = [test for comparison in document["comparisons"] for test in comparison["tests"]]
    assert {test["verified"] for test in tests} == {"yes"}
    assert {test["page_cache"] for test in tests} <= {"cold", "warm", "cold, mapped", "warm, mapped"}


def test_every_limit_has_a_table_that_says_where_and_how_it_was_measured(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["limits"]
    assert status == 0, output
    if "recycled left out: " in output:  # a filesystem without write leases
        output = output.replace("recycled left out: ", "**recycled: ")
    titles = re.findall(r"^\*\*([\w-]+): ", output, re.MULTILINE)
    assert list(dict.fromkeys(titles)) == LIMITS
    assert re.search(r"^\*\*fresh: .*; 1 paired rounds, GB = 1e9 bytes\*\*\n\nmachine: Linux ", output, re.MULTILINE)
    assert "DeepSpeed" not in re.sub(r"test_ds_aio_fast_save left out: .*", "", output)
    verified = re.findall(r"^\| fastpersist, posix \| .* \| (\S+) \|$", output[: output.index("**load: ")], re.MULTILINE)
    assert set(verified[:2]) == {"yes"}


def test_without_deepspeed_its_script_says_what_to_install(outcomes: dict[str, tuple[int, str]]) -> None:
    status, output = outcomes["deepspeed"]
    assert status == 1
    assert "deepspeed is not installed: pip install deepspeed" in output


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("lost_json", "nonesuch is no folder"),
        ("no_matplotlib", r"pip install\s+'fastpersist\[plot\]'"),
        ("unknown_engine", "'nonesuch' is not one of"),
        ("fused_alone", "add --optimizer"),
        ("unknown_row", "'nonesuch' is not one of fresh, recycled"),
    ],
)
def test_mistakes_are_told_before_anything_is_done(outcomes: dict[str, tuple[int, str]], run: str, message: str) -> None:
    status, output = outcomes[run]
    assert status == 2
    assert re.search(message, output)
    assert not _lines(output)


def test_the_plot_is_a_png(outcomes: dict[str, tuple[int, str]], folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed: pip install 'fastpersist[plot]'")
    assert outcomes["plot"][0] == 0, outcomes["plot"][1]
    assert (folder / "tensor.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_no_checkpoint_and_no_folder_is_left(outcomes: dict[str, tuple[int, str]], folder: Path) -> None:
    assert outcomes
    left = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert left <= {"tensor.json", "load.json", "tensor.png"}
