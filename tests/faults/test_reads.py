"""Every read of a load fails in turn: the error is the true one, no wrong byte is returned, and nothing is left behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import CheckpointFormatError, TransferError, checkpoint
from fastpersist.engines import Engine, files
from fastpersist.memory.buffers import shared_pool
from fastpersist.testing import Fault, FaultyEngine
from fastpersist.transfer import pipeline
from fastpersist.transfer.loading import Reading
from tests.faults.scene import Scene, assert_same, state_of

ENGINES = ("posix", "io_uring")
BLOCK_NBYTES = 262144  # small, for a load of many reads
MANY = 100_000  # more requests than any load here makes
LARGE_NBYTES = (1_100_001, 1 << 20, 1_300_000)  # from 1 MiB on a storage is read by itself

# A hang is a failure like any other here: it must end the test, and not the run.
pytestmark = pytest.mark.timeout(120)

Call = Callable[[Path, Engine], Any]


def content(value: int) -> dict[str, Any]:
    """Large and small tensors, each of which tells in every element which content it belongs to."""
    large = {f"large{index}": torch.full((nbytes,), value, dtype=torch.uint8) for index, nbytes in enumerate(LARGE_NBYTES)}
    small = {f"small{index}": torch.full((37 + index,), float(value)) for index in range(9)}
    return {"empty": torch.zeros(0), **large, **small, "value": value}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A directory of its own, with the content in it."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    scene = Scene(directory)
    fastpersist.save(content(7), scene.path, engine="posix", durable=False)
    return scene


def load(path: Path, engine: Engine) -> None:
    """A load, whose result must be the content."""
    assert_same(fastpersist.load(path, engine=engine), content(7))


def load_verified(path: Path, engine: Engine) -> None:
    """A load with its checksums verified."""
    assert_same(fastpersist.load(path, engine=engine, verify=True), content(7))


def load_part(path: Path, engine: Engine) -> None:
    """A load of some tensors."""
    whole, only = content(7), ("large1", "small3", "value")
    assert_same(fastpersist.load(path, engine=engine, only=only), {key: whole[key] for key in only})


def verify(path: Path, engine: Engine) -> None:
    """A check of the whole file."""
    assert fastpersist.verify(path, engine=engine).records == 17


@pytest.fixture(params=[load, load_verified, load_part, verify], ids=lambda call: call.__name__)
def call(request: pytest.FixtureRequest) -> Call:
    """Each way of reading."""
    chosen: Call = request.param
    return chosen


@pytest.fixture(autouse=True, params=[True, False], ids=["ahead", "first"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether reads go on while the pickle is read, as with an engine of the load's own, or are done with before."""

    def reading(engine: Engine, _: bool, *others: Any) -> Reading:
        return Reading(engine, request.param, *others)

    monkeypatch.setattr(checkpoint, "Reading", reading)


