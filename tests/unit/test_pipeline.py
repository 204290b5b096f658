"""The pipeline's way out: buffers go back to the pool when, and only when, nothing in flight uses them."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastpersist.engines import Engine, File, Request, Write, open_engine
from fastpersist.engines.memory import MemoryEngine
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
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


class CountingEngine(MemoryEngine):
    """Notes how many requests each call of submit has brought; they are done when somebody waits."""

    def __init__(self, queue_depth: int) -> None:
        super().__init__(queue_depth=queue_depth)
        self.calls: list[int] = []

    def submit(self, *requests: Request) -> None:
        super().submit(*requests)
        self.calls.append(len(requests))


class TestHeld:
    """Requests that wait for others, to be started together."""

    @pytest.fixture
    def engine(self) -> Iterator[CountingEngine]:
        with CountingEngine(8) as engine:
            yield engine

    @pytest.fixture
    def pool(self) -> BufferPool:
        return BufferPool(4 * NBYTES)

    @pytest.fixture
    def file(self, engine: CountingEngine) -> File:
        return engine.open("file", "w")

    def start(self, engine: Engine, pool: BufferPool, together: int | None = None) -> Pipeline:
        return Pipeline(
            engine, pool, queue_depth=engine.queue_depth, failure=_failure, moved=lambda nbytes: None, together=together
        )

    def write(self, pipeline: Pipeline, file: File, buffer: AlignedBuffer, count: int) -> None:
        for number in range(count):
            pipeline.submit(Write(file, buffer.address, NBYTES, number * NBYTES, owner=buffer))

    def test_half_a_queue_at_a_time(self, engine: CountingEngine, pool: BufferPool, file: File) -> None:
        """At once while little is in flight: the disk must not wait for the other half."""
        with self.start(engine, pool) as pipeline:
            self.write(pipeline, file, pipeline.borrow(NBYTES), 19)
            assert engine.calls == [1, 1, 1, 1, 4, 4, 4]
            pipeline.finish()
        assert engine.calls == [1, 1, 1, 1, 4, 4, 4, 3]
        assert len(engine.contents("file")) == 19 * NBYTES

    def test_one_at_a_time_if_asked_for(self, engine: CountingEngine, pool: BufferPool, file: File) -> None:
        with self.start(engine, pool, together=1) as pipeline:
            self.write(pipeline, file, pipeline.borrow(NBYTES), 12)
            assert engine.calls == [1] * 12

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_small_queues(self, pool: BufferPool, depth: int) -> None:
        with CountingEngine(depth) as engine, self.start(engine, pool) as pipeline:
            self.write(pipeline, engine.open("file", "w"), pipeline.borrow(NBYTES), 7)
            pipeline.finish()
            assert engine.calls == [1] * 7
            assert len(engine.contents("file")) == 7 * NBYTES

    def test_a_group_is_started_whole(self, engine: CountingEngine, pool: BufferPool, file: File) -> None:
        with self.start(engine, pool) as pipeline:
            buffer, ends = pipeline.borrow(NBYTES), list[int]()
            group = [Write(file, buffer.address, NBYTES, number * NBYTES, owner=buffer) for number in range(4)]
            pipeline.submit(*group, finished=ends.append)
            pipeline.finish()
        assert engine.calls == [4]
        assert sorted(ends) == [NBYTES, 2 * NBYTES, 3 * NBYTES, 4 * NBYTES]

    def test_reaping_starts_them_first(self, engine: CountingEngine, pool: BufferPool, file: File) -> None:
        with self.start(engine, pool) as pipeline:
            self.write(pipeline, file, pipeline.borrow(NBYTES), 6)
            pipeline.reap()
            assert engine.calls == [1, 1, 1, 1, 2]

    @pytest.mark.parametrize("trying", [False, True])
    def test_the_pool_may_be_in_their_hands(self, engine: CountingEngine, pool: BufferPool, file: File, trying: bool) -> None:
        """Who waits for a buffer would wait for ever if those that have them were held."""
        with self.start(engine, pool) as pipeline:
            self.write(pipeline, file, AlignedBuffer(NBYTES), 4)
            for number in range(4, 7):
                buffer = pipeline.borrow(NBYTES)
                pipeline.submit(Write(file, buffer.address, NBYTES, number * NBYTES, owner=buffer), buffer=buffer)
            lent = pipeline.borrow(NBYTES)
            assert pool.try_acquire(NBYTES) is None
            assert engine.calls == [1, 1, 1, 1]
            assert (pipeline.try_borrow if trying else pipeline.borrow)(NBYTES) is not None
            assert engine.calls == [1, 1, 1, 1, 3]
            pipeline.give_back(lent)
            pipeline.finish()

    def test_what_is_held_at_an_exception_is_dropped(self, engine: CountingEngine, pool: BufferPool, file: File) -> None:
        with contextlib.suppress(KeyboardInterrupt), self.start(engine, pool) as pipeline:
            self.write(pipeline, file, AlignedBuffer(NBYTES), 4)
            buffer = pipeline.borrow(NBYTES)
            pipeline.submit(Write(file, buffer.address, NBYTES, 4 * NBYTES, owner=buffer), buffer=buffer)
            _interrupt()
        assert pool.lent_nbytes == 0
        assert len(engine.contents("file")) == 4 * NBYTES
