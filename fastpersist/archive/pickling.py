"""From an object to data.pkl and the storages that it refers to. The pickle is byte for byte the one that torch.save writes."""

from __future__ import annotations

import gc
import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from fastpersist.archive.collecting import StorageCollector
from fastpersist.archive.direct_pickling import DirectPickler

PICKLE_PROTOCOLS = (2, 3)
"""What torch.load(weights_only=True) accepts."""

_CONTAINERS = (list, tuple, dict, OrderedDict)
_MANY_ENTRIES = 50  # below, the pickler in C is faster
_MANY_OBJECTS = 10_000


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
    with garbage_collector_paused():
        pickle_bytes, pickler = _pickle_directly(obj, protocol) or _pickle_in_c(obj, protocol)
    return FlatObject(pickle_bytes, pickler.storages, pickler.storage_nbytes, pickler.addresses)


def _pickle_directly(obj: object, protocol: int) -> tuple[bytes, StorageCollector] | None:
    try:
        if _entries(obj) < _MANY_ENTRIES:
            return None
        pickler = DirectPickler(protocol)
        return pickler.run(obj), pickler
    except Exception:  # it does not pay, or the object cannot be pickled: the other pickler shows it, by errors of its own
        return None


def _pickle_in_c(obj: object, protocol: int) -> tuple[bytes, StorageCollector]:
    buffer = io.BytesIO()
    pickler = _PicklerInC(buffer, protocol)
    pickler.dump(obj)
    return buffer.getvalue(), pickler


def _entries(obj: Any) -> int:
    """Entries of a container and of those in it. Subclasses may have a mind of their own, and are not asked."""
    if type(obj) not in _CONTAINERS:
        return 0
    values = obj.values() if isinstance(obj, dict) else obj
    return len(obj) + sum(len(value) for value in values if type(value) in _CONTAINERS)


class _PicklerInC(StorageCollector, pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, protocol: int) -> None:
        StorageCollector.__init__(self)
        pickle.Pickler.__init__(self, buffer, protocol=protocol)


class garbage_collector_paused:  # noqa: N801  # used as a function is; one made of a generator takes longer
    """No collection meanwhile; restored on every way out."""

    # Pickling makes many small objects and no cycles; the collector would look through all of them again and again.

    def __init__(self) -> None:
        self._is_to_resume = gc.isenabled()

    def __enter__(self) -> None:
        try:
            gc.disable()
        except BaseException:  # Ctrl-C right after it must not leave the collector off for good
            self._resume()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            # Of few new objects nothing need be spared, and the count of frozen ones, which is not kept, takes its time.
            if self._is_to_resume and gc.get_count()[0] > _MANY_OBJECTS and gc.get_freeze_count() == 0:
                gc.freeze()  # together they move what was made into the oldest generation (where others are frozen, these
                gc.unfreeze()  # would be thawed): it is looked through once, in the next full collection, and not right now
        finally:
            self._resume()

    def __del__(self) -> None:
        self._resume()  # or between the pause and the block

    def _resume(self) -> None:
        if self._is_to_resume:
            gc.enable()
            self._is_to_resume = False
