"""The report of a probe, and its JSON form, which programs may rely on: "version" changes when a field does.

    {"version": 1, "fastpersist": version of the package, "path": the directory,
     "facts":    the fields of Facts and what it holds,
     "sweep":    null, or {"file_nbytes", "written_nbytes", "read_nbytes", "seconds",
                           "measurements": [{"step": "coarse" or "fine", SETTINGS, "fresh": PASS, "overwrite": PASS or null,
                                             "read": PASS or null}],
                           "sustained": [{SETTINGS, "nbytes", "seconds", "gb_per_s", "first_second_gb_per_s",
                                          "last_second_gb_per_s"}],
                           "torch_save": null or {"nbytes", "seconds", "sync_seconds", "gb_per_s"}},
     "verdict":  null, or {"best": {SETTINGS, "gb_per_s"}, "limiter": {"name", "reason"},
                           "checkpoint_10_gb": [{"name", "seconds", "gb_per_s"}]},
     "remedies": [{"why", "command"}],  "notes": [text],
     "problem":  null, or {"reason", "remedy"}: why nothing was measured,
     "profile_file": null or path}

    SETTINGS  "engine", "block_nbytes", "in_flight_nbytes", "queue_depth"
    PASS      the fields of trial.Pass, and "gb_per_s"

Sizes are bytes, times seconds, rates units of 1e9 bytes per second. What is not known is null.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fastpersist._version import __version__
from fastpersist.probing.facts import Facts
from fastpersist.probing.sweep import Measurement, Sustained, Sweep
from fastpersist.probing.trial import Pass, Settings
from fastpersist.probing.verdict import Remedy, Verdict

VERSION = 1


@dataclass(frozen=True, slots=True)
class Problem:
    """Why nothing, or not everything, was measured, and what to do about it."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Report:
    """All that a probe found out. ``notes`` are warnings that were logged meanwhile."""

    path: str
    facts: Facts
    sweep: Sweep | None
    verdict: Verdict | None
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...]
    problem: Problem | None
    profile_file: str | None = None


def as_json(report: Report) -> dict[str, Any]:
    """The report as one JSON object."""
    return {
        "version": VERSION,
        "fastpersist": __version__,
        "path": report.path,
        "facts": dataclasses.asdict(report.facts),
        "sweep": None if report.sweep is None else _sweep(report.sweep),
        "verdict": None if report.verdict is None else _verdict(report.verdict),
        "remedies": [dataclasses.asdict(remedy) for remedy in report.remedies],
        "notes": list(report.notes),
        "problem": None if report.problem is None else dataclasses.asdict(report.problem),
        "profile_file": report.profile_file,
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    saved = sweep.torch_save
    return {
        "file_nbytes": sweep.file_nbytes,
        "written_nbytes": sweep.written_nbytes,
        "read_nbytes": sweep.read_nbytes,
        "seconds": sweep.seconds,
        "measurements": [_measurement(item) for item in sweep.measurements],
        "sustained": [_sustained(run) for run in sweep.sustained],
        "torch_save": None if saved is None else dataclasses.asdict(saved) | {"gb_per_s": saved.gb_per_s},
    }


def _measurement(item: Measurement) -> dict[str, Any]:
    passes = {"fresh": _pass(item.fresh), "overwrite": _pass(item.overwrite), "read": _pass(item.read)}
    return {"step": item.step, **_settings(item.settings), **passes}


def _sustained(run: Sustained) -> dict[str, Any]:
    rest = {field.name: getattr(run, field.name) for field in dataclasses.fields(run) if field.name != "settings"}
    return _settings(run.settings) | rest


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "best": _settings(verdict.best) | {"gb_per_s": verdict.gb_per_s},
        "limiter": dataclasses.asdict(verdict.limiter),
        "checkpoint_10_gb": [dataclasses.asdict(item) for item in verdict.estimates],
    }


def _settings(settings: Settings) -> dict[str, Any]:
    return dataclasses.asdict(settings) | {"queue_depth": settings.queue_depth}


def _pass(part: Pass | None) -> dict[str, Any] | None:
    return None if part is None else dataclasses.asdict(part) | {"gb_per_s": part.gb_per_s}
