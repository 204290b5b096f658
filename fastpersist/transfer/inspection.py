"""What a checkpoint holds, told from its metadata alone."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch

from fastpersist.archive import zipformat
from fastpersist.archive.directory import Directory
from fastpersist.archive.unpickling import byte_order
from fastpersist.errors import CheckpointFormatError, brief
from fastpersist.memory.alignment import PAGE_NBYTES, round_up
from fastpersist.reports import CheckpointInfo, RecordInfo, TensorInfo
from fastpersist.transfer.sketch import Sketch
from fastpersist.transfer.source import CheckpointFile

MAX_DEPTH = 100
MAX_PATH_LENGTH = 1000


def describe(source: CheckpointFile, directory: Directory) -> CheckpointInfo:
    """Read the directory, all local headers and the pickle. Raises CheckpointFormatError for what contradicts itself."""
    records = tuple(_describe_record(source, directory, record) for record in range(len(directory.names)))
    tensors, note = _describe_tensors(source, directory)
    return CheckpointInfo(
        path=source.path,
        file_nbytes=source.nbytes,
        nbytes=sum(int(directory.nbytes[record]) for record in directory.storages()),
        prefix=directory.prefix,
        byteorder=byte_order(source.record(directory, "byteorder")),
        torch_offsets=_torch_offsets(source, directory, {record.name: record.offset for record in records}),
        records=records,
        tensors=tensors,
        note=note,
    )


def _describe_record(source: CheckpointFile, directory: Directory, record: int) -> RecordInfo:
    offset = source.data_offset(directory, record)
    nbytes, checksum = int(directory.nbytes[record]), directory.checksums[record]
    return RecordInfo(
        name=directory.names[record],
        nbytes=nbytes,
        offset=offset,
        alignment=min(offset & -offset, PAGE_NBYTES),
        checksum=None if checksum == 0 and nbytes else checksum,
    )


def _describe_tensors(source: CheckpointFile, directory: Directory) -> tuple[tuple[TensorInfo, ...] | None, str]:
    try:
        sketch = Sketch(source, directory, weights_only=True, order=byte_order(source.record(directory, "byteorder")))
    except pickle.UnpicklingError as error:
        return None, f"the tensors' names are not told: the pickle holds more than weights_only allows ({brief(error)})"
    infos = [_describe_tensor(sketch, directory, path, tensor) for path, tensor in _tensors(sketch.obj, "", set(), 0)]
    return tuple(infos), ""


def _describe_tensor(sketch: Sketch, directory: Directory, path: str, tensor: torch.Tensor) -> TensorInfo:
    try:  # sparse and wrapper tensors have no storage of their own, and attributes of a hostile pickle are not asked
        record = sketch.record_of(torch.Tensor.untyped_storage(tensor))
    except (NotImplementedError, RuntimeError):
        record = None
    try:
        shape = tuple(int(length) for length in torch.Tensor.size(tensor))
    except (NotImplementedError, RuntimeError, TypeError):  # nested tensors have several
        shape = ()
    name = None if record is None else directory.names[record]
    printable = path[:MAX_PATH_LENGTH].encode(errors="backslashreplace").decode()
    return TensorInfo(printable, str(tensor.dtype).removeprefix("torch."), shape, name)


def _tensors(value: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a nest of dicts, lists and tuples, each container under the first of its paths only.

    Nothing is told of what lies deeper than MAX_DEPTH.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if not isinstance(value, dict | list | tuple) or id(value) in seen or depth > MAX_DEPTH:
        return
    seen.add(id(value))
    items: Any = dict.items(value) if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield from _tensors(inner, f"{path}.{key}" if path else str(key), seen, depth + 1)


def _torch_offsets(source: CheckpointFile, directory: Directory, offsets: dict[str, int]) -> str:
    """Whether torch reads offsets from the headers or calculates them, and then rightly (torch.serialization._load)."""
    version = source.record(directory, ".format_version")
    if version is None or version < b"1":
        return "read"
    alignment = _storage_alignment(source.record(directory, ".storage_alignment"))
    end = 0
    for key in range(len(directory.storages())):
        record = directory.index.get(f"data/{key}")
        if record is None:
            return "wrong"
        nbytes, header, name_nbytes = int(directory.nbytes[record]), end, len(f"{directory.prefix}/data/{key}".encode())
        if key == 0:  # torch reads the first offset, and calculates from there
            header, expected = int(directory.header_offsets[record]), offsets["data/0"]
        else:
            shortest = zipformat.LOCAL_HEADER_NBYTES + zipformat.FILLER_HEADER_NBYTES + name_nbytes
            expected = round_up(header + shortest + zipformat.zip64_extra_nbytes(nbytes, header), alignment)
        if offsets[f"data/{key}"] != expected:
            return "wrong"
        end = expected + nbytes + zipformat.descriptor_nbytes(nbytes, header)
    return "calculated"


def _storage_alignment(record: bytes | None) -> int:
    try:
        return max(int((record or b"64")[:20]), 1)
    except ValueError:
        raise CheckpointFormatError(f"record '.storage_alignment' holds {brief(record or b'')}, which is no number") from None
