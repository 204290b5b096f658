"""Random damage to files: of any bytes, of the numbers in zip structures, and of pickles whose checksum is set right again."""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
from collections.abc import Callable
from random import Random

from tests.fuzz import forge
from tests.fuzz.forge import Archive, End, Record, call, dict_of, name, number, numbers, storage, tensor, text, tuple_of

SIGNATURES = (b"PK\1\2", b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"PK\7\x08")
INTERESTING = (
    0, 1, 2, 3, 4, 8, 15, 16, 30, 46, 63, 64, 255, 256, 1023, 1024, 1025, 4095, 4096, 65534, 65535, 65536, (1 << 20) - 1,
    1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 100, (1 << 64) - 1,
)  # fmt: skip
GLOBALS = (
    "collections.OrderedDict", "collections.Counter", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
    "torch.Size", "torch.Tensor", "torch.device", "_codecs.encode", "builtins.set", "builtins.complex", "torch.float32",
    "torch.int64", "torch.quint8", "torch.uint3", "torch.FloatStorage", "torch.LongStorage", "torch.ByteStorage",
    "torch.BFloat16Storage", "torch.QInt8Storage", "torch.ComplexDoubleStorage", "torch.BoolStorage",
    "torch.storage.UntypedStorage", "torch.storage.TypedStorage", "torch.per_tensor_affine", "torch.per_channel_affine",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_qtensor",
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_sparse_tensor", "torch._utils._rebuild_meta_tensor_no_storage",
    "torch._utils._rebuild_nested_tensor", "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy", "torch._utils._rebuild_device_tensor_from_cpu_tensor",
    "torch._tensor._rebuild_from_type_v2", "os.system", "builtins.eval",
)  # fmt: skip
OPCODES = b"()]}NRQbtu.e\x85\x86\x87\x81\x88\x89as\x8f"


def pieces(random: Random) -> bytes:
    """One piece of a pickle that makes some sense."""
    makers: list[Callable[[], bytes]] = [
        lambda: bytes([random.choice(OPCODES)]),
        lambda: name(random.choice(GLOBALS)),
        lambda: number(random.choice(INTERESTING[:29]) * random.choice((1, -1))),
        lambda: text(random.choice(("storage", "0", "1", "cpu", "meta", "module", "", "strided", "torch.sparse_coo"))),
        lambda: storage(
            random.choice("01"), random.choice((0, 1, 128, 256, 257, 512, 1024)), kind=random.choice(GLOBALS[14:23])
        ),
        lambda: tensor(
            offset=random.choice((0, 1, 255, 256, -1)),
            size=tuple(random.choice((0, 1, 2, 16, 256, 257, -1)) for _ in range(random.randrange(4))),
            stride=tuple(random.choice((0, 1, 2, 16, -1)) for _ in range(random.randrange(4))),
        ),
        lambda: numbers(*(random.choice(INTERESTING[:29]) for _ in range(random.randrange(4)))),
        lambda: b"q" + bytes([random.randrange(4)]),
        lambda: b"h" + bytes([random.randrange(4)]),
        lambda: call(random.choice(GLOBALS), *(pieces(random) for _ in range(random.randrange(5)))),
        lambda: tuple_of(*(pieces(random) for _ in range(random.randrange(6)))),
        lambda: dict_of(model=pieces(random), x=pieces(random)),
        lambda: random.randbytes(random.randrange(6)),
    ]
    return random.choice(makers)()


def soup(random: Random) -> bytes:
    """A pickle of random pieces, some of them in a state dict."""
    if random.random() < 0.5:
        value = b"".join(pieces(random) for _ in range(random.randrange(1, 4)))
        return forge.program(dict_of(model=dict_of(w=tensor(), x=value), y=pieces(random)))
    return forge.program(*(pieces(random) for _ in range(random.randrange(1, 12))))


def damaged_pickle(random: Random, content: bytes) -> bytes:
    """The pickle with opcodes deleted, doubled, exchanged or replaced."""
    starts = [position for _, _, position in pickletools.genops(content) if position is not None]
    parts = [content[start:stop] for start, stop in zip(starts, [*starts[1:], len(content)], strict=True)]
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(len(parts))
        kind = random.randrange(6)
        if kind == 0 and len(parts) > 1:
            del parts[place]
        elif kind == 1:
            parts.insert(place, parts[random.randrange(len(parts))])
        elif kind == 2:
            other = random.randrange(len(parts))
            parts[place], parts[other] = parts[other], parts[place]
        elif kind == 3:
            parts[place] = pieces(random)
        elif kind == 4:
            parts.insert(place, pieces(random))
        else:
            parts[place] = parts[place][:1] + random.randbytes(len(parts[place]) - 1)
    return b"".join(parts)


