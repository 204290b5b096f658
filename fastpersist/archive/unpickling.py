"""From data.pkl and storages back to an object: the other of the two files that touch torch's internals.

The pickle is read by torch's own restricted unpickler (weights_only=True, with its messages) or by pickle's; only the
lookup of storages is ours. What torch does around it is torch/serialization.py, ``_load``.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import _weights_only_unpickler

from fastpersist.archive.pickling import garbage_collector_paused
from fastpersist.errors import CheckpointFormatError, brief

MapLocation = Any
"""None, a device or its name, a dict of names, or a function of (storage, location): as for torch.load."""

Place = Callable[[torch.UntypedStorage, str], torch.UntypedStorage]
"""(storage, location): the storage where it is to be."""

Raw = tuple[memoryview, int, int]
"""(memory, start, nbytes): the bytes of a storage in host memory, aligned for every dtype, of which none is made yet."""

StorageLookup = Callable[[str], torch.UntypedStorage | Raw | None]
"""The storage under a key, which is asked for once; None if there is none. It may have to be read: all errors are true ones."""

MAX_LOCATION_LENGTH = 200
_STORAGE_TYPES = (type, torch.serialization.StorageType)  # torch's own pickles give the one or the other
LEGACY_START = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19", re.DOTALL)
"""How files of torch before 1.6 begin: the pickle of torch.serialization.MAGIC_NUMBER, in a frame from protocol 4 on."""
LEGACY_START_NBYTES = 24


class _OwnError(Exception):
    """Carries an exception of ours or of map_location's unharmed through an unpickler whose errors are translated."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


def reads_no_data(map_location: MapLocation) -> bool:
    """True where torch.load reads no tensor data: under FakeTensorMode, for map_location "meta", and under skip_data."""
    if isinstance(map_location, torch.device):
        on_meta = map_location.type == "meta"
    else:
        on_meta = isinstance(map_location, str) and map_location.partition(":")[0] == "meta"
    skipped = bool(getattr(torch.serialization._serialization_tls, "skip_data", False))
    return on_meta or skipped or torch._guards.detect_fake_mode(None) is not None


def resolve_weights_only(weights_only: bool | None) -> bool:
    """True for None, and where the environment's TORCH_FORCE_WEIGHTS_ONLY_LOAD demands it, as for torch.load."""
    forced = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0").lower() in ("1", "y", "yes", "true")
    return weights_only is None or bool(weights_only) or forced


def byte_order(record: bytes | None) -> str:
    """ "little" or "big", from the ``byteorder`` record or, without one, from torch's setting."""
    if record is not None:
        if record not in (b"little", b"big"):
            raise CheckpointFormatError(f"record 'byteorder' holds {brief(record)}, not little or big")
        return record.decode()
    default = torch.serialization.get_default_load_endianness()
    if default is None or default is torch.serialization.LoadEndianness.LITTLE:
        return "little"
    return "big" if default is torch.serialization.LoadEndianness.BIG else sys.byteorder


def unflatten(
    pickle_bytes: bytes,
    lookup: StorageLookup,
    *,
    unread: StorageLookup | None = None,
    weights_only: bool,
    map_location: MapLocation = None,
    place: Place | None = None,
    order: str = sys.byteorder,
) -> Any:
    """Rebuild the object. ``order`` is the byte order of the storages; they are swapped in place where it is not ours.

    ``unread`` stands in for storages that ``lookup`` does not have: values that use them will be dropped, so they are
    neither swapped nor moved. ``place`` moves storages instead of what map_location says.

    Raises pickle.UnpicklingError for what the restricted unpickler refuses, CheckpointFormatError for a pickle that makes
    no sense or does not fit its storages, and whatever map_location raises.
    """
    restore = place or torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]
    loader = _StorageLoader(lookup, unread, restore, swap=order != sys.byteorder)
    loader.stays_on_host = map_location is None and place is None
    source = io.BytesIO(pickle_bytes)
    unpickler: Any
    if weights_only:
        unpickler = _weights_only_unpickler.Unpickler(source, encoding="utf-8")
    else:
        unpickler = _TrustingUnpickler(source, encoding="utf-8")
    unpickler.persistent_load = loader.persistent_load
    with garbage_collector_paused(), torchs_state_kept(map_location):
        try:
            obj = _translate_errors(unpickler.load, weights_only)
        finally:
            loader.forget_sources()
        loader.make_all()
        return obj


def _translate_errors(load: Callable[[], Any], weights_only: bool) -> Any:
    try:
        result = load()
        torch._utils._validate_loaded_sparse_tensors()  # type: ignore[no-untyped-call]
        return result
    except _OwnError as carrier:
        own = carrier.error
    except (pickle.UnpicklingError, MemoryError, RecursionError) as error:
        if weights_only and isinstance(error, pickle.UnpicklingError):
            raise
        raise CheckpointFormatError(f"data.pkl cannot be unpickled: {brief(error)}") from error
    except Exception as error:
        # Under weights_only nothing of the caller's runs, so the pickle is at fault. Otherwise a class of the caller's may
        # have raised, or be missing, and that must reach the caller as it is.
        if not weights_only:
            raise
        raise CheckpointFormatError(f"data.pkl does not describe an object that can be rebuilt: {brief(error)}") from error
    try:
        raise own  # here, where it does not come to refer to its carrier, and so to itself and the file
    finally:
        del own


