"""A checkpoint over a mapping of its file, and what that tells: which storages the values of a state dict view."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch

from fastpersist.archive.directory import PICKLE, Directory
from fastpersist.archive.pickling import flatten
from fastpersist.archive.selection import walk
from fastpersist.archive.unpickling import unflatten
from fastpersist.errors import CheckpointFormatError, brief
from fastpersist.transfer.source import CheckpointFile

MAP_NORESERVE = 0x4000  # <asm-generic/mman.h>; the mmap module of Python 3.11 does not name it


class MappedStorages:
    """The storages of a file as views of a mapping of it: only what is looked at is read."""

    def __init__(self, source: CheckpointFile, directory: Directory) -> None:
        self._source = source
        self._directory = directory
        # Private: whatever is done to a storage, the file stays as it is. No memory is set aside for that beforehand.
        mapping = mmap.mmap(source.fileno, source.nbytes, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
        self._mapped = torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
        self._record_at: dict[int, int] = {}

    def storage(self, key: str) -> torch.UntypedStorage | None:
        """The storage under ``key``, unread; None if the checkpoint has none."""
        record = self._directory.index.get(f"data/{key}")
        if record is None:
            return None
        start, nbytes = self._source.data_offset(self._directory, record), int(self._directory.nbytes[record])
        self._record_at[start] = record
        view: torch.UntypedStorage = self._mapped[start : start + nbytes]
        return view

    def record_of(self, storage: torch.UntypedStorage) -> int | None:
        """Place in the directory of the record that a storage maps; None for one that is not of this file."""
        return self._record_at.get(storage.data_ptr() - self._mapped.data_ptr())


class Sketch(MappedStorages):
    """``obj`` is the whole object, on the host, over a private mapping of the file.

    In a file of the other byte order storages are left as they are: which of them a value views does not depend on it. Only
    where the object cannot be rebuilt so (nested and sparse tensors look at their indices) are all of them swapped, in
    memory. Raises what unflatten raises.
    """

    def __init__(self, source: CheckpointFile, directory: Directory, *, weights_only: bool, order: str) -> None:
        super().__init__(source, directory)
        self._pickle_bytes = source.record(directory, PICKLE) or b""
        self._weights_only = weights_only
        self._swapped_order = None if order == sys.byteorder else order
        try:
            self.obj = self._rebuild(sys.byteorder)
        except Exception:
            if not self._swap():
                raise

    def _rebuild(self, order: str) -> Any:
        return unflatten(self._pickle_bytes, self.storage, weights_only=self._weights_only, place=_stay, order=order)

    def _swap(self) -> bool:
        """Rebuild the object over swapped storages; False if that is not called for, or was done already."""
        order, self._swapped_order = self._swapped_order, None
        if order is not None:
            self.obj = self._rebuild(order)
        return order is not None

    def choose(self, wanted: Callable[[str], bool]) -> tuple[set[str], list[int]]:
        """Of the values of the state dict that are wanted: their paths, and the records that they need.

        Raises as selection.walk does, and CheckpointFormatError for values that cannot be searched for storages.
        """
        paths: set[str] = set()
        values: list[Any] = []

        def visit(path: str, value: Any) -> bool:
            if wanted(path):
                paths.add(path)
                values.append(value)  # two values may have one path: {"a.b": ..., "a": {"b": ...}}
            return True

        walk(self.obj, visit)
        try:
            storages = flatten(values).storages  # pickling a value meets all of its storages
        except Exception as error:
            if self._swap():
                return self.choose(wanted)
            raise CheckpointFormatError(f"the chosen values cannot be searched for storages: {brief(error)}") from error
        records = {self.record_of(storage) for storage in storages}
        return paths, sorted(record for record in records if record is not None)


def _stay(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    return storage
