"""Every operation of a save fails in turn: the error is the true one, the old file stays, and nothing else does."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import NotDurableError, TransferError
from fastpersist.engines import Engine
from fastpersist.testing import Fault, FaultyEngine
from fastpersist.transfer import pipeline
from tests.faults.scene import Scene, assert_same, content, generation_in, renew, without_nameless_files

ENGINES = ("posix", "io_uring")
BLOCK_NBYTES = 65536  # small, for a save of many writes
MANY = 100_000  # more requests than any save here makes

# A hang is a failure like any other here: it must end the test, and not the run.
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=ENGINES)
def inner(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A real engine."""
    with fastpersist.open_engine(request.param, block_nbytes=BLOCK_NBYTES) as engine:
        yield engine


@pytest.fixture
def engine(inner: Engine) -> FaultyEngine:
    """The same real engine, with faults that a test may set (it starts without one)."""
    return FaultyEngine(inner, {})


def set_faults(engine: FaultyEngine, faults: dict[int, Fault]) -> None:
    """Number the requests from 1 again, and meet these faults."""
    engine.submitted = 0
    engine.faults = faults


def writes_of(engine: FaultyEngine, scene: Scene, saved: dict[str, Any], **options: Any) -> int:
    """How many writes a save of this object makes without faults, tried beside the scene.

    Of this very object: where a large storage lies in memory decides how the file is cut.
    """
    trial_path(scene).parent.mkdir(exist_ok=True)
    set_faults(engine, {})
    fastpersist.save(saved, trial_path(scene), engine=engine, **options)
    assert engine.submitted >= 15  # else the loops below prove little
    return engine.submitted


def trial_path(scene: Scene) -> Path:
    """Where writes_of leaves the finished file."""
    return scene.directory.parent / "trial" / scene.path.name


def record_at(finished: Path, offset: int) -> str:
    """Name of the record around an offset, told by a finished file of the same plan."""
    with zipfile.ZipFile(finished) as archive:
        if offset >= archive.start_dir:
            return "central directory"
        return [info.filename for info in archive.infolist() if info.header_offset <= offset][-1]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_each_write_fails_in_turn(scene: Scene, engine: FaultyEngine, code: int, layout: str) -> None:
    saved = content(2)
    writes = writes_of(engine, scene, saved, layout=layout)
    offsets: list[int] = []
    for failing in range(1, writes + 1):
        note = f"write {failing} of {writes}"
        set_faults(engine, {failing: Fault.error(code)})
        with scene.unharmed(note), pytest.raises(TransferError) as caught:
            fastpersist.save(saved, scene.path, engine=engine, layout=layout)
        assert engine.in_flight == engine.inner.in_flight == 0, note
        offsets.append(assert_located(caught.value, scene, code))
    assert sorted(set(offsets)) == offsets  # each write was hit once, and the message told which


def assert_located(error: TransferError, scene: Scene, code: int) -> int:
    """The error and its message say what failed, and where; returns the offset."""
    assert (error.errno, error.path, error.filename) == (code, str(scene.path), str(scene.path))
    assert error.offset is not None
    assert error.record == record_at(trial_path(scene), error.offset)
    said = (os.strerror(code), f"at offset {error.offset}", f"({error.nbytes} bytes)", repr(error.record), str(scene.path))
    assert [part for part in said if part not in str(error)] == []
    return error.offset


def test_the_engine_serves_on_after_each_failure(scene: Scene, engine: FaultyEngine) -> None:
    saved = content(2)
    for failing in range(1, writes_of(engine, scene, saved) + 1):
        set_faults(engine, {failing: Fault.error(errno.EIO)})
        with pytest.raises(TransferError):
            fastpersist.save(saved, scene.path, engine=engine)
        set_faults(engine, {})
        fastpersist.save(renew(saved, failing), scene.path, engine=engine)
        scene.assert_holds(failing)


