"""The pipeline's way out: buffers go back to the pool when, and only when, nothing in flight uses them."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fastpersist.engines import Engine, File, Request, Write, open_engine
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import BufferPool
from fastpersist.testing import Fault, FaultyEngine
from fastpersist.transfer.pipeline import Pipeline

NBYTES = 65536


def _failure(request: Request, code: int, hint: str) -> TransferError:
    return TransferError(code, "cannot write", request.file.path, hint=hint)


def _run(engine: Engine, file: File, pool: BufferPool, leave: Callable[[], None]) -> None:
    with Pipeline(engine, pool, queue_depth=2, failure=_failure, moved=lambda nbytes: None) as pipeline:
        buffer = pipeline.borrow(NBYTES)
        pipeline.submit(Write(file, buffer.address, NBYTES, 0, owner=buffer), buffer=buffer)
        leave()
        pipeline.finish()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_the_drain_begins_lends_no_buffer_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BufferPool(NBYTES)
    with open_engine("posix") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        with monkeypatch.context() as patch:
            patch.setattr(engine, "drain", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                _run(engine, file, pool, lambda: None if engine.in_flight == 0 else _interrupt())
        assert engine.in_flight == 1
        assert pool.try_acquire(1) is None  # the only buffer belongs to the request still
        engine.drain()


def test_an_exception_drains_and_gives_the_buffers_back(tmp_path: Path) -> None:
    pool = BufferPool(NBYTES)
    with open_engine("posix") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        with pytest.raises(KeyboardInterrupt):
            _run(engine, file, pool, _interrupt)
        assert engine.in_flight == 0
        assert pool.lent_nbytes == 0


def test_a_failed_transfer_gives_the_buffers_back(tmp_path: Path) -> None:
    pool = BufferPool(NBYTES)
    faulty = FaultyEngine(open_engine("posix"), {1: Fault.error(errno.EIO)})
    with faulty as engine, engine.open(str(tmp_path / "file"), "w") as file:
        with pytest.raises(TransferError, match="cannot write"):
            _run(engine, file, pool, lambda: None)
        assert pool.lent_nbytes == 0
