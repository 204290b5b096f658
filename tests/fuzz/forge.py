"""Builds archives in which any field may lie, and pickles opcode by opcode: what no writer would produce.

Nothing here uses fastpersist: a fault there cannot hide in the file that is to show it.
"""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from dataclasses import dataclass, field

import torch

LIMIT_32 = 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    """One record of an archive. What is None is told truly; ``fields`` below lie where they are given."""

    name: str | bytes
    content: bytes = b""
    folder: str = "archive"
    checksum: int | None = None
    nbytes: int | None = None
    stored_nbytes: int | None = None
    header_offset: int | None = None
    local_name: bytes | None = None
    local_checksum: int = 0
    local_nbytes: int = 0
    local_method: int = 0
    local_extra: bytes | None = None
    local_extra_nbytes: int | None = None
    local_signature: bytes = b"PK\3\4"
    flags: int = 0x808
    method: int = 0
    extra: bytes = b""
    comment: bytes = b""
    descriptor: bytes | None = None
    listed: bool = True
    listed_signature: bytes = b"PK\1\2"
    alignment: int = 64

    @property
    def full_name(self) -> bytes:
        """The name as the file has it: bytes are taken as they are, text gets the folder in front."""
        return self.name if isinstance(self.name, bytes) else f"{self.folder}/{self.name}".encode()


@dataclass(frozen=True)
class End:
    """The end records; what is None is told truly."""

    records: int | None = None
    records_here: int | None = None
    nbytes: int | None = None
    offset: int | None = None
    comment: bytes = b""
    comment_nbytes: int | None = None
    zip64: bool = False
    zip64_records: int | None = None
    zip64_nbytes: int | None = None
    zip64_offset: int | None = None
    zip64_own_nbytes: int = 44
    locator: int | None = None
    disk: int = 0
    classic: bool = True


@dataclass
class Archive:
    """An archive: ``to_bytes`` writes it."""

    records: list[Record]
    end: End = field(default_factory=End)
    before_directory: bytes = b""
    before_end: bytes = b""
    after: bytes = b""

    def to_bytes(self) -> bytes:
        """The whole file."""
        out, directory = io.BytesIO(), io.BytesIO()
        for record in self.records:
            header_offset = out.tell()
            out.write(_local(record, header_offset))
            if record.listed:
                directory.write(_listed(record, header_offset))
        out.write(self.before_directory)
        directory_offset = out.tell()
        out.write(directory.getvalue())
        out.write(self.before_end)
        listed = sum(record.listed for record in self.records)
        out.write(_end(self.end, listed, directory_offset, len(directory.getvalue()), out.tell()))
        return out.getvalue() + self.after


def _local(record: Record, header_offset: int) -> bytes:
    name = record.full_name if record.local_name is None else record.local_name
    extra = record.local_extra
    if extra is None:
        filler = -(header_offset + 30 + len(name) + 4) % record.alignment
        extra = struct.pack("<2sH", b"FB", filler) + b"Z" * filler
    extra_nbytes = len(extra) if record.local_extra_nbytes is None else record.local_extra_nbytes
    header = record.local_signature + struct.pack(
        "<HHHHHIIIHH", 0, record.flags & 0xFFFF, record.local_method, 0, 0, record.local_checksum, record.local_nbytes,
        record.local_nbytes, len(name), extra_nbytes,
    )  # fmt: skip
    tail = record.descriptor
    if tail is None:
        size = len(record.content)
        tail = struct.pack("<4sIII", b"PK\7\x08", zlib.crc32(record.content), size, size) if record.flags & 8 else b""
    return header + name + extra + record.content + tail


def _listed(record: Record, header_offset: int) -> bytes:
    checksum = zlib.crc32(record.content) if record.checksum is None else record.checksum
    nbytes = len(record.content) if record.nbytes is None else record.nbytes
    stored = nbytes if record.stored_nbytes is None else record.stored_nbytes
    offset = header_offset if record.header_offset is None else record.header_offset
    wide = [value for value in (nbytes, stored, offset) if value >= LIMIT_32]
    zip64 = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    extra = zip64 + record.extra
    numbers = (
        0, 0, record.flags & 0xFFFF, record.method, 0, 0, checksum, min(stored, LIMIT_32), min(nbytes, LIMIT_32),
        len(record.full_name), len(extra), len(record.comment), 0, 0, 0, min(offset, LIMIT_32),
    )  # fmt: skip
    return record.listed_signature + struct.pack("<HHHHHHIIIHHHHHII", *numbers) + record.full_name + extra + record.comment


