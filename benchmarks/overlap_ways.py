"""Ways to save a checkpoint while a model is trained, and what each of them leaves open."""

from __future__ import annotations

import copy
import errno
import mmap
import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peers import DCP_MISSING, dcp_load, deepspeed_saver
from saving import Saver, sync_file, torch_save_published
from verifying import compare, payload_nbytes, verify_file, verify_in_memory

import fastpersist

State = dict[str, Any]
NONE = "none"
_BUFFER_NBYTES = 16 << 20


class Saving:
    """One way, which saves to names in ``folder``; this one saves nothing.

    After ``save`` the tensors may be changed by steps of ``optimizer``, and by nothing else. ``lacks`` says what is missing
    of: bit for bit the state of that step, whole or not at all under its name, on stable storage, with checksums.
    """

    lacks = ""
    through_page_cache = False

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self.path = folder / "checkpoint.pt"
        self.optimizer = optimizer

    def save(self, state: State) -> None:
        """Save, or begin to; waits for the save before."""

    def drain(self) -> None:
        """Wait until all that was begun is complete."""

    def verify(self, expected: State) -> None:
        """Raises DifferenceError unless the last checkpoint is ``expected``."""


class TorchSave(Saving):
    """torch.save, synced, renamed, the folder synced."""

    through_page_cache = True

    def save(self, state: State) -> None:
        torch_save_published(state, self.path)

    def verify(self, expected: State) -> None:
        verify_file(self.path, expected)


class Blocking(Saving):
    """fastpersist.save."""

    def save(self, state: State) -> None:
        fastpersist.save(state, self.path)

    def verify(self, expected: State) -> None:
        verify_file(self.path, expected)


class Background(Saving):
    """fastpersist.async_save of copies."""

    _pending: fastpersist.PendingSave | None = None

    def save(self, state: State) -> None:
        self.drain()
        self._pending = self.begin(state)

    def begin(self, state: State) -> fastpersist.PendingSave:
        """Call async_save."""
        return fastpersist.async_save(state, self.path)

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def verify(self, expected: State) -> None:
        verify_file(self.path, expected)


class Guarded(Background):
    """fastpersist.async_save without copies."""

    def begin(self, state: State) -> fastpersist.PendingSave:
        return fastpersist.async_save(state, self.path, snapshot=False, guard=self.optimizer)


class BareWrites(Saving):
    """As many bytes from one buffer on huge pages, by direct writes in a thread: what the disk itself takes of the machine."""

    lacks = "all of it: these are no checkpoints"

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, optimizer)
        self._buffer = mmap.mmap(-1, _BUFFER_NBYTES)
        self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self._buffer[:] = os.urandom(_BUFFER_NBYTES)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def save(self, state: State) -> None:
        self.drain()
        self._pending = self._thread.submit(self._write, payload_nbytes(state))

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _write(self, nbytes: int) -> None:
        self.path.unlink(missing_ok=True)
        fileno = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        try:
            blocks = max(1, round(nbytes / _BUFFER_NBYTES))
            os.posix_fallocate(fileno, 0, blocks * _BUFFER_NBYTES)
            for index in range(blocks):
                if os.pwrite(fileno, self._buffer, index * _BUFFER_NBYTES) != _BUFFER_NBYTES:
                    raise OSError(errno.EIO, "a short write", str(self.path))
            os.fdatasync(fileno)
        finally:
            os.close(fileno)


class Distributed(Saving):
    """torch.distributed.checkpoint.async_save in one process, without a process group; its copies keep their memory.

    It writes a folder and replaces none. So there are two, in turn: the last complete checkpoint stays while the next is
    written. The one that is written over loses its metadata first, by which DCP tells that a checkpoint is complete.
    """

    lacks = "its folders are never synced: after a power cut the checkpoint may not be found"
    through_page_cache = True

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, optimizer)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it warns in a thread of its own
        gpu = optimizer.param_groups[0]["params"][0].is_cuda
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=gpu)
        )
        self._folders = [folder / "checkpoint-0", folder / "checkpoint-1"]
        self._pending: Future[Any] | None = None

    def save(self, state: State) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import async_save

        self.drain()
        self._folders.reverse()
        (self._folders[0] / ".metadata").unlink(missing_ok=True)
        writer = FileSystemWriter(self._folders[0], sync_files=True)
        pending = async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        assert isinstance(pending, Future)
        self._pending = pending

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def verify(self, expected: State) -> None:
        targets: dict[object, object] = {key: copy.deepcopy(value) for key, value in expected.items()}
        _zero(targets)
        dcp_load(targets, self._folders[0])
        compare(targets, expected, "object")


class DeepSpeed(Saving):
    """DeepSpeed's FastFileWriter, renamed, the folder synced."""

    lacks = "no checksums"

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, optimizer)
        saver = deepspeed_saver()
        assert isinstance(saver, Saver)
        self._save = saver.save

    def save(self, state: State) -> None:
        temporary = self.path.with_suffix(".temporary")
        self._save(state, temporary)
        temporary.rename(self.path)
        sync_file(self.path.parent)

    def verify(self, expected: State) -> None:
        verify_in_memory(self.path, expected)


BARE_WRITES = "bare writes"
DCP = "DCP async_save"
DEEPSPEED = "DeepSpeed FastFileWriter"
WAYS: dict[str, Callable[[Path, torch.optim.Optimizer], Saving]] = {
    NONE: Saving,
    BARE_WRITES: BareWrites,
    "torch.save": TorchSave,
    "fastpersist.save": Blocking,
    "async_save snapshot": Background,
    "async_save guard": Guarded,
    DCP: Distributed,
    DEEPSPEED: DeepSpeed,
}


def refusal(name: str) -> str | None:
    """Why a way cannot run here; None if it can."""
    if name == DCP and not torch.distributed.is_available():
        return DCP_MISSING
    if name == DEEPSPEED and not isinstance(saver := deepspeed_saver(), Saver):
        return saver.reason
    return None


def _zero(value: object) -> None:
    """What is loaded must come from the checkpoint."""
    if isinstance(value, torch.Tensor):
        value.detach().zero_()
    elif isinstance(value, dict):
        for member in value.values():
            _zero(member)
