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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch

PICKLE_PROTOCOLS = (2, 3)
"""What torch.load(weights_only=True) accepts."""

_MANY_OBJECTS = 10_000

PersistentId = tuple[str, type, str, str, int]


@dataclass(frozen=True)
class FlatObject:
    """``storages[k]`` holds ``storage_nbytes[k]`` bytes under key ``str(k)`` of ``pickle_bytes``; all are kept alive here.

    ``addresses[k]`` is where they lie in host memory; 0 for a storage on a device.
    """

    pickle_bytes: bytes
    storages: list[torch.UntypedStorage]
    storage_nbytes: list[int]
    addresses: list[int]

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
    with garbage_collector_paused(), pickler:
        pickler.dump(obj)
    return FlatObject(buffer.getvalue(), pickler.storages, pickler.storage_nbytes, pickler.addresses)


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
            # Of few new objects nothing need be spared, and the count of frozen ones, which is not kept, takes its time.
            if gc.get_count()[0] > _MANY_OBJECTS and gc.get_freeze_count() == 0:  # nobody else's frozen objects would be thawed
                gc.freeze()  # together they move what was made into the oldest generation: it is looked through once,
                gc.unfreeze()  # in the next full collection, and not right now
            gc.enable()


class _LastMember:
    """Stands for the last member of a plain tensor."""


_answer_none: Callable[[object], None] = collections.deque[object](maxlen=0).append  # to any object, without running Python


class _StoragePickler(pickle.Pickler):
    """Use it within its with block, and once."""

    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        super().__init__(buffer, protocol=protocol)
        self.storages: list[torch.UntypedStorage] = []  # strong references: a key stands for an address that must not be reused
        self.storage_nbytes: list[int] = []
        self.addresses: list[int] = []
        # A program may have taught pickle its own way with tensors, which then goes first.
        self._shortcut = torch.Tensor not in copyreg.dispatch_table and torch.Tensor.__reduce_ex__ is _TORCHS_REDUCE_EX
        self._shortcut_dtype: torch.dtype | None = None  # of the tensor that took it, and whose storage is pickled next
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._no_storages: set[type] = {str, int, tuple, dict}  # types met so far that are none of a storage
        self._find_storage = self._storage_id  # one reference for good: no method may vanish in the middle of its own call
        self.persistent_id = self._find_storage  # type: ignore[method-assign]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.persistent_id = _answer_none  # type: ignore[method-assign]
        del self._find_storage  # a cycle, which would keep all storages alive until the next garbage collection

    def _storage_id(self, obj: Any) -> PersistentId | None:
        # Called for every object of the pickle, some 19 of them for a tensor: the usual answer must come first.
        kind = type(obj)
        if kind in self._no_storages:
            return None
        if issubclass(kind, _UntypedStorage):
            if self._shortcut_dtype is not None:
                dtype, self._shortcut_dtype = self._shortcut_dtype, None
                self.persistent_id = _answer_none  # type: ignore[method-assign]  # as far as the tensor's last member
                return self._identify(obj, dtype, _STORAGE_TYPES[dtype], "cpu", on_host=True)
            on_host = obj.device.type == "cpu"
            return self._identify(obj, torch.uint8, torch.UntypedStorage, _location(obj, obj), on_host=on_host)
        if issubclass(kind, torch.storage.TypedStorage):  # and the old torch.FloatStorage and its like
            if obj.dtype not in _STORAGE_TYPES:
                raise KeyError(f"dtype {obj.dtype} is not recognized")
            storage, dtype = obj._untyped_storage, obj.dtype
            on_host = storage.device.type == "cpu"
            return self._identify(storage, dtype, _STORAGE_TYPES[dtype], _location(storage, obj), on_host=on_host)
        self._no_storages.add(kind)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """What Tensor.__reduce_ex__ returns for a plain tensor, in a fraction of the time; all others take the usual way."""
        kind = type(obj)
        if kind is _Tensor and self._shortcut and _is_plain(obj):
            self._shortcut_dtype = obj.dtype
            return _rebuild_tensor, (
                obj.untyped_storage(), obj.storage_offset(), tuple(obj.shape), obj.stride(), obj.requires_grad,
                _LastMember(),
            )  # fmt: skip
        if kind is _LastMember:  # torch puts an empty OrderedDict there
            self.persistent_id = self._find_storage  # type: ignore[method-assign]
            return _OrderedDict, ()
        return NotImplemented

    def _identify(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, storage_type: type, location: str, *, on_host: bool
    ) -> PersistentId:
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        # numel x itemsize: a storage may hold a few bytes more, and torch refuses to load a record of that length.
        numel = storage.nbytes() // dtype.itemsize
        key = self._keys.get(storage._cdata)
        if key is None:
            self._keys[storage._cdata] = key = str(len(self.storages))
            self.storages.append(storage)
            self.storage_nbytes.append(numel * dtype.itemsize)
            self.addresses.append(address if on_host else 0)
        return ("storage", storage_type, key, location, numel)


def _location(storage: torch.UntypedStorage, holder: Any) -> str:
    """Where torch.load is to put the storage; ``holder`` may carry the device of a fake one."""
    if storage.device.type == "meta":
        raise ValueError("cannot save a storage on device 'meta': it has no data (save tensors on 'meta', not their storages)")
    fake_device = getattr(holder, "_fake_device", None)
    location: str = str(fake_device) if fake_device is not None else torch.serialization.location_tag(storage)
    return location


# Looked up once, and not for each tensor: together that takes a tenth of its time.
_Tensor, _UntypedStorage, _strided, _OrderedDict = torch.Tensor, torch.UntypedStorage, torch.strided, collections.OrderedDict
_rebuild_tensor = torch._utils._rebuild_tensor_v2
_get_metadata = torch._C._get_tensor_metadata  # type: ignore[attr-defined]
_TORCHS_REDUCE_EX = torch.Tensor.__reduce_ex__
_STORAGE_TYPES = {dtype: getattr(torch, name) for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
_has_names = getattr(torch.Tensor, "has_names", None)  # older torch has named tensors, and refuses to pickle them


def _is_plain(tensor: torch.Tensor) -> bool:
    """True for one in host memory without anything special; newer dtypes are pickled as untyped storages, another way."""
    return (
        tensor.is_cpu
        and tensor.layout is _strided
        and tensor.dtype in _STORAGE_TYPES
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
        and not (_has_names is not None and _has_names(tensor))
        and tensor._backward_hooks is None
        and not _get_metadata(tensor)
    )
