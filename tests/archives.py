"""Checkpoint files for tests of loading: zips written anew record by record, and damaged at a known place."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

Edit = Callable[[str, bytes], bytes | None]
"""What becomes of a record (name without the prefix, content): its new content, or None to leave it out."""

SINCE_TORCH_2_7 = (".format_version", ".storage_alignment")
SINCE_TORCH_2_1 = ("byteorder", ".data/serialization_id")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the parts of a record lie. ``central_offset`` is that of its entry in the central directory."""

    header_offset: int
    data_offset: int
    nbytes: int
    central_offset: int

    @property
    def descriptor_offset(self) -> int:
        """Where the data descriptor begins, if there is one."""
        return self.data_offset + self.nbytes


def places_of(path: Path) -> dict[str, Place]:
    """The places of all records by name, as the zip's own structures tell, in the order of the central directory."""
    places: dict[str, Place] = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        central_offset = archive.start_dir
        for info in archive.infolist():
            lengths = _numbers(file, info.header_offset + 26, "<HH")
            name = info.filename.partition("/")[2]
            places[name] = Place(info.header_offset, info.header_offset + 30 + sum(lengths), info.file_size, central_offset)
            central_offset += 46 + sum(_numbers(file, central_offset + 28, "<HHH"))
    return places


def _numbers(file: BinaryIO, offset: int, layout: str) -> tuple[int, ...]:
    file.seek(offset)
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def flip(path: Path, offset: int, mask: int = 0x01) -> None:
    """Change a byte of the file, in place."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ mask]))


def unchanged(name: str, content: bytes) -> bytes:
    """The edit that changes nothing."""
    return content


def without(*names: str) -> Edit:
    """The edit that leaves these records out."""
    return lambda name, content: None if name in names else content


def rewrite(
    source: Path, target: Path, edit: Edit = unchanged, *, folders: bool = False, comment: bytes = b"", shift: int | None = None
) -> Path:
    """Write ``source`` anew as Python's zipfile does it: sizes in the local headers, no descriptors, data anywhere.

    shift: let the data of each record start at this distance from a multiple of 64.
    """
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        if folders:
            prefix = old.namelist()[0].partition("/")[0]
            new.writestr(f"{prefix}/", b"")
            new.writestr(f"{prefix}/data/", b"")
        for entry in old.infolist():
            content = edit(entry.filename.partition("/")[2], old.read(entry))
            if content is None:
                continue
            info = zipfile.ZipInfo(entry.filename)
            if shift is not None:
                start = new.fp.tell() + 30 + len(info.filename.encode()) + 4  # type: ignore[union-attr]
                filler = (shift - start) % 64
                info.extra = struct.pack("<HH", 0xFEED, filler) + bytes(filler)
            new.writestr(info, content)
        new.comment = comment
    return target


def big_endian(source: Path, target: Path, *, declared: bool = True) -> Path:
    """The same checkpoint as a big-endian machine saves it; ``declared`` False leaves the byteorder record out."""
    dtypes = _dtypes_of(source)

    def edit(name: str, content: bytes) -> bytes | None:
        if name == "byteorder":
            return b"big" if declared else None
        key = name.removeprefix("data/")
        return _swapped(content, dtypes[key]) if name != key and key in dtypes else content

    return rewrite(source, target, edit)


def _swapped(content: bytes, dtype: torch.dtype) -> bytes:
    if not content:
        return content
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    tensor.untyped_storage().byteswap(dtype)  # type: ignore[no-untyped-call]
    return tensor.numpy().tobytes()


def _dtypes_of(path: Path) -> dict[str, torch.dtype]:
    """The dtype of each storage by key, found by unpickling with storages full of zeros."""
    dtypes: dict[str, torch.dtype] = {}

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module == "torch" and name.endswith("Storage"):
                return torch.serialization.StorageType(name) if name != "UntypedStorage" else torch.UntypedStorage
            return super().find_class(module, name)

        def persistent_load(self, saved_id: Any) -> Any:
            _, storage_type, key, _, numel = saved_id
            dtypes[key] = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
            zeros = torch.zeros(numel * dtypes[key].itemsize, dtype=torch.uint8).untyped_storage()
            return torch.storage.TypedStorage(wrap_storage=zeros, dtype=dtypes[key], _internal=True)

    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        Listing(io.BytesIO(archive.read(name))).load()
    return dtypes


def tagged(source: Path, target: Path, device: str) -> Path:
    """The same checkpoint as if its storages had been saved from ``device``."""
    old, new = (b"X" + struct.pack("<I", len(text)) + text.encode() for text in ("cpu", device))
    return rewrite(source, target, lambda name, content: content.replace(old, new) if name == "data.pkl" else content)