def test_all_writes_fail_at_once(scene: Scene, engine: FaultyEngine) -> None:
    set_faults(engine, dict.fromkeys(range(1, MANY), Fault.error(errno.ENOSPC)))
    with scene.unharmed(), pytest.raises(TransferError) as caught:
        fastpersist.save(content(2), scene.path, engine=engine)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize(
    ("nbytes", "layout"),
    [(1, "auto"), (511, "torch"), (512, "auto"), (4096, "auto"), (4097, "torch"), (BLOCK_NBYTES - 1, "auto")],
)
def test_each_write_is_short_in_turn(scene: Scene, engine: FaultyEngine, nbytes: int, layout: str) -> None:
    saved = content(2)
    for short in range(1, writes_of(engine, scene, saved, layout=layout) + 1):
        set_faults(engine, {short: Fault.short(nbytes)})
        fastpersist.save(renew(saved, short), scene.path, engine=engine, layout=layout)
        scene.assert_holds(short)


@pytest.mark.parametrize("nbytes", [4096, 12345])
def test_all_writes_are_short(scene: Scene, engine: FaultyEngine, nbytes: int) -> None:
    set_faults(engine, dict.fromkeys(range(1, MANY), Fault.short(nbytes)))
    fastpersist.save(content(2), scene.path, engine=engine)
    assert engine.submitted > 100
    scene.assert_holds(2)


def test_a_short_write_of_a_short_write(scene: Scene, engine: FaultyEngine) -> None:
    # Every second request: what is left of a short write is short in its turn, at some point in the queue.
    set_faults(engine, dict.fromkeys(range(1, MANY, 2), Fault.short(4096 + 1)))
    fastpersist.save(content(2), scene.path, engine=engine)
    scene.assert_holds(2)


def test_progress_counts_each_byte_of_short_writes_once(scene: Scene, engine: FaultyEngine) -> None:
    seen: list[tuple[int, int]] = []
    set_faults(engine, dict.fromkeys(range(1, MANY, 3), Fault.short(8192 + 1)))
    fastpersist.save(content(2), scene.path, engine=engine, progress=lambda done, total: seen.append((done, total)))
    size = scene.path.stat().st_size
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


def test_a_write_of_nothing_is_an_error(scene: Scene, engine: FaultyEngine) -> None:
    saved = content(2)
    writes = writes_of(engine, scene, saved)
    for failing in range(1, writes + 1):
        set_faults(engine, {failing: Fault.short(0)})
        with scene.unharmed(f"write {failing} of {writes}"), pytest.raises(TransferError) as caught:
            fastpersist.save(saved, scene.path, engine=engine)
        assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_each_write_is_told_to_try_again_in_turn(scene: Scene, engine: FaultyEngine, code: int) -> None:
    saved = content(2)
    for refused in range(1, writes_of(engine, scene, saved) + 1):
        set_faults(engine, {refused: Fault.error(code)})
        fastpersist.save(renew(saved, refused), scene.path, engine=engine)
        scene.assert_holds(refused)


@pytest.mark.parametrize("code", [errno.EINTR, errno.EAGAIN])
def test_trying_again_has_an_end(scene: Scene, engine: FaultyEngine, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(pipeline, "STALL_PAUSE_SECONDS", 0.0)
    set_faults(engine, dict.fromkeys(range(5, MANY), Fault.error(code)))
    with scene.unharmed(), pytest.raises(TransferError, match="made no progress") as caught:
        fastpersist.save(content(2), scene.path, engine=engine)
    assert caught.value.errno in (errno.EIO, code)
    assert engine.submitted < MANY - 1


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["reserve", "resize", "sync"])
def test_each_call_on_the_file_fails(scene: Scene, inner: Engine, call: str, code: int) -> None:
    for path in (scene.path, scene.directory / "new.pt"):
        with scene.unharmed(), pytest.raises(TransferError) as caught:
            # Of layout "torch", which has to be cut to its length.
            fastpersist.save(content(2), path, engine=FaultyEngine(inner, {}, calls={call: code}), layout="torch")
        assert (caught.value.errno, caught.value.path) == (code, str(path))
        assert os.strerror(code) in str(caught.value)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EMFILE])
def test_no_temporary_file_can_be_opened(scene: Scene, inner: Engine, code: int) -> None:
    with scene.unharmed(), pytest.raises(OSError, match="cannot create a temporary file") as caught:
        fastpersist.save(content(2), scene.path, engine=FaultyEngine(inner, {}, calls={"open": code}))
    assert (caught.value.errno, caught.value.filename) == (code, str(scene.directory))
    assert os.strerror(code) in str(caught.value)


