"""From a flat object to a published file. Read ``SaveJob.run`` from top to bottom to follow a checkpoint to the disk."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastpersist.archive.layout import LARGE_NBYTES, LAYOUTS, ArchivePlan, Int64Array, plan
from fastpersist.archive.pickling import FlatObject
from fastpersist.engines import DEFAULT_BLOCK_NBYTES, Engine, File, Memory
from fastpersist.errors import RecycleRefusedError, as_transfer_error
from fastpersist.memory.alignment import PAGE_NBYTES, round_up
from fastpersist.memory.buffers import shared_pool
from fastpersist.options import check_zero_copy, choose, choose_zero_copy, ready_engine
from fastpersist.progress import Progress, ProgressCounter, progress_reporter
from fastpersist.reports import SaveReport
from fastpersist.transfer.cuda import CUDA
from fastpersist.transfer.device import Copies, WorkSoFar, work_so_far
from fastpersist.transfer.extents import Direct, Extent, cut_into_blocks, plan_extents
from fastpersist.transfer.gpudirect import has_gpudirect
from fastpersist.transfer.image import ArchiveImage
from fastpersist.transfer.publish import Publication, Unpublished, resolve_target
from fastpersist.transfer.small import is_small, write_small
from fastpersist.transfer.staging import copy_from_device, cuda_devices, residues
from fastpersist.transfer.writer import NOBODY, DeviceSources, Watcher, write_blocks

log = logging.getLogger("fastpersist")

Path = str | os.PathLike[str]


class Written(NamedTuple):
    """What a file amounts to; ``copied_nbytes`` of payload went through a buffer."""

    file_nbytes: int
    records: int
    copied_nbytes: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """How and where to save, checked; the options are those of fastpersist.save. Made before the object is looked at."""

    target: str
    prefix: str
    engine: str | Engine
    block_nbytes: int
    queue_depth: int
    checksum: bool
    durable: bool
    layout: str
    zero_copy: bool | None
    recycle: str | None
    must_recycle: bool
    progress: bool | Progress

    @classmethod
    def check(
        cls,
        path: Path,
        *,
        engine: str | Engine = "auto",
        block_nbytes: int | None = None,
        queue_depth: int | None = None,
        checksum: bool = True,
        durable: bool = True,
        layout: str = "auto",
        zero_copy: bool | None = None,
        recycle: Path | None = None,
        must_recycle: bool = True,
        progress: bool | Progress = False,
        beside_training: bool = False,
    ) -> SaveJob:
        """With must_recycle False a file that cannot be recycled is left alone, and a fresh one written. beside_training: what
        has been left open is chosen so that it costs others little, not so that the save is fast.

        Raises what resolve_target and the options raise; nothing has been touched then.
        """
        # The engine is opened when there is something to write.
        choice = choose(engine, block_nbytes, queue_depth, path, beside_training=beside_training)
        zero_copy = check_zero_copy(zero_copy)
        if zero_copy is None and beside_training:
            zero_copy = True  # a training needs the CPU more than the save needs the disk
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(map(repr, LAYOUTS))}")
        return cls(
            resolve_target(path), _prefix(path), *choice, checksum, durable, layout, zero_copy,
            None if recycle is None else os.path.abspath(os.fsdecode(recycle)), must_recycle, progress,
        )  # fmt: skip

    def run(
        self,
        flat: FlatObject,
        *,
        started: float | None = None,
        watcher: Watcher = NOBODY,
        work: WorkSoFar | None = None,
    ) -> SaveReport:
        """Write and publish. ``started`` (of time.perf_counter) is where the report's seconds begin; ``work`` (of
        device.work_so_far) is what produces the storages on CUDA devices, if that is not the calling thread.
        """
        started = time.perf_counter() if started is None else started
        work = work_so_far(flat) if work is None else work
        depth = min(self.queue_depth, _max_blocks(flat, self.block_nbytes))  # a small file needs neither threads nor a queue
        with ready_engine(self._engine(work), self.target, self.block_nbytes, depth) as engine:
            with self._destination(engine) as destination:
                if self._is_small(flat, destination.file, watcher):
                    written = self._write_small(flat, engine, destination.file)
                else:
                    written = self._write(flat, engine, destination.file, depth, watcher, work)
                watcher.publishing()
                destination.publish()
            return SaveReport(
                path=self.target,
                nbytes=flat.nbytes,
                file_nbytes=written.file_nbytes,
                seconds=time.perf_counter() - started,
                engine=engine.name,
                direct=destination.file.direct,
                zero_copy_nbytes=flat.nbytes - written.copied_nbytes,
                copied_nbytes=written.copied_nbytes,
                sync_seconds=destination.sync_seconds,
                records=written.records,
                block_nbytes=self.block_nbytes,
                queue_depth=self.queue_depth,
            )

    def _engine(self, work: WorkSoFar) -> str | Engine:
        """For "auto" the one that reaches device memory, where that has been proven and is of use."""
        if not work or self.recycle is not None or self.engine != "auto":
            return self.engine
        if not has_gpudirect(os.path.dirname(self.target) or ".", min(work)):
            return self.engine
        if self.checksum:
            log.warning("%s: 'auto' takes kvikio: large storages get no checksum; engine='io_uring' sums them", self.target)
        return "kvikio"

    def _destination(self, engine: Engine) -> Publication | Unpublished:
        """The file to write to, and what publishes it."""
        if engine.capabilities.persistent:
            return Publication(engine, self.target, durable=self.durable, recycle=self.recycle, must_recycle=self.must_recycle)
        if self.recycle is not None and self.must_recycle:
            reason, remedy = f"engine {engine.name!r} keeps no files", "take an engine that writes to a disk"
            raise RecycleRefusedError(self.recycle, reason, remedy)
        return Unpublished(engine, self.target)

    def _is_small(self, flat: FlatObject, file: File, watcher: Watcher) -> bool:
        return self.layout == "auto" and watcher is NOBODY and is_small(flat, self.prefix, file, self.block_nbytes)

    def _write_small(self, flat: FlatObject, engine: Engine, file: File) -> Written:
        """The whole file in one transfer."""
        with progress_reporter(self.progress, self.target) as report:
            file_nbytes, records = write_small(
                flat, self.prefix, engine, file, shared_pool(), checksum=self.checksum, path=self.target, report=report
            )
        return Written(file_nbytes, records, flat.nbytes)

    def _write(
        self, flat: FlatObject, engine: Engine, file: File, queue_depth: int, watcher: Watcher, work: WorkSoFar
    ) -> Written:
        """Plan the file, cut it into extents, write them all, and give the file its true length."""
        addresses, devices = np.array(flat.addresses, np.int64), cuda_devices(flat)
        reachable = addresses  # for the engine: device memory, too, where it can move that
        if work and Memory.DEVICE in engine.capabilities.memory:
            reachable = _with_device_addresses(flat, addresses, devices, work)
        if self._copies(engine, file):
            reachable = np.where(devices >= 0, reachable, 0)
        archive = plan(
            self.prefix,
            flat.pickle_bytes,
            np.array(flat.storage_nbytes, np.int64),
            residues(reachable, np.where(devices >= 0, PAGE_NBYTES, file.memory_alignment)),
            self.layout,
        )
        cut_nbytes = max(PAGE_NBYTES, file.offset_alignment)
        blocks = self._blocks(archive, reachable, devices, file, cut_nbytes)
        watcher.planned(archive, blocks)

        def fetch(storage: int, start: int, target: memoryview) -> None:
            if devices[storage] < 0:  # else it is there already: the writer copies from CUDA devices ahead
                copy_from_device(flat.storages[storage], start, target)

        unseen = {block.record for block in blocks if isinstance(block, Direct) and block.device >= 0}
        image = ArchiveImage(archive, addresses, fetch, checksum=self.checksum, unseen=unseen)
        on_devices = DeviceSources(flat.storages, devices.tolist(), Copies(work)) if work else None
        padded_nbytes = round_up(archive.file_nbytes, cut_nbytes)
        with as_transfer_error("cannot reserve space for", self.target, nbytes=padded_nbytes):
            engine.reserve(file, padded_nbytes)
        with progress_reporter(self.progress, self.target) as report:
            moved = ProgressCounter(report, archive.file_nbytes).add
            copied_nbytes = write_blocks(
                blocks, image, engine, file, shared_pool(),
                queue_depth=queue_depth, path=self.target, moved=moved, watcher=watcher, on_devices=on_devices,
            )  # fmt: skip
        if padded_nbytes != archive.file_nbytes:
            with as_transfer_error("cannot set the length of", self.target, nbytes=archive.file_nbytes):
                engine.resize(file, archive.file_nbytes)
        return Written(archive.file_nbytes, archive.records, copied_nbytes)

    def _copies(self, engine: Engine, file: File) -> bool:
        """Whether host memory goes through buffers, which lie on huge pages, rather than from where it lies."""
        if self.zero_copy is None and not (file.direct and engine.capabilities.persistent):
            return False  # the page cache is a copy already, and "null" shows what the software could do
        return not choose_zero_copy(self.zero_copy, os.path.dirname(self.target))

    def _blocks(
        self, archive: ArchivePlan, addresses: Int64Array, devices: Int64Array, file: File, cut_nbytes: int
    ) -> list[Extent]:
        extents = plan_extents(
            archive, addresses, memory_alignment=file.memory_alignment, cut_nbytes=cut_nbytes, devices=devices
        )
        assembled_nbytes = min(self.block_nbytes, DEFAULT_BLOCK_NBYTES)  # of the pool
        return list(cut_into_blocks(extents, round_up(self.block_nbytes, cut_nbytes), round_up(assembled_nbytes, cut_nbytes)))


def _with_device_addresses(flat: FlatObject, addresses: Int64Array, devices: Int64Array, work: WorkSoFar) -> Int64Array:
    """The address of each storage, on devices too. An engine knows no streams: what produces the bytes has ended then."""
    for event in work.values():
        CUDA.synchronize(event)
    everywhere = addresses.copy()
    for index in np.flatnonzero(devices >= 0).tolist():
        everywhere[index] = flat.storages[index].data_ptr()
    return everywhere


def _max_blocks(flat: FlatObject, block_nbytes: int) -> int:
    """As many transfers as the file can take, at most: large storages have an interior and what lies before it."""
    large = sum(nbytes >= LARGE_NBYTES for nbytes in flat.storage_nbytes)
    return flat.nbytes // min(block_nbytes, DEFAULT_BLOCK_NBYTES) + 2 * large + 1  # what is copied goes in the latter


def _prefix(path: Path) -> str:
    """Folder name inside the zip: the file's name without its last extension; "archive" where that is empty or not ASCII.

    So torch has it, which also splits names at a backslash.
    """
    name = os.fsdecode(path).rpartition("/")[2].rpartition("\\")[2]
    stem = name.rpartition(".")[0] if "." in name else name
    return stem if stem and name.isascii() else "archive"
