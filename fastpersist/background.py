"""``async_save``: the same save beside training, by one thread of its own, with nothing lost on the way.

The object is pickled, and what may change is copied, before ``async_save`` returns; the rest is ``SaveJob.run`` in the thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from fastpersist.archive.pickling import FlatObject, flatten
from fastpersist.engines import Engine
from fastpersist.guarding import Optimizers, as_optimizers, guarded_storages, hold_next_step, remove_idle_hooks
from fastpersist.memory.available import available_nbytes
from fastpersist.memory.staging import shared_staging
from fastpersist.pending import PendingSave, raise_what_nobody_asked_about
from fastpersist.progress import Progress
from fastpersist.saving_thread import saving_thread
from fastpersist.transfer.saving import SaveJob
from fastpersist.transfer.snapshot import Snapshot


def async_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    snapshot: bool = True,
    guard: Optimizers | None = None,
    max_staging_nbytes: int | None = None,
    max_pending: int = 1,
    engine: str = "auto",
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
    checksum: bool = True,
    durable: bool = True,
    layout: str = "auto",
    zero_copy: bool | None = None,
    recycle: str | os.PathLike[str] | None = None,
    pickle_protocol: int = 2,
    progress: bool | Progress = False,
) -> PendingSave:
    """Begin to save ``obj`` as ``save`` does, and return as soon as the caller may go on; a thread does the rest.

    snapshot=True: returns once every byte is in memory of ours or written, so that the tensors may be changed at once. Such
    memory is kept for the next save. max_staging_nbytes bounds it (default: half of the available memory, a container's limit
    included); what does not fit is written before the call returns.

    snapshot=False: nothing is copied, and no tensor may be changed until ``PendingSave.staged()`` is true or ``wait()``
    returns. guard, an optimizer or several, sees to that: the storages of its parameters and its state stay where they are,
    and its next step waits for them; all others are copied as above before the call returns (a forward pass changes the
    buffers of BatchNorm; gradients, averages and learning rates change between steps). A step that is replayed from a CUDA
    graph calls no hooks and does not wait: then use snapshot=True.

    max_pending: with so many saves unfinished the call waits for the oldest. Saves are written one after another, in the
    order of the calls. engine: a name; an open engine belongs to one thread. The other options are those of ``save``, and
    ``progress`` is called in the thread.

    What neither arguments nor the environment say is chosen for the training's sake: zero_copy is True, as copies cost CPU
    time, and blocks are of 32 MiB at least, as each group of them takes the interpreter's lock three times.

    Raises at once what ``save`` raises before it opens a file; later failures come from the PendingSave. One that nobody has
    asked about is logged, raised by the next call of async_save, and printed when the interpreter exits.
    """
    return begin_save(
        obj, path, snapshot=snapshot, guard=guard, max_staging_nbytes=max_staging_nbytes, max_pending=max_pending,
        pickle_protocol=pickle_protocol, engine=engine, block_nbytes=block_nbytes, queue_depth=queue_depth, checksum=checksum,
        durable=durable, layout=layout, zero_copy=zero_copy, recycle=recycle, progress=progress,
    )  # fmt: skip


def begin_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    snapshot: bool = True,
    guard: Optimizers | None = None,
    max_staging_nbytes: int | None = None,
    max_pending: int = 1,
    pickle_protocol: int = 2,
    beside_training: bool = True,
    afterwards: Callable[[], object] | None = None,
    **job_options: Any,
) -> PendingSave:
    """async_save with all options of SaveJob.check. ``afterwards`` is called in the thread when the file is published, before
    anybody is told. ``beside_training`` False: the caller will wait for its end.
    """
    started = time.perf_counter()
    if isinstance(job_options.get("engine"), Engine):
        raise TypeError("async_save takes the name of an engine: an open one belongs to the thread that first used it")
    if snapshot and guard is not None:
        raise ValueError("guard is for snapshot=False: with snapshot=True every tensor may be changed at once")
    if saving_thread().is_this_thread():
        raise RuntimeError("async_save cannot be called from the saving thread (a callback): it would wait for itself")
    if max_pending < 1:
        raise ValueError(f"max_pending must be at least 1, not {max_pending}")
    if max_staging_nbytes is not None and max_staging_nbytes < 0:
        raise ValueError(f"max_staging_nbytes must not be negative, but it is {max_staging_nbytes}")
    optimizers = [] if guard is None else as_optimizers(guard)
    job = SaveJob.check(path, beside_training=beside_training, **job_options)
    remove_idle_hooks()
    raise_what_nobody_asked_about()
    with saving_thread().place(max_pending) as place:
        raise_what_nobody_asked_about()  # the save that was waited for may have failed
        flat = flatten(obj, pickle_protocol)
        keep = _left_alone(flat, optimizers) if guard is not None else set() if snapshot else set(range(len(flat.storages)))
        limit = partial(_staging_limit, max_staging_nbytes)
        staged = Snapshot(flat, keep, shared_staging(), layout=job.layout, limit=limit)
        pending = PendingSave(job, staged, started, afterwards)
        try:
            if optimizers:
                hold_next_step(optimizers, pending._wait_until_staged, pending.staged)
            has_thread = place.take(pending._run)
            staged.copy()
            if not has_thread:
                saving_thread().carry_out_all()
            staged.wait_until_copied()
        except BaseException:  # Ctrl-C above all: the copies are not complete
            if place.taken:
                pending.cancel()
            else:
                pending._end_before_it_began()
            staged.end_copying()
            staged.wait_until_free()
            raise
    return pending


def _left_alone(flat: FlatObject, optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    guarded = guarded_storages(optimizers)
    return {index for index, storage in enumerate(flat.storages) if storage._cdata in guarded}


def _staging_limit(max_nbytes: int | None, nbytes: int) -> int:
    """How much of ``nbytes`` to stage. By default no more than what is at hand from the last save, or half of all there is."""
    if max_nbytes is not None:
        return max_nbytes
    at_hand = shared_staging().free_nbytes
    return nbytes if nbytes <= at_hand else (available_nbytes() + at_hand) // 2  # (a hundred system calls)
