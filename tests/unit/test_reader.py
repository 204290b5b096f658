"""RecordReader and stream_blocks: which bytes become which storage, and what is asked of the engine."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.archive.directory import Directory
from fastpersist.archive.unpickling import Raw
from fastpersist.engines import Engine, File, open_engine
from fastpersist.errors import CheckpointFormatError, CorruptCheckpointError, TransferError
from fastpersist.memory.alignment import PAGE_NBYTES
from fastpersist.memory.buffers import BufferPool
from fastpersist.transfer.pipeline import Pipeline
from fastpersist.transfer.reader import Arriving, RecordReader, Storages
from fastpersist.transfer.source import CheckpointFile
from fastpersist.transfer.streaming import stream_blocks
from tests.archives import flip

MIB = 1 << 20
SIZES = {"0": MIB + 1, "1": 0, "2": 7, "3": 3 * MIB, "4": 5000, "5": 1}


@dataclass
class Bench:
    """A file of records, open in an engine, with a pool of its own."""

    path: Path
    contents: dict[str, bytes]
    engine: Engine
    pool: BufferPool = field(default_factory=BufferPool)
    moved: list[int] = field(default_factory=list)

    def directory(self) -> Directory:
        with CheckpointFile(self.path) as source:
            return source.directory()

    def storages(self, *keys: str, verify: bool = True, block_nbytes: int = MIB, direct: bool = True) -> Storages:
        """Read the storages under these keys, or all."""
        directory = self.directory()
        wanted = [place for place in directory.storages() if not keys or directory.names[place][5:] in keys]
        with self.engine.open(str(self.path), "r", direct=direct) as file:
            reader = self._reader(file, directory, block_nbytes)
            with reader.reading(wanted, verify=verify) as arriving:
                return {key: arriving.take(key) for key in (directory.names[place][5:] for place in wanted)}

    @contextlib.contextmanager
    def arriving(self, block_nbytes: int = PAGE_NBYTES, **options: Any) -> Iterator[Arriving]:
        """All storages, on their way."""
        directory = self.directory()
        with (
            self.engine.open(str(self.path), "r") as file,
            self._reader(file, directory, block_nbytes).reading(directory.storages(), **{"verify": True} | options) as arriving,
        ):
            yield arriving

    def _reader(self, file: File, directory: Directory, block_nbytes: int) -> RecordReader:
        return RecordReader(
            self.engine, file, directory, self.pool, path="the file", block_nbytes=block_nbytes, queue_depth=3,
            moved=self.moved.append,
        )  # fmt: skip

    def blocks(self, nbytes: int, **options: Any) -> Iterator[bytes]:
        """The file as a stream."""
        options = {"block_nbytes": MIB, "queue_depth": 3, "moved": self.moved.append} | options
        with self.engine.open(str(self.path), "r") as file:
            for block in stream_blocks(self.engine, file, nbytes, self.pool, path="the file", **options):
                yield bytes(block)


def bytes_of(raw: Raw) -> bytes:
    """A storage's content."""
    memory, start, nbytes = raw
    return bytes(memory[start : start + nbytes])


def address_of(raw: Raw) -> int:
    """Where a storage lies."""
    return torch.frombuffer(raw[0], dtype=torch.uint8).data_ptr() + raw[1]


