"""Archives whose records, directory or end records are missing, lie, or contradict each other."""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import replace

import pytest

from tests.fuzz.court import Court, faults
from tests.fuzz.forge import (
    Archive,
    End,
    Record,
    checkpoint,
    dict_of,
    name,
    number,
    program,
    storage,
    tensor,
)

PICKLE = program(dict_of(model=dict_of(weight=tensor(), bias=tensor(storage("1", 256)))))
DATA = bytes(range(256)) * 4
RECORDS = [
    Record("data.pkl", PICKLE),
    Record("byteorder", b"little"),
    Record("data/0", DATA),
    Record("data/1", DATA[::-1]),
    Record("version", b"3\n"),
]
HUGE_64 = 0xFFFFFFFFFFFFFFFF
FAKE_END = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 46, 0, 0)


def with_records(*records: Record, end: End | None = None) -> bytes:
    return Archive(list(records), End() if end is None else end).to_bytes()


def changed(place: int, **lies: object) -> bytes:
    """The good archive, with one record that lies."""
    records = list(RECORDS)
    records[place] = replace(records[place], **lies)
    return with_records(*records)


def added(*records: Record) -> bytes:
    return with_records(*RECORDS, *records)


def ended(**lies: object) -> bytes:
    """The good archive, with end records that lie."""
    return with_records(*RECORDS, end=End(**lies))


def named(raw: bytes) -> bytes:
    return added(Record(raw, b"content"))


def with_header_in_data() -> bytes:
    """Record "1" begins inside the data of record "0", where its header and its data lie."""
    inner = Archive([Record("data/1", DATA[:500], alignment=1)]).to_bytes()
    data = inner[:700].ljust(1024, b"\0")
    records = [replace(record, content=data) if record.name == "data/0" else record for record in RECORDS]
    records[3] = replace(records[3], listed=False)
    start = with_records(*records).index(inner[:100])
    return with_records(*records, Record("data/1", header_offset=start, nbytes=500))


