"""An object as its checkpoint describes it, over a mapping of the file: only what is looked at is read.

It tells which values a state dict has, and which storages each of them views, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastpersist.archive.directory import PICKLE, Directory
from fastpersist.archive.pickling import flatten
from fastpersist.archive.selection import walk
from fastpersist.archive.unpickling import unflatten
from fastpersist.transfer.source import CheckpointFile


class Sketch:
    """``obj`` is the whole object; its storages are views of the mapped file, in the file's byte order.

    Raises what unflatten raises.
    """

    def __init__(self, source: CheckpointFile, directory: Directory, *, weights_only: bool) -> None:
        self._source = source
        self._directory = directory
        self._mapped = torch.UntypedStorage.from_file(source.path, False, source.nbytes)
        self._record_at: dict[int, int] = {}
        pickle_bytes = source.record(directory, PICKLE)
        self.obj: Any = unflatten(pickle_bytes or b"", self.storage, weights_only=weights_only)

    def storage(self, key: str) -> torch.UntypedStorage | None:
        """The storage under ``key``, unread; None if the checkpoint has none."""
        record = self._directory.index.get(f"data/{key}")
        if record is None:
            return None
        nbytes = int(self._directory.nbytes[record])
        if nbytes == 0:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        start = self._source.data_offset(self._directory, record)
        self._record_at[start] = record
        view: torch.UntypedStorage = self._mapped[start : start + nbytes]
        return view

    def record_of(self, storage: torch.UntypedStorage) -> int | None:
        """Place in the directory of the record that a storage of this object maps; None for one without bytes."""
        return self._record_at.get(storage.data_ptr() - self._mapped.data_ptr())

    def records_of(self, values: Iterable[Any]) -> list[int]:
        """Places of all records whose storages the values view, ascending: found by pickling them."""
        found = {self.record_of(storage) for storage in flatten(list(values)).storages}
        return sorted(record for record in found if record is not None)

    def choose(self, wanted: Callable[[str], bool]) -> dict[str, Any]:
        """The values of the state dict whose path is wanted, by path. Raises as selection.walk does."""
        chosen: dict[str, Any] = {}

        def visit(path: str, value: Any) -> bool:
            if wanted(path):
                chosen[path] = value
            return True

        walk(self.obj, visit)
        return chosen
