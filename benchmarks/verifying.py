"""Whether a file holds an object bit for bit, as plain torch.load reads it; and how many bytes such an object has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch


class DifferenceError(Exception):
    """A file does not hold what was saved; the message says where."""


def tensors_in(obj: object) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings, lists and tuples."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif isinstance(obj, Mapping):
        for value in obj.values():
            yield from tensors_in(value)
    elif isinstance(obj, list | tuple):
        for value in obj:
            yield from tensors_in(value)


def payload_nbytes(obj: object) -> int:
    """Bytes of all storages, each counted once however many tensors share it."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(obj))
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def verify_file(path: Path, expected: object) -> None:
    """Raises DifferenceError unless torch.load of ``path`` gives ``expected``: keys, types, shapes, dtypes and bits."""
    compare(torch.load(path, mmap=True, weights_only=True, map_location="cpu"), expected, "object")


def compare(actual: object, expected: object, where: str) -> None:
    """Raises DifferenceError, with the place named after ``where``, unless the two are the same. NaNs compare by bits."""
    if type(actual) is not type(expected):
        raise DifferenceError(f"{where} is a {type(actual).__name__}, not a {type(expected).__name__}")
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        _compare_tensors(actual, expected, where)
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping)
        if list(actual) != list(expected):
            raise DifferenceError(f"the keys of {where} differ")
        for key, value in expected.items():
            compare(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert isinstance(actual, list | tuple)
        if len(actual) != len(expected):
            raise DifferenceError(f"{where} has {len(actual)} items, not {len(expected)}")
        for index, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
            compare(mine, theirs, f"{where}[{index}]")
    elif actual != expected:
        raise DifferenceError(f"{where} is {actual!r}, not {expected!r}")


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    for aspect in ("dtype", "shape"):
        if getattr(actual, aspect) != getattr(expected, aspect):
            raise DifferenceError(f"{where} has {aspect} {getattr(actual, aspect)}, not {getattr(expected, aspect)}")
    if not torch.equal(_bits(actual), _bits(expected)):
        raise DifferenceError(f"{where} has other bits than the tensor that was saved")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