@contextmanager
def torchs_state_kept(map_location: MapLocation = None) -> Iterator[None]:
    """Tell torch's globals of a load, and leave nothing of it in them: a load that fails would leave tensors there."""
    # Tensors that are rebuilt without a storage (through numpy, wrapper subclasses) look the map_location up.
    state = torch.serialization._serialization_tls
    previous, state.map_location = getattr(state, "map_location", None), map_location
    try:
        yield
    finally:
        state.map_location = previous
        torch._utils._sparse_tensors_to_validate.clear()


class _StorageLoader:
    """Answers the pickle's persistent ids. A storage is looked up, swapped and moved once, however often it is named."""

    def __init__(self, lookup: StorageLookup, unread: StorageLookup | None, restore: Place, *, swap: bool) -> None:
        self._lookup = lookup
        self._unread = unread
        self._restore = restore
        self.stays_on_host = False  # True: a storage of location "cpu" need not be moved
        self._swap = swap
        self._loaded: dict[str, torch.storage.TypedStorage] = {}
        self._empty: dict[str, torch.UntypedStorage | Raw] = {}
        self._dtypes: dict[Any, torch.dtype] = {torch.UntypedStorage: torch.uint8}

    def persistent_load(self, saved_id: Any) -> torch.storage.TypedStorage:
        # Types come first: to hash, compare or print what a hostile pickle puts here could take forever.
        if type(saved_id) is not tuple or len(saved_id) != 5:
            raise _OwnError(CheckpointFormatError("data.pkl refers to a storage by something that is no tuple of five"))
        kind, storage_type, key, location, numel = saved_id
        if type(key) is not str or type(numel) is not int or not isinstance(storage_type, _STORAGE_TYPES):
            raise _OwnError(CheckpointFormatError("data.pkl refers to a storage by values of the wrong types"))
        found = self._loaded.get(key)
        if found is not None:
            if type(found) is _RawStorage:
                found.become_ordinary()
            return found
        if type(kind) is not str or type(location) is not str:
            kind, location = _text(kind), _text(location)
        if kind != "storage" or len(location) > MAX_LOCATION_LENGTH:
            raise _OwnError(CheckpointFormatError(f"data.pkl refers to a storage as {brief(kind)} at {brief(location)}"))
        try:
            storage = self._lookup(key)
        except Exception as error:
            raise _OwnError(error) from error
        read = True
        if storage is None:
            storage, read = self._look_elsewhere(key)
        dtype = self._dtypes.get(storage_type) or self._dtype(storage_type, key)
        nbytes = storage[2] if isinstance(storage, tuple) else storage.nbytes()
        if nbytes != numel * dtype.itemsize:
            count = numel if 0 <= numel < 1 << 63 else "an absurd number of"
            message = f"record 'data/{key}' holds {nbytes} bytes, data.pkl expects {count} elements of {dtype}"
            raise _OwnError(CheckpointFormatError(message))
        typed = _raw_storage(storage, dtype) if isinstance(storage, tuple) else _typed_storage(storage, dtype)
        if read and (self._swap or location != "cpu" or not self.stays_on_host):
            typed = _typed_storage(self._adapt(typed._untyped_storage, dtype, location), dtype)
        if nbytes:
            self._loaded[key] = typed
        else:  # made anew for each mention, as torch does
            self._empty[key] = storage
        return typed

    def _look_elsewhere(self, key: str) -> tuple[torch.UntypedStorage | Raw, bool]:
        if key in self._empty:
            return self._empty[key], True
        unread = None if self._unread is None else self._unread(key)
        if unread is not None:
            return unread, False
        raise _OwnError(CheckpointFormatError(f"data.pkl refers to storage {brief(key)}, but there is no such record"))

    def _adapt(self, storage: torch.UntypedStorage, dtype: torch.dtype, location: str) -> torch.UntypedStorage:
        if self._swap:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        try:
            return self._restore(storage, location)
        except Exception as error:
            raise _OwnError(error) from error

    def forget_sources(self) -> None:
        """Nothing is looked up any more: an error that somebody keeps, and with it this object, shall keep no file open."""
        self._lookup, self._unread = _no_storage, None

    def make_all(self) -> None:
        """Make the storages that nothing has looked at yet: the object holds them as such, not through a tensor."""
        for typed in self._loaded.values():
            if type(typed) is _RawStorage and typed.tensor is None:
                typed.become_ordinary()

    def _dtype(self, storage_type: Any, key: str) -> torch.dtype:
        dtype = getattr(storage_type, "dtype", None)
        if not isinstance(dtype, torch.dtype):
            raise _OwnError(CheckpointFormatError(f"data.pkl gives storage {brief(key)} a type that is no storage's"))
        self._dtypes[storage_type] = dtype
        return dtype


