"""DeepSpeed's FastFileWriter, driven as DeepSpeed drives it, on machines with and without a GPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

# What DeepSpeed's own benchmark takes.
_BLOCK_NBYTES, _QUEUE_DEPTH, _BUFFER_NBYTES = 8 << 20, 8, 64 << 20
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class DeepSpeedWriter:
    """One asynchronous handle and one pinned, halved buffer for all saves. Raises what building its library raises."""

    def __init__(self) -> None:
        prepare_environment()
        # Here and not above: importing DeepSpeed takes seconds, reads the environment, and should cost nobody else.
        from deepspeed.io import fast_file_writer
        from deepspeed.ops.op_builder import AsyncIOBuilder
        from deepspeed.ops.op_builder.utils import UtilsBuilder

        quieten()
        # Its CPU accelerator hides this one, though it runs there.
        fast_file_writer.UtilsBuilder = UtilsBuilder
        self._writer_class: Any = fast_file_writer.FastFileWriter
        handle = AsyncIOBuilder().load(verbose=False).aio_handle(_BLOCK_NBYTES, _QUEUE_DEPTH, False, False, 1)
        buffer = handle.new_cpu_locked_tensor(_BUFFER_NBYTES, torch.empty(0, dtype=torch.uint8))
        self._config: Any = fast_file_writer.FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=buffer)
        UtilsBuilder().load(verbose=False)

    def save(self, obj: object, path: Path) -> None:
        """Write torch's format from before 1.6 to the new file ``path``, and sync the file.

        DeepSpeed's build of torch hands all storages to the writer at once. Any other torch writes one after the other
        through Python, at a fraction of the speed, so they are collected here and handed over as that build does it.
        """
        storages: list[tuple[torch.UntypedStorage, torch.dtype]] = []

        def collect(storage: torch.UntypedStorage, _file: object, _real: bool, _save_size: bool, itemsize: int) -> None:
            storages.append((storage, _DTYPES[itemsize]))

        writer = self._writer_class(str(path), self._config)
        self._keep_sizes_alive(writer)
        try:
            with mock.patch.object(torch.UntypedStorage, "_write_file", collect):
                torch.save(obj, writer, _use_new_zipfile_serialization=False)
            writer.save_torch_storage_object_list(storages, save_size=True)
        finally:
            writer.close()  # it syncs the file

    @staticmethod
    def _keep_sizes_alive(writer: Any) -> None:
        """Its byte views own no memory, and it lets go of the tensors with the storages' sizes before it has written them.

        Without a reference to them, the file holds whatever malloc has put there since, and cannot be loaded.
        """
        kept: list[list[torch.Tensor]] = []
        cast_to_bytes = writer._cast_to_byte_tensor

        def cast_and_keep(tensors: list[torch.Tensor]) -> object:
            kept.append(tensors)
            return cast_to_bytes(tensors)

        writer._cast_to_byte_tensor = cast_and_keep


def prepare_environment() -> None:
    """What DeepSpeed reads when it is imported: without a GPU it is to be told so."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def quieten() -> None:
    """Errors only, to be called after the import, which sets its own level."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
