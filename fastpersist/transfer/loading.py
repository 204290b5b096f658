"""From a checkpoint file to an object: while the storages arrive, the pickle is read that refers to them."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist.archive.checking import ByteStream, CheckedRecord, check_records
from fastpersist.archive.directory import PICKLE, Directory
from fastpersist.archive.selection import select
from fastpersist.archive.unpickling import (
    MapLocation,
    StorageLookup,
    byte_order,
    explain_refusal,
    placeholder,
    torchs_state_kept,
    unflatten,
)
from fastpersist.engines import Engine, File, _libc
from fastpersist.errors import CheckpointFormatError, brief
from fastpersist.memory.buffers import shared_pool
from fastpersist.options import Choice, ready_engine
from fastpersist.progress import Progress, ProgressCounter, progress_reporter
from fastpersist.transfer.cuda import CUDA
from fastpersist.transfer.device_reader import DeviceReader
from fastpersist.transfer.sketch import MappedStorages, Sketch
from fastpersist.transfer.source import CheckpointFile
from fastpersist.transfer.streaming import stream_blocks

log = logging.getLogger("fastpersist")

_SPARSE = b"_rebuild_sparse_tensor"

CACHED_SHARE = 0.9
"""From this share of a file in the page cache on, "auto" reads it from there: copying is faster than the disk."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read: the engine, whether it was opened for this alone, whether to read directly, and in what sizes."""

    engine: Engine
    own_engine: bool
    direct: bool
    block_nbytes: int
    queue_depth: int
    verify: bool
    progress: bool | Progress


@contextlib.contextmanager
def reading_engine(choice: Choice, source: CheckpointFile, *, through_cache: bool) -> Iterator[tuple[Engine, bool]]:
    """The engine to read with, and whether to read directly: with ``through_cache`` not a file that lies in the page cache."""
    direct = True
    if through_cache:
        cached = _libc.cached_nbytes(source.fileno, source.nbytes)
        if cached is not None and cached >= CACHED_SHARE * source.nbytes:
            direct = False
            log.info(
                "%s: %.0f%% of it lie in the page cache, and are read from there", source.path, 100 * cached / source.nbytes
            )
    with ready_engine(choice.engine, source.path, choice.block_nbytes, choice.queue_depth) as active:
        if not active.capabilities.persistent:
            raise ValueError(f"engine {active.name!r} holds no files of the disk, and cannot load any")
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
    with explained(source, directory, weights_only) as (pickle_bytes, order):
        sketch = None if wanted is None else Sketch(source, directory, weights_only=weights_only, order=order)
        chosen, records = (set(), directory.storages()) if sketch is None or wanted is None else sketch.choose(wanted)
        device = CUDA.device_named(map_location) if order == sys.byteorder else -1
        # Before all has been read nothing is unpickled that may use the same engine or, unverified, run code of the caller's;
        # and sparse tensors wait for their validation in a list that all loads of the process share, so no longer than needed.
        ahead = reading.own_engine and (weights_only or not reading.verify) and _SPARSE not in pickle_bytes
        with _storages(source, directory, records, reading, device, ahead=ahead) as take:
            obj = unflatten(
                pickle_bytes, take, unread=None if sketch is None else sketch.storage, weights_only=weights_only,
                map_location=map_location, place=None if device < 0 else _stay, order=order,
            )  # fmt: skip
    return obj if sketch is None else select(obj, chosen.__contains__)


def load_mapped(source: CheckpointFile, directory: Directory, *, map_location: MapLocation, weights_only: bool) -> Any:
    """The object over a mapping of the file, as torch.load(mmap=True) gives it: its data is read when it is looked at."""
    with explained(source, directory, weights_only) as (pickle_bytes, order):
        mapped = MappedStorages(source, directory)
        return unflatten(pickle_bytes, mapped.storage, weights_only=weights_only, map_location=map_location, order=order)


