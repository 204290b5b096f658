"""Names of engines, what they mean, and what is said of those that cannot run."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

import fastpersist
from fastpersist import engines
from fastpersist.engines import Engine, available, engine_class, open_engine
from fastpersist.engines.posix import PosixEngine
from fastpersist.errors import EngineUnavailableError


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown engine 'uring'.*'posix', 'io_uring', 'kvikio', 'memory', 'null'"):
        open_engine("uring")


def test_every_registered_engine_answers_whether_it_can_run() -> None:
    verdicts = available()
    assert set(verdicts) == {"posix", "io_uring", "kvikio", "memory", "null"}
    for verdict in verdicts.values():
        assert verdict.usable or (verdict.reason and verdict.remedy)


def test_each_name_opens_the_engine_of_that_name() -> None:
    for name, verdict in available().items():
        if verdict.usable:
            with open_engine(name, block_nbytes=4096, queue_depth=3) as engine:
                assert (engine.name, engine.block_nbytes, engine.queue_depth) == (name, 4096, 3)


def test_auto_logs_its_choice_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    monkeypatch.setattr(engines, "_announced", set())
    with caplog.at_level(logging.INFO, "fastpersist"):
        open_engine("auto", path=tmp_path).close()
        open_engine("auto", path=tmp_path).close()
    assert len([record for record in caplog.records if "engine 'auto' is" in record.message]) == 1


def test_auto_says_why_when_nothing_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Engine, **sizes: int) -> None:
        raise EngineUnavailableError(self.name, "out of order", "mend it")

    for name in ("io_uring", "posix"):
        monkeypatch.setattr(engine_class(name), "__init__", refuse)
    with pytest.raises(EngineUnavailableError, match=r"io_uring cannot: out of order; posix cannot: out of order"):
        open_engine("auto")


def test_one_transfer_at_a_time_takes_neither_ring_nor_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    with open_engine("auto", queue_depth=1) as engine:
        assert engine.name == "posix"
        assert threading.active_count() == before
    assert fastpersist.save({"weight": torch.zeros(100)}, tmp_path / "small.pt").engine == "posix"
    if engine_class("io_uring").availability().usable:
        assert fastpersist.save({"weight": torch.zeros(100)}, tmp_path / "small.pt", engine="io_uring").engine == "io_uring"
        assert fastpersist.save({"weight": torch.zeros(9 << 20)}, tmp_path / "large.pt").engine == "io_uring"


def test_posix_threads_end_with_the_engine() -> None:
    engine = open_engine("posix", queue_depth=5)
    assert isinstance(engine, PosixEngine)
    assert [thread.is_alive() for thread in engine._threads] == [True] * 5
    engine.close()
    assert [thread.is_alive() for thread in engine._threads] == [False] * 5


@pytest.mark.parametrize("started", [0, 2])
def test_posix_does_with_fewer_threads_where_no_more_are_to_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    """Python >= 3.12 refuses new ones at the end of the interpreter, when a last save may still run."""
    real, left = threading.Thread.start, [None] * started

    def start(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        left.pop()
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    fastpersist.save({"weights": torch.arange(3_000_000)}, tmp_path / "model.pt", engine="posix", block_nbytes=1 << 20)
    monkeypatch.undo()
    assert torch.equal(torch.load(tmp_path / "model.pt")["weights"], torch.arange(3_000_000))
