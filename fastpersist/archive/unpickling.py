"""From data.pkl and storages back to an object: the other of the two files that touch torch's internals.

The pickle is read by torch's own restricted unpickler (weights_only=True, with its messages) or by pickle's; only the
lookup of storages is ours. What torch does around it is torch/serialization.py, ``_load``.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _weights_only_unpickler

from fastpersist.archive.pickling import garbage_collector_paused
from fastpersist.errors import CheckpointFormatError

MapLocation = Any
"""None, a device or its name, a dict of names, or a function of (storage, location): as for torch.load."""

StorageLookup = Callable[[str], torch.UntypedStorage | None]
"""The storage under a key, None if the checkpoint has none."""

LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
"""How files of torch before 1.6 begin: the pickle of torch.serialization.MAGIC_NUMBER."""


class _OwnError(Exception):
    """Carries an exception of ours or of map_location's unharmed through an unpickler whose errors are translated."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def reads_no_data(map_location: MapLocation) -> bool:
    """True where torch.load reads no tensor data: under FakeTensorMode, for map_location "meta", and under skip_data."""
    location = torch.device(map_location) if isinstance(map_location, str) and map_location.startswith("meta") else map_location
    on_meta = isinstance(location, torch.device) and location.type == "meta"
    skipped = bool(getattr(torch.serialization._serialization_tls, "skip_data", False))
    return on_meta or skipped or torch._guards.detect_fake_mode(None) is not None


def forced_weights_only(weights_only: bool) -> bool:
    """``weights_only``, or True where the environment's TORCH_FORCE_WEIGHTS_ONLY_LOAD demands it, as for torch.load."""
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    return weights_only or forced


def byte_order(record: bytes | None) -> str:
    """ "little" or "big", from the ``byteorder`` record or, without one, from torch's setting."""
    if record is not None:
        if record not in (b"little", b"big"):
            raise CheckpointFormatError(f"record 'byteorder' holds {record[:20]!r}, not little or big")
        return record.decode()
    default = torch.serialization.get_default_load_endianness()
    if default is None or default is torch.serialization.LoadEndianness.LITTLE:
        return "little"
    return "big" if default is torch.serialization.LoadEndianness.BIG else sys.byteorder


def unflatten(
    pickle_bytes: bytes,
    lookup: StorageLookup,
    *,
    weights_only: bool,
    map_location: MapLocation = None,
    order: str = sys.byteorder,
) -> Any:
    """Rebuild the object. ``order`` is the byte order of the storages; they are swapped in place where it is not ours.

    Raises pickle.UnpicklingError for what the restricted unpickler refuses, CheckpointFormatError for a pickle that makes
    no sense or does not fit its storages, and whatever map_location raises.
    """
    loader = _StorageLoader(lookup, map_location, swap=order != sys.byteorder)
    source = io.BytesIO(pickle_bytes)
    unpickler: Any
    if weights_only:
        unpickler = _weights_only_unpickler.Unpickler(source, encoding="utf-8")
    else:
        unpickler = _TrustingUnpickler(source, encoding="utf-8")
    unpickler.persistent_load = loader.persistent_load
    with garbage_collector_paused(), _map_location_known_to_torch(map_location):
        result = _translate_errors(unpickler.load, weights_only)
        torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
    return result


def _translate_errors(load: Callable[[], Any], weights_only: bool) -> Any:
    try:
        return load()
    except _OwnError as carrier:
        raise carrier.error from None
    except (pickle.UnpicklingError, MemoryError, RecursionError) as error:
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise
        raise CheckpointFormatError(f"data.pkl cannot be unpickled: {error!r}") from error
    except Exception as error:
        # Under weights_only nothing of the caller's runs, so the pickle is at fault. Otherwise a class of the caller's may
        # have raised, or be missing, and that must reach the caller as it is.
        if not weights_only:
            raise
        raise CheckpointFormatError(f"data.pkl does not describe an object that can be rebuilt: {error!r}") from error


@contextmanager
def _map_location_known_to_torch(map_location: MapLocation) -> Iterator[None]:
    # Tensors that are rebuilt without a storage (through numpy, wrapper subclasses) look it up there.
    torch.serialization._serialization_tls.map_location = map_location
    try:
        yield
    finally:
        torch.serialization._serialization_tls.map_location = None