def load_without_data(source: CheckpointFile, directory: Directory, *, map_location: MapLocation, weights_only: bool) -> Any:
    """The object on device "meta" or, under FakeTensorMode, of fake tensors. Each storage notes its place in the file."""
    fake = torch._guards.detect_fake_mode(None) is not None

    def lookup(key: str) -> torch.UntypedStorage | None:
        record = directory.index.get(f"data/{key}")
        if record is None:
            return None
        storage = placeholder(int(directory.nbytes[record]))
        storage._checkpoint_offset = source.data_offset(directory, record)  # where torch tells it, too
        return storage

    def stay(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if fake:
            storage._fake_device = location  # type: ignore[assignment]
        return storage

    with explained(source, directory, weights_only) as (pickle_bytes, _):
        return unflatten(pickle_bytes, lookup, weights_only=weights_only, map_location=map_location, place=stay)


def _open(reading: Reading, source: CheckpointFile) -> File:
    """The file that ``source`` has open, in the engine, even if another has taken its path since."""
    with contextlib.suppress(FileNotFoundError):
        file = reading.engine.open(source.path, "r", direct=reading.direct)
        if os.path.samestat(os.fstat(file.fileno), os.fstat(source.fileno)):
            return file
        file.close()
    return reading.engine.open(f"/proc/self/fd/{source.fileno}", "r", direct=reading.direct)


def _stay(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    return storage


@contextlib.contextmanager
def _storages(
    source: CheckpointFile, directory: Directory, records: list[int], reading: Reading, device: int, *, ahead: bool
) -> Iterator[StorageLookup]:
    """Read to CUDA device ``device``, or to host memory (-1), with ``ahead`` while they are looked up. That takes them out."""
    total_nbytes = sum(int(directory.nbytes[record]) for record in records)
    with (
        _open(reading, source) as file,
        progress_reporter(reading.progress, source.path) as report,
    ):
        reader = DeviceReader(
            reading.engine, file, directory, shared_pool(), path=source.path, block_nbytes=reading.block_nbytes,
            queue_depth=reading.queue_depth, moved=ProgressCounter(report, total_nbytes).add,
        )  # fmt: skip
        if device >= 0:
            storages = reader.read_to_device(records, device, verify=reading.verify)
            yield lambda key: storages.pop(key, None)
            return
        with reader.reading(records, verify=reading.verify) as arriving:
            if not ahead:
                arriving.finish()
            yield arriving.take


def check_file(source: CheckpointFile, directory: Directory, reading: Reading) -> list[CheckedRecord]:
    """Read the whole file and check it; the records, none of them at fault."""
    with (
        _open(reading, source) as file,
        progress_reporter(reading.progress, source.path) as report,
    ):
        blocks = stream_blocks(
            reading.engine, file, source.nbytes, shared_pool(), path=source.path, block_nbytes=reading.block_nbytes,
            queue_depth=reading.queue_depth, moved=ProgressCounter(report, source.nbytes).add,
        )  # fmt: skip
        with contextlib.closing(blocks), path_named(source):
            return list(check_records(directory, ByteStream(blocks)))


def load_legacy(path: str, *, map_location: MapLocation, weights_only: bool, mmap: bool) -> Any:
    """torch.load of a file of torch before 1.6, with what it says of a broken file translated to CheckpointFormatError."""
    if mmap:
        raise CheckpointFormatError(f"mmap can only be used with zip checkpoints, and {path} is a file of torch before 1.6")
    try:
        with torchs_state_kept(), open(path, "rb") as source:  # by its name torch might take it for another format
            return torch.load(source, map_location=map_location, weights_only=weights_only)
    except (pickle.UnpicklingError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        # Nothing of the caller's runs under weights_only, but for its map_location and torch's words on missing devices.
        if (
            callable(map_location)
            or not weights_only
            or "deserialize object on" in str(error)
            or "restore data location" in str(error)
        ):
            raise
        raise CheckpointFormatError(f"{path}: torch.load cannot read it: {brief(error)}") from error


@contextlib.contextmanager
def explained(source: CheckpointFile, directory: Directory, weights_only: bool) -> Iterator[tuple[bytes, str]]:
    """Gives the pickle and the byte order of the storages.

    Within, format errors come to name the path, and a refusal of the restricted unpickler comes in torch.load's own words.
    """
    with path_named(source):
        pickle_bytes = source.record(directory, PICKLE) or b""
        try:
            yield pickle_bytes, byte_order(source.record(directory, "byteorder"))
        except pickle.UnpicklingError as error:
            if not weights_only:
                raise
            keys = (directory.names[record].removeprefix("data/") for record in directory.storages())
            raise explain_refusal(pickle_bytes, keys, error) from None


@contextlib.contextmanager
def path_named(source: CheckpointFile) -> Iterator[None]:
    """Format errors of what knows bytes only come to name the path."""
    try:
        yield
    except CheckpointFormatError as error:
        raise (error if str(error).startswith(source.path) else source.named(error)) from error.__cause__