def _end(end: End, listed: int, offset: int, nbytes: int, position: int) -> bytes:
    def told(lie: int | None, truth: int) -> int:
        return truth if lie is None else lie

    out = b""
    if end.zip64:
        records = told(end.zip64_records, listed)
        out += b"PK\6\6" + struct.pack(
            "<QHHIIQQQQ", end.zip64_own_nbytes, 0, 45, 0, 0, records, records, told(end.zip64_nbytes, nbytes),
            told(end.zip64_offset, offset),
        )  # fmt: skip
        out += b"PK\6\7" + struct.pack("<IQI", 0, told(end.locator, position), 1)
    records = told(end.records, listed)
    if end.classic:
        comment_nbytes = told(end.comment_nbytes, len(end.comment))
        out += b"PK\5\6" + struct.pack(
            "<HHHHIIH", end.disk, end.disk, told(end.records_here, records), records, told(end.nbytes, nbytes),
            told(end.offset, offset), comment_nbytes,
        )  # fmt: skip
        out += end.comment
    return out


def checkpoint(pickle_bytes: bytes, *, storages: dict[str, bytes] | None = None, byteorder: bytes = b"little") -> bytes:
    """An archive that is right in every byte but holds the pickle given; storage "0" holds 256 float32 unless told else."""
    if storages is None:
        storages = {"0": bytes(range(256)) * 4}
    records = [Record("data.pkl", pickle_bytes), Record("byteorder", byteorder)]
    records += [Record(f"data/{key}", content) for key, content in storages.items()]
    return Archive([*records, Record("version", b"3\n")]).to_bytes()


# Opcodes of pickle protocol 2, as far as torch's restricted unpickler knows them.


def program(*parts: bytes) -> bytes:
    """A whole pickle."""
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    """Push a string."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    """Push an integer of any size up to 255 bytes."""
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = pickle.encode_long(value)
    return b"\x8a" + bytes([len(raw)]) + raw


def name(path: str) -> bytes:
    """Push a global, written as module.name."""
    module, _, attribute = path.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def tuple_of(*parts: bytes) -> bytes:
    """Push a tuple of what the parts push."""
    return b"(" + b"".join(parts) + b"t"


def call(function: str, *arguments: bytes) -> bytes:
    """Push what a global returns for arguments."""
    return name(function) + tuple_of(*arguments) + b"R"


def dict_of(**items: bytes) -> bytes:
    """Push a dict."""
    return b"}(" + b"".join(text(key) + value for key, value in items.items()) + b"u"


def numbers(*values: int) -> bytes:
    """Push a tuple of integers."""
    return tuple_of(*map(number, values))


def storage(key: str = "0", numel: int = 256, *, kind: str = "torch.FloatStorage") -> bytes:
    """Push a storage, through a persistent id."""
    return tuple_of(text("storage"), name(kind), text(key), text("cpu"), number(numel)) + b"Q"


def tensor(
    source: bytes | None = None, *, offset: int = 0, size: tuple[int, ...] = (256,), stride: tuple[int, ...] = (1,)
) -> bytes:
    """Push a tensor over a storage, by default a good one over all of storage "0"."""
    hooks = call("collections.OrderedDict")
    source = storage() if source is None else source
    return call("torch._utils._rebuild_tensor_v2", source, number(offset), numbers(*size), numbers(*stride), b"\x89", hooks)


def good_checkpoint() -> bytes:
    """What torch.save writes for a small state dict of several dtypes, nested, with shared and empty storages."""
    shared = torch.arange(20, dtype=torch.int64)
    state = {
        "model": {"weight": torch.arange(300.0), "view": shared[3:9], "same": shared},
        "half": torch.ones(5, dtype=torch.float16),
        "empty": torch.empty(0),
        "step": 7,
    }
    out = io.BytesIO()
    torch.save(state, out)
    return out.getvalue()


def legacy_checkpoint() -> bytes:
    """The same in the format of torch before 1.6."""
    out = io.BytesIO()
    state = {"weight": torch.arange(300.0), "step": 7, "half": torch.ones(5, dtype=torch.float16)}
    torch.save(state, out, _use_new_zipfile_serialization=False)
    return out.getvalue()
