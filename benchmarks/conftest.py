"""Benchmarks are collected with --benchmark-only and not otherwise: a plain run of the tests stays short."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Let the benchmarks import the modules beside them, as the scripts do."""
    if _wanted(config):
        sys.path.insert(0, str(Path(__file__).parent))


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """True leaves a file out; None leaves the choice to pytest."""
    return None if _wanted(config) else True


def _wanted(config: pytest.Config) -> bool:
    return bool(config.getoption("benchmark_only", default=False))
