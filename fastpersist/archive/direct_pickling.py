"""A pickler for objects that are mostly plain tensors: it writes the same bytes as pickle does, in half the time.

The pickle of a tensor is a score of opcodes. Those of two tensors of one kind (dtype, shape, strides, size of the storage)
differ in the storage's key and in the places that they take in the memo, and in nothing else. So the first of a kind is
pickled in the usual way, and leaves a form that is filled in for all that follow.

It builds upon the pickler in Python that the standard library keeps beside the one in C; only what a checkpoint has many of
is done differently. All else is slower than in C: an account of time is kept, and PicklingInCIsFasterError ends an attempt that
does not pay (what was pickled until then is pickled once more).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from typing import Any

import torch

from fastpersist.archive.collecting import StorageCollector, is_plain

# The account of time: a unit is about 0.2 us, what an entry of a list or dict costs beyond its time in C.
_CREDIT = 10_000
_TENSOR_GAIN = 15
_OTHER_OBJECT_LOSS = 10

_BATCH = 1_000  # entries of a list or dict that one opcode adds
_TEXT, _LONG_PUT, _DEFINITIONS = b"X", b"r", (b"X", b"c")  # opcodes: BINUNICODE, LONG_BINPUT; those of text and of types
_FIRST_LONG_PUT = 256

_number = struct.Struct("<I").pack

Kind = tuple[Any, ...]
_PicklerInPython: Any = pickle._Pickler  # its methods are known to nobody's type checker


class PicklingInCIsFasterError(Exception):
    """Nothing is wrong; pickle.Pickler is to be used."""


class DirectPickler(StorageCollector, _PicklerInPython):  # type: ignore[misc]
    """To be ``run`` once; the storages are there afterwards."""

    def __init__(self, protocol: int) -> None:
        StorageCollector.__init__(self)
        self._code: list[bytes] = []
        _PicklerInPython.__init__(self, _Sink(self._code), protocol)
        self.write = self._code.append
        self._memoized = 0  # places taken; the memo itself lacks what nobody can meet again
        self._account = _CREDIT
        self._forms: dict[Kind, _Form] = {}
        self._ways: dict[type, Callable[[Any], None]] = {
            torch.Tensor: self._save_tensor, str: self._save_text, int: self.save_long, float: self.save_float,
            bool: self.save_bool, type(None): self.save_none, dict: self._save_dict, list: self._save_list,
            tuple: self._save_tuple,
        }  # fmt: skip

    def run(self, obj: object) -> bytes:
        """The pickle. Raises PicklingInCIsFasterError, and what the pickling of a member raises."""
        try:
            self.dump(obj)
        finally:
            self._ways.clear()  # a cycle, which would keep all storages alive until the next garbage collection
        return b"".join(self._code)

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Called for each object, by the inherited methods too."""
        way = self._ways.get(type(obj))
        if way is not None:
            way(obj)
        else:
            self._spend(_OTHER_OBJECT_LOSS)
            super().save(obj, save_persistent_id)

    def memoize(self, obj: object) -> None:
        """As inherited, but the place is not the length of the memo."""
        self.write(_put(self._memoized))
        self.memo[id(obj)] = self._memoized, obj
        self._memoized += 1

    def _spend(self, units: int) -> None:
        self._account -= units
        if self._account < 0:
            raise PicklingInCIsFasterError

    def _refers(self, obj: object) -> bool:
        """True if the object was met before; then a reference to it is written."""
        known = self.memo.get(id(obj))
        if known is None:
            return False
        self.write(self.get(known[0]))
        return True

    def _save_text(self, text: str) -> None:
        known = self.memo.get(id(text))  # not through _refers, as there is a text for each tensor
        if known is None:
            place = self._memoized
            self.write(_text(text, place))
            self.memo[id(text)] = place, text
            self._memoized = place + 1
        else:
            self.write(self.get(known[0]))

    def _save_tuple(self, entries: tuple[Any, ...]) -> None:
        if not self._refers(entries):
            self.save_tuple(entries)

    def _save_list(self, entries: list[Any]) -> None:
        if self._refers(entries):
            return
        self.write(b"]")
        self.memoize(entries)
        if len(entries) == 1:
            self._save_batch(entries, b"", b"a")
            return
        for start in range(0, len(entries), _BATCH):
            self._save_batch(entries[start : start + _BATCH], b"(", b"e")

    def _save_dict(self, entries: dict[Any, Any]) -> None:
        if self._refers(entries):
            return
        self.write(b"}")
        self.memoize(entries)
        flat = [part for item in entries.items() for part in item]
        if len(entries) == 1:
            self._save_batch(flat, b"", b"s")
        elif entries:
            # As in C, where a full batch is followed by another one, even if that is empty.
            for start in range(0, len(flat) + 1, 2 * _BATCH):
                self._save_batch(flat[start : start + 2 * _BATCH], b"(", b"u")

    def _save_batch(self, objects: list[Any], before: bytes, after: bytes) -> None:
        self._spend(len(objects))
        self.write(before)
        save, ways = self.save, self._ways
        for obj in objects:
            ways.get(type(obj), save)(obj)
        self.write(after)

    def _save_tensor(self, tensor: torch.Tensor) -> None:
        known = self.memo.get(id(tensor))
        if known is not None:
            self.write(self.get(known[0]))
            return
        if not self.knows_tensors or not is_plain(tensor):
            super().save(tensor)
            return
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        key = self.collect(storage, dtype, on_host=True)
        kind = dtype, storage.nbytes(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.requires_grad
        form, place = self._forms.get(kind), self._memoized
        if id(key) in self.memo:  # the storage of another tensor, too
            super().save(tensor)
        elif form is None:
            self._save_first(tensor, kind, key)
        else:
            self.write(form.fill_in(key, place))
            self.memo[id(key)] = place, key
            self._memoized = place = place + form.places
            self.memo[id(tensor)] = place - 1, tensor
            self._account += _TENSOR_GAIN

    def _save_first(self, tensor: torch.Tensor, kind: Kind, key: str) -> None:
        start, place = len(self._code), self._memoized
        super().save(tensor)
        if place >= _FIRST_LONG_PUT:
            form = _Form(self._code[start:], key, place)
            if form.places == self._memoized - place:
                self._forms[kind] = form


class _Form:
    """The pickle of a tensor with blanks for the key of its storage and for its ``places`` in the memo, which are in a row.

    What follows the key is kept as one number, the bytes being its digits: to move all places on, one addition will do.
    """

    __slots__ = ("_first", "_head", "_nbytes", "_step", "places")

    def __init__(self, pieces: list[bytes], key: str, place: int) -> None:
        """``pieces`` (of whole opcodes) are the pickle of a tensor with this key; ``place`` is the first one that it takes.

        places is 0 if they define what the next pickle would only refer to: the name of a type, above all.
        """
        self.places = 0
        key_piece = _text(key, place)
        if [piece for piece in pieces if piece.startswith(_DEFINITIONS)] != [key_piece]:
            return
        key_index = pieces.index(key_piece)
        first = b""
        self._step = 0
        for piece in [_put(place), *pieces[key_index + 1 :]]:
            if piece == _put(place + self.places):
                self._step += 1 << 8 * (len(first) + len(_LONG_PUT))
                first += _LONG_PUT + _number(self.places)
                self.places += 1
            else:
                first += piece
        self._head = b"".join(pieces[:key_index]) + _TEXT
        self._first, self._nbytes = int.from_bytes(first, "little"), len(first)

    def fill_in(self, key: str, place: int) -> bytes:
        """The pickle of a tensor of this kind with a storage that was not met before."""
        rest = (self._first + place * self._step).to_bytes(self._nbytes, "little")
        return b"%b%b%b%b" % (self._head, _number(len(key)), key.encode(), rest)


class _Sink:
    """The file that the inherited pickler asks for."""

    def __init__(self, code: list[bytes]) -> None:
        self.write = code.append


def _text(text: str, place: int) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    if place < _FIRST_LONG_PUT:
        return b"X%b%b%b" % (_number(len(encoded)), encoded, _put(place))
    return b"X%b%br%b" % (_number(len(encoded)), encoded, _number(place))  # there is a text for each tensor


def _put(place: int) -> bytes:
    return _LONG_PUT + _number(place) if place >= _FIRST_LONG_PUT else b"q%c" % place
