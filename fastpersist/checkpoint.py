"""The verbs. ``save`` leads through ``archive/pickling.py`` to ``transfer/saving.py``, ``load`` to ``transfer/loading.py``."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from fastpersist.archive.pickling import flatten
from fastpersist.archive.selection import Selection, as_predicate, select
from fastpersist.archive.unpickling import MapLocation, reads_no_data, resolve_weights_only
from fastpersist.engines import DEFAULT_BLOCK_NBYTES, Engine
from fastpersist.options import choose
from fastpersist.progress import Progress
from fastpersist.reports import CheckpointInfo, SaveReport, VerifyReport
from fastpersist.transfer.inspection import describe
from fastpersist.transfer.loading import (
    Reading,
    check_file,
    load_legacy,
    load_mapped,
    load_records,
    load_without_data,
    path_named,
    reading_engine,
)
from fastpersist.transfer.saving import SaveJob
from fastpersist.transfer.source import CheckpointFile

log = logging.getLogger("fastpersist")


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
    zero_copy: bool | None = None,
    recycle: str | os.PathLike[str] | None = None,
    pickle_protocol: int = 2,
    progress: bool | Progress = False,
) -> SaveReport:
    """Save ``obj`` as a checkpoint that ``torch.load`` reads, and return when it is on stable storage.

    At every instant ``path`` holds the old complete file or the new complete file. A save that fails leaves the old file
    as it was and no other file behind. Tensors must not be changed during the call.

    Tensors on CUDA devices are copied through page-locked buffers, while what was copied before is written; what the calling
    thread's current streams are still to do comes first. Engine "kvikio" writes them from device memory, and then storages of
    256 KiB and more get no checksum (0, as torch.save writes with its check off): nothing on the host has seen their bytes.
    "auto" takes it for them where a trial write has proven that GPUDirect Storage works, and without ``recycle``.

    engine: a name ("auto", "io_uring", "posix", "null") or an open engine. block_nbytes: bytes of one transfer, a
    multiple of 4096. queue_depth: transfers in flight. checksum: store the CRC-32 of each storage. durable: sync the file
    and its directory; without it the file survives the death of the process, not that of the machine. layout: "auto"
    places storages for the fastest transfer; "torch" gives the offsets that torch calculates for itself, and the same
    bytes for the same object. pickle_protocol: 2 or 3. progress: True for a bar, or a function of (bytes done, bytes in
    all). zero_copy: True writes large tensors from where they lie, which takes the least CPU time; False copies them into
    buffers on huge pages first, which is faster where a disk takes small pages slowly; None copies for disks of virtual
    machines (virtio), unless torch's memory is on huge pages anyway.

    recycle: path of a retired checkpoint that nobody needs any more: the new one is written over its blocks, which is
    faster than having fresh ones allocated, and the retired path is gone afterwards. It must lie on the target's
    filesystem, have one name, be nobody's open or mapped file and belong to whoever saves. Its owner, mode and extended
    attributes go to the new file, but for the mode where ``path`` exists. A power cut or a kill leaves under the retired
    path the complete retired file or nothing. RecycleRefusedError (a ValueError) means that nothing was changed. A save
    that fails after the file was taken over has lost it, and nothing else: a note on the exception says so.

    Raises TypeError or ValueError for arguments that cannot work, EngineUnavailableError for a named engine that cannot
    run here, what pickling ``obj`` raises, OSError for a directory that is missing or not writable, TransferError (an
    OSError with the true errno, ENOSPC above all) for a write that fails, and NotDurableError if only the last step, the
    directory's sync, failed.
    """
    started = time.perf_counter()
    job = SaveJob.check(
        path, engine=engine, block_nbytes=block_nbytes, queue_depth=queue_depth, checksum=checksum, durable=durable,
        layout=layout, zero_copy=zero_copy, recycle=recycle, progress=progress,
    )  # fmt: skip
    flat = flatten(obj, pickle_protocol)  # nothing is on disk yet: what cannot be pickled costs nothing
    return job.run(flat, started=started)


def load(
    path: str | os.PathLike[str],
    *,
    map_location: MapLocation = None,
    weights_only: bool | None = True,
    mmap: bool = False,
    verify: bool = False,
    only: Selection | None = None,
    engine: str | Engine = "auto",
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
    progress: bool | Progress = False,
) -> Any:
    """Load what ``torch.load`` would load from ``path``, by direct reads into the memory of the new tensors.

    map_location, weights_only: as for torch.load; the restricted unpickler is torch's own. mmap: map the file instead of
    reading it, as torch.load(mmap=True) does. verify: check the stored CRC-32 of every record that is read. only: a
    prefix, several prefixes or a function of the path (see fastpersist.archive.selection): only those values of a state
    dict are read, the others are absent. engine: "auto" reads through the page cache where the file lies in it already.
    block_nbytes, queue_depth, progress: as for save.

    With map_location="cuda", "cuda:1" or such a torch.device storages go to that device as they are read, through page-locked
    buffers of at most 64 MiB or, with engine "kvikio" and without verify, past host memory. Any other map_location that
    names devices, and files of the other byte order, are read into host memory first and moved then.

    FakeTensorMode and map_location="meta" read no data. Files of torch before 1.6 are left to torch.load.
    Storages of 1 MiB and more have memory of their own, page-aligned where the file's offset is; smaller ones share memory
    in pieces of about 4 MiB. Their memory cannot be resized in place.

    Raises FileNotFoundError and its like, CheckpointFormatError for a file that is no checkpoint, truncated, or at odds
    with itself, CorruptCheckpointError (a CheckpointFormatError) where a checksum does not match, pickle.UnpicklingError
    with torch's message for what weights_only refuses, TypeError where ``only`` meets no state dict, KeyError where it
    selects nothing, TransferError for a read that fails.
    """
    choice = choose(engine, block_nbytes, queue_depth, path)
    weights_only = resolve_weights_only(weights_only)
    wanted = None if only is None else as_predicate(only)
    without_data = reads_no_data(map_location)
    if verify and (mmap or without_data):
        raise ValueError("verify=True checks data that is read, and this load reads none: call fastpersist.verify(path) first")
    with CheckpointFile(path) as source:
        if source.is_legacy():
            log.info("%s: a file of torch before 1.6, left to torch.load", source.path)
            obj = load_legacy(source.path, map_location=map_location, weights_only=weights_only, mmap=mmap)
            return obj if wanted is None else select(obj, wanted)
        directory = source.directory()
        if without_data or mmap:
            if without_data:
                obj = load_without_data(source, directory, map_location=map_location, weights_only=weights_only)
            else:
                obj = load_mapped(source, directory, map_location=map_location, weights_only=weights_only)
            return obj if wanted is None else select(obj, wanted)
        with reading_engine(choice, source, through_cache=engine == "auto") as (active, direct):
            own = active is not engine
            reading = Reading(active, own, direct, choice.block_nbytes, choice.queue_depth, verify, progress)
            return load_records(source, directory, reading, wanted, map_location=map_location, weights_only=weights_only)


def verify(path: str | os.PathLike[str], *, engine: str | Engine = "auto", progress: bool | Progress = False) -> VerifyReport:
    """Read the whole file once, and check every header against the directory and every checksum against the data.

    Returns a report if nothing is wrong. Raises CorruptCheckpointError for data that contradicts its checksum and
    CheckpointFormatError for everything else: the first bad record is named, with its offset. A file of torch before 1.6
    has no checksums and is refused.
    """
    started = time.perf_counter()
    choice = choose(engine, None, None, path)
    choice = choice._replace(block_nbytes=min(choice.block_nbytes, DEFAULT_BLOCK_NBYTES))  # of the pool
    with CheckpointFile(path) as source:
        directory = source.zip_directory()
        with reading_engine(choice, source, through_cache=engine == "auto") as (active, direct):
            reading = Reading(active, active is not engine, direct, choice.block_nbytes, choice.queue_depth, True, progress)
            checked = check_file(source, directory, reading)
    return VerifyReport(
        path=source.path,
        nbytes=source.nbytes,
        records=len(checked),
        records_without_checksum=sum(not record.checksummed for record in checked),
        seconds=time.perf_counter() - started,
        engine=active.name,
    )


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """What the checkpoint holds: records, their places and checksums, and the tensors' names, dtypes and shapes.

    Only metadata is read. Raises CheckpointFormatError for a file that is no zip checkpoint, or at odds with itself.
    """
    with CheckpointFile(path) as source, path_named(source):
        return describe(source, source.zip_directory())
