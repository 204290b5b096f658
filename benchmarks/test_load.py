"""Cold loads of fastpersist, torch and safetensors: pytest benchmarks --benchmark-only

Files go to FASTPERSIST_BENCH_DIR, else to bench-files in the current directory, and are removed afterwards.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from measuring import GB, filesystem_type, process_cpu_seconds
from pytest_benchmark.fixture import BenchmarkFixture
from reading import drop_from_cache, loaders, remove_files, write_files
from room import GIB, ready_memory, require_room, scratch_folder
from workloads import random_tensor, random_tensors, transformer_tensors

ROUNDS = 5
WORKLOADS: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
    "load one tensor of 1 GiB": lambda: {"tensor": random_tensor(GIB // 2)},
    "load 300 tensors of a transformer": transformer_tensors,
    "load 20000 tensors of 1 KiB": lambda: random_tensors(20_000, 1024),
}
TAGS = (
    "torch.load",
    "fastpersist, io_uring",
    "fastpersist, posix",
    "fastpersist, verify=True",
    "fastpersist, torch's file",
    "safetensors load_file, mapped",
    "safetensors load_file, copied",
)


@pytest.fixture(scope="session", params=list(WORKLOADS))
def files(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path, int]]:
    """(name, folder, payload bytes) of a workload that has been written in every format."""
    parent = Path(os.environ.get("FASTPERSIST_BENCH_DIR") or "bench-files")
    require_room(parent, file_nbytes=3 * GIB, memory_nbytes=3 * GIB)
    with scratch_folder(parent) as scratch:
        if filesystem_type(scratch) in ("tmpfs", "ramfs"):
            pytest.fail(f"{parent} lies in memory: set FASTPERSIST_BENCH_DIR to a folder on a disk")
        tensors = WORKLOADS[request.param]()
        write_files(tensors, scratch)
        yield request.param, scratch, sum(tensor.nbytes for tensor in tensors.values())
        remove_files(scratch)


@pytest.mark.parametrize("tag", TAGS)
def test_load(benchmark: BenchmarkFixture, files: tuple[str, Path, int], tag: str) -> None:
    """Time until the object is there, from a file that is not in the page cache."""
    name, scratch, nbytes = files
    loader = next((loader for loader in loaders(scratch, weights_only=True) if loader.tag == tag), None)
    if loader is None:
        pytest.skip(f"{tag} cannot run here")
    path, started, rounds = scratch / loader.file, [0.0], []

    def prepare() -> None:
        drop_from_cache(path)
        ready_memory(nbytes)
        started[0] = process_cpu_seconds()

    def finish(*_: object) -> None:
        rounds.append(process_cpu_seconds() - started[0])

    benchmark.group = name
    benchmark.pedantic(loader.load, args=(path,), setup=prepare, teardown=finish, rounds=ROUNDS, iterations=1)
    benchmark.extra_info["gb_per_s"] = round(nbytes / GB / benchmark.stats.stats.median, 3)
    benchmark.extra_info["cpu_seconds_per_gb"] = round(statistics.median(rounds) / (nbytes / GB), 4)
