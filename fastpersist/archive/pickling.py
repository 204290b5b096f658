"""From an object to data.pkl and the storages that it refers to: one of the two files that touch torch's internals.

The pickle is byte for byte the one that torch.save writes (torch/serialization.py, ``_save``): a storage is pickled as
the persistent id ("storage", type, key, location, numel), with keys "0", "1", ... in the order of first meeting.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import gc
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

PICKLE_PROTOCOLS = (2, 3)
"""What torch.load(weights_only=True) accepts."""

PersistentId = tuple[str, type, str, str, int]


@dataclass(frozen=True)
class FlatObject:
    """``storages[k]`` holds ``storage_nbytes[k]`` bytes under key ``str(k)`` of ``pickle_bytes``; all are kept alive here."""

    pickle_bytes: bytes
    storages: list[torch.UntypedStorage]
    storage_nbytes: list[int]

    @property
    def nbytes(self) -> int:
        """Payload: the bytes of all storages."""
        return sum(self.storage_nbytes)


def flatten(obj: object, protocol: int = 2) -> FlatObject:
    """Pickle ``obj`` and collect its storages, without copying or reading one.

    Raises whatever the pickling of a member raises (AttributeError, PicklingError, TypeError, ...), RuntimeError for
    storages that view the same memory as different dtypes, ValueError for storages without data and for a protocol that
    torch.load refuses.
    """
    if protocol not in PICKLE_PROTOCOLS:
        raise ValueError(f"pickle_protocol must be 2 or 3, not {protocol!r}: torch.load(weights_only=True) reads no other")
    buffer = io.BytesIO()
    pickler = _StoragePickler(buffer, protocol)
    with garbage_collector_paused():
        pickler.dump(obj)
    return FlatObject(buffer.getvalue(), pickler.storages, pickler.storage_nbytes)


@contextlib.contextmanager
def garbage_collector_paused() -> Iterator[None]:
    """No collection meanwhile; restored on every way out."""
    # Pickling makes many small objects and no cycles; the collector would look through all of them again and again.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:  # nobody else's frozen objects would be thawed
                gc.freeze()  # together they move what was made into the oldest generation: it is looked through once,
                gc.unfreeze()  # in the next full collection, and not right now
            gc.enable()


class _StorageReference:
    """Stands for one mention of a storage in the pickle."""

    __slots__ = ("persistent_id",)

    def __init__(self, persistent_id: PersistentId) -> None:
        self.persistent_id = persistent_id


class _StoragePickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol=protocol)
        self.storages: list[torch.UntypedStorage] = []  # strong references: a key stands for an address that must not be reused
        self.storage_nbytes: list[int] = []
        # A program may have taught pickle its own way with tensors, which then goes first.
        self._shortcut = torch.Tensor not in copyreg.dispatch_table and torch.Tensor.__reduce_ex__ is _TORCHS_REDUCE_EX
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._storage_types: dict[torch.dtype, type] = {}

    def persistent_id(self, obj: Any) -> PersistentId | None:
        # Called for every object of the pickle, some 19 of them for a tensor: the usual answer must come first.
        kind = type(obj)
        if kind is _StorageReference:
            persistent_id: PersistentId = obj.persistent_id
            return persistent_id
        if kind is torch.storage.TypedStorage:
            return self._typed(obj._untyped_storage, obj.dtype, getattr(obj, "_fake_device", None))
        if issubclass(kind, torch.UntypedStorage):
            return self._identify(obj, torch.uint8, torch.UntypedStorage, obj.nbytes(), getattr(obj, "_fake_device", None))
        if issubclass(kind, torch.storage.TypedStorage):  # the old torch.FloatStorage and its like
            return self._typed(obj._untyped_storage, obj.dtype, getattr(obj, "_fake_device", None))
        return None

    def reducer_override(self, obj: Any) -> Any:
        """What Tensor.__reduce_ex__ returns for a plain tensor, in a third of the time; all others take the usual way."""
        if type(obj) is not torch.Tensor or not self._shortcut or not _is_plain(obj):
            return NotImplemented
        arguments: tuple[Any, ...] = (
            _StorageReference(self._typed(obj.untyped_storage(), obj.dtype, None)),
            obj.storage_offset(), tuple(obj.size()), obj.stride(), obj.requires_grad, collections.OrderedDict(),
        )  # fmt: skip
        return torch._utils._rebuild_tensor_v2, arguments

    def _typed(self, storage: torch.UntypedStorage, dtype: torch.dtype, fake_device: object) -> PersistentId:
        storage_type = self._storage_types.get(dtype)
        if storage_type is None:
            typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
            storage_type = getattr(torch, typed._pickle_storage_type())  # type: ignore[no-untyped-call]
            self._storage_types[dtype] = storage_type
        return self._identify(storage, dtype, storage_type, storage.nbytes() // dtype.itemsize, fake_device)

    def _identify(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, storage_type: type, numel: int, fake_device: object
    ) -> PersistentId:
        key = self._keys.get(storage._cdata)
        if key is None:
            key = self._add(storage, dtype, numel)
        else:
            self._check_dtype(storage, dtype)
        if fake_device is not None:
            location = str(fake_device)
        else:
            location = "cpu" if storage.device.type == "cpu" else torch.serialization.location_tag(storage)
        return ("storage", storage_type, key, location, numel)

    def _add(self, storage: torch.UntypedStorage, dtype: torch.dtype, numel: int) -> str:
        if storage.device.type == "meta":
            raise ValueError(
                "cannot save a storage on device 'meta': it has no data (save tensors on 'meta', not their storages)"
            )
        self._check_dtype(storage, dtype)
        key = str(len(self.storages))
        self._keys[storage._cdata] = key
        self.storages.append(storage)
        # numel x itemsize: a storage may hold a few bytes more, and torch refuses to load a record of that length.
        self.storage_nbytes.append(numel * dtype.itemsize)
        return key

    def _check_dtype(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")


_TORCHS_REDUCE_EX = torch.Tensor.__reduce_ex__
_NEW_DTYPES = torch.storage._new_dtypes()  # pickled as untyped storages, through _rebuild_tensor_v3
_PLAIN_DEVICES = ("cpu", "cuda")
_has_names = getattr(torch.Tensor, "has_names", None)  # older torch has named tensors, and refuses to pickle them


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type in _PLAIN_DEVICES
        and tensor.dtype not in _NEW_DTYPES
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
        and not (_has_names is not None and _has_names(tensor))
        and tensor._backward_hooks is None
        and not torch._C._get_tensor_metadata(tensor)  # type: ignore[attr-defined]
    )
