"""Good files with bits flipped, numbers changed and ends cut off, place by place and by hypothesis."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.court import MAIN_VERBS, Court, faults
from tests.fuzz.forge import (
    Archive,
    End,
    Record,
    checkpoint,
    dict_of,
    good_checkpoint,
    legacy_checkpoint,
    name,
    number,
    numbers,
    program,
    storage,
    tensor,
    text,
    tuple_of,
)
from tests.fuzz.judge import digest
from tests.fuzz.mutations import (
    GLOBALS,
    INTERESTING,
    OPCODES,
    damaged_bytes,
    damaged_numbers,
    damaged_pickle,
    soup,
    with_pickle,
)

TAIL_NBYTES = 1500
SAMPLES = 150
BITS = 8

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def small_archive() -> bytes:
    """Few bytes of metadata, and all kinds of it: zip64 end, descriptors, an extra field, a comment."""
    records = [
        Record("data.pkl", program(dict_of(w=tensor())), alignment=1),
        Record("byteorder", b"little", alignment=64),
        Record("data/0", bytes(range(256)) * 4, alignment=64),
    ]
    return Archive([*records, Record("version", b"3\n", alignment=1)], End(zip64=True, comment=b"hi")).to_bytes()


def content_of(archive: bytes) -> str:
    return digest(torch.load(io.BytesIO(archive)))


def spread(nbytes: int, samples: int, seed: int) -> list[int]:
    """Places in a file of that size, at random but the same ones each time."""
    return sorted(Random(seed).sample(range(nbytes), min(samples, nbytes)))


def metadata_places(archive: bytes) -> list[int]:
    """All bytes but the records' data."""
    places = set(range(len(archive)))
    for data in (program(dict_of(w=tensor())), bytes(range(256)) * 4):
        start = archive.index(data)
        places -= set(range(start, start + len(data)))
    return sorted(places)


@pytest.fixture
def base(court: Court) -> Iterator[Path]:
    """A place for the file that is damaged."""
    path = court.folder / "base.pt"
    yield path
    path.unlink()


@pytest.mark.parametrize("whole", [good_checkpoint(), small_archive()], ids=["saved by torch", "small"])
def test_the_end_is_cut_off(court: Court, base: Path, whole: bytes) -> None:
    base.write_bytes(whole)
    tail = range(max(0, len(whole) - TAIL_NBYTES), len(whole))
    for keep in sorted({*tail, *spread(len(whole), SAMPLES, 1)}):
        findings = court.hear_edited(base, [], keep, verbs=MAIN_VERBS if keep % 8 == 0 else ("inspect",))
        assert faults(findings) == [], f"{keep} of {len(whole)} bytes kept"
        # Without its end, no file is whole; but a comment may lose bytes only together with the file.
        assert all(finding.outcome.startswith("CheckpointFormatError") for finding in findings), f"{keep} bytes kept"


def test_a_legacy_file_whose_end_is_cut_off(court: Court, base: Path) -> None:
    whole = legacy_checkpoint()
    base.write_bytes(whole)
    for keep in spread(len(whole), SAMPLES, 2):
        findings = court.hear_edited(base, [], keep, verbs=("load", "inspect", "verify"))
        assert faults(findings) == [], f"{keep} of {len(whole)} bytes kept"
        assert findings[0].outcome != "ok", f"{keep} of {len(whole)} bytes kept"


@pytest.mark.parametrize("bit", range(BITS))
def test_a_bit_of_metadata_is_flipped(court: Court, base: Path, bit: int) -> None:
    whole = small_archive()
    base.write_bytes(whole)
    expected = content_of(whole)
    for place in metadata_places(whole):
        verb = ("load verified", "verify")[(place + bit) % 2]
        findings = court.hear_edited(base, [(place, bytes([whole[place] ^ 1 << bit]))], None, ("inspect", verb), expected)
        assert faults(findings) == [], f"bit {bit} of byte {place} flipped"


@pytest.mark.parametrize("whole", [good_checkpoint(), small_archive()], ids=["saved by torch", "small"])
def test_a_bit_anywhere_is_flipped(court: Court, base: Path, whole: bytes) -> None:
    base.write_bytes(whole)
    expected = content_of(whole)
    for place in spread(len(whole), SAMPLES, 3):
        findings = court.hear_edited(base, [(place, bytes([whole[place] ^ 1 << place % 8]))], None, MAIN_VERBS, expected)
        assert faults(findings) == [], f"bit {place % 8} of byte {place} flipped"


def test_a_bit_of_data_is_flipped_and_noticed(court: Court, base: Path) -> None:
    whole = small_archive()
    base.write_bytes(whole)
    start = whole.index(bytes(range(256)) * 4)
    for place in spread(1024, 20, 4):
        edit = (start + place, bytes([whole[start + place] ^ 1 << place % 8]))
        loaded, verified = court.hear_edited(base, [edit], None, ("load verified", "verify"))
        assert loaded.outcome.startswith("CorruptCheckpointError"), str(loaded)
        assert verified.outcome.startswith("CorruptCheckpointError"), str(verified)


def test_a_bit_of_a_legacy_file_is_flipped(court: Court, base: Path) -> None:
    whole = legacy_checkpoint()
    base.write_bytes(whole)
    for place in spread(len(whole) - 1300, SAMPLES, 5):  # the last bytes are data, which has no checksum
        findings = court.hear_edited(base, [(place, bytes([whole[place] ^ 1 << place % 8]))], None, ("load", "inspect"))
        assert faults(findings) == [], f"bit {place % 8} of byte {place} flipped"


