"""The probe as a user runs it, with small budgets; its JSON has the documented form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from typer.testing import CliRunner

from fastpersist import cli, probe
from fastpersist.engines import Availability, engine_class
from fastpersist.probing import facts, plot, profile, scratch
from fastpersist.probing.scratch import scratch_file
from fastpersist.probing.sweep import Sweeper
from fastpersist.probing.trial import Bench, Settings
from tests.mounting import Mounts

SMALL = ("--budget-gb", "0.03", "--seconds", "0.2")
MIB = 1 << 20

NUMBER = (int, float)
SETTINGS = {"engine": str, "block_nbytes": int, "in_flight_nbytes": int, "queue_depth": int}
PASS = {
    "nbytes": int,
    **dict.fromkeys(("seconds", "reserve_seconds", "sync_seconds", "latency_p50_seconds", "latency_p99_seconds"), NUMBER),
    "cpu_seconds_per_gb": NUMBER,
    "direct": bool,
    "gb_per_s": NUMBER,
}
DEVICE = {
    "level": int,
    **dict.fromkeys(("name", "kind", "number"), str),
    **dict.fromkeys(("model", "backing_file", "scheduler", "write_cache", "link", "link_at_best"), (str, NoneType)),
    **dict.fromkeys(("nbytes", "logical_block_nbytes", "physical_block_nbytes", "max_sectors_kb"), (int, NoneType)),
    **dict.fromkeys(("max_hw_sectors_kb", "nr_requests", "numa_node"), (int, NoneType)),
    "rotational": (bool, NoneType),
    "virtio": bool,
}
FACTS = {
    **dict.fromkeys(("kernel", "architecture"), str),
    **dict.fromkeys(("cores", "available_memory_nbytes"), int),
    "filesystem": {
        **dict.fromkeys(("kind", "mountpoint", "source"), str),
        "options": [str],
        **dict.fromkeys(("free_nbytes", "total_nbytes"), int),
    },
    "devices": [DEVICE],
    "direct_io": {
        "supported": (bool, NoneType),
        "memory_alignment": (int, NoneType),
        "offset_alignment": (int, NoneType),
        "found_by": str,
    },
    "engines": {name: {"usable": bool, "reason": str, "remedy": str} for name in ("posix", "io_uring")},
    "memlock_nbytes": (int, NoneType),
    "huge_pages": {"transparent": (str, NoneType), **dict.fromkeys(("reserved", "free", "page_nbytes"), (int, NoneType))},
    "gpu": {"names": [str], "verdict": str, "gds": str},
    "memcpy_gb_per_s": NUMBER,
    "crc_gb_per_s": NUMBER,
}
RATES = ("seconds", "gb_per_s", "first_second_gb_per_s", "last_second_gb_per_s")
SCHEMA = {
    "version": int,
    "fastpersist": str,
    "path": str,
    "facts": FACTS,
    "sweep": {
        **dict.fromkeys(("file_nbytes", "written_nbytes", "read_nbytes"), int),
        "seconds": NUMBER,
        "measurements": [{"step": str, **SETTINGS, "fresh": PASS, "overwrite": (PASS, NoneType), "read": (PASS, NoneType)}],
        "sustained": [SETTINGS | {"nbytes": int} | dict.fromkeys(RATES, NUMBER)],
        "torch_save": {"nbytes": int, "seconds": NUMBER, "sync_seconds": NUMBER, "gb_per_s": NUMBER},
    },
    "verdict": {
        "best": SETTINGS | {"gb_per_s": NUMBER},
        "limiter": {"name": str, "reason": str},
        "checkpoint_10_gb": [{"name": str, "seconds": NUMBER, "gb_per_s": NUMBER}],
    },
    "remedies": [{"why": str, "command": str}],
    "notes": [str],
    "problem": NoneType,
    "profile_file": (str, NoneType),
}


def _faults(value: Any, form: Any, where: str = "$") -> Iterator[str]:
    """Where ``value`` departs from ``form``: a type, a tuple of alternatives, a list of one form, or a dict of exact keys."""
    if isinstance(form, tuple):
        if all(list(_faults(value, choice, where)) for choice in form):
            yield f"{where}: {value!r} is none of {form}"
    elif isinstance(form, dict):
        if not isinstance(value, dict) or set(value) != set(form):
            yield f"{where}: {value!r} has not the keys {sorted(form)}"
        else:
            for key, inner in form.items():
                yield from _faults(value[key], inner, f"{where}.{key}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            yield f"{where}: {value!r} is no list"
        else:
            for index, item in enumerate(value):
                yield from _faults(item, form[0], f"{where}[{index}]")
    elif type(value) is not form:
        yield f"{where}: {value!r} is no {form.__name__}"


def _run(*arguments: object, app: Any = probe.app) -> tuple[int, str, str]:
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))
    return directory


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[Mounts]:
    with Mounts(tmp_path / "mounts") as found:
        yield found


def test_json_has_the_documented_form(tmp_path: Path) -> None:
    status, output, errors = _run(tmp_path, *SMALL, "--json")
    report = json.loads(output)
    assert (status, errors) == (0, "")
    assert list(_faults(report, SCHEMA)) == []
    assert report["version"] == 1
    assert {item["step"] for item in report["sweep"]["measurements"]} == {"coarse", "fine"}
    assert 1 <= len(report["sweep"]["sustained"]) <= 2
    assert report["sweep"]["written_nbytes"] >= sum(item["fresh"]["nbytes"] for item in report["sweep"]["measurements"])
    assert os.listdir(tmp_path) == []


def test_the_schema_of_this_test_can_fail() -> None:
    assert list(_faults({"a": 1}, {"a": str})) != []
    assert list(_faults({"a": 1}, {"b": int})) != []
    assert list(_faults([1, "x"], [int])) == ["$[1]: 'x' is no int"]
    assert list(_faults(None, ({"a": int}, NoneType))) == []
    assert list(_faults(True, int)) != []


def test_people_get_tables_and_the_command_is_part_of_fastpersist(tmp_path: Path) -> None:
    status, output, _ = _run("probe", tmp_path, *SMALL, "--engine", "posix", app=cli.app)
    assert status == 0
    for words in ("kernel", "direct I/O", "GPU", "fresh", "best: posix", "limited by", "torch.save", "written and"):
        assert words in output
    assert "--budget-gb" in _run("probe", "--help", app=cli.app)[1]


def test_nothing_imports_the_probe_until_it_is_run() -> None:
    script = (
        "import runpy, sys, fastpersist, fastpersist.cli; print('fastpersist.probe' in sys.modules, flush=True)\n"
        "runpy.run_module('fastpersist.probe', run_name='__main__')"  # warns of a module that is there already
    )
    command = [sys.executable, "-W", "error", "-c", script, "/no/such/place"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr.startswith("error: /no/such/place does not exist")


def test_the_file_keeps_to_its_bound_and_has_no_name(tmp_path: Path) -> None:
    bound, sizes = 6_000_000, []
    with scratch_file(tmp_path) as file:

        def look(words: str, share: float) -> None:
            sizes.append(os.fstat(file.fileno).st_size)
            assert os.listdir(tmp_path) == []
            assert 0 <= share <= 1

        sweep = Sweeper(Bench(file, 64 * MIB), bound, bound, look).run(["posix"], 0.1)
        sizes.append(os.fstat(file.fileno).st_size)
    assert 0 < max(sizes) <= bound
    assert sweep.written_nbytes <= 4 * bound  # three steps, and what torch.save wrote


def test_each_pass_counts_what_it_moved(tmp_path: Path) -> None:
    settings = Settings("posix", 1 << 18, 1 << 20)
    with scratch_file(tmp_path) as file:
        bench = Bench(file, MIB)
        fresh = bench.fresh(settings, 3 * MIB, 60.0)
        content = os.pread(file.fileno, 3 * MIB, 0)
        overwrite, read = bench.overwrite(settings, 60.0), bench.read(settings, 60.0)
    assert (fresh.nbytes, overwrite.nbytes, read.nbytes) == (3 * MIB,) * 3
    assert (bench.written_nbytes, bench.read_nbytes) == (6 * MIB, 3 * MIB)
    assert all(content[start : start + 4096].strip(b"\0") for start in range(0, 3 * MIB, 4096))
    assert 0 < fresh.latency_p50_seconds <= fresh.latency_p99_seconds


def test_time_bounds_a_pass_after_one_block_at_least(tmp_path: Path) -> None:
    with scratch_file(tmp_path) as file:
        assert Bench(file, MIB).fresh(Settings("posix", 4096, 4096), MIB, 0.0).nbytes == 4096


def test_save_profile_stores_what_was_best(tmp_path: Path, cache: Path) -> None:
    status, output, _ = _run(tmp_path, *SMALL, "--json", "--save-profile")
    report = json.loads(output)
    best, found = report["verdict"]["best"], profile.load_profile(tmp_path / "new.pt")
    assert status == 0
    assert Path(report["profile_file"]).is_relative_to(cache)
    assert found == profile.Profile(best["engine"], best["block_nbytes"], best["queue_depth"])


def test_a_profile_that_cannot_be_stored_costs_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    status, output, errors = _run(tmp_path, *SMALL, "--json", "--save-profile")
    report = json.loads(output)
    assert status == 1
    assert report["verdict"]["best"]["gb_per_s"] > 0
    assert report["profile_file"] is None
    assert "all is measured, but" in errors


def test_a_heatmap_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: the extra 'plot'")
    rates = {Settings(engine, MIB << size, 8 * MIB): 1.0 + size for engine in ("posix", "io_uring") for size in range(3)}
    plot.draw(rates, Settings("posix", 4 * MIB, 8 * MIB), "title", tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    status, output, errors = _run(tmp_path, *SMALL, "--plot", tmp_path / "heat.png")
    assert (status, output) == (2, "")
    assert "pip install fastpersist[plot]" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/place",), "mkdir -p /no/such/place"),
        ((__file__,), "is a file"),
        ((".", "--engine", "warp"), "unknown engine 'warp'"),
        ((".", "--engine", "null"), "has no disk"),
        ((".", "--plot", "/no/such/place/heat.png"), "mkdir -p /no/such/place"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    status, output, errors = _run(*arguments)
    assert (status, output) == (2, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_an_engine_that_cannot_run_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Availability(usable=False, reason="forbidden", remedy="allow it")
    monkeypatch.setattr(engine_class("io_uring"), "availability", classmethod(lambda cls: refusal))
    status, _, errors = _run(tmp_path, "--engine", "io_uring")
    assert status == 2
    assert "forbidden. Remedy: allow it" in errors


def test_without_io_uring_the_others_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Availability(usable=False, reason="forbidden", remedy="allow it")
    monkeypatch.setattr(engine_class("io_uring"), "availability", classmethod(lambda cls: refusal))
    report = json.loads(_run(tmp_path, *SMALL, "--json")[1])
    assert {item["engine"] for item in report["sweep"]["measurements"]} == {"posix"}
    assert {"why": "engine io_uring cannot run: forbidden", "command": "allow it"} in report["remedies"]


def _facts_only(*arguments: object) -> dict[str, Any]:
    status, output, errors = _run(*arguments, *SMALL, "--json")
    report: dict[str, Any] = json.loads(output)
    form = SCHEMA | {"sweep": NoneType, "verdict": NoneType, "problem": {"reason": str, "remedy": str}}
    assert status == 1
    assert list(_faults(report, form)) == []
    assert report["problem"]["remedy"] in errors
    return report


def test_a_directory_without_write_permission_yields_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> int:
        raise PermissionError(13, "Permission denied")  # what root never meets

    monkeypatch.setattr(scratch, "_open_nameless", refuse)
    assert "Permission denied" in _facts_only(tmp_path)["problem"]["reason"]


def test_tiny_free_space_yields_the_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = facts._filesystem
    monkeypatch.setattr(facts, "_filesystem", lambda *a: probe.replace(whole(*a), free_nbytes=5_000_000))
    assert "5.0 MB are free" in _facts_only(tmp_path)["problem"]["reason"]
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fills_up_meanwhile_ends_the_sweep_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(self: Sweeper, finalists: list[Settings]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Sweeper, "_fine", fill)
    status, output, errors = _run(tmp_path, *SMALL, "--json")
    report = json.loads(output)
    assert status == 1
    assert "No space left on device" in errors
    assert report["verdict"]["best"]["gb_per_s"] > 0  # what was measured before is told
    assert report["sweep"]["torch_save"] is None


def test_without_direct_io_the_report_says_so(tmp_path: Path) -> None:
    directory = Path("/dev/shm")
    if not os.access(directory, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    before = set(os.listdir(directory))
    report = json.loads(_run(directory, *SMALL, "--json", "--engine", "posix")[1])
    assert report["facts"]["direct_io"]["supported"] is False
    assert report["facts"]["devices"] == []
    assert report["verdict"]["limiter"]["name"] == "memcpy"
    assert not any(item["fresh"]["direct"] for item in report["sweep"]["measurements"])
    assert not {name for name in set(os.listdir(directory)) - before if name.startswith(".fastpersist")}


def test_warnings_of_a_filesystem_are_told_once_and_by_the_directorys_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastpersist.engines._libc.statx_direct_alignment", lambda fileno: (0, 0))
    monkeypatch.setattr("fastpersist.engines._libc.filesystem_magic", lambda fileno: 0)
    monkeypatch.setattr("fastpersist.engines.files._refused_devices", set())
    notes = json.loads(_run(tmp_path, *SMALL, "--json", "--engine", "posix")[1])["notes"]
    assert len(notes) == 1
    assert notes[0].startswith(f"{tmp_path}: the kernel states")


@pytest.mark.mounts
def test_a_read_only_filesystem_yields_the_facts(mounts: Mounts) -> None:
    mounted = mounts.tmpfs()
    mounts.remount(mounted, "ro")
    problem = _facts_only(mounted.root)["problem"]
    assert "Read-only" in problem["reason"]
    assert f"remount,rw {mounted.root}" in problem["remedy"]


@pytest.mark.mounts
def test_a_tiny_filesystem_is_measured_as_far_as_it_goes(mounts: Mounts) -> None:
    mounted = mounts.tmpfs("size=16m")
    status, output, _ = _run(mounted.root, "--seconds", "0.1", "--json")
    report = json.loads(output)
    assert status == 0
    assert list(_faults(report, SCHEMA)) == []
    assert report["sweep"]["file_nbytes"] <= 16 * MIB // 10