def _no_storage(key: str) -> None:
    return None


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    # TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True) does this, after 3 us of looking at its arguments.
    typed = object.__new__(torch.storage.TypedStorage)
    typed.dtype, typed._untyped_storage = dtype, storage
    return typed


class _RawStorage(torch.storage.TypedStorage):
    """A storage that torch's object is made for when it is first looked at; from then on a TypedStorage like any other.

    For most it is never made: a plain tensor comes straight from the memory, which takes half the time.
    """

    raw: Raw
    tensor: torch.Tensor | None

    @property
    def _untyped_storage(self) -> torch.UntypedStorage:  # type: ignore[override]
        return self.become_ordinary()

    def become_ordinary(self) -> torch.UntypedStorage:
        memory, start, nbytes = self.raw
        tensor = self.tensor
        if tensor is None:
            tensor = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)
        del self.raw, self.tensor
        self.__class__ = torch.storage.TypedStorage  # type: ignore[assignment]
        untyped = self._untyped_storage = tensor.untyped_storage()  # type: ignore[misc]
        return untyped

    def whole_tensor(self, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor | None:
        """The tensor of all elements in their order; None if that is not what size and stride say."""
        memory, start, nbytes = self.raw
        count = nbytes // self.dtype.itemsize
        if not (size == (count,) and stride == (1,)) and not _is_whole(size, stride, count):
            return None
        self.tensor = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=start)
        return self.tensor if len(size) == 1 else self.tensor.as_strided_(size, stride)


def _is_whole(size: tuple[int, ...], stride: tuple[int, ...], count: int) -> bool:
    step = 1
    for extent, found in zip(reversed(size), reversed(stride), strict=True):
        if found != step:
            return False
        step *= extent
    return step == count


def _raw_storage(raw: Raw, dtype: torch.dtype) -> torch.storage.TypedStorage:
    if not raw[2]:
        return _typed_storage(_empty_storage(), dtype)
    typed = object.__new__(_RawStorage)
    typed.dtype, typed.raw, typed.tensor = dtype, raw, None
    return typed


def _empty_storage() -> torch.UntypedStorage:
    """A storage of no bytes. As all storages here it cannot be resized: a tensor cannot reach beyond its record."""
    nothing: torch.UntypedStorage = torch.frombuffer(bytearray(1), dtype=torch.uint8).untyped_storage()[0:0]
    return nothing


def _text(value: Any) -> str:
    if type(value) is bytes:
        return value.decode("ascii", "replace")
    if type(value) is not str:
        raise _OwnError(CheckpointFormatError("data.pkl refers to a storage by values of the wrong types"))
    return value


class _TrustingUnpickler(pickle.Unpickler):
    """pickle's unpickler with torch's names for storage types, and a shorter way to a plain tensor."""

    def __init__(self, source: io.BytesIO, encoding: str) -> None:
        super().__init__(source, encoding=encoding)
        # Under FakeTensorMode a tensor must be given the device that it would have.
        self._shortcut = torch._guards.detect_fake_mode(None) is None

    def find_class(self, module: str, name: str) -> Any:
        if "Storage" in name:
            try:
                return torch.serialization.StorageType(name)  # type: ignore[no-untyped-call]
            except KeyError:
                pass  # a class of the user's that is called so
        if self._shortcut and module == "torch._utils" and name == "_rebuild_tensor_v2":
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
    tensor = None
    if type(storage) is _RawStorage and storage.tensor is None and storage_offset == 0:
        tensor = storage.whole_tensor(size, stride)
    if tensor is None:
        untyped = storage._untyped_storage
        tensor = torch.empty((0,), dtype=storage.dtype, device=untyped.device).set_(untyped, storage_offset, size, stride)
    if requires_grad:
        tensor.requires_grad = True
    if metadata:
        torch._utils.set_tensor_metadata(tensor, metadata)  # type: ignore[no-untyped-call]
    if backward_hooks:
        tensor._backward_hooks = backward_hooks
    return tensor


def explain_refusal(pickle_bytes: bytes, keys: Iterable[str], error: pickle.UnpicklingError) -> pickle.UnpicklingError:
    """torch.load's own message for what its restricted unpickler refuses.

    torch.load is asked about a file with the same pickle and the same storages, all of them empty, and nothing else of the
    original in it.
    """
    substitute = io.BytesIO()
    with zipfile.ZipFile(substitute, "w") as archive:
        archive.writestr("archive/data.pkl", pickle_bytes)
        archive.writestr("archive/version", "3\n")
        for key in keys:
            archive.writestr(f"archive/data/{key}", b"")
    substitute.seek(0)
    try:
        with torchs_state_kept():
            torch.load(substitute, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as explained:
        return explained
    except Exception:  # another fault comes first there: ours is the one to tell
        return error
    return error


def placeholder(nbytes: int) -> torch.UntypedStorage:
    """A storage without data, on device "meta"."""
    return torch.UntypedStorage(nbytes, device="meta")  # type: ignore[no-untyped-call]