def zipped(method: int) -> bytes:
    """What Python's zipfile makes of the good records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for record in RECORDS:
            archive.writestr(f"archive/{record.name}", record.content)
    return out.getvalue()


def two_tensors(first_numel: int, size: int) -> bytes:
    """A pickle of two tensors, the first over a storage of which it claims the number of elements."""
    first = tensor(storage("0", first_numel), size=(size,))
    return program(dict_of(model=dict_of(weight=first, bias=tensor(storage("1", 256)))))


def counted(alignment: bytes, version: bytes = b"1", pickle_bytes: bytes = PICKLE) -> bytes:
    """An archive that says torch may calculate where storages lie, at this alignment."""
    records = [replace(RECORDS[0], content=pickle_bytes), *RECORDS[1:]]
    return with_records(Record(".format_version", version), Record(".storage_alignment", alignment), *records)


REFUSED_BY_TORCH = program(dict_of(model=dict_of(weight=tensor(), bias=tensor(storage("1", 256)), x=name("os.system"))))

ARCHIVES: dict[str, bytes] = {
    "the good one": with_records(*RECORDS),
    "the good one, zip64 end": ended(zip64=True),
    "by zipfile": zipped(zipfile.ZIP_STORED),
    "no records": with_records(),
    "only a pickle": with_records(Record("data.pkl", program(number(1)))),
    "no pickle": with_records(*RECORDS[1:]),
    "pickle in capitals": with_records(Record("DATA.PKL", PICKLE), *RECORDS[1:]),
    "two pickles": added(Record("data.pkl", PICKLE)),
    "pickle in capitals, too": added(Record("DATA.PKL", program(number(1)))),
    "storages differ in case": added(Record("DATA/0", DATA[::-1])),
    "storage twice": added(Record("data/0", DATA)),
    "storage missing": with_records(*RECORDS[:3]),
    "two prefixes": added(Record("data/7", DATA, folder="other")),
    "other prefix first": with_records(Record("data/7", DATA, folder="other"), *RECORDS),
    "pickle under another prefix": with_records(*RECORDS[1:], Record("data.pkl", PICKLE, folder="other")),
    "compressed": zipped(zipfile.ZIP_DEFLATED),
    "compressed, says the directory": changed(2, method=8),
    "compressed, says the header": changed(2, local_method=8),
    "encrypted": changed(2, flags=0x809),
    "pickle encrypted": changed(0, flags=0x809),
    "stored size differs": changed(2, stored_nbytes=500),
    "method unknown": changed(2, method=99),
    "TorchScript": added(Record("constants.pkl", program(b")")), Record("code/__torch__.py", b"pass")),
    # Sizes and offsets that lie.
    "size smaller": changed(2, nbytes=1000),
    "size larger": changed(2, nbytes=1030),
    "size into the next": changed(2, nbytes=1100),
    "size of half the file": changed(2, nbytes=2000),
    "size 0": changed(2, nbytes=0),
    "size 2 ** 32 - 1": changed(2, nbytes=0xFFFFFFFF),
    "size 2 ** 31": changed(2, nbytes=1 << 31),
    "size 2 ** 40": changed(2, nbytes=1 << 40),
    "size 2 ** 63": changed(2, nbytes=1 << 63),
    "size 2 ** 64 - 1": changed(2, nbytes=HUGE_64),
    "size 2 ** 63 - 1": changed(2, nbytes=(1 << 63) - 1),
    "pickle size larger": changed(0, nbytes=len(PICKLE) + 5),
    "pickle size smaller": changed(0, nbytes=len(PICKLE) - 5),
    "pickle size 2 ** 40": changed(0, nbytes=1 << 40),
    "offset 0": changed(2, header_offset=0),
    "offset of another": changed(2, header_offset=64),
    "offset 1 off": changed(2, header_offset=127),
    "offset past the end": changed(2, header_offset=1 << 20),
    "offset 2 ** 32 - 1": changed(2, header_offset=0xFFFFFFFF),
    "offset 2 ** 40": changed(2, header_offset=1 << 40),
    "offset 2 ** 63": changed(2, header_offset=1 << 63),
    "offset 2 ** 64 - 1": changed(2, header_offset=HUGE_64),
    "offset and size that wrap": changed(2, header_offset=HUGE_64 - 100, nbytes=200),
    "zip64 values missing": changed(2, nbytes=0xFFFFFFFF, stored_nbytes=0xFFFFFFFF, extra=b""),
    "zip64 field cut off": changed(2, extra=struct.pack("<HH", 1, 500)),
    "zip64 field alone": changed(2, extra=struct.pack("<HHQQ", 1, 16, 5, 5)),
    "other field cut off": changed(2, extra=b"\xff\xff\xff"),
    "checksum 0": changed(2, checksum=0),
    "checksum wrong": changed(2, checksum=5),
    "pickle checksum 0": changed(0, checksum=0),
    "pickle checksum wrong": changed(0, checksum=5),
    "in data of another": with_header_in_data(),
    # Local headers.
    "header signature": changed(2, local_signature=b"PK\3\5"),
    "pickle header signature": changed(0, local_signature=b"PK\3\5"),
    "header name other": changed(2, local_name=b"archive/data/1"),
    "header name empty": changed(2, local_name=b""),
    "header name long": changed(2, local_name=b"n" * 0xFFFF),
    "header extra long": changed(2, local_extra=bytes(0xFFFF)),
    "header extra too long": changed(2, local_extra_nbytes=0xFFFF),
    "last header extra too long": changed(4, local_extra_nbytes=0xFFFF),
    "header size lies": changed(2, local_nbytes=5),
    "header size huge": changed(2, local_nbytes=0xFFFFFFFF),
    "header checksum lies": changed(2, local_checksum=5),
    "descriptor missing": changed(2, descriptor=b""),
    "descriptor of zeros": changed(2, descriptor=bytes(16)),
    "descriptor lies": changed(2, descriptor=struct.pack("<4sIII", b"PK\7\x08", 5, 1024, 1024)),
    "descriptor of 64 bits": changed(2, descriptor=struct.pack("<4sIQQ", b"PK\7\x08", 5, 1024, 1024)),
    "last descriptor missing": changed(4, descriptor=b""),
    # Names.
    "name with dots": named(b"archive/../x"),
    "name of dots": named(b".."),
    "name with dots in front": named(b"../archive/x"),
    "name absolute": named(b"/etc/passwd"),
    "name with NUL": named(b"archive/x\0y"),
    "name with a backslash": named(b"archive\\x"),
    "name that is not UTF-8": named(b"archive/\xff\xfe"),
    "name empty": named(b""),
    "name of a folder": added(Record(b"archive/", b"")),
    "name of a folder with content": named(b"archive/"),
    "name without a folder": named(b"version"),
    "name of 65535": named(b"archive/" + b"n" * 65527),
    "name with a line break": named(b"archive/a\nb\x1b[31m"),
    "name with a slash twice": named(b"archive//data/0"),
    "name data/ alone": named(b"archive/data/"),
    "folder name long": with_records(*(replace(record, folder="f" * 60_000) for record in RECORDS)),
    "folder name with a percent": with_records(*(replace(record, folder="%s{0}") for record in RECORDS)),
    # Directory and end records.
    "entry signature": changed(2, listed_signature=b"PK\1\3"),
    "entry comment": changed(2, comment=b"c" * 60_000),
    "one record fewer": ended(records=4),
    "one record more": ended(records=6),
    "no record, it says": ended(records=0),
    "65535 records": ended(records=0xFFFF),
    "65534 records": ended(records=0xFFFE),
    "other count here": ended(records_here=2),
    "other disk": ended(disk=1),
    "directory size 0": ended(nbytes=0),
    "directory size huge": ended(nbytes=0xFFFFFFF0),
    "directory size 2 ** 32 - 1": ended(nbytes=0xFFFFFFFF),
    "directory offset 0": ended(offset=0),
    "directory offset past the end": ended(offset=1 << 30),
    "directory offset 2 ** 32 - 1": ended(offset=0xFFFFFFFF),
    "directory offset 1 off": ended(offset=1),
    "no end record": ended(classic=False),
    "no end record but zip64": ended(classic=False, zip64=True),
    "zip64 records huge": ended(zip64=True, zip64_records=HUGE_64),
    "zip64 records 2 ** 31": ended(zip64=True, zip64_records=1 << 31),
    "zip64 records fewer": ended(zip64=True, zip64_records=1),
    "zip64 size huge": ended(zip64=True, zip64_nbytes=HUGE_64),
    "zip64 offset huge": ended(zip64=True, zip64_offset=HUGE_64),
    "zip64 offset and size that wrap": ended(zip64=True, zip64_offset=HUGE_64 - 10, zip64_nbytes=100),
    "zip64 offset 2 ** 63": ended(zip64=True, zip64_offset=1 << 63),
    "zip64 own size lies": ended(zip64=True, zip64_own_nbytes=1 << 40),
    "zip64 locator 0": ended(zip64=True, locator=0),
    "zip64 locator huge": ended(zip64=True, locator=HUGE_64),
    "comment": ended(comment=b"a comment"),
    "comment of 65535": ended(comment=b"c" * 0xFFFF),
    "comment that holds an end record": ended(comment=FAKE_END + b"xx"),
    "comment that ends in an end record": ended(comment=b"xx" + FAKE_END),
    "comment that is many end records": ended(comment=FAKE_END * 2900),
    "comment that is many signatures": ended(comment=b"PK\5\6" * 16_000),
    "comment longer than the file": ended(comment_nbytes=500),
    "comment that holds an archive": ended(comment=with_records(*RECORDS)),
    "archive after the archive": with_records(*RECORDS) * 2,
    "rubbish in front": b"rubbish!" * 10 + with_records(*RECORDS),
    "rubbish behind": with_records(*RECORDS) + b"rubbish",
    "zeros behind": with_records(*RECORDS) + bytes(100_000),
    "rubbish before the directory": Archive(RECORDS, before_directory=b"rubbish" * 99).to_bytes(),
    "rubbish before the end": Archive(RECORDS, before_end=b"rubbish" * 99).to_bytes(),
    "end record alone": b"PK\3\4" + bytes(26) + b"PK\5\6" + bytes(18),
    "directory in the header": b"PK\3\4" + bytes(30) + Archive(RECORDS).to_bytes()[64:],
    "20000 empty records": with_records(*RECORDS, *(Record(f"data/x{n}", alignment=1) for n in range(20_000))),
    # What metadata records say.
    "byteorder big": checkpoint(PICKLE.replace(b"X\1\0\0\0001", b"X\1\0\0\0000"), byteorder=b"big"),
    "byteorder rubbish": checkpoint(PICKLE, storages={"0": DATA, "1": DATA}, byteorder=b"middle"),
    "byteorder empty": checkpoint(PICKLE, storages={"0": DATA, "1": DATA}, byteorder=b""),
    "byteorder not ASCII": checkpoint(PICKLE, storages={"0": DATA, "1": DATA}, byteorder=b"\xff" * 9),
    "byteorder of a megabyte": checkpoint(PICKLE, storages={"0": DATA, "1": DATA}, byteorder=b"big" * 400_000),
    "byteorder big, odd storages": checkpoint(
        program(dict_of(model=dict_of(w=tensor(storage("0", 1023, kind="torch.ByteStorage"), size=(3,))))),
        storages={"0": DATA[:1023]}, byteorder=b"big",
    ),
    "alignment 64": counted(b"64"),
    "alignment 0": counted(b"0"),
    "alignment 0, refused pickle": counted(b"0", pickle_bytes=REFUSED_BY_TORCH),
    "alignment -1": counted(b"-1"),
    "alignment 1": counted(b"1"),
    "alignment 2 ** 31": counted(b"2147483648"),
    "alignment 2 ** 63": counted(b"9223372036854775808"),
    "alignment 2 ** 64": counted(b"18446744073709551616"),
    "alignment of 5000 digits": counted(b"9" * 5000),
    "alignment of a megabyte": counted(b"x" * 1_000_000),
    "alignment empty": counted(b""),
    "alignment rubbish": counted(b"many"),
    "alignment not ASCII": counted(b"\xff\xfe"),
    "alignment with underscores": counted(b"6_4"),
    "version rubbish": counted(b"64", version=b"\xff\xff"),
    "version empty": counted(b"64", version=b""),
    "version 0": counted(b"64", version=b"0"),
    "calculated numel lies": counted(b"64", pickle_bytes=two_tensors(1 << 61, 4)),
    "calculated numel negative": counted(b"64", pickle_bytes=two_tensors(-1 << 40, 0)),
    "calculated key that is not first": counted(
        b"64", pickle_bytes=program(dict_of(model=dict_of(a=tensor(storage("1", 256)), b=tensor(storage("0", 256)))))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHIVES)
def test_an_archive(court: Court, case: str) -> None:
    assert faults(court.hear(ARCHIVES[case])) == []