@pytest.fixture(params=["posix", "io_uring"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Records of all sizes, written by torch's own writer."""
    contents = {key: os.urandom(nbytes) for key, nbytes in SIZES.items()}
    path = tmp_path / "file"
    with torch.serialization._open_zipfile_writer(str(path)) as writer:
        writer.write_record("data.pkl", b"none", 4)
        for key, content in contents.items():
            writer.write_record(f"data/{key}", content, len(content))
    with open_engine(request.param, queue_depth=4) as engine:
        yield Bench(path, contents, engine)


@pytest.mark.parametrize("block_nbytes", [PAGE_NBYTES, 3 * PAGE_NBYTES, MIB, 64 * MIB])
@pytest.mark.parametrize("direct", [True, False])
def test_storages_hold_their_records(bench: Bench, block_nbytes: int, direct: bool) -> None:
    storages = bench.storages(block_nbytes=block_nbytes, direct=direct)
    assert {key: bytes_of(storage) for key, storage in storages.items()} == bench.contents
    assert sum(bench.moved) >= sum(SIZES.values())
    assert bench.pool.lent_nbytes == 0
    assert bench.engine.in_flight == 0


@pytest.mark.parametrize("keys", [("0",), ("2", "5"), ("1",), ("3", "4")])
def test_some_storages_and_no_others(bench: Bench, keys: tuple[str, ...]) -> None:
    storages = bench.storages(*keys)
    assert {key: bytes_of(storage) for key, storage in storages.items()} == {key: bench.contents[key] for key in keys}
    assert sum(bench.moved) <= sum(SIZES[key] for key in keys) + 2 * MIB  # little but what was asked for


def test_nothing_wanted_reads_nothing(bench: Bench) -> None:
    directory = bench.directory()
    with (
        bench.engine.open(str(bench.path), "r") as file,
        bench._reader(file, directory, MIB).reading([], verify=True) as arriving,
    ):
        assert arriving.take("0") is None
    assert bench.moved == []


@pytest.mark.parametrize("backwards", [True, False])
def test_storages_can_be_had_in_any_order_and_each_once(bench: Bench, backwards: bool) -> None:
    with bench.arriving() as arriving:
        for key in sorted(bench.contents, reverse=backwards):
            assert bytes_of(arriving.take(key)) == bench.contents[key]
            assert arriving.take(key) is None
        assert arriving.take("none") is None


def test_reads_run_ahead_of_the_one_that_is_waited_for(bench: Bench) -> None:
    with bench.arriving() as arriving:
        first = bench.directory().names[bench.directory().storages()[0]][5:]
        arriving.take(first)
        assert 0 < bench.engine.in_flight <= 3
        assert sum(bench.moved) < sum(SIZES.values())
    assert bench.engine.in_flight == 0
    assert sum(bench.moved) >= sum(SIZES.values())  # those that nobody took were read as well, and checked


def test_what_fails_beside_the_reads_leaves_none_in_flight(bench: Bench) -> None:
    def fail() -> None:
        with bench.arriving() as arriving:
            arriving.take("0")
            raise ZeroDivisionError

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            fail()
        assert not any(type(kept) is Arriving for kept in gc.get_objects())  # it has the pages
    finally:
        gc.enable()
    assert bench.engine.in_flight == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "fastpersist-populate"]


def test_pages_live_no_longer_than_their_storages(bench: Bench) -> None:
    with bench.arriving() as arriving:
        memory, _, _ = arriving.take("0")
        pages = weakref.ref(memory.obj)
        assert pages() is not None
        del memory
        arriving.finish()
        gc.collect()
        assert pages() is None


def test_a_flipped_bit_is_found_though_nobody_takes_the_storage(bench: Bench) -> None:
    directory = bench.directory()
    with CheckpointFile(bench.path) as source:
        flip(bench.path, source.data_offset(directory, directory.index["data/3"]), 0x80)
    with pytest.raises(CorruptCheckpointError, match="data/3"), bench.arriving() as arriving:
        arriving.take("0")


def test_large_storages_do_not_share_memory(bench: Bench) -> None:
    """Each mapping goes away with its storage."""
    storages = bench.storages()
    ranges = sorted((address_of(raw), address_of(raw) + raw[2]) for raw in storages.values() if raw[2])
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    large = {address_of(storages[key]) // PAGE_NBYTES for key in ("0", "3")}
    small = {address_of(storages[key]) // PAGE_NBYTES for key in ("2", "4", "5")}
    assert not large & small


@pytest.mark.parametrize("key", ["0", "2", "3", "4", "5"])
def test_a_flipped_bit_is_found_if_it_is_asked_for(bench: Bench, key: str) -> None:
    directory = bench.directory()
    with CheckpointFile(bench.path) as source:
        start = source.data_offset(directory, directory.index[f"data/{key}"])
    flip(bench.path, start + SIZES[key] - 1, 0x80)
    with pytest.raises(CorruptCheckpointError, match=rf"the file: record 'data/{key}' \(offset {start}, {SIZES[key]} bytes\)"):
        bench.storages()
    assert bench.pool.lent_nbytes == 0
    assert bytes_of(bench.storages(verify=False)[key])[:-1] == bench.contents[key][:-1]


@pytest.mark.parametrize("key", ["0", "2"])
def test_a_damaged_header_is_named(bench: Bench, key: str) -> None:
    directory = bench.directory()
    offset = int(directory.header_offsets[directory.index[f"data/{key}"]])
    flip(bench.path, offset)
    with pytest.raises(CheckpointFormatError, match=f"the file: record 'data/{key}': no local header at offset {offset}"):
        bench.storages()
    assert bench.pool.lent_nbytes == 0
    assert bench.engine.in_flight == 0


@pytest.mark.parametrize("key", ["0", "4"])
def test_a_header_that_moves_the_data_into_the_next_record(bench: Bench, key: str) -> None:
    directory = bench.directory()
    flip(bench.path, int(directory.header_offsets[directory.index[f"data/{key}"]]) + 29, 0xF0)  # length of the extra field
    with pytest.raises(CheckpointFormatError, match=f"'data/{key}'.* beyond"):
        bench.storages()


def test_no_thread_is_left(bench: Bench) -> None:
    before = threading.enumerate()
    bench.storages()
    assert threading.enumerate() == before


@pytest.mark.parametrize("block_nbytes", [PAGE_NBYTES, 5 * PAGE_NBYTES, MIB, 64 * MIB])
@pytest.mark.parametrize("queue_depth", [1, 2, 4])
def test_a_stream_is_the_file(bench: Bench, block_nbytes: int, queue_depth: int) -> None:
    content = bench.path.read_bytes()
    blocks = list(bench.blocks(len(content), block_nbytes=block_nbytes, queue_depth=queue_depth))
    assert b"".join(blocks) == content
    assert {len(block) for block in blocks[:-1]} <= {block_nbytes}
    assert bench.pool.lent_nbytes == 0


def test_a_stream_of_nothing(bench: Bench) -> None:
    assert list(bench.blocks(0)) == []


def test_a_stream_takes_no_more_than_the_pool(bench: Bench) -> None:
    """A queue deeper than the pool: blocks are consumed to make room, and nothing waits for ever."""
    bench.pool = BufferPool(2 * MIB)
    content = bench.path.read_bytes()
    assert b"".join(bench.blocks(len(content), queue_depth=4)) == content
    assert bench.pool.held_nbytes <= 2 * MIB


def test_a_stream_that_is_left_gives_all_back(bench: Bench) -> None:
    stream = bench.blocks(bench.path.stat().st_size, block_nbytes=PAGE_NBYTES)
    next(stream)
    assert bench.pool.lent_nbytes > 0
    stream.close()  # type: ignore[attr-defined]
    assert bench.pool.lent_nbytes == 0
    assert bench.engine.in_flight == 0


@pytest.mark.parametrize("cut", [1, 5000, 2 * MIB])
def test_a_stream_of_a_file_that_became_shorter(bench: Bench, cut: int) -> None:
    nbytes = bench.path.stat().st_size
    os.truncate(bench.path, nbytes - cut)
    with pytest.raises(TransferError, match=r"cut meanwhile.*the file") as caught:
        list(bench.blocks(nbytes))
    assert caught.value.offset == nbytes - cut or cut > MIB
    assert bench.pool.lent_nbytes == 0


# What is unpickled may load, too

SHARED: list[Engine] = []


def load_the_other(path: str) -> Any:
    """What a pickle calls; by the shared engine, if there is one, which nobody else uses then. None for a damaged file."""
    assert not any(engine.in_flight for engine in SHARED)
    with contextlib.suppress(CheckpointFormatError):
        return fastpersist.load(path, engine=SHARED[0] if SHARED else "auto")


class Other:
    """Pickled as the content of another checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return load_the_other, (str(self.path),)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
@pytest.mark.parametrize("damaged", [True, False])
@pytest.mark.timeout(60)
def test_a_load_within_a_load(tmp_path: Path, engine: str, shared: bool, damaged: bool) -> None:
    inner = [torch.full((300_000,), 1.0), torch.ones(5)]
    outer = [torch.full((300_000 + count,), float(count)) for count in range(40)]
    fastpersist.save(inner, tmp_path / "inner.pt")
    if damaged:
        with CheckpointFile(tmp_path / "inner.pt") as source:
            directory = source.directory()
        flip(tmp_path / "inner.pt", int(directory.header_offsets[directory.index["data/0"]]), 0x80)
    fastpersist.save([outer[0], Other(tmp_path / "inner.pt"), outer], tmp_path / "outer.pt")
    with open_engine(engine) as opened:
        SHARED.extend([opened] * shared)
        try:
            loaded = fastpersist.load(
                tmp_path / "outer.pt", engine=opened if shared else engine, weights_only=False, block_nbytes=65536
            )
        finally:
            SHARED.clear()
    assert (loaded[1] is None) == damaged
    assert damaged or all(torch.equal(found, expected) for found, expected in zip(loaded[1], inner, strict=True))
    assert all(torch.equal(found, expected) for found, expected in zip(loaded[2], outer, strict=True))


# What is a program's own, while a load reads


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Forty tensors with regions of their own, of several blocks each."""
    fastpersist.save({f"w{index}": torch.full((300_000,), float(index)) for index in range(40)}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("only", [None, ["w1", "w2", "w3", "w30"]])
@pytest.mark.parametrize("at", [1, 2, 20])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("error", [KeyError("boom"), ValueError("boom")])
@pytest.mark.timeout(60)
def test_an_error_of_the_callers_comes_through(
    checkpoint: Path, only: list[str] | None, at: int, weights_only: bool, error: Exception
) -> None:
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    with pytest.raises(type(error)) as caught:
        fastpersist.load(
            checkpoint, engine="posix", only=only, weights_only=weights_only, progress=progress, block_nbytes=131072
        )
    assert caught.value is error


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_while_a_load_waits(checkpoint: Path, collects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reap, while_waiting = Pipeline.reap, []

    def reap_late(self: Pipeline, timeout: float | None = None) -> None:
        if timeout is None:  # else: as if nothing had come in that time
            while_waiting.append(gc.isenabled())
            reap(self)

    monkeypatch.setattr(Pipeline, "reap", reap_late)
    enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        fastpersist.load(checkpoint, engine="posix", block_nbytes=131072)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if enabled else gc.disable)()
    assert len(while_waiting) > 10
    assert set(while_waiting) == {collects}


@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_tensors_wait_for_nothing_while_their_validation_is_due(
    tmp_path: Path, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of those to be validated is one for the whole process: another load validates, or forgets, what is in it."""
    tensors = [torch.full((300_000,), float(index)) for index in range(40)]
    fastpersist.save([torch.eye(3).to_sparse() if sparse else 0, *tensors], tmp_path / "a.pt")
    reap, waiting = Pipeline.reap, []

    def reap_and_look(self: Pipeline, timeout: float | None = None) -> None:
        waiting.append(len(torch._utils._sparse_tensors_to_validate))
        reap(self, timeout)

    monkeypatch.setattr(Pipeline, "reap", reap_and_look)
    loaded = fastpersist.load(tmp_path / "a.pt", engine="posix", block_nbytes=131072)
    assert all(torch.equal(found, expected) for found, expected in zip(loaded[1:], tensors, strict=True))
    assert len(waiting) > 10
    assert not any(waiting)
