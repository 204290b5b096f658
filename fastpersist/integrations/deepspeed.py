"""DeepSpeed checkpoints through fastpersist.

    import deepspeed
    from fastpersist.integrations.deepspeed import install

    install(deepspeed)                    # before deepspeed.initialize: every engine made from now on
    engine, *_ = deepspeed.initialize(...)
    engine.save_checkpoint(folder)        # each file atomic and durable; the files stay what torch.load reads

``install(engine)`` changes an engine that exists already. Checkpoints go both ways: DeepSpeed's own writer and this one read
each other's files.

Written against DeepSpeed 0.19, whose checkpoint engines have the methods below.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

from fastpersist.checkpoint import load, save
from fastpersist.engines import engine_class
from fastpersist.errors import NotDurableError

try:
    import deepspeed.runtime.engine as deepspeed_engine
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
except ModuleNotFoundError as error:
    raise ImportError(
        f"fastpersist.integrations.deepspeed needs DeepSpeed: pip install deepspeed ({error})", name=error.name
    ) from error

log = logging.getLogger("fastpersist")


class FastPersistCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's checkpoint engine, each of whose files is on stable storage when ``save`` returns.

    engine, block_nbytes, queue_depth, checksum: as for fastpersist.save. Raises ValueError for an unknown engine name.
    """

    def __init__(
        self,
        config_params: object = None,
        *,
        engine: str = "auto",
        block_nbytes: int | None = None,
        queue_depth: int | None = None,
        checksum: bool = True,
    ) -> None:
        super().__init__(config_params)
        if engine != "auto":
            engine_class(engine)
        self.name = "FastPersistCheckpointEngine"
        self._sizes: dict[str, Any] = {"engine": engine, "block_nbytes": block_nbytes, "queue_depth": queue_depth}
        self._checksum = checksum

    def create(self, info: CheckpointCommitInfo) -> None:
        """Called before the files of a checkpoint are saved. Nothing needs to be prepared."""
        log.info("checkpoint %s is about to be saved to %s", info.tag, info.save_dir)

    def save(self, state_dict: object, path: str | os.PathLike[str]) -> None:
        """As fastpersist.save; raises what that raises. An earlier file of that name stays whole until the new one is."""
        log.info("%s", save(state_dict, path, checksum=self._checksum, **self._sizes))

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """As fastpersist.load with weights_only=False: DeepSpeed keeps objects of its own classes in its checkpoints.

        So a checkpoint can run code when it is loaded, here as with DeepSpeed's own engine: load only what you trust.
        """
        return load(path, map_location=map_location, weights_only=False, **self._sizes)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Called when the files of a checkpoint are saved; they are durable already. Makes the names of its folders so too.

        Raises NotDurableError where the filesystem refuses.
        The file ``latest``, which DeepSpeed writes afterwards by itself, is not synced by anybody.
        """
        folder = os.path.abspath(info.save_dir)
        _sync_folder(folder)
        with contextlib.suppress(PermissionError):  # the folder above may belong to somebody else, who has made it durable
            _sync_folder(os.path.dirname(folder))
        return True

    def makedirs(self, path: str | os.PathLike[str], exist_ok: bool = False) -> None:
        """As os.makedirs."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """One process of those that hold the same weights writes them: the first."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """False: a save is finished when ``save`` returns, and nothing is left to do in the background."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Only decoupled engines keep it."""

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """None, as nothing awaits a commit."""
        return None

    def cleanup(self) -> None:
        """Nothing outlives a call of ``save`` or ``load``."""

    def preserves_storage_sharing(self) -> bool:
        """True, as for torch.save: a view brings the whole of its storage, so DeepSpeed clones slices of flat buffers first."""
        return True


def install(
    target: Any,
    *,
    engine: str = "auto",
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
    checksum: bool = True,
) -> Callable[[], None]:
    """Let DeepSpeed save and load through fastpersist. Returns a function that undoes it.

    ``target`` is the module ``deepspeed``, for all engines that ``deepspeed.initialize`` makes afterwards, or one of those
    engines. Raises TypeError for anything else. The other arguments are those of FastPersistCheckpointEngine. Settings in
    DeepSpeed's configuration that choose another writer are overruled.
    """

    def make(config_params: object = None, *_: object, **__: object) -> FastPersistCheckpointEngine:
        return FastPersistCheckpointEngine(
            config_params, engine=engine, block_nbytes=block_nbytes, queue_depth=queue_depth, checksum=checksum
        )

    if isinstance(target, deepspeed_engine.DeepSpeedEngine):
        return _install_in_engine(target, make(target._config))
    if getattr(target, "__name__", None) == "deepspeed":
        make()  # a wrong argument should be told now
        return _install_in_module(make)
    raise TypeError(f"install takes the module deepspeed or one of its engines, not {type(target).__name__}")


def _install_in_module(make: Callable[..., FastPersistCheckpointEngine]) -> Callable[[], None]:
    """DeepSpeed has no registry of checkpoint engines: its engines ask this one function."""
    previous = deepspeed_engine.create_checkpoint_engine
    deepspeed_engine.create_checkpoint_engine = make

    def undo() -> None:
        deepspeed_engine.create_checkpoint_engine = previous

    return undo


def _install_in_engine(target: Any, ours: FastPersistCheckpointEngine) -> Callable[[], None]:
    """The writer decides which processes save, so that is decided again, as DeepSpeed did with the writer it had."""
    previous = target.checkpoint_engine, target.save_non_zero_checkpoint

    def undo() -> None:
        target.checkpoint_engine, target.save_non_zero_checkpoint = previous

    rank = target.local_rank if target.use_node_local_storage() else _data_parallel_rank()
    target.checkpoint_engine = ours
    target.save_non_zero_checkpoint = ours.is_data_parallel_writer(rank) or bool(
        target.zero_optimization_partition_weights() and target.is_first_weights_partition_group()
    )
    return undo


def _data_parallel_rank() -> int:
    rank: int = deepspeed_engine.groups._get_sequence_data_parallel_rank()
    return rank


def _sync_folder(path: str) -> None:
    fileno = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fileno)
    except OSError as error:
        raise NotDurableError(error.errno or 0, "syncing the checkpoint's folder", path) from error
    finally:
        os.close(fileno)