def with_pickle(base: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The archive with its pickle changed, and every checksum right."""
    with zipfile.ZipFile(io.BytesIO(base)) as archive:
        folder = archive.namelist()[0].partition("/")[0]
        records = []
        for info in archive.infolist():
            content = archive.read(info)
            short = info.filename.partition("/")[2]
            records.append(Record(short, change(content) if short == "data.pkl" else content, folder=folder))
    return Archive(records).to_bytes()


def damaged_bytes(random: Random, base: bytes) -> bytes:
    """Flipped bits, bytes and runs of bytes replaced, inserted, deleted, moved, or the end cut off."""
    content = bytearray(base)
    for _ in range(random.choice((1, 1, 1, 2, 5, 20))):
        place = random.randrange(len(content)) if random.random() < 0.5 else max(0, len(content) - random.randrange(1, 1500))
        length = random.choice((1, 2, 4, 8, 30, 100, 1000))
        kind = random.randrange(7)
        if kind == 0:
            content[place] ^= 1 << random.randrange(8)
        elif kind == 1:
            content[place : place + length] = random.randbytes(min(length, len(content) - place))
        elif kind == 2:
            content[place:place] = random.randbytes(length)
        elif kind == 3 and len(content) > length:
            del content[place : place + length]
        elif kind == 4:
            start = random.randrange(len(content))
            content[place : place + length] = content[start : start + length]
        elif kind == 5:
            content[place : place + length] = bytes(min(length, len(content) - place))
        elif random.random() < 0.3:
            del content[place:]
        if not content:
            break
    return bytes(content)


def damaged_numbers(random: Random, base: bytes) -> bytes:
    """Numbers in the structures of the zip, found by their signatures, replaced by interesting ones."""
    content = bytearray(base)
    places = []
    for signature in SIGNATURES:
        found = content.find(signature)
        while found >= 0:
            places.append(found)
            found = content.find(signature, found + 1)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not places:
            break
        at = random.choice(places) + random.randrange(0, 60, 1 if random.random() < 0.2 else 2)
        width = random.choice((2, 2, 4, 4, 8))
        mask = (1 << 8 * width) - 1
        if at + width > len(content):
            continue
        (old,) = struct.unpack("<Q", content[at : at + width].ljust(8, b"\0"))
        new = random.choice((random.choice(INTERESTING), old + random.choice((-64, -1, 1, 64)), old * 2, len(base), at)) & mask
        content[at : at + width] = struct.pack("<Q", new)[:width]
    return bytes(content)


def damaged_plan(random: Random) -> bytes:
    """An archive whose records and end lie about a few things."""
    lies: dict[str, Callable[[], object]] = {
        "checksum": lambda: random.choice((0, 1, 0xFFFFFFFF)),
        "nbytes": lambda: random.choice(INTERESTING),
        "stored_nbytes": lambda: random.choice(INTERESTING),
        "header_offset": lambda: random.choice((*INTERESTING, *range(0, 3000, 64))),
        "local_nbytes": lambda: random.choice(INTERESTING) & 0xFFFFFFFF,
        "local_extra_nbytes": lambda: random.choice(INTERESTING) & 0xFFFF,
        "local_extra": lambda: random.randbytes(random.randrange(100)),
        "flags": lambda: random.randrange(1 << 16),
        "extra": lambda: struct.pack("<HH", 1, random.choice((0, 7, 8, 16, 24))) + random.randbytes(random.randrange(30)),
        "descriptor": lambda: random.randbytes(random.randrange(30)),
        "alignment": lambda: random.choice((1, 3, 64, 4096)),
        "name": lambda: random.choice(("data/0", "data/1", "data.pkl", "byteorder", ".format_version", b"archive/", b"x")),
        "listed": lambda: False,
        "content": lambda: random.choice(
            (b"", b"0", b"-1", b"1", b"64", b"little", b"big", random.randbytes(9), bytes(1 << 20))
        ),
    }
    plain = [
        ("data.pkl", forge.program(dict_of(model=dict_of(w=tensor(), v=tensor(storage("1", 256)))))), ("byteorder", b"little"),
        (".format_version", b"1"), (".storage_alignment", b"64"), ("data/0", bytes(1024)), ("data/1", bytes(range(256)) * 4),
        ("data/2", b""), ("version", b"3\n"),
    ]  # fmt: skip
    records = []
    for short, content in plain:
        told: dict[str, object] = {"name": short, "content": content}
        if random.random() < 0.2:
            for lie in random.sample(list(lies), random.randrange(1, 3)):
                told[lie] = lies[lie]()
        records.append(Record(**told))  # type: ignore[arg-type]
    if random.random() < 0.1:
        random.shuffle(records)
    ends = ("records", "nbytes", "offset", "zip64_records", "zip64_nbytes", "zip64_offset", "locator", "comment_nbytes")
    limits = {"records": 0xFFFF, "comment_nbytes": 0xFFFF, "nbytes": 0xFFFFFFFF, "offset": 0xFFFFFFFF}
    end: dict[str, object] = {"zip64": random.random() < 0.5}
    if random.random() < 0.3:
        field = random.choice(ends)
        end[field] = random.choice(INTERESTING) & limits.get(field, (1 << 64) - 1)
    return Archive(records, End(**end)).to_bytes()  # type: ignore[arg-type]


def mutant(random: Random, archives: list[bytes], others: list[bytes]) -> bytes:
    """A damaged file; ``archives`` are good zips, ``others`` good files of other kinds."""
    base = random.choice(archives)
    kind = random.randrange(10)
    if kind < 2:
        return damaged_bytes(random, base)
    if kind < 4:
        return damaged_numbers(random, base)
    if kind < 6:
        return with_pickle(base, lambda content: damaged_pickle(random, content))
    if kind < 8:
        return forge.checkpoint(soup(random), storages={"0": bytes(1024), "1": bytes(512)})
    if kind < 9:
        return damaged_plan(random)
    return damaged_bytes(random, random.choice(others))
