"""A save over a retired file fails, is killed, or loses power, at each of its steps in turn."""

from __future__ import annotations

import errno
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fastpersist
from fastpersist import NotDurableError, TransferError
from fastpersist.engines import Engine
from fastpersist.testing import Fault, FaultyEngine
from tests.faults.scene import Scene, content, generation_in, renew, state_of
from tests.faults.test_interrupts import Profiler
from tests.mounting import Mounted, Mounts

ENGINES = ("posix", "io_uring")
BLOCK_NBYTES = 65536
RETIRED = "retired.pt"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=ENGINES)
def inner(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A real engine."""
    with fastpersist.open_engine(request.param, block_nbytes=BLOCK_NBYTES) as engine:
        yield engine


@pytest.fixture
def retired(scene: Scene) -> Path:
    """A checkpoint of generation 7 beside that of generation 1."""
    path = scene.directory / RETIRED
    fastpersist.save(content(7), path, engine="posix")
    return path


def fails_the(number: int, real: Callable[..., Any], code: int) -> Callable[..., Any]:
    """A system call whose N-th use, counted from 1, fails."""
    calls = iter(range(1, 1000))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "rename", "fsync"])
@pytest.mark.parametrize("durable", [True, False])
def test_a_failure_before_the_first_byte_changes_nothing(
    scene: Scene, retired: Path, inner: Engine, monkeypatch: pytest.MonkeyPatch, call: str, code: int, durable: bool
) -> None:
    engine = FaultyEngine(inner, {}, calls={"open": code} if call == "open" else None)
    for path in (scene.path, scene.directory / "new.pt"):
        with scene.unharmed(call), monkeypatch.context() as patch:
            if call != "open":
                patch.setattr(os, call, fails_the(1, getattr(os, call), code))
            with pytest.raises(TransferError) as caught:
                fastpersist.save(content(2), path, engine=engine, durable=durable, recycle=retired)
        assert (caught.value.errno, caught.value.path) == (code, str(retired))
        assert not hasattr(caught.value, "__notes__")
    fastpersist.save(content(3), scene.path, engine=inner, recycle=retired)
    scene.assert_holds(3)


def test_the_sync_of_either_directory_fails(
    scene: Scene, retired: Path, inner: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = scene.directory.parent / "other"
    other.mkdir()
    moved = retired.rename(other / RETIRED)
    for number in (1, 2):
        before = state_of(other)
        with scene.unharmed(), monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fails_the(number, os.fsync, errno.EIO))
            with pytest.raises(TransferError, match="cannot sync the directory"):
                fastpersist.save(content(2), scene.path, engine=inner, recycle=moved)
        assert state_of(other) == before


def assert_lost(scene: Scene, error: BaseException, retired: Path, log: str) -> None:
    """The retired file is gone, which error and log say; the target is as it was, and nothing else is left."""
    (note,) = error.__notes__
    assert str(retired) in note
    assert "is gone" in note
    assert note in log
    scene.assert_holds(1)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("call", ["reserve", "resize", "sync", "rename", "fchmod"])
def test_a_later_failure_loses_the_retired_file_alone(
    scene: Scene,
    retired: Path,
    inner: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    code: int,
) -> None:
    descriptors = os.listdir("/proc/self/fd")
    engine = FaultyEngine(inner, {}, calls={call: code})
    with monkeypatch.context() as patch:
        if call in ("rename", "fchmod"):
            patch.setattr(os, call, fails_the(2 if call == "rename" else 1, getattr(os, call), code))
        with pytest.raises(TransferError) as caught:
            fastpersist.save(content(2), scene.path, engine=engine, recycle=retired, layout="torch")  # which has to be cut
    assert (caught.value.errno, caught.value.path) == (code, str(scene.path))
    assert_lost(scene, caught.value, retired, caplog.text)
    assert os.listdir("/proc/self/fd") == descriptors


def test_each_write_fails_in_turn(scene: Scene, inner: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine, saved, retired = FaultyEngine(inner, {}), content(2), scene.directory / RETIRED
    fastpersist.save(saved, scene.directory / "trial.pt", engine=engine)
    writes = engine.submitted
    assert writes >= 15
    (scene.directory / "trial.pt").unlink()
    for failing in range(1, writes + 1):
        fastpersist.save(content(7), retired, engine="posix")
        engine.submitted, engine.faults = 0, {failing: Fault.error(errno.EIO)}
        with pytest.raises(TransferError) as caught:
            fastpersist.save(saved, scene.path, engine=engine, recycle=retired)
        assert (caught.value.errno, caught.value.path) == (errno.EIO, str(scene.path))
        assert_lost(scene, caught.value, retired, caplog.text)


@pytest.mark.parametrize("fault", [Fault.short(4097), Fault.error(errno.EAGAIN)])
def test_short_and_refused_writes_are_repeated(scene: Scene, retired: Path, inner: Engine, fault: Fault) -> None:
    engine = FaultyEngine(inner, dict.fromkeys(range(1, 200, 3), fault))
    fastpersist.save(content(2), scene.path, engine=engine, recycle=retired)
    scene.assert_holds(2)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_caller_stops_it(
    scene: Scene, retired: Path, inner: Engine, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    def stop(*_: int) -> None:
        raise error

    with pytest.raises(error) as caught:
        fastpersist.save(content(2), scene.path, engine=inner, recycle=retired, progress=stop)
    assert_lost(scene, caught.value, retired, caplog.text)


def test_only_the_last_sync_of_the_directory_fails(
    scene: Scene, retired: Path, inner: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails_the(2, os.fsync, errno.EIO))
        with pytest.raises(NotDurableError) as caught:
            fastpersist.save(content(2), scene.path, engine=inner, recycle=retired)
    assert not hasattr(caught.value, "__notes__")  # the retired file served its purpose
    scene.assert_holds(2)


@pytest.mark.mounts
def test_a_retired_file_gives_room_on_a_full_disk(mounts: Mounts, inner: Engine) -> None:
    root = mounts.tmpfs("size=3m").root
    scene = Scene(root)
    fastpersist.save(content(7), root / RETIRED, engine="posix")
    with scene.unharmed(), pytest.raises(TransferError, match="No space left"):
        fastpersist.save(content(2), scene.path, engine=inner)
    fastpersist.save(content(2), scene.path, engine=inner, recycle=root / RETIRED)
    scene.assert_holds(2)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
# An interrupt in a finalizer or a weak reference's callback cannot be raised: Python reports it, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_wherever_python_handles_signals(scene: Scene, engine: str) -> None:
    retired = scene.directory / RETIRED
    saved = content(1)

    def save() -> None:
        fastpersist.save(saved, scene.path, engine=engine, block_nbytes=BLOCK_NBYTES, recycle=retired)

    fastpersist.save(content(7), retired, engine=engine)
    survey = Profiler()
    survey.run(save)
    assert ("c_return", "recycling.py") in {place[:2] for place in survey.places}
    generation, kept, lost = 1, 0, 0
    for place in survey.places:
        fastpersist.save(content(7), retired, engine=engine)  # which removes what the last one may have left
        new = generation % 250 + 1
        renew(saved, new)
        interrupted = Profiler(place).run(save)
        found = generation_in(scene.path)
        assert found in (generation, new), place
        assert interrupted or found == new, place
        assert not retired.exists() or generation_in(retired) == 7, place
        if interrupted and place[1] == "recycling.py" and place[3] in ("take", "_check", "_open", "_lease", "_hide"):
            assert retired.exists(), place
        kept += interrupted and found == generation and retired.exists()
        lost += interrupted and found == generation and not retired.exists()
        generation = found
    assert kept > 20
    assert lost > 20
    fastpersist.save(content(7), retired, engine=engine)
    save()
    assert os.listdir(scene.directory) == [scene.path.name]


@pytest.mark.slow
def test_killed_before_and_after_each_step(run_victim: Callable[[str], dict[str, Any]]) -> None:
    left = run_victim("killed_while_recycling")
    assert len(left) == 2 * 2 * 9  # engines; before and after; steps
    for case, (retired, hidden) in left.items():
        step = case.partition(", ")[2]
        assert retired == (step in ("before engine.open", "after engine.open", "before first os.rename")), case
        assert hidden == (
            not retired and step not in ("after last os.rename", "before last os.fsync", "after last os.fsync")
        ), case


def test_readers_wait_and_do_not_kill_the_save(run_victim: Callable[[str], dict[str, Any]]) -> None:
    assert run_victim("opened_while_recycling") == {"read": [2]}


class PowerCuts:
    """Copies the device while a save is under way, and looks at each copy as after a power cut."""

    def __init__(self, mounts: Mounts, kind: str) -> None:
        self._mounts, self._kind = mounts, kind
        self._mounted: Mounted = mounts.make(kind)
        self._images: list[tuple[str, Path]] = []
        self.root = self._mounted.root

    def cut(self, moment: str) -> None:
        """What the device holds at this moment is what a power cut would leave."""
        self._images.append((moment, self._mounts.copy_image(self._mounted)))

    def survivors(self) -> Iterator[tuple[str, Path]]:
        """(moment, root of the copy, mounted); what was copied is unmounted for good."""
        self._mounts.unmount(self._mounted)
        for moment, image in self._images:
            copy = self._mounts.mount_copy(self._kind, image)
            yield moment, copy.root
            self._mounts.unmount(copy)
            image.unlink()


def cutting(cuts: PowerCuts, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """The call, with a power cut just before and just after it."""

    def call(*arguments: Any, **options: Any) -> Any:
        cuts.cut(f"before {what}")
        result = real(*arguments, **options)
        cuts.cut(f"after {what}")
        return result

    return call


@pytest.mark.mounts
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("disk", ["ext4", "xfs"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_power_cut_never_leaves_new_bytes_under_the_retired_name(
    mounts: Mounts, monkeypatch: pytest.MonkeyPatch, disk: str, engine: str, elsewhere: bool
) -> None:
    cuts = PowerCuts(mounts, disk)
    (cuts.root / "old").mkdir()
    target, retired = cuts.root / "checkpoint.pt", cuts.root / ("old" if elsewhere else ".") / RETIRED
    saved = content(7)
    fastpersist.save(saved, retired, engine=engine, block_nbytes=BLOCK_NBYTES)
    fastpersist.save(content(1), target, engine=engine)
    calls = iter(range(1000))

    def progress(done_nbytes: int, total_nbytes: int) -> None:
        if next(calls) in (0, 3, 9) or done_nbytes == total_nbytes:
            cuts.cut(f"with {done_nbytes} of {total_nbytes} bytes written")

    for name in ("rename", "fsync"):
        monkeypatch.setattr(os, name, cutting(cuts, name, getattr(os, name)))
    monkeypatch.setattr(Engine, "reserve", cutting(cuts, "reserve", Engine.reserve))
    renew(saved, 2)
    fastpersist.save(saved, target, engine=engine, block_nbytes=BLOCK_NBYTES, recycle=retired, progress=progress)
    monkeypatch.undo()
    cuts.cut("in the end")

    found: list[tuple[str, int | None, int]] = []
    for moment, root in cuts.survivors():
        name = root / retired.relative_to(cuts.root)
        found.append((moment, generation_at(name), generation_in(root / target.name)))
    moments = [moment for moment, _, _ in found]
    last_rename = len(moments) - 1 - moments[::-1].index("before rename")
    assert sum("bytes written" in moment for moment in moments) == 4
    for index, (moment, old, new) in enumerate(found):
        taken = index > moments.index("after fsync") - (moment == "after fsync")
        assert old in ((None,) if taken else (None, 7)), moment
        assert new in ((1,) if index <= last_rename else (1, 2)), moment
    assert found[0] == ("before rename", 7, 1)
    assert found[-1] == ("in the end", None, 2)


def generation_at(path: Path) -> int | None:
    """The generation of a complete file, None where there is none. A file of several fails the test."""
    try:
        return generation_in(path)
    except FileNotFoundError:
        return None
    except zipfile.BadZipFile as error:
        raise AssertionError(f"{path.name} is torn") from error
