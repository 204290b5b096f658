"""From a checkpoint file to an object: storages first, then the pickle that refers to them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist.archive.checking import ByteStream, CheckedRecord, check_records
from fastpersist.archive.directory import PICKLE, Directory
from fastpersist.archive.selection import select
from fastpersist.archive.unpickling import MapLocation, byte_order, explain_refusal, unflatten
from fastpersist.engines import Engine, _libc
from fastpersist.errors import CheckpointFormatError
from fastpersist.memory.buffers import shared_pool
from fastpersist.options import ready_engine
from fastpersist.progress import Progress, ProgressCounter, progress_reporter
from fastpersist.transfer.reader import RecordReader, Storages, stream_blocks
from fastpersist.transfer.sketch import Sketch
from fastpersist.transfer.source import CheckpointFile

log = logging.getLogger("fastpersist")

CACHED_SHARE = 0.9
"""From this share of a file in the page cache on, "auto" reads it from there: copying is faster than the disk."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: the engine, whether directly, and in what sizes."""

    engine: Engine
    direct: bool
    block_nbytes: int
    queue_depth: int
    verify: bool
    progress: bool | Progress


@contextlib.contextmanager
def reading_engine(
    engine: str | Engine, source: CheckpointFile, block_nbytes: int, queue_depth: int
) -> Iterator[tuple[Engine, bool]]:
    """The engine to read with, and whether to read directly: "auto" goes through the page cache for a file that lies in it."""
    direct = True
    if engine == "auto":
        cached = _libc.cached_nbytes(source.fileno, source.nbytes)
        if cached is not None and cached >= CACHED_SHARE * source.nbytes:
            direct = False
            log.info(
                "%s: %.0f%% of it lie in the page cache, and are read from there", source.path, 100 * cached / source.nbytes
            )
    with ready_engine(engine, source.path, block_nbytes, queue_depth) as active:
        yield active, direct


def load_records(
    source: CheckpointFile,
    directory: Directory,
    reading: Reading,
    wanted: Callable[[str], bool] | None,
    *,
    map_location: MapLocation,
    weights_only: bool,
) -> Any:
    """Read the storages, all or those that the values ``wanted`` view, and rebuild the object."""
    pickle_bytes = source.record(directory, PICKLE) or b""
    order = byte_order(source.record(directory, "byteorder"))
    with _explained(source, weights_only):
        sketch = None if wanted is None else Sketch(source, directory, weights_only=weights_only)
        chosen = {} if sketch is None or wanted is None else sketch.choose(wanted)
        records = directory.storages() if sketch is None else sketch.records_of(chosen.values())
        storages = _read_storages(source, directory, records, reading)

        def absent(key: str) -> torch.UntypedStorage | None:
            if sketch is not None:
                return sketch.storage(key)
            return torch.UntypedStorage(0) if f"data/{key}" in directory.index else None  # type: ignore[no-untyped-call]

        def lookup(key: str) -> torch.UntypedStorage | None:
            # A storage is asked for once (moved to a device, its copy here is freed), an empty one again and again.
            return storages.pop(key, None) or absent(key)

        obj = unflatten(pickle_bytes, lookup, weights_only=weights_only, map_location=map_location, order=order)
    return obj if sketch is None else select(obj, chosen.__contains__)


def _read_storages(source: CheckpointFile, directory: Directory, records: list[int], reading: Reading) -> Storages:
    total_nbytes = sum(int(directory.nbytes[record]) for record in records)
    with (
        reading.engine.open(source.path, "r", direct=reading.direct) as file,
        progress_reporter(reading.progress, os.path.basename(source.path)) as report,
    ):
        reader = RecordReader(
            reading.engine, file, directory, shared_pool(), path=source.path, block_nbytes=reading.block_nbytes,
            queue_depth=reading.queue_depth, moved=ProgressCounter(report, total_nbytes).add,
        )  # fmt: skip
        return reader.read_storages(records, verify=reading.verify)


def check_file(source: CheckpointFile, directory: Directory, reading: Reading) -> list[CheckedRecord]:
    """Read the whole file and check it; the records, none of them at fault."""
    with (
        reading.engine.open(source.path, "r", direct=reading.direct) as file,
        progress_reporter(reading.progress, os.path.basename(source.path)) as report,
    ):
        blocks = stream_blocks(
            reading.engine, file, source.nbytes, shared_pool(), path=source.path, block_nbytes=reading.block_nbytes,
            queue_depth=reading.queue_depth, moved=ProgressCounter(report, source.nbytes).add,
        )  # fmt: skip
        with contextlib.closing(blocks), _path_named(source):
            return list(check_records(directory, ByteStream(blocks)))


def load_with_torch(path: str, *, map_location: MapLocation, weights_only: bool, mmap: bool) -> Any:
    """torch.load, with what it says of a broken file translated to CheckpointFormatError."""
    try:
        return torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError:
        raise
    except (EOFError, AssertionError, IndexError, KeyError, ValueError, OverflowError) as error:
        raise CheckpointFormatError(f"{path}: torch.load cannot read it: {error!r}") from error
    except RuntimeError as error:
        if "PytorchStreamReader" in str(error) or "storage has wrong byte size" in str(error):
            raise CheckpointFormatError(f"{path}: torch.load cannot read it: {error}") from error
        raise


@contextlib.contextmanager
def _explained(source: CheckpointFile, weights_only: bool) -> Iterator[None]:
    """Format errors name the path, and a refusal of the restricted unpickler comes in torch.load's own words."""
    try:
        with _path_named(source):
            yield
    except pickle.UnpicklingError as error:
        raise explain_refusal(source.path, error) if weights_only else error from None


@contextlib.contextmanager
def _path_named(source: CheckpointFile) -> Iterator[None]:
    try:
        yield
    except CheckpointFormatError as error:
        raise (error if str(error).startswith(source.path) else source.named(error)) from error.__cause__
