"""Whether a file holds an object bit for bit, as plain torch.load reads it; and how many bytes such an object has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fastpersist.memory.checksum import crc32

Fingerprint = tuple[str, tuple[int, ...], int]
"""dtype, shape and CRC-32 of the bytes of a tensor."""


class DifferenceError(Exception):
    """A file does not hold what was saved; the message says where."""


def named_tensors(obj: object, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """All tensors in nested mappings, lists and tuples, each with the keys and indices that lead to it."""
    if isinstance(obj, torch.Tensor):
        yield path, obj
    elif isinstance(obj, Mapping):
        for key, value in obj.items():
            yield from named_tensors(value, (*path, key))
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(obj):
            yield from named_tensors(value, (*path, index))


def tensors_in(obj: object) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings, lists and tuples."""
    return (tensor for _, tensor in named_tensors(obj))


def dotted(path: tuple[object, ...]) -> str:
    """The keys joined by dots."""
    return ".".join(map(str, path))


def fingerprints(obj: object) -> dict[str, Fingerprint]:
    """What tells a changed tensor, by dotted path, for where memory does not hold the object twice."""
    return {dotted(path): _fingerprint(tensor) for path, tensor in named_tensors(obj)}


def _fingerprint(tensor: torch.Tensor) -> Fingerprint:
    return str(tensor.dtype), tuple(tensor.shape), crc32(_bits(tensor).numpy().data)


def compare_fingerprints(actual: Mapping[str, Fingerprint], expected: Mapping[str, Fingerprint], where: str) -> None:
    """Raises DifferenceError, which names ``where`` and the first tensor that differs, unless the two are the same."""
    if actual.keys() != expected.keys():
        odd = sorted(actual.keys() ^ expected.keys())
        raise DifferenceError(f"{where} has other tensors than those that were saved: {odd[0]} and {len(odd) - 1} more")
    for name, fingerprint in expected.items():
        if actual[name] != fingerprint:
            raise DifferenceError(f"{where}: {name} is not the tensor that was saved: {actual[name]}, not {fingerprint}")


def payload_nbytes(obj: object) -> int:
    """Bytes of all storages, each counted once however many tensors share it."""
    storages = (tensor.untyped_storage() for tensor in tensors_in(obj))
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def verify_in_memory(path: Path, expected: object) -> None:
    """verify_file for files that torch cannot map into memory: the object is there twice meanwhile."""
    compare(torch.load(path, weights_only=True, map_location="cpu"), expected, "object")


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
