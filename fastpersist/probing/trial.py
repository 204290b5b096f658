"""One trial: an engine with one block size and one depth, writing or reading blocks of the scratch file in random order.

Requests go through the same Pipeline that save and load use.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fastpersist.engines import Engine, File, Read, Request, Write, open_engine
from fastpersist.errors import TransferError
from fastpersist.memory.buffers import shared_pool
from fastpersist.memory.pages import Pages
from fastpersist.probing.scratch import Scratch
from fastpersist.transfer.pipeline import Pipeline

GB = 1e9


@dataclass(frozen=True, slots=True, order=True)
class Settings:
    """What is tried. ``in_flight_nbytes`` is a multiple of ``block_nbytes``."""

    engine: str
    block_nbytes: int
    in_flight_nbytes: int

    @property
    def queue_depth(self) -> int:
        """Requests in flight."""
        return max(1, self.in_flight_nbytes // self.block_nbytes)


@dataclass(frozen=True, slots=True)
class Pass:
    """One run over some blocks. gb_per_s counts all of ``seconds``: reserving space, transfers, and the sync.

    The latencies are those of single requests, from submission to the reaping of the completion. direct says whether the
    page cache was bypassed.
    """

    nbytes: int
    seconds: float
    reserve_seconds: float
    sync_seconds: float
    latency_p50_seconds: float
    latency_p99_seconds: float
    cpu_seconds_per_gb: float
    direct: bool

    @property
    def gb_per_s(self) -> float:
        """Units of 1e9 bytes per second."""
        return self.nbytes / GB / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Timeline:
    """Bytes completed over time: (seconds since the start, bytes), in order."""

    points: list[tuple[float, int]] = field(default_factory=list)

    def first_and_last_gb_per_s(self) -> tuple[float, float]:
        """Rates of the first and of the last second; of the two halves where all took less than two seconds."""
        if not self.points:
            return 0.0, 0.0
        end = self.points[-1][0]
        window = min(1.0, end / 2)
        if window <= 0:
            return 0.0, 0.0
        first = sum(nbytes for at, nbytes in self.points if at <= window)
        last = sum(nbytes for at, nbytes in self.points if at > end - window)
        return first / GB / window, last / GB / window


@dataclass(slots=True)
class _Moved:
    """What the requests of one pass came to."""

    nbytes: int = 0
    blocks: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)


class _Clock:
    """Seconds, and CPU seconds of the process, since it was made."""

    def __init__(self) -> None:
        self._started, self._cpu_started = time.perf_counter(), process_cpu_seconds()

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def cpu_seconds(self) -> float:
        return process_cpu_seconds() - self._cpu_started


class Bench:
    """The memory and the file of all trials; counts every byte written and read."""

    def __init__(self, scratch: Scratch, memory_nbytes: int, seed: int = 0) -> None:
        """``memory_nbytes`` is the most that any trial has in flight."""
        self.written_nbytes = 0
        self.read_nbytes = 0
        self.scratch = scratch
        self._random = np.random.default_rng(seed)
        self.source = Pages(memory_nbytes)
        self._sink = Pages(memory_nbytes)
        self._sink.populate()
        words = np.frombuffer(self.source.view, np.uint64)
        words[:] = self._random.integers(0, 1 << 64, len(words), np.uint64)  # no device can compress it
        self._offsets: Sequence[int] = ()

    def fresh(self, settings: Settings, nbytes: int, seconds: float, timeline: Timeline | None = None) -> Pass:
        """Write ``nbytes`` into newly reserved space, or as many as ``seconds`` allow; then sync. Raises OSError."""
        self.forget()
        blocks = max(1, nbytes // settings.block_nbytes)
        offsets = [int(block) * settings.block_nbytes for block in self._random.permutation(blocks)]
        with self._open(settings) as engine, engine.open(self.scratch.path, "r+") as file:
            clock = _Clock()
            engine.reserve(file, blocks * settings.block_nbytes)
            result, moved = self._write(engine, file, settings, offsets, seconds, clock, timeline)
        self._offsets = offsets[: moved.blocks]
        return result

    def overwrite(self, settings: Settings, seconds: float) -> Pass:
        """Write the blocks of the last fresh pass once more, in another order; then sync. Raises OSError."""
        with self._open(settings) as engine, engine.open(self.scratch.path, "r+") as file:
            return self._write(engine, file, settings, self._shuffled(), seconds, _Clock())[0]

    def read(self, settings: Settings, seconds: float) -> Pass:
        """Read the blocks of the last fresh pass. Raises OSError."""
        with self._open(settings) as engine, engine.open(self.scratch.path, "r") as file:
            if not file.direct:
                os.posix_fadvise(file.fileno, 0, 0, os.POSIX_FADV_DONTNEED)
            clock = _Clock()
            moved = self._transfer(engine, file, settings, Read, self._shuffled(), seconds)
            self.read_nbytes += moved.nbytes
            return _judge(moved, clock, file)

    def _shuffled(self) -> list[int]:
        return [int(offset) for offset in self._random.permutation(self._offsets)]

    def _open(self, settings: Settings) -> Engine:
        return open_engine(
            settings.engine,
            path=self.scratch.path,
            block_nbytes=settings.block_nbytes,
            queue_depth=settings.queue_depth,
        )

    def forget(self) -> None:
        """Give all blocks back, and have that recorded before the clock starts."""
        os.ftruncate(self.scratch.fileno, 0)
        os.fsync(self.scratch.fileno)

    def _write(
        self,
        engine: Engine,
        file: File,
        settings: Settings,
        offsets: Sequence[int],
        seconds: float,
        clock: _Clock,
        timeline: Timeline | None = None,
    ) -> tuple[Pass, _Moved]:
        """Write and sync. What passed on the clock before counts as the time to reserve space."""
        reserve_seconds = clock.seconds()
        moved = self._transfer(engine, file, settings, Write, offsets, seconds, timeline)
        self.written_nbytes += moved.nbytes
        started = time.perf_counter()
        engine.sync(file)
        return _judge(moved, clock, file, reserve_seconds, time.perf_counter() - started), moved

    def _transfer(
        self,
        engine: Engine,
        file: File,
        settings: Settings,
        kind: type[Request],
        offsets: Sequence[int],
        seconds: float,
        timeline: Timeline | None = None,
    ) -> _Moved:
        moved, base = _Moved(), (self.source if kind is Write else self._sink).address
        free = [base + slot * settings.block_nbytes for slot in range(settings.queue_depth)]
        before = timeline.points[-1][0] if timeline is not None and timeline.points else 0.0
        started = time.perf_counter()

        def count(nbytes: int) -> None:
            moved.nbytes += nbytes
            if timeline is not None:
                timeline.points.append((before + time.perf_counter() - started, nbytes))

        depth = settings.queue_depth
        # One at a time, or what is held would count as the drive's latency.
        with Pipeline(engine, shared_pool(), queue_depth=depth, failure=_failure, moved=count, together=1) as pipeline:
            for offset in offsets:
                pipeline.make_room()
                submitted = time.perf_counter()
                if submitted - started > seconds and moved.blocks:
                    break
                address = free.pop()
                request = kind(file, address, settings.block_nbytes, offset, owner=self)
                pipeline.submit(request, finished=partial(_finish, free, address, moved.latencies, submitted))
                moved.blocks += 1
            pipeline.finish()
        moved.seconds = time.perf_counter() - started
        return moved


def process_cpu_seconds() -> float:
    """User and system time of this process: of its threads, and of the kernel's workers that io_uring gives it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of ``values`` that at least ``share`` of them do not exceed; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(np.ceil(share * len(ordered))) - 1))] if ordered else 0.0


def _finish(free: list[int], address: int, latencies: list[float], submitted: float, _: int) -> None:
    latencies.append(time.perf_counter() - submitted)
    free.append(address)


def _failure(request: Request, code: int, hint: str) -> TransferError:
    return TransferError(
        code, "a trial failed", request.file.path, offset=request.file_offset, nbytes=request.nbytes, hint=hint
    )


def _judge(moved: _Moved, clock: _Clock, file: File, reserve_seconds: float = 0.0, sync_seconds: float = 0.0) -> Pass:
    return Pass(
        nbytes=moved.nbytes,
        seconds=reserve_seconds + moved.seconds + sync_seconds,
        reserve_seconds=reserve_seconds,
        sync_seconds=sync_seconds,
        latency_p50_seconds=percentile(moved.latencies, 0.50),
        latency_p99_seconds=percentile(moved.latencies, 0.99),
        cpu_seconds_per_gb=clock.cpu_seconds() / (moved.nbytes / GB) if moved.nbytes else 0.0,
        direct=file.direct,
    )