@pytest.fixture(params=ENGINES)
def inner(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A real engine."""
    with fastpersist.open_engine(request.param, block_nbytes=BLOCK_NBYTES) as engine:
        yield engine


@pytest.fixture
def engine(inner: Engine) -> FaultyEngine:
    """The same real engine, with faults that a test may set (it starts without one)."""
    return FaultyEngine(inner, {})


def failure_of(call: Callable[[], Any], error: type[BaseException]) -> Any:
    """The error that the call raises, without the frames that it passed: a kept error keeps what they refer to."""
    try:
        call()
    except error as failure:  # pytest.raises would keep it in this frame, which it refers to
        traceback.clear_frames(failure.__traceback__)
        return failure.with_traceback(None)
    return pytest.fail(f"no {error.__name__} was raised")


def set_faults(engine: FaultyEngine, faults: dict[int, Fault]) -> None:
    """Number the requests from 1 again, and meet these faults."""
    engine.submitted = 0
    engine.faults = faults


def reads_of(engine: FaultyEngine, scene: Scene, call: Call) -> int:
    """How many reads the call makes without faults."""
    set_faults(engine, {})
    call(scene.path, engine)
    assert engine.submitted >= 4  # else the loops below prove little
    return engine.submitted


def test_each_read_fails_in_turn(scene: Scene, engine: FaultyEngine, call: Call) -> None:
    code, reads = errno.ESTALE, reads_of(engine, scene, call)
    for failing in range(1, reads + 1):
        note = f"read {failing} of {reads}"
        set_faults(engine, {failing: Fault.error(code)})
        with scene.unharmed(note):
            error = failure_of(lambda: call(scene.path, engine), TransferError)
        assert (error.errno, error.path, error.filename) == (code, str(scene.path), str(scene.path)), note
        assert error.offset is not None
        said = ("cannot read", os.strerror(code), f"at offset {error.offset}", f"({error.nbytes} bytes)", str(scene.path))
        assert [part for part in said if part not in str(error)] == [], note
        assert engine.in_flight == engine.inner.in_flight == 0, note
    set_faults(engine, {})
    call(scene.path, engine)  # the engine serves on


def test_all_reads_fail_at_once(scene: Scene, engine: FaultyEngine, call: Call) -> None:
    set_faults(engine, dict.fromkeys(range(1, MANY), Fault.error(errno.EIO)))
    with scene.unharmed():
        assert failure_of(lambda: call(scene.path, engine), TransferError).errno == errno.EIO


def test_each_read_finds_the_end_of_the_file_in_turn(scene: Scene, engine: FaultyEngine, call: Call) -> None:
    """As when the file is cut at that moment. Nothing but a failed transfer may come of it: no stale byte is looked at."""
    reads = reads_of(engine, scene, call)
    for empty in range(1, reads + 1):
        note = f"read {empty} of {reads}"
        set_faults(engine, {empty: Fault.short(0)})
        with scene.unharmed(note):
            assert "cut meanwhile" in str(failure_of(lambda: call(scene.path, engine), TransferError)), note
        assert engine.in_flight == 0, note


@pytest.mark.parametrize("nbytes", [512, BLOCK_NBYTES - 4096])
def test_each_read_is_short_in_turn(scene: Scene, engine: FaultyEngine, call: Call, nbytes: int) -> None:
    for short in range(1, reads_of(engine, scene, call) + 1):
        set_faults(engine, {short: Fault.short(nbytes)})
        call(scene.path, engine)


@pytest.mark.parametrize("nbytes", [12288])
def test_all_reads_are_short(scene: Scene, engine: FaultyEngine, call: Call, nbytes: int) -> None:
    set_faults(engine, dict.fromkeys(range(1, MANY), Fault.short(nbytes)))
    call(scene.path, engine)
    assert engine.submitted > 50


@pytest.mark.parametrize("nbytes", [511, 4097])
def test_odd_ends_are_ends_of_the_file(scene: Scene, engine: FaultyEngine, call: Call, nbytes: int) -> None:
    """A direct read stops between two blocks of the device at the end of the file, and nowhere else."""
    with engine.open(str(scene.path), "r") as file:
        if not file.direct:
            pytest.skip("direct I/O is not to be had in the test's directory")
    for short in range(1, reads_of(engine, scene, call) + 1):
        set_faults(engine, {short: Fault.short(nbytes)})
        try:
            call(scene.path, engine)
        except TransferError as error:
            assert "cut meanwhile" in str(error)  # noqa: PT017


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_each_read_is_told_to_try_again_in_turn(scene: Scene, engine: FaultyEngine, call: Call, code: int) -> None:
    for refused in range(1, reads_of(engine, scene, call) + 1):
        set_faults(engine, {refused: Fault.error(code)})
        call(scene.path, engine)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_trying_again_has_an_end(
    scene: Scene, engine: FaultyEngine, call: Call, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "STALL_PAUSE_SECONDS", 0.0)
    set_faults(engine, dict.fromkeys(range(3, MANY), Fault.error(code)))
    with scene.unharmed():
        assert "made no progress" in str(failure_of(lambda: call(scene.path, engine), TransferError))
    assert engine.submitted < MANY - 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_a_file_that_the_engine_cannot_open(scene: Scene, inner: Engine, call: Call, code: int) -> None:
    with scene.unharmed():
        error = failure_of(lambda: call(scene.path, FaultyEngine(inner, {}, calls={"open": code})), OSError)
        assert error.errno == code


def test_direct_reads_that_are_refused_go_through_the_page_cache(
    scene: Scene, engine: FaultyEngine, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EINVAL is a filesystem's verdict on direct I/O, whatever it said when the file was opened."""
    monkeypatch.setattr(files, "_refused_devices", set())  # the verdict is kept, but not beyond this test
    set_faults(engine, {1: Fault.error(errno.EINVAL)})
    call(scene.path, engine)


# The file changes while it is read


class Cutting(FaultyEngine):
    """Cuts the file to a length before a certain request."""

    def __init__(self, inner: Engine, path: Path, nbytes: int, before: int) -> None:
        super().__init__(inner, {})
        self._cut = (path, nbytes)
        self._before = before

    def _start(self, ticket: int, request: Any) -> None:
        if self.submitted + 1 == self._before:
            os.truncate(*self._cut)
        super()._start(ticket, request)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_file_that_is_cut_while_it_is_read(scene: Scene, inner: Engine, call: Call, share: float) -> None:
    whole = scene.path.read_bytes()
    reads = reads_of(FaultyEngine(inner, {}), scene, call)
    failures = 0
    for before in range(1, reads + 1):
        scene.path.write_bytes(whole)
        descriptors = set(os.listdir("/proc/self/fd"))
        try:
            call(scene.path, Cutting(inner, scene.path, int(share * len(whole)), before))
        except (TransferError, CheckpointFormatError) as error:
            failures += 1
            assert str(scene.path) in str(error)  # noqa: PT017
        # A load that had read all it needed by then returns it, and it is right: call compares.
        assert set(os.listdir("/proc/self/fd")) == descriptors
        assert shared_pool().lent_nbytes == 0
        assert inner.in_flight == 0
    assert failures > 0


def test_a_file_that_is_replaced_while_it_is_read(scene: Scene, inner: Engine) -> None:
    """Replaced as save does it: what was loaded is one of the two, never a mixture without an error."""
    for before in range(1, reads_of(FaultyEngine(inner, {}), scene, load) + 1):
        fastpersist.save(content(7), scene.path, engine="posix", durable=False)
        engine = FaultyEngine(inner, {})
        real = engine._start

        def replace_before(ticket: int, request: Any, engine: Any = engine, real: Any = real, before: int = before) -> None:
            if engine.submitted + 1 == before:
                fastpersist.save(content(9), scene.path, engine="posix", durable=False)
            real(ticket, request)

        engine._start = replace_before  # type: ignore[method-assign]
        found = fastpersist.load(scene.path, engine=engine)
        assert_same(found, content(found["value"]))


# Interrupts


@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("verb", [fastpersist.load, fastpersist.verify])
def test_an_exception_from_progress(
    scene: Scene, verb: Any, name: str, error: type[BaseException], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPERSIST_BLOCK_NBYTES", str(BLOCK_NBYTES))
    calls = 0

    def report(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error

    with scene.unharmed(), pytest.raises(error):
        verb(scene.path, engine=name, progress=report)
    assert calls == at
    verb(scene.path, engine=name)


def test_an_open_engine_serves_on_after_an_interrupt_outside_of_it(scene: Scene, inner: Engine, call: Call) -> None:
    def report(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with scene.unharmed(), pytest.raises(KeyboardInterrupt):
        fastpersist.load(scene.path, engine=inner, progress=report)
    assert inner.in_flight == 0
    call(scene.path, inner)


@pytest.mark.parametrize("hook", ["_start", "_collect"])
@pytest.mark.parametrize("failing", [1, 2])  # so many calls of a hook the shortest load makes, whatever completes at once
def test_an_interrupt_inside_the_engine(scene: Scene, call: Call, hook: str, failing: int) -> None:
    before = state_of(scene.directory)
    with fastpersist.open_engine("posix", block_nbytes=BLOCK_NBYTES, queue_depth=2) as engine:
        real, calls = getattr(engine, hook), 0

        def interrupted(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == failing:
                raise KeyboardInterrupt
            return real(*arguments)

        setattr(engine, hook, interrupted)
        with pytest.raises(KeyboardInterrupt):
            call(scene.path, engine)
        assert engine.in_flight == 0
    after = state_of(scene.directory)
    assert (after.descriptors, after.lent_nbytes, after.threads) == (before.descriptors, 0, before.threads)


def test_an_exception_from_map_location_frees_what_was_read(scene: Scene) -> None:
    def locate(storage: Any, location: str) -> Any:
        raise ZeroDivisionError

    with scene.unharmed(), pytest.raises(ZeroDivisionError):
        fastpersist.load(scene.path, map_location=locate)
    mapped = _mapped_nbytes()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            fastpersist.load(scene.path, map_location=locate)
    gc.collect()
    assert _mapped_nbytes() - mapped < sum(LARGE_NBYTES)


def _mapped_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


# Nothing is left


@pytest.mark.parametrize("name", ["auto", *ENGINES])
def test_a_good_load_leaves_nothing(scene: Scene, name: str) -> None:
    fastpersist.load(scene.path, engine=name)  # what is made once and kept is made here
    threads = threading.enumerate()
    with scene.unharmed():
        for verb in (fastpersist.load, fastpersist.verify):
            verb(scene.path, engine=name)
        fastpersist.load(scene.path, engine=name, only="large1")
        fastpersist.inspect(scene.path)
    assert threading.enumerate() == threads
    assert str(scene.path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("damage", ["header", "tail", "pickle", "data"])
def test_a_refused_file_leaves_nothing(scene: Scene, damage: str) -> None:
    changed = bytearray(scene.path.read_bytes())
    locator = changed.rindex(b"PK\6\7")
    position = {"header": 1, "tail": locator + 8, "pickle": 80, "data": len(changed) // 2}[damage]
    changed[position] ^= 0xFF
    scene.path.write_bytes(changed)
    with scene.unharmed():
        for verb in (lambda path: fastpersist.load(path, verify=True), fastpersist.verify):
            with pytest.raises(CheckpointFormatError):
                verb(scene.path)


def test_loads_in_a_loop_do_not_grow(scene: Scene) -> None:
    def run() -> None:
        for _ in range(10):
            load(scene.path, shared)

    with fastpersist.open_engine("posix") as shared:
        run()
        before = _mapped_nbytes()
        run()
        gc.collect()
        assert _mapped_nbytes() - before < 2 * sum(LARGE_NBYTES)
