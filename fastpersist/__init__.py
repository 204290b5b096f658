"""fastpersist: checkpoints of PyTorch models at the speed of the disk, never torn, never lost."""

from fastpersist._version import __version__
from fastpersist.checkpoint import save
from fastpersist.engines import Availability, Engine, available, open_engine
from fastpersist.errors import (
    AlignmentError,
    CheckpointFormatError,
    CorruptCheckpointError,
    EngineStateError,
    EngineUnavailableError,
    FastPersistError,
    NotDurableError,
    PoolExhausted,
    QueueFull,
    TransferError,
)
from fastpersist.reports import SaveReport

__all__ = [
    "AlignmentError", "Availability", "CheckpointFormatError", "CorruptCheckpointError", "Engine", "EngineStateError",
    "EngineUnavailableError", "FastPersistError", "NotDurableError", "PoolExhausted", "QueueFull", "SaveReport",
    "TransferError", "__version__", "available", "open_engine", "save",
]  # fmt: skip