class _StorageLoader:
    """Answers the pickle's persistent ids. A storage is looked up, swapped and moved once, however often it is named."""

    def __init__(self, lookup: StorageLookup, map_location: MapLocation, *, swap: bool) -> None:
        self._lookup = lookup
        self._restore = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]
        self._stays_on_host = map_location is None
        self._swap = swap
        self._loaded: dict[str, torch.storage.TypedStorage] = {}
        self._dtypes: dict[Any, torch.dtype] = {torch.UntypedStorage: torch.uint8}

    def persistent_load(self, saved_id: Any) -> torch.storage.TypedStorage:
        try:
            kind, storage_type, key, location, numel = saved_id
            found = self._loaded.get(key)
        except (TypeError, ValueError):
            raise _OwnError(CheckpointFormatError(f"data.pkl refers to a storage as {str(saved_id)[:200]}")) from None
        if found is not None:
            return found
        if (kind != "storage" and _text(kind) != "storage") or type(key) is not str or type(numel) is not int:
            raise _OwnError(CheckpointFormatError(f"data.pkl refers to a storage as {str(saved_id)[:200]}"))
        storage = self._lookup(key)
        if storage is None:
            raise _OwnError(CheckpointFormatError(f"data.pkl refers to storage {key!r}, but there is no record 'data/{key}'"))
        dtype, nbytes = self._dtype(storage_type, key), storage.nbytes()
        if nbytes != numel * dtype.itemsize:
            message = f"record 'data/{key}' holds {nbytes} bytes, data.pkl expects {numel} elements of {dtype}"
            raise _OwnError(CheckpointFormatError(message))
        if self._swap:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        if location != "cpu" or not self._stays_on_host:
            storage = self._move(storage, _text(location))
        typed = _typed_storage(storage, dtype)
        if nbytes:  # an empty storage is made anew for each mention, as torch does
            self._loaded[key] = typed
        return typed

    def _dtype(self, storage_type: Any, key: str) -> torch.dtype:
        try:
            return self._dtypes[storage_type]
        except (KeyError, TypeError):
            dtype = getattr(storage_type, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise _OwnError(CheckpointFormatError(f"data.pkl gives storage {key!r} a type that is none: {storage_type!r}"))
        self._dtypes[storage_type] = dtype
        return dtype

    def _move(self, storage: torch.UntypedStorage, location: Any) -> torch.UntypedStorage:
        try:
            moved: torch.UntypedStorage = self._restore(storage, location)
        except Exception as error:
            raise _OwnError(error) from error
        return moved


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    # TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True) does this, after 3 us of looking at its arguments.
    typed = object.__new__(torch.storage.TypedStorage)
    typed.dtype, typed._untyped_storage = dtype, storage
    return typed


def _text(value: Any) -> Any:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


class _TrustingUnpickler(pickle.Unpickler):
    """pickle's unpickler with torch's names for storage types, and a shorter way to a plain tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            try:
                return torch.serialization.StorageType(name)  # type: ignore[no-untyped-call]
            except KeyError:
                pass  # a class of the user's that is called so
        if module == "torch._utils" and name == "_rebuild_tensor_v2":
            return _rebuild_tensor
        return super().find_class("torch._tensor" if module == "torch.tensor" else module, name)


def _rebuild_tensor(
    storage: torch.storage.TypedStorage,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    backward_hooks: Any,
    metadata: Any = None,
) -> torch.Tensor:
    """What torch._utils._rebuild_tensor_v2 does for a tensor on a real device."""
    untyped = storage._untyped_storage
    tensor = torch.empty((0,), dtype=storage.dtype, device=untyped.device).set_(untyped, storage_offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    if backward_hooks:
        tensor._backward_hooks = backward_hooks
    return tensor


def explain_refusal(path: str, error: pickle.UnpicklingError) -> pickle.UnpicklingError:
    """torch.load's own message for what its restricted unpickler refuses: it is asked, without reading tensor data."""
    try:
        torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as explained:
        return explained
    except Exception:  # another fault comes first there: ours is the one to tell
        return error
    return error
