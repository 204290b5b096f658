"""fastpersist: checkpoints of PyTorch models at the speed of the disk, never torn, never lost."""

from fastpersist._version import __version__
from fastpersist.background import async_save
from fastpersist.checkpoint import inspect, load, save, verify
from fastpersist.checkpointer import Checkpointer
from fastpersist.engines import Availability, Engine, available, open_engine
from fastpersist.errors import (
    AlignmentError,
    CheckpointerBusyError,
    CheckpointFormatError,
    CorruptCheckpointError,
    EngineStateError,
    EngineUnavailableError,
    FastPersistError,
    NotDurableError,
    PoolExhausted,
    QueueFull,
    RecycleRefusedError,
    SaveCancelledError,
    TransferError,
)
from fastpersist.pending import PendingSave
from fastpersist.reports import CheckpointInfo, RecordInfo, SaveReport, TensorInfo, VerifyReport

__all__ = [
    "AlignmentError", "Availability", "CheckpointFormatError", "CheckpointInfo", "Checkpointer", "CheckpointerBusyError",
    "CorruptCheckpointError", "Engine", "EngineStateError", "EngineUnavailableError", "FastPersistError", "NotDurableError",
    "PendingSave", "PoolExhausted", "QueueFull", "RecordInfo", "RecycleRefusedError", "SaveCancelledError", "SaveReport",
    "TensorInfo", "TransferError", "VerifyReport", "__version__", "async_save", "available", "inspect", "load", "open_engine",
    "save", "verify",
]  # fmt: skip