def test_without_durability_nothing_is_synced(scene: Scene, inner: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    fastpersist.save(content(2), scene.path, engine=FaultyEngine(inner, {}, calls={"sync": errno.EIO}), durable=False)
    scene.assert_holds(2)


def raising(code: int) -> Callable[..., Any]:
    """A function that fails like a system call, whatever it is given."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EPERM])
@pytest.mark.parametrize("call", ["link", "rename", "fchmod"])
def test_each_step_of_publishing_fails(
    scene: Scene, inner: Engine, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, raising(code))
        with scene.unharmed(), pytest.raises(TransferError, match="cannot publish") as caught:
            fastpersist.save(content(2), scene.path, engine=inner)
    assert (caught.value.errno, caught.value.path) == (code, str(scene.path))
    fastpersist.save(content(3), scene.path, engine=inner)
    scene.assert_holds(3)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EPERM])
def test_a_new_name_is_refused(scene: Scene, inner: Engine, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    new = scene.directory / "new.pt"
    monkeypatch.setattr(os, "link", raising(code))
    with scene.unharmed(), pytest.raises(TransferError, match="cannot publish") as caught:
        fastpersist.save(content(2), new, engine=inner)
    assert (caught.value.errno, caught.value.path) == (code, str(new))


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_named_temporary_file_is_removed_too(scene: Scene, inner: Engine, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    without_nameless_files(monkeypatch)
    monkeypatch.setattr(os, "rename", raising(errno.EIO))
    with scene.unharmed(), pytest.raises(TransferError):
        fastpersist.save(content(2), scene.path, engine=inner)


def test_a_named_temporary_file_serves_as_well(scene: Scene, engine: FaultyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    without_nameless_files(monkeypatch)
    names: set[str] = set()
    saved = content(2)
    fastpersist.save(saved, scene.path, engine=engine, progress=lambda *_: names.update(os.listdir(scene.directory)))
    assert len(names) == 2  # the target, and one hidden file while the save ran
    scene.assert_holds(2)
    for failing in range(1, engine.submitted + 1):
        set_faults(engine, {failing: Fault.error(errno.ENOSPC)})
        with scene.unharmed(), pytest.raises(TransferError):
            fastpersist.save(saved, scene.path, engine=engine)


def test_a_filesystem_without_locks(scene: Scene, inner: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", raising(errno.ENOLCK))
    fastpersist.save(content(2), scene.path, engine=inner)
    scene.assert_holds(2)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_only_the_sync_of_the_directory_fails(scene: Scene, inner: Engine, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raising(code))
        with pytest.raises(NotDurableError, match="published, not known durable") as caught:
            fastpersist.save(content(2), scene.path, engine=inner)
    assert (caught.value.errno, caught.value.path) == (code, str(scene.path))
    scene.assert_holds(2)
    assert os.listdir("/proc/self/fd") == descriptors


class FromTheCaller(Exception):
    """What a caller's own function raises."""


@pytest.mark.parametrize("error", [FromTheCaller, KeyboardInterrupt, SystemExit])
def test_progress_raises_at_each_call(scene: Scene, engine: FaultyEngine, error: type[BaseException]) -> None:
    saved = content(2)
    writes = writes_of(engine, scene, saved)
    for failing in range(1, writes + 1):
        calls = iter(range(1, writes + 1))

        def progress(done_nbytes: int, total_nbytes: int, calls: Iterator[int] = calls, failing: int = failing) -> None:
            if next(calls) == failing:
                raise error

        with scene.unharmed(f"call {failing} of {writes}"), pytest.raises(error):
            fastpersist.save(saved, scene.path, engine=engine, progress=progress)
        assert engine.in_flight == engine.inner.in_flight == 0
    fastpersist.save(content(3), scene.path, engine=engine)  # no hook was interrupted: the engine serves on
    scene.assert_holds(3)


def test_what_was_saved_by_a_faulty_engine_equals_the_object(scene: Scene, engine: FaultyEngine) -> None:
    set_faults(engine, {2: Fault.short(513), 3: Fault.error(errno.EAGAIN), 5: Fault.short(1)})
    fastpersist.save(content(7), scene.path, engine=engine)
    assert_same(torch.load(scene.path), content(7))
    assert generation_in(scene.path) == 7