@few
@given(st.randoms(use_true_random=False), st.sampled_from([damaged_bytes, damaged_numbers]))
def test_damaged_files(court: Court, random, damage) -> None:
    whole = good_checkpoint()
    assert faults(court.hear(damage(random, whole), MAIN_VERBS, content_of(whole))) == []


@few
@given(st.randoms(use_true_random=False))
def test_damaged_pickles_with_the_right_checksum(court: Court, random) -> None:
    content = with_pickle(good_checkpoint(), lambda pickle_bytes: damaged_pickle(random, pickle_bytes))
    assert faults(court.hear(content)) == []


@few
@given(st.randoms(use_true_random=False))
def test_pickles_of_random_pieces(court: Court, random) -> None:
    assert faults(court.hear(checkpoint(soup(random), storages={"0": bytes(1024), "1": bytes(512)}))) == []


interesting = st.sampled_from(INTERESTING)
names = st.one_of(
    st.sampled_from(["data/0", "data/1", "data.pkl", "byteorder", ".format_version", ".storage_alignment", "data/", "x/../y"]),
    st.binary(max_size=20),
)
records = st.builds(
    Record,
    name=names,
    content=st.one_of(st.binary(max_size=40), st.sampled_from([program(dict_of(w=tensor())), bytes(1024), b"1", b"0", b"big"])),
    checksum=st.one_of(st.none(), st.none(), st.just(0), st.integers(0, 0xFFFFFFFF)),
    nbytes=st.one_of(st.none(), st.none(), interesting),
    stored_nbytes=st.one_of(st.none(), st.none(), st.none(), interesting),
    header_offset=st.one_of(st.none(), st.none(), st.none(), interesting, st.integers(0, 4000)),
    local_name=st.one_of(st.none(), st.none(), st.binary(max_size=9)),
    local_nbytes=st.sampled_from([0, 0, 0, 1, 0xFFFFFFFF]),
    local_extra_nbytes=st.one_of(st.none(), st.none(), st.none(), st.sampled_from([0, 1, 64, 0xFFFF])),
    flags=st.sampled_from([0x808, 0x808, 0, 8, 9]),
    method=st.sampled_from([0, 0, 0, 0, 8]),
    extra=st.one_of(st.just(b""), st.binary(max_size=30), st.binary(max_size=26).map(lambda tail: b"\1\0" + tail)),
    comment=st.binary(max_size=5),
    listed=st.sampled_from([True, True, True, False]),
    alignment=st.sampled_from([1, 64, 4096]),
)
ends = st.builds(
    End,
    records=st.one_of(st.none(), st.none(), st.integers(0, 8), st.just(0xFFFF)),
    nbytes=st.one_of(st.none(), st.none(), st.integers(0, 0xFFFFFFFF)),
    offset=st.one_of(st.none(), st.none(), st.integers(0, 0xFFFFFFFF)),
    comment=st.binary(max_size=30),
    comment_nbytes=st.one_of(st.none(), st.none(), st.integers(0, 0xFFFF)),
    zip64=st.booleans(),
    zip64_records=st.one_of(st.none(), st.none(), interesting),
    zip64_nbytes=st.one_of(st.none(), st.none(), interesting),
    zip64_offset=st.one_of(st.none(), st.none(), interesting),
    locator=st.one_of(st.none(), st.none(), interesting),
)


@few
@given(st.lists(records, max_size=5), ends, st.booleans())
def test_archives_that_lie(court: Court, some: list[Record], end: End, complete: bool) -> None:
    good = [Record("data.pkl", program(dict_of(w=tensor()))), Record("data/0", bytes(1024)), Record("version", b"3\n")]
    content = Archive([*(good if complete else []), *some], end).to_bytes()
    assert faults(court.hear(content)) == []


leaves = st.one_of(
    st.sampled_from(INTERESTING[:29]).map(number),
    st.sampled_from(GLOBALS).map(name),
    st.sampled_from(["storage", "0", "1", "cpu", "meta", ""]).map(text),
    st.sampled_from([tensor(), storage(), storage("1", 256), storage("2", 0), b"N", b"\x88", b"\x89", b")", b"]", b"}"]),
    st.lists(st.sampled_from(INTERESTING[:29]), max_size=3).map(lambda values: numbers(*values)),
    st.sampled_from([bytes([code]) for code in OPCODES]),
    st.floats(allow_nan=True).map(lambda value: b"G" + struct.pack(">d", value)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6).map(lambda parts: tuple_of(*parts)),
        st.lists(inner, max_size=6).map(lambda parts: b"](" + b"".join(parts) + b"e"),
        st.lists(inner, max_size=3).map(lambda parts: dict_of(**{f"k{place}": part for place, part in enumerate(parts)})),
        st.tuples(st.sampled_from(GLOBALS), st.lists(inner, max_size=8)).map(
            lambda made: name(made[0]) + tuple_of(*made[1]) + b"R"
        ),
        st.tuples(inner, inner).map(lambda made: made[0] + made[1] + b"b"),
        inner.map(lambda saved_id: saved_id + b"Q"),
    ),
    max_leaves=12,
)


@settings(few, max_examples=150)
@given(values)
def test_pickles_that_make_sense_to_the_unpickler(court: Court, value: bytes) -> None:
    storages = {"0": bytes(range(256)) * 4, "1": bytes(1024), "2": b""}
    assert faults(court.hear(checkpoint(program(dict_of(model=dict_of(w=tensor(), x=value))), storages=storages))) == []
