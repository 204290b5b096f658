"""The storages behind a pickle: collected, named, and found in what is pickled. Both picklers do it alike.

A storage is pickled as torch.save does it (torch/serialization.py, ``_save``): as the persistent id ("storage", type, key,
location, numel), with keys "0", "1", ... in the order of first meeting.
"""

from __future__ import annotations

import collections
import copyreg
from typing import Any

import torch

PersistentId = tuple[str, type, str, str, int]


class StorageCollector:
    """A pickler's ``persistent_id`` and ``reducer_override``, and the storages that these have met."""

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []  # strong references: a key stands for an address that must not be reused
        self.storage_nbytes: list[int] = []
        self.addresses: list[int] = []
        # A program may have taught pickle its own way with tensors, which then goes first.
        self.knows_tensors = _Tensor not in copyreg.dispatch_table and _Tensor.__reduce_ex__ is _TORCHS_REDUCE_EX
        self._plain_dtype: torch.dtype | None = None  # of the plain tensor whose storage is pickled next
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}
        self._no_storages: set[type] = {str, int, tuple, dict}  # types met so far that are none of a storage

    def persistent_id(self, obj: Any) -> PersistentId | None:
        """None for what is no storage."""
        # Called for every object of the pickle: the usual answer must come first.
        kind = type(obj)
        if kind in self._no_storages:
            return None
        if issubclass(kind, _UntypedStorage):
            if self._plain_dtype is not None:
                dtype, self._plain_dtype = self._plain_dtype, None
                return self._id_of(obj, dtype, STORAGE_TYPES[dtype], "cpu", on_host=True)
            on_host = obj.device.type == "cpu"
            return self._id_of(obj, torch.uint8, torch.UntypedStorage, _location(obj, obj), on_host=on_host)
        if issubclass(kind, torch.storage.TypedStorage):  # and the old torch.FloatStorage and its like
            if obj.dtype not in STORAGE_TYPES:
                raise KeyError(f"dtype {obj.dtype} is not recognized")
            storage, dtype = obj._untyped_storage, obj.dtype
            on_host = storage.device.type == "cpu"
            return self._id_of(storage, dtype, STORAGE_TYPES[dtype], _location(storage, obj), on_host=on_host)
        self._no_storages.add(kind)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """What Tensor.__reduce_ex__ returns for a plain tensor, in a fraction of the time; all others take the usual way."""
        if type(obj) is not _Tensor or not self.knows_tensors or not is_plain(obj):
            return NotImplemented
        self._plain_dtype = obj.dtype
        return _rebuild_tensor, (
            obj.untyped_storage(), obj.storage_offset(), tuple(obj.shape), obj.stride(), obj.requires_grad, _OrderedDict(),
        )  # fmt: skip

    def collect(self, storage: torch.UntypedStorage, dtype: torch.dtype, *, on_host: bool) -> str:
        """The key of a storage whose elements are ``dtype``; it is noted if it is new.

        Raises RuntimeError if the same memory was met with another dtype.
        """
        address = storage.data_ptr()
        if address and self._dtypes.setdefault(address, dtype) is not dtype:
            raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")
        key = self._keys.get(storage._cdata)
        if key is None:
            self._keys[storage._cdata] = key = str(len(self.storages))
            self.storages.append(storage)
            # numel x itemsize: a storage may hold a few bytes more, and torch refuses to load a record of that length.
            self.storage_nbytes.append(storage.nbytes() // dtype.itemsize * dtype.itemsize)
            self.addresses.append(address if on_host else 0)
        return key

    def _id_of(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, storage_type: type, location: str, *, on_host: bool
    ) -> PersistentId:
        key = self.collect(storage, dtype, on_host=on_host)
        return ("storage", storage_type, key, location, storage.nbytes() // dtype.itemsize)


def is_plain(tensor: torch.Tensor) -> bool:
    """True for one in host memory without anything special; newer dtypes are pickled as untyped storages, another way."""
    return (
        tensor.is_cpu
        and tensor.layout is _strided
        and tensor.dtype in STORAGE_TYPES
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.__dict__
        and not (_has_names is not None and _has_names(tensor))
        and tensor._backward_hooks is None
        and not _get_metadata(tensor)
    )


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
STORAGE_TYPES = {dtype: getattr(torch, name) for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
"""torch.FloatStorage and its like, by dtype."""
_has_names = getattr(torch.Tensor, "has_names", None)  # older torch has named tensors, and refuses to pickle them
