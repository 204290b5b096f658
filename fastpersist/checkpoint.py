"""The verbs. Read ``save`` from top to bottom to follow a checkpoint from an object to a durable file."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import numpy as np

from fastpersist.archive.layout import LAYOUTS, ArchivePlan, plan
from fastpersist.archive.pickling import FlatObject, flatten
from fastpersist.engines import DEFAULT_BLOCK_NBYTES, Engine, File
from fastpersist.memory.alignment import PAGE_NBYTES, round_up
from fastpersist.memory.buffers import shared_pool
from fastpersist.options import ready_engine, resolve_block_nbytes, resolve_queue_depth
from fastpersist.progress import Progress, ProgressCounter, progress_reporter
from fastpersist.reports import SaveReport
from fastpersist.transfer.extents import cut_into_blocks, plan_extents
from fastpersist.transfer.image import ArchiveImage
from fastpersist.transfer.publish import Publication, resolve_target
from fastpersist.transfer.staging import copy_from_device, host_addresses, residues
from fastpersist.transfer.writer import write_blocks


def save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    engine: str | Engine = "auto",
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
    checksum: bool = True,
    durable: bool = True,
    layout: str = "auto",
    pickle_protocol: int = 2,
    progress: bool | Progress = False,
) -> SaveReport:
    """Save ``obj`` as a checkpoint that ``torch.load`` reads, and return when it is on stable storage.

    At every instant ``path`` holds the old complete file or the new complete file. A save that fails leaves the old file
    as it was and no other file behind. Tensors must not be changed during the call.

    engine: a name ("auto", "io_uring", "posix", "null") or an open engine. block_nbytes: bytes of one transfer, a
    multiple of 4096. queue_depth: transfers in flight. checksum: store the CRC-32 of each storage. durable: sync the file
    and its directory; without it the file survives the death of the process, not that of the machine. layout: "auto"
    places storages for the fastest transfer; "torch" gives the offsets that torch calculates for itself, and the same
    bytes for the same object. pickle_protocol: 2 or 3. progress: True for a bar, or a function of (bytes done, bytes in
    all).

    Raises TypeError or ValueError for arguments that cannot work, EngineUnavailableError for a named engine that cannot
    run here, what pickling ``obj`` raises, OSError for a directory that is missing or not writable, TransferError (an
    OSError with the true errno, ENOSPC above all) for a write that fails, and NotDurableError if only the last step, the
    directory's sync, failed.
    """
    started = time.perf_counter()
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: use one of {', '.join(map(repr, LAYOUTS))}")
    block_nbytes = resolve_block_nbytes(block_nbytes, engine)
    queue_depth = resolve_queue_depth(queue_depth, engine)
    target = resolve_target(path)

    with ready_engine(engine, target, block_nbytes, queue_depth) as active:
        flat = flatten(obj, pickle_protocol)  # nothing is on disk yet: what cannot be pickled costs nothing
        with _destination(active, target, durable=durable) as (file, publication):
            archive, copied_nbytes = _write(
                flat,
                path,
                target,
                active,
                file,
                block_nbytes,
                queue_depth,
                layout=layout,
                checksum=checksum,
                progress=progress,
            )
            if publication is not None:
                publication.publish()
        return SaveReport(
            path=target,
            nbytes=flat.nbytes,
            file_nbytes=archive.file_nbytes,
            seconds=time.perf_counter() - started,
            engine=active.name,
            direct=file.direct,
            zero_copy_nbytes=flat.nbytes - copied_nbytes,
            copied_nbytes=copied_nbytes,
            sync_seconds=0.0 if publication is None else publication.sync_seconds,
            records=archive.records,
            block_nbytes=block_nbytes,
            queue_depth=queue_depth,
        )


@contextlib.contextmanager
def _destination(engine: Engine, target: str, *, durable: bool) -> Iterator[tuple[File, Publication | None]]:
    """The file to write to, and what publishes it: nothing, where the engine keeps nothing."""
    if engine.capabilities.persistent:
        with Publication(engine, target, durable=durable) as publication:
            yield publication.file, publication
    else:
        with engine.open(target, "w") as file:
            yield file, None


def _write(
    flat: FlatObject,
    path: str | os.PathLike[str],
    target: str,
    engine: Engine,
    file: File,
    block_nbytes: int,
    queue_depth: int,
    *,
    layout: str,
    checksum: bool,
    progress: bool | Progress,
) -> tuple[ArchivePlan, int]:
    """Plan the file, cut it into extents, write them all, and give the file its true length.

    Returns the plan and how many bytes of payload went through a buffer.
    """
    addresses = host_addresses(flat.storages)
    archive = plan(
        _prefix(path),
        flat.pickle_bytes,
        np.array(flat.storage_nbytes, np.int64),
        residues(addresses, file.memory_alignment),
        layout,
    )
    cut_nbytes = max(PAGE_NBYTES, file.offset_alignment)
    extents = plan_extents(archive, addresses, memory_alignment=file.memory_alignment, cut_nbytes=cut_nbytes)
    blocks = cut_into_blocks(
        extents, round_up(block_nbytes, cut_nbytes), round_up(min(block_nbytes, DEFAULT_BLOCK_NBYTES), cut_nbytes)
    )
    image = ArchiveImage(
        archive,
        addresses,
        lambda storage, start, to: copy_from_device(flat.storages[storage], start, to),
        checksum=checksum,
    )
    padded_nbytes = round_up(archive.file_nbytes, cut_nbytes)
    engine.reserve(file, padded_nbytes)
    with progress_reporter(progress, os.path.basename(target)) as report:
        moved = ProgressCounter(report, archive.file_nbytes).add
        copied_nbytes = write_blocks(
            blocks, image, engine, file, shared_pool(), queue_depth=queue_depth, path=target, moved=moved
        )
    if padded_nbytes != archive.file_nbytes:
        engine.resize(file, archive.file_nbytes)
    return archive, copied_nbytes


def _prefix(path: str | os.PathLike[str]) -> str:
    """Folder name inside the zip: the file's name without its last extension; "archive" where that is empty or not ASCII.

    So torch has it, which also splits names at a backslash.
    """
    name = os.path.basename(os.fsdecode(path)).rpartition("\\")[2]
    stem = name.rpartition(".")[0] if "." in name else name
    return stem if stem and name.isascii() else "archive"
