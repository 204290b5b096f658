"""Objects as plain values that can be compared: what must be equal after a round trip, sharing and identity included."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_VALUES = (
    type(None), bool, int, str, bytes, complex, range, slice, type, types.FunctionType, types.BuiltinFunctionType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme, enum.Enum,
)  # fmt: skip


def describe(obj: object) -> Any:
    """A value that equals another's exactly when the objects are alike: types, bits, views, sharing, identity."""
    return _Describer().of(obj)


def tensors_of(obj: object) -> list[torch.Tensor]:
    """All strided tensors with a storage inside ``obj``, in the order of their description."""
    describer = _Describer()
    describer.of(obj)
    return describer.tensors


def storages_of(obj: object) -> Iterator[torch.UntypedStorage]:
    """The distinct storages inside ``obj``."""
    describer = _Describer()
    describer.of(obj)
    yield from describer.storages


class _Describer:
    """Numbers objects and storages in the order of meeting them, so that sharing shows as equal numbers."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.storages: list[torch.UntypedStorage] = []
        self._storage_numbers: dict[int, int] = {}
        self._object_numbers: dict[int, int] = {}
        self._keep: list[object] = []  # an id may be taken again once its object is gone

    def of(self, obj: Any) -> Any:
        if isinstance(obj, float):
            return ("float", obj.hex())  # NaN and -0.0 included
        if isinstance(obj, _VALUES):
            return (type(obj).__name__, obj)
        if id(obj) in self._object_numbers:
            return ("again", self._object_numbers[id(obj)])
        self._object_numbers[id(obj)] = len(self._object_numbers)
        self._keep.append(obj)
        return (type(obj).__qualname__, *self._content(obj))

    def _content(self, obj: Any) -> tuple[Any, ...]:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        if isinstance(obj, torch.UntypedStorage):
            return (self._storage(obj),)
        if isinstance(obj, torch.storage.TypedStorage):
            return (obj.dtype, obj._size(), self._storage(obj._untyped_storage))
        if isinstance(obj, torch.Generator):
            return (obj.device, self.of(obj.get_state()))
        if isinstance(obj, (np.ndarray, np.generic)):
            return self._array(obj)
        return self._plain(obj)

    def _plain(self, obj: Any) -> tuple[Any, ...]:
        # In order of name: which attribute was set first is nothing that an object keeps.
        attributes = tuple((name, self.of(value)) for name, value in sorted(getattr(obj, "__dict__", {}).items()))
        if isinstance(obj, dict):
            return (*((self.of(key), self.of(value)) for key, value in obj.items()), attributes)
        if isinstance(obj, (list, tuple)):
            return (*map(self.of, obj), attributes)
        if isinstance(obj, (set, frozenset)):
            return (*sorted(map(repr, obj)), attributes)
        if dataclasses.is_dataclass(obj) or attributes:
            return (attributes,)
        return (repr(obj),)

    def _array(self, obj: Any) -> tuple[Any, ...]:
        if obj.dtype == object:
            return (obj.shape, self.of(obj.tolist()))
        return (str(obj.dtype), obj.shape, getattr(obj, "strides", None), obj.tobytes())

    def _tensor(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        common = (
            type(tensor).__qualname__, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, tensor.is_nested,
        )  # fmt: skip
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return (*common, "uninitialized")
        if tensor.is_nested or tensor.layout is not torch.strided:
            return (*common, *(self.of(part) for part in _parts(tensor.detach())))
        return (*common, *self._strided(tensor), self.of(_attributes(tensor)))

    def _strided(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        self.tensors.append(tensor)
        quantizer = self.of(_quantizer(tensor)) if tensor.is_quantized else ()
        view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.is_conj(), tensor.is_neg())
        return (*view, quantizer, self._storage(tensor.untyped_storage()))

    def _storage(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        number = self._storage_numbers.setdefault(storage._cdata, len(self._storage_numbers))
        if number < len(self.storages):
            return ("storage", number)
        self.storages.append(storage)
        return ("storage", number, str(storage.device), storage.nbytes(), storage_bytes(storage))


def storage_bytes(storage: torch.UntypedStorage) -> bytes:
    """All bytes of a storage; none where it has no data."""
    if storage.device.type == "meta" or storage.nbytes() == 0:
        return b""
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What was set on the tensor from Python, apart from what makes a fake tensor fake."""
    own = dict(getattr(tensor, "__dict__", {}))
    own |= {slot: getattr(tensor, slot) for slot in getattr(type(tensor), "__slots__", ()) if hasattr(tensor, slot)}
    if isinstance(tensor, FakeTensor):
        with FakeTensorMode():
            of_the_mode = vars(torch.empty(0))
        return {name: value for name, value in own.items() if name not in of_the_mode}
    return own


def _parts(tensor: torch.Tensor) -> list[Any]:
    """The tensors and sizes that a tensor of another layout consists of."""
    if tensor.is_nested and tensor.layout is torch.jagged:
        return [tensor._values, tensor._offsets, tensor._lengths, tensor._ragged_idx]
    if tensor.is_nested:
        return [
            tensor.values(),
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        ]
    if tensor.layout is torch.sparse_coo:
        return [tuple(tensor.shape), tensor._indices(), tensor._values(), tensor.is_coalesced()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tuple(tensor.shape), tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tuple(tensor.shape), tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _quantizer(tensor: torch.Tensor) -> list[Any]:
    if tensor.qscheme() is torch.per_tensor_affine:
        return [tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()]
    return [tensor.qscheme(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()]
