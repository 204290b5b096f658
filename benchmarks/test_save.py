"""Engines x shapes of checkpoints, against torch.save with fsync: pytest benchmarks --benchmark-only

Files go to FASTPERSIST_BENCH_DIR, else to bench-files in the current directory, and are removed afterwards.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from measuring import GB, filesystem_type, process_cpu_seconds
from pytest_benchmark.fixture import BenchmarkFixture
from room import GIB, ready_page_cache, remove_and_settle, require_room, scratch_folder
from saving import Saver, fastpersist_saver, torch_save_fsync, warm_up
from verifying import payload_nbytes, verify_file
from workloads import random_tensor, random_tensors, transformer_tensors

from fastpersist.engines import available

ROUNDS = 5
WORKLOADS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "one tensor of 1 GiB": lambda: {"tensor": random_tensor(GIB // 2)},
    "300 tensors of a transformer": transformer_tensors,
    "20000 tensors of 1 KiB": lambda: random_tensors(20_000, 1024),
}
TORCH = "torch.save + fsync"
WRITERS = (TORCH, "posix", "io_uring", "null")


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """An empty folder on a disk."""
    parent = Path(os.environ.get("FASTPERSIST_BENCH_DIR") or "bench-files")
    require_room(parent, file_nbytes=GIB, memory_nbytes=GIB)
    with scratch_folder(parent) as scratch:
        if filesystem_type(scratch) in ("tmpfs", "ramfs"):
            pytest.fail(f"{parent} lies in memory: set FASTPERSIST_BENCH_DIR to a folder on a disk")
        yield scratch


@pytest.fixture(scope="session", params=list(WORKLOADS))
def workload(request: pytest.FixtureRequest) -> tuple[str, dict[str, torch.Tensor]]:
    """Name and content; session scope makes pytest run all writers on one before it builds the next."""
    return request.param, WORKLOADS[request.param]()


@pytest.fixture(params=WRITERS)
def saver(request: pytest.FixtureRequest) -> Saver:
    """torch's way or one of fastpersist's engines, if it can run here."""
    if request.param == TORCH:
        return Saver(TORCH, torch_save_fsync)
    verdict = available()[request.param]
    if not verdict.usable:
        pytest.skip(f"engine {request.param}: {verdict.reason}")
    return fastpersist_saver(request.param)


def test_save(benchmark: BenchmarkFixture, workload: tuple[str, dict[str, torch.Tensor]], saver: Saver, folder: Path) -> None:
    """Time of a save to a fresh file until it is durable; the last round's file is compared bit for bit."""
    name, tensors = workload
    nbytes = payload_nbytes(tensors)
    path = folder / "checkpoint.pt"
    meter = CpuMeter()

    def prepare() -> None:
        remove_and_settle(path)
        ready_page_cache(path, nbytes)
        gc.collect()
        meter.start()

    try:
        warm_up([saver], path)
        benchmark.group = name
        benchmark.pedantic(saver.save, args=(tensors, path), setup=prepare, teardown=meter.stop, rounds=ROUNDS, iterations=1)
        if saver.writes:
            verify_file(path, tensors)
    finally:
        remove_and_settle(path)
    benchmark.extra_info["payload_nbytes"] = nbytes
    benchmark.extra_info["gb_per_s"] = round(nbytes / GB / benchmark.stats.stats.median, 3)
    benchmark.extra_info["cpu_seconds_per_gb"] = round(statistics.median(meter.rounds) / (nbytes / GB), 4)


class CpuMeter:
    """CPU seconds of each round, read outside of what is timed."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Called last before a round."""
        self._started = process_cpu_seconds()

    def stop(self, *_: object) -> None:
        """Called first after a round, with the arguments of the call that was timed."""
        self.rounds.append(process_cpu_seconds() - self._started)
