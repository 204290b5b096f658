"""Checkpointer: names, which checkpoints are kept, whose blocks are written over, and who may save."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import Checkpointer, CheckpointerBusyError, NotDurableError, TransferError
from fastpersist.engines import Engine
from tests.faults.scene import without_nameless_files

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

LOCK, LEDGER, SPARE = ".step.lock", ".step.written.json", ".step.spare"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(params=[True, False], ids=["blocking", "background"])
def blocking(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[True, False], ids=["recycle", "plain"])
def recycle(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def content(step: int) -> dict[str, Any]:
    """A state that tells its step everywhere."""
    return {"step": step, "large": torch.full((80_000,), float(step)), "small": torch.full((7,), step)}


def assert_holds(found: dict[str, Any], step: int) -> None:
    expected = content(step)
    assert found.keys() == expected.keys()
    assert found["step"] == step
    assert torch.equal(found["large"], expected["large"])
    assert torch.equal(found["small"], expected["small"])


def assert_loads(checkpointer: Checkpointer, *steps: int) -> None:
    """These steps are listed, no others, and each holds its own content."""
    assert checkpointer.steps() == sorted(steps)
    assert checkpointer.latest() == max(steps, default=None)
    for step in steps:
        assert_holds(checkpointer.load(step), step)


def save_all(checkpointer: Checkpointer, *steps: int, blocking: bool = True) -> None:
    for step in steps:
        checkpointer.save(content(step), step, blocking=blocking)
    checkpointer.wait()


def name_of(step: int, prefix: str = "step") -> str:
    return f"{prefix}-{step:010d}.pt"


def put(directory: Path, step: int, marker: int = 0) -> Path:
    """A checkpoint that no Checkpointer wrote."""
    directory.mkdir(exist_ok=True)
    fastpersist.save(content(marker), directory / name_of(step), engine="posix")
    return directory / name_of(step)


def raises(code: int, fails: Callable[..., bool], real: Callable[..., Any]) -> Callable[..., Any]:
    """A call that fails where ``fails`` says so of its arguments."""

    def call(*arguments: Any, **options: Any) -> Any:
        if fails(*arguments, **options):
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    return call


def file_behind(fileno: int) -> str:
    return os.readlink(f"/proc/self/fd/{fileno}")


class TestNames:
    def test_what_lies_in_the_directory(self, directory: Path, blocking: bool, recycle: bool) -> None:
        with Checkpointer(directory, keep_last=2, recycle=recycle) as checkpointer:
            save_all(checkpointer, 1, 20, 300, 4000, blocking=blocking)
            assert checkpointer.path(300) == str(directory / "step-0000000300.pt")
        hidden = {LOCK, LEDGER, SPARE} if recycle else {LOCK, LEDGER}
        assert set(os.listdir(directory)) == {"step-0000000300.pt", "step-0000004000.pt", *hidden}
        assert torch.load(directory / "step-0000004000.pt")["step"] == 4000

    def test_the_directory_is_made_and_may_be_given_as_path_or_text(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.chdir(tmp_path)
        with Checkpointer("deep/er") as checkpointer:
            save_all(checkpointer, 1)
            monkeypatch.chdir("/")  # it was made absolute
            assert_loads(checkpointer, 1)
        assert_loads(Checkpointer(tmp_path / "deep" / "er"), 1)

    def test_a_file_in_place_of_the_directory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"mine")
        with pytest.raises(FileExistsError):
            Checkpointer(tmp_path / "file")

    def test_steps_of_more_digits_than_the_name_has_are_ordered_as_numbers(self, directory: Path) -> None:
        steps = (0, 9_999_999_999, 10_000_000_000, 123_456_789_012)
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, *steps)
            assert_loads(checkpointer, *steps[2:])

    @pytest.mark.parametrize("step", [-1, 1.0, "1", None, 2.5])
    def test_what_is_no_step(self, directory: Path, step: Any) -> None:
        with pytest.raises(ValueError, match="step must be a whole number"):
            Checkpointer(directory).save([], step)
        assert os.listdir(directory) == []

    @pytest.mark.parametrize("prefix", ["", ".", ".step", "-step", "a/b", "a b", "step\n", "step+", "schritt\u00e4", "a*"])
    def test_what_is_no_prefix(self, directory: Path, prefix: str) -> None:
        with pytest.raises(ValueError, match="prefix must consist of"):
            Checkpointer(directory, prefix=prefix)
        assert not directory.exists()

    def test_characters_of_a_prefix_stand_for_themselves(self, directory: Path) -> None:
        (directory).mkdir()
        fastpersist.save(content(9), directory / name_of(9, "aXb-c"))
        with Checkpointer(directory, prefix="a.b-c", keep_last=1) as checkpointer:
            assert checkpointer.steps() == []
            save_all(checkpointer, 1, 2, 10)
            assert_loads(checkpointer, 10)
        assert (directory / name_of(9, "aXb-c")).exists()

    @pytest.mark.parametrize("other", ["ste", "step.1", "step-1", "step-0000000001", "Step", "step.written", "step_"])
    def test_two_prefixes_do_not_disturb_each_other(self, directory: Path, other: str, recycle: bool) -> None:
        with (
            Checkpointer(directory, keep_last=1, recycle=recycle) as one,
            Checkpointer(directory, keep_last=2, recycle=recycle, prefix=other) as two,
        ):
            for step in range(1, 6):
                one.save(content(step), step)
                two.save(content(100 + step), 100 + step)
            one.wait()
            two.wait()
            assert_loads(one, 5)
            assert_loads(two, 104, 105)
        assert {name for name in os.listdir(directory) if not name.startswith(".")} == {
            name_of(5), name_of(104, other), name_of(105, other),
        }  # fmt: skip


class TestListing:
    def test_an_empty_directory(self, directory: Path) -> None:
        checkpointer = Checkpointer(directory)
        assert checkpointer.steps() == []
        assert checkpointer.latest() is None
        with pytest.raises(FileNotFoundError, match=r"holds no checkpoint step-STEP\.pt"):
            checkpointer.load()
        with pytest.raises(FileNotFoundError):
            checkpointer.load(3)
        assert os.listdir(directory) == []  # whoever reads leaves nothing

    @pytest.mark.parametrize(
        "name",
        [
            "step-1.pt", "step-000000001.pt", "step-00000000012.pt", "step-0000000001.pt.tmp", "step-0000000001.PT",
            "step-0000000001", "xstep-0000000001.pt", "Step-0000000001.pt", "step--000000001.pt", "step-+000000001.pt",
            "step-0000000001.pt\n", ".step-0000000001.pt", "step_0000000001.pt", "step-" + "\u0661" * 10 + ".pt",
            ".fastpersist-0123456789abcdef.tmp.pt", "step-0000000001Xpt", "a-step-0000000001.pt",
        ],
    )  # fmt: skip
    def test_names_that_look_alike(self, directory: Path, name: str) -> None:
        directory.mkdir()
        (directory / name).write_bytes(b"mine")
        with Checkpointer(directory, keep_last=1) as checkpointer:
            assert checkpointer.steps() == []
            save_all(checkpointer, 5, 6, 7)
            assert_loads(checkpointer, 7)
        assert (directory / name).read_bytes() == b"mine"

    def test_what_is_no_file_is_no_checkpoint(self, directory: Path, tmp_path: Path) -> None:
        elsewhere = put(tmp_path / "elsewhere", 8, 3)
        directory.mkdir()
        (directory / name_of(1)).mkdir()
        (directory / name_of(2)).symlink_to(tmp_path)
        (directory / name_of(3)).symlink_to(elsewhere)  # this is one
        (directory / name_of(4)).symlink_to(directory / "nowhere")
        (directory / name_of(5)).symlink_to(directory / name_of(5))
        os.mkfifo(directory / name_of(6))
        before = {name: os.lstat(directory / name) for name in os.listdir(directory)}
        with Checkpointer(directory, keep_last=1) as checkpointer:
            assert_loads(checkpointer, 3)
            for step in range(1, 7):
                with pytest.raises(FileExistsError, match="was not written by a Checkpointer"):
                    checkpointer.save([], step)
            save_all(checkpointer, 7, 8, 9)
            assert checkpointer.steps() == [3, 9]
        for name, status in before.items():
            assert os.path.samestat(os.lstat(directory / name), status)
        assert fastpersist.load(elsewhere)["step"] == 3

    def test_temporary_files_of_others_are_no_checkpoints(self, directory: Path, monkeypatch: Any) -> None:
        without_nameless_files(monkeypatch)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1, 2)
        seen: list[list[int]] = []

        def look(*_: int) -> None:
            assert any(name.endswith(".tmp") for name in os.listdir(directory))
            seen.append(Checkpointer(directory).steps())

        fastpersist.save(content(3), directory / "other.pt", progress=look)
        with Checkpointer(directory, keep_last=1, progress=look) as checkpointer:
            save_all(checkpointer, 3)
        assert seen
        assert all(steps == [2] for steps in seen)

    def test_load_takes_the_latest_or_a_step_and_the_options_of_load(self, directory: Path) -> None:
        with Checkpointer(directory) as checkpointer:
            save_all(checkpointer, 1, 2)
        reader = Checkpointer(directory)
        assert_holds(reader.load(), 2)
        assert_holds(reader.load(1), 1)
        assert_holds(reader.load(verify=True, engine="posix"), 2)
        assert reader.load(1, only="step") == {"step": 1}
        assert reader.load(map_location="meta")["large"].device.type == "meta"
        with pytest.raises(TypeError):
            reader.load(option=1)

    def test_load_goes_on_to_the_newer_one_when_the_latest_is_removed(self, directory: Path, monkeypatch: Any) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            reader = Checkpointer(directory)
            listed = reader.steps

            def steps() -> list[int]:
                found = listed()
                if found[-1] < 4:
                    save_all(checkpointer, found[-1] + 1)  # which removes what was just found
                return found

            monkeypatch.setattr(reader, "steps", steps)
            assert_holds(reader.load(), 4)

    def test_load_looks_again_where_a_listing_misses_what_is_being_replaced(self, directory: Path, monkeypatch: Any) -> None:
        with Checkpointer(directory) as checkpointer:
            save_all(checkpointer, 1)
            listings = iter([[], [], [1]])
            monkeypatch.setattr(checkpointer, "steps", lambda: next(listings))
            assert_holds(checkpointer.load(), 1)

    def test_load_gives_up_in_the_end(self, directory: Path, monkeypatch: Any) -> None:
        checkpointer = Checkpointer(directory)
        monkeypatch.setattr(checkpointer, "steps", lambda: [5])
        with pytest.raises(FileNotFoundError, match="was removed 8 times"):
            checkpointer.load()

    def test_load_is_not_given_a_file_that_was_recycled_while_it_was_opened(self, directory: Path, monkeypatch: Any) -> None:
        """The kernel may look up the name, be held up, and open the file when it is another checkpoint's."""
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            real = os.open
            late = False

            def opened_late(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
                nonlocal late
                if path == checkpointer.path(1) and not late and flags & os.O_ACCMODE == os.O_RDONLY:
                    late = True
                    save_all(checkpointer, 2, 3)  # 3 is written over the blocks of 1
                    return real(checkpointer.path(3), flags, *arguments, **options)
                return real(path, flags, *arguments, **options)

            monkeypatch.setattr(os, "open", opened_late)
            inode = os.stat(checkpointer.path(1)).st_ino
            with pytest.raises(FileNotFoundError):
                checkpointer.load(1, mmap=True)  # which opens the file once
            assert late
            assert os.stat(checkpointer.path(3)).st_ino == inode

    def test_a_checkpoint_that_is_being_loaded_is_not_recycled(self, directory: Path) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            saved: list[int] = []

            def meanwhile(*_: int) -> None:
                if not saved:
                    saved.append(1)
                    save_all(checkpointer, 2, 3)

            assert_holds(checkpointer.load(1, progress=meanwhile), 1)
            assert saved
            assert_loads(checkpointer, 3)

    def test_under_a_lease_load_does_not_wait(self, directory: Path) -> None:
        with Checkpointer(directory) as checkpointer:
            save_all(checkpointer, 1)
        fileno = os.open(directory / name_of(1), os.O_RDWR)
        fcntl.fcntl(fileno, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fileno, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        try:
            with pytest.raises(FileNotFoundError, match="removed while it was opened"):
                checkpointer.load(1)
        finally:
            os.close(fileno)


class TestRetention:
    @pytest.mark.parametrize(("keep_last", "left"), [(1, (7,)), (3, (5, 6, 7)), (None, tuple(range(8)))])
    def test_keep_last(
        self, directory: Path, keep_last: int | None, left: tuple[int, ...], blocking: bool, recycle: bool
    ) -> None:
        with Checkpointer(directory, keep_last=keep_last, recycle=recycle) as checkpointer:
            save_all(checkpointer, *range(8), blocking=blocking)
            assert_loads(checkpointer, *left)

    def test_three_are_kept_by_default(self, directory: Path) -> None:
        with Checkpointer(directory) as checkpointer:
            save_all(checkpointer, *range(6))
            assert_loads(checkpointer, 3, 4, 5)

    def test_keep_every(self, directory: Path, blocking: bool, recycle: bool) -> None:
        with Checkpointer(directory, keep_last=2, keep_every=4, recycle=recycle) as checkpointer:
            save_all(checkpointer, *range(11), blocking=blocking)
            assert_loads(checkpointer, 0, 4, 8, 9, 10)

    @pytest.mark.parametrize("name", ["keep_last", "keep_every"])
    @pytest.mark.parametrize("value", [0, -1, 2.5, "3"])
    def test_numbers_that_make_no_sense(self, directory: Path, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"{name} must be at least 1, or None"):
            Checkpointer(directory, **{name: value})
        assert not directory.exists()

    def test_each_run_prunes_as_it_is_told(self, directory: Path) -> None:
        with Checkpointer(directory, keep_last=None) as checkpointer:
            save_all(checkpointer, *range(5))
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 5)
            assert_loads(checkpointer, 4, 5)
        with Checkpointer(directory, keep_last=None) as checkpointer:
            save_all(checkpointer, 6, 7)
            assert_loads(checkpointer, 4, 5, 6, 7)

    def test_the_same_step_twice(self, directory: Path, blocking: bool, recycle: bool) -> None:
        with Checkpointer(directory, keep_last=2, recycle=recycle) as checkpointer:
            save_all(checkpointer, 1, 2, 3, blocking=blocking)
            checkpointer.save(content(30), 3, blocking=blocking)
            checkpointer.wait()
            assert checkpointer.steps() == [2, 3]
            assert_holds(checkpointer.load(3), 30)
            assert_holds(checkpointer.load(2), 2)

    def test_a_step_below_the_latest(self, directory: Path, blocking: bool, caplog: pytest.LogCaptureFixture) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 10, 20, 30)
            assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
            save_all(checkpointer, 5, blocking=blocking)
            (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert "step 5 is saved while step 30 exists, which stays the latest" in warning.getMessage()
            assert_loads(checkpointer, 5, 20, 30)
            save_all(checkpointer, 6, blocking=blocking)
            assert_loads(checkpointer, 6, 20, 30)
            save_all(checkpointer, 31, blocking=blocking)
            assert_loads(checkpointer, 30, 31)

    def test_a_step_that_is_saved_again_is_not_pruned_meanwhile(self, directory: Path, monkeypatch: Any) -> None:
        begun = threading.Event()

        def progress(*_: int) -> None:
            assert begun.wait(60)

        with Checkpointer(directory, keep_last=1, max_pending=2, recycle=False, progress=progress) as checkpointer:
            begun.set()
            save_all(checkpointer, 1)
            begun.clear()
            checkpointer.save(content(2), 2)  # with its end 1 would be pruned
            checkpointer.save(content(100), 1)
            begun.set()
            checkpointer.wait()
            assert checkpointer.steps() == [1, 2]
            assert_holds(checkpointer.load(1), 100)
            save_all(checkpointer, 1, 3)  # it is still known as ours
            assert_loads(checkpointer, 3)

    def test_nothing_is_pruned_for_an_engine_that_writes_nothing(self, directory: Path) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 1, 2)
        with Checkpointer(directory, keep_last=2, engine="null") as checkpointer:
            save_all(checkpointer, 3, 4)
            assert_loads(checkpointer, 1, 2)


class TestRecycling:
    def test_the_blocks_of_the_one_removed_hold_the_next(self, directory: Path, blocking: bool) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 1, 2, 3, blocking=blocking)
            assert os.path.exists(directory / SPARE)
            inodes = []
            for step in range(4, 8):
                spare = os.stat(directory / SPARE).st_ino
                save_all(checkpointer, step, blocking=blocking)
                assert os.stat(checkpointer.path(step)).st_ino == spare
                inodes.append(spare)
                assert_loads(checkpointer, step - 1, step)
            assert len(set(inodes)) == 3

    def test_a_save_that_waits_for_another_takes_the_spare_that_it_leaves(self, directory: Path) -> None:
        both = threading.Event()
        both.set()

        def progress(*_: int) -> None:
            assert both.wait(60)

        with Checkpointer(directory, keep_last=1, max_pending=2, progress=progress) as checkpointer:
            save_all(checkpointer, 1, 2)
            inodes = [os.stat(directory / name).st_ino for name in (SPARE, name_of(2))]
            both.clear()
            checkpointer.save(content(3), 3)
            checkpointer.save(content(4), 4)
            both.set()
            checkpointer.wait()
            assert [os.stat(directory / name).st_ino for name in (SPARE, name_of(4))] == inodes
            assert_loads(checkpointer, 4)

    def test_without_it_nothing_hidden_is_left(self, directory: Path, blocking: bool) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1, 2)
        spare = os.stat(directory / SPARE).st_ino
        with Checkpointer(directory, keep_last=1, recycle=False) as checkpointer:
            fileno = os.open(directory / SPARE, os.O_RDONLY | os.O_PATH)  # which keeps the number from being used again
            save_all(checkpointer, 3, blocking=blocking)
            assert os.stat(checkpointer.path(3)).st_ino != spare
            os.close(fileno)
            assert set(os.listdir(directory)) == {name_of(3), LOCK, LEDGER}

    @pytest.mark.parametrize("mapped", [True, False])
    def test_what_somebody_reads_is_left_to_him(self, directory: Path, blocking: bool, mapped: bool) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            read = checkpointer.load(1, mmap=True) if mapped else None
            reader = None if mapped else os.open(checkpointer.path(1), os.O_RDONLY)
            save_all(checkpointer, 2)
            first = os.stat(directory / SPARE)
            before = (directory / SPARE).read_bytes()
            save_all(checkpointer, 3, blocking=blocking)
            assert os.stat(checkpointer.path(3)).st_ino != first.st_ino
            assert_loads(checkpointer, 3)
            assert os.stat(directory / SPARE).st_ino != first.st_ino  # 2 lies there now
            if reader is not None:
                assert os.fstat(reader).st_nlink == 0
                assert os.pread(reader, 1 << 24, 0) == before
                os.close(reader)
            else:
                assert read is not None
                assert_holds(read, 1)
            save_all(checkpointer, 4, blocking=blocking)
            assert_loads(checkpointer, 4)
            assert set(os.listdir(directory)) == {name_of(4), LOCK, LEDGER, SPARE}

    def test_a_spare_with_another_name_is_left_alone(self, directory: Path) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            os.link(checkpointer.path(1), directory / "kept.pt")
            save_all(checkpointer, 2, 3, 4)
            assert_loads(checkpointer, 4)
        assert_holds(fastpersist.load(directory / "kept.pt"), 1)

    def test_what_is_no_file_under_the_hidden_name_stops_nothing(
        self, directory: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (directory / SPARE).mkdir(parents=True)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1, 2, 3)
            assert_loads(checkpointer, 3)
        assert (directory / SPARE).is_dir()
        assert f"{SPARE} cannot be removed" in caplog.text


class TestForeignFiles:
    def test_one_of_the_same_name_is_neither_replaced_nor_pruned(self, directory: Path, blocking: bool, recycle: bool) -> None:
        foreign = put(directory, 5)
        before, status = foreign.read_bytes(), foreign.stat()
        with Checkpointer(directory, keep_last=1, recycle=recycle) as checkpointer:
            with pytest.raises(FileExistsError, match=r"step-0000000005.pt was not written by a Checkpointer"):
                checkpointer.save(content(5), 5, blocking=blocking)
            assert checkpointer.steps() == [5]
            save_all(checkpointer, 6, 7, 8, blocking=blocking)
            assert checkpointer.steps() == [5, 8]
            with pytest.raises(FileExistsError):
                checkpointer.save(content(5), 5, blocking=blocking)
        assert os.path.samestat(foreign.stat(), status)
        assert foreign.read_bytes() == before

    def test_one_above_all_of_ours(self, directory: Path) -> None:
        put(directory, 99, 99)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1, 2, 3)
            assert_loads(checkpointer, 3, 99)

    @pytest.mark.parametrize(
        "ledger",
        [b"", b"{", b"[]", b"5", b"{}", b'{"written": 5}', b'{"written": [null]}', b'{"written": ["x"]}', b"\xff\xfe",
         b'{"written": [1e999]}', b"[" * 100_000, b'{"writt'],
    )  # fmt: skip
    def test_an_unreadable_ledger(self, directory: Path, ledger: bytes, caplog: pytest.LogCaptureFixture) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 1, 2)
        (directory / LEDGER).write_bytes(ledger)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 3, 4, 5)
            assert_loads(checkpointer, 1, 2, 5)
            with pytest.raises(FileExistsError):
                checkpointer.save(content(2), 2)
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert f"{LEDGER} cannot be read" in warning.getMessage()
        with Checkpointer(directory, keep_last=1) as checkpointer:  # the new ledger knows what was written since
            save_all(checkpointer, 6)
            assert_loads(checkpointer, 1, 2, 6)
        assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1

    def test_a_ledger_that_cannot_be_opened(self, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 1, 2)
        (directory / LEDGER).unlink()
        (directory / LEDGER).symlink_to(LEDGER)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 3, 4)
            assert_loads(checkpointer, 1, 2, 4)
        assert f"{LEDGER} cannot be read" in caplog.text

    def test_a_lost_ledger(self, directory: Path, recycle: bool) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 1, 2)
        (directory / LEDGER).unlink()
        with Checkpointer(directory, keep_last=1, recycle=recycle) as checkpointer:
            save_all(checkpointer, 3, 4)
            assert_loads(checkpointer, 1, 2, 4)
            with pytest.raises(FileExistsError):
                checkpointer.save(content(1), 1)

    def test_a_file_put_where_one_was_pruned(self, directory: Path) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1, 2)
            put(directory, 1, 77)
            save_all(checkpointer, 3)
            assert checkpointer.steps() == [1, 3]
        (directory / name_of(2)).write_bytes((directory / name_of(1)).read_bytes())
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 4, 5)
            assert checkpointer.steps() == [1, 2, 5]
            assert_holds(checkpointer.load(2), 77)

    def test_a_file_put_where_a_save_failed(self, directory: Path, monkeypatch: Any) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "sync", raises(errno.EIO, lambda *_: True, Engine.sync))
                with pytest.raises(TransferError):
                    checkpointer.save(content(2), 2, blocking=True)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 3)
        put(directory, 2, 77)
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 4)
            assert checkpointer.steps() == [2, 4]

    def test_the_ledger_lists_what_was_written_and_is_there(self, directory: Path) -> None:
        with Checkpointer(directory, keep_last=2) as checkpointer:
            save_all(checkpointer, 1, 2, 3)
        assert json.loads((directory / LEDGER).read_text()) == {"version": 1, "written": [2, 3]}


class TestOptions:
    def test_they_reach_the_save(self, directory: Path, blocking: bool) -> None:
        told: list[int] = []
        options: dict[str, Any] = {"engine": "posix", "layout": "torch", "checksum": False, "pickle_protocol": 3}
        with Checkpointer(
            directory, block_nbytes=65536, queue_depth=3, progress=lambda done, _: told.append(done), **options
        ) as checkpointer:
            report = checkpointer.save(content(1), 1, blocking=blocking).result()
        assert (report.engine, report.block_nbytes, report.queue_depth) == ("posix", 65536, 3)
        assert told
        expected = directory / "expected" / name_of(1)
        expected.parent.mkdir()
        fastpersist.save(content(1), expected, **options)
        assert (directory / name_of(1)).read_bytes() == expected.read_bytes()

    def test_blocks_are_large_beside_a_training_only(self, directory: Path, blocking: bool) -> None:
        with Checkpointer(directory) as checkpointer:
            report = checkpointer.save(content(1), 1, blocking=blocking).result()
        assert report.block_nbytes == (8 << 20 if blocking else 32 << 20)

    def test_durable(self, directory: Path, monkeypatch: Any, blocking: bool) -> None:
        synced: list[str] = []
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fileno: (synced.append(file_behind(fileno)), real(fileno))[1])
        with Checkpointer(directory, durable=False) as checkpointer:
            save_all(checkpointer, 1, blocking=blocking)
            assert str(directory) not in synced
        with Checkpointer(directory) as checkpointer:
            save_all(checkpointer, 2, blocking=blocking)
            assert str(directory) in synced

    def test_guard_and_snapshot_are_for_saves_in_the_background(self, directory: Path) -> None:
        model = torch.nn.Linear(100, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(directory, snapshot=False, guard=optimizer) as checkpointer:
            for step, blocking in ((1, True), (2, False)):
                before = model.weight.clone()
                checkpointer.save(model.state_dict(), step, blocking=blocking)
                model(torch.ones(100)).sum().backward()
                optimizer.step()
                assert not torch.equal(model.weight, before)
                assert torch.equal(checkpointer.load(step)["weight"] if blocking else before, before)
            checkpointer.wait()
            assert torch.equal(checkpointer.load(2)["weight"], before)

    def test_a_blocking_save_copies_nothing(self, directory: Path) -> None:
        with Checkpointer(directory, layout="auto") as checkpointer:
            state = [torch.ones(1 << 20)]
            assert checkpointer.save(state, 1, blocking=True).result().zero_copy_nbytes > 0

    @pytest.mark.parametrize("name", ["path", "obj", "must_recycle", "afterwards", "keep", "keep_best", "blocking"])
    def test_unknown_ones_are_refused(self, directory: Path, name: str) -> None:
        with pytest.raises(TypeError, match=f"Checkpointer has no option '{name}'.*max_pending.*snapshot"):
            Checkpointer(directory, **{name: 1})
        assert not directory.exists()

    def test_what_async_save_refuses_leaves_nothing_behind(self, directory: Path, blocking: bool) -> None:
        with Checkpointer(directory, layout="strange") as checkpointer:
            with pytest.raises(ValueError, match="unknown layout"):
                checkpointer.save([], 1, blocking=blocking)
            assert checkpointer.steps() == []
        with Checkpointer(directory) as checkpointer:
            with pytest.raises((TypeError, AttributeError)):
                checkpointer.save(lambda: None, 1, blocking=blocking)  # which cannot be pickled
            save_all(checkpointer, 1, 2, 3, 4)
            assert_loads(checkpointer, 2, 3, 4)


class TestOneSaver:
    def test_a_second_one_of_the_process_is_refused_until_the_first_is_closed(self, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "alias").symlink_to(directory)
        first, second = Checkpointer(directory), Checkpointer(tmp_path / "alias")
        save_all(first, 1)
        for _ in range(2):
            with pytest.raises(CheckpointerBusyError, match="another Checkpointer of this process"):
                second.save(content(2), 2)
        assert_loads(second, 1)  # it may read
        save_all(first, 2)
        first.close()
        save_all(second, 3)
        with pytest.raises(CheckpointerBusyError):
            first.save(content(4), 4)
        assert_loads(first, 1, 2, 3)
        second.close()
        save_all(first, 4)
        first.close()
        first.close()

    def test_whoever_was_refused_takes_no_lock_away(self, directory: Path) -> None:
        with Checkpointer(directory) as first:
            save_all(first, 1)
            with pytest.raises(CheckpointerBusyError):
                Checkpointer(directory).save([], 2)
            assert is_locked(directory / LOCK)
            Checkpointer(directory).close()
            assert_loads(Checkpointer(directory), 1)
            assert is_locked(directory / LOCK)
        assert not is_locked(directory / LOCK)

    def test_nothing_is_locked_before_the_first_save(self, directory: Path) -> None:
        with Checkpointer(directory) as first, Checkpointer(directory) as second:
            save_all(first, 1)
            assert_loads(second, 1)

    def test_another_directory_and_another_prefix_are_free(self, directory: Path, tmp_path: Path) -> None:
        with (
            Checkpointer(directory) as first,
            Checkpointer(directory, prefix="other") as second,
            Checkpointer(tmp_path / "other") as third,
        ):
            for checkpointer in (first, second, third):
                save_all(checkpointer, 1)
                assert_loads(checkpointer, 1)

    def test_of_many_threads_one_wins(self, directory: Path) -> None:
        for attempt in range(20):
            together = threading.Barrier(4)
            outcomes: list[str] = []
            candidates = [Checkpointer(directory / str(attempt)) for _ in range(4)]

            def save(checkpointer: Checkpointer, together: Any = together, outcomes: list[str] = outcomes) -> None:
                together.wait()
                try:
                    checkpointer.save([1], 1, blocking=True)
                    outcomes.append("saved")
                except CheckpointerBusyError:
                    outcomes.append("busy")

            threads = [threading.Thread(target=save, args=(candidate,)) for candidate in candidates]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(outcomes) == ["busy", "busy", "busy", "saved"]
            assert is_locked(directory / str(attempt) / LOCK)
            for candidate in candidates:
                candidate.close()

    def test_without_locks_it_saves_all_the_same(self, directory: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(fcntl, "lockf", raises(errno.ENOLCK, lambda *_: True, fcntl.lockf))
        with Checkpointer(directory) as checkpointer:
            save_all(checkpointer, 1)
            with pytest.raises(CheckpointerBusyError):
                Checkpointer(directory).save([], 2)

    def test_a_failed_start_lets_go(self, directory: Path, monkeypatch: Any) -> None:
        with Checkpointer(directory) as checkpointer:
            with monkeypatch.context() as patch:
                patch.setattr(fcntl, "lockf", raises(errno.EAGAIN, lambda *_: True, fcntl.lockf))
                with pytest.raises(CheckpointerBusyError, match="another process saves here"):
                    checkpointer.save([], 1)
            save_all(checkpointer, 1)
        descriptors = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
        assert not any(file_behind(int(name)).endswith(LOCK) for name in descriptors)


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock: asked without opening the file in this one, which would end it."""
    inode = os.stat(path).st_ino
    with open("/proc/locks") as locks:
        return any(f":{inode} " in line and "POSIX" in line for line in locks)


class TestFailures:
    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        """Lets saves fail in their last sync, or succeed again."""
        real = Engine.sync
        failing = threading.Event()
        monkeypatch.setattr(Engine, "sync", raises(errno.EIO, lambda *_: failing.is_set(), real))
        return lambda fails: failing.set() if fails else failing.clear()

    def test_wait_raises_the_first_one_once(self, directory: Path, broken: Callable[[bool], None]) -> None:
        checkpointer = Checkpointer(directory, max_pending=3)
        broken(True)
        pending = [checkpointer.save(content(step), step) for step in (1,)]
        with pytest.raises(TransferError, match=name_of(1)):
            checkpointer.wait()
        checkpointer.wait()
        checkpointer.close()
        assert not pending[0].succeeded()

    def test_wait_tells_of_all_that_failed(self, directory: Path, broken: Callable[[bool], None]) -> None:
        begun = threading.Event()

        def progress(*_: int) -> None:
            assert begun.wait(60)

        with Checkpointer(directory, max_pending=2, progress=progress) as checkpointer:
            broken(True)
            for step in (1, 2):
                checkpointer.save(content(step), step)
            begun.set()
            with pytest.raises(TransferError, match=name_of(1)) as caught:
                checkpointer.wait()
            assert name_of(2) in caught.value.__notes__[0]

    def test_close_raises_it_and_lets_others_save(self, directory: Path, broken: Callable[[bool], None]) -> None:
        checkpointer = Checkpointer(directory)
        broken(True)
        checkpointer.save(content(1), 1)
        with pytest.raises(TransferError):
            checkpointer.close()
        checkpointer.close()
        broken(False)
        with Checkpointer(directory) as other:
            save_all(other, 1)

    def test_the_context_manager_raises_it(self, directory: Path, broken: Callable[[bool], None]) -> None:
        broken(True)
        with pytest.raises(TransferError), Checkpointer(directory) as checkpointer:
            checkpointer.save(content(1), 1)
        assert not is_locked(directory / LOCK)

    def test_an_exception_of_the_block_stays_and_gets_a_note(self, directory: Path, broken: Callable[[bool], None]) -> None:
        broken(True)
        checkpointer = Checkpointer(directory)
        checkpointer.save(content(1), 1)
        with pytest.raises(ZeroDivisionError) as caught, checkpointer:
            raise ZeroDivisionError
        (note,) = caught.value.__notes__
        assert f"A save in {directory} failed as well" in note
        assert not is_locked(directory / LOCK)

    def test_a_blocking_save_raises_its_own_and_wait_does_not_repeat_it(
        self, directory: Path, broken: Callable[[bool], None]
    ) -> None:
        with Checkpointer(directory) as checkpointer:
            broken(True)
            with pytest.raises(TransferError):
                checkpointer.save(content(1), 1, blocking=True)
            broken(False)
            checkpointer.wait()
            save_all(checkpointer, 2)
            assert_loads(checkpointer, 2)

    def test_one_that_nobody_asked_about_is_raised_by_the_next_save(
        self, directory: Path, broken: Callable[[bool], None]
    ) -> None:
        checkpointer = Checkpointer(directory)
        broken(True)
        failed = threading.Event()
        checkpointer.save(content(1), 1).add_done_callback(lambda _: failed.set())
        assert failed.wait(60)
        with pytest.raises(TransferError, match=name_of(1)) as caught:
            checkpointer.save(content(2), 2)
        assert "the save asked for now was not begun" in caught.value.__notes__[0]
        with pytest.raises(TransferError, match=name_of(1)):
            checkpointer.close()
        assert checkpointer.steps() == []

    def test_cancelling_is_no_failure(self, directory: Path) -> None:
        held = threading.Event()

        def progress(*_: int) -> None:
            assert held.wait(60)

        with Checkpointer(directory, max_pending=2, progress=progress) as checkpointer:
            checkpointer.save(content(1), 1)
            second = checkpointer.save(content(2), 2)
            assert second.cancel()
            held.set()
            checkpointer.wait()
            assert_loads(checkpointer, 1)

    def test_an_interrupted_close_can_be_repeated(self, directory: Path) -> None:
        held = threading.Event()

        def progress(*_: int) -> None:
            assert held.wait(60)

        checkpointer = Checkpointer(directory, progress=progress)
        pending = checkpointer.save(content(1), 1)
        real = pending.exception
        pending.exception = raising(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            checkpointer.close()
        assert is_locked(directory / LOCK)  # the save is still at work
        pending.exception = real  # type: ignore[method-assign]
        held.set()
        checkpointer.close()
        assert pending.succeeded()
        assert not is_locked(directory / LOCK)


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def is_publication(source: Any, target: Any, **_: Any) -> bool:
    return str(target).startswith("step-")


FAILURES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "open": (Engine, "open", lambda engine, path, mode, **_: mode == "tmpfile" or mode == "recycle"),
    "reserve": (Engine, "reserve", lambda *_: True),
    "write": (Engine, "submit", lambda *_: True),
    "sync": (Engine, "sync", lambda *_: True),
    "link": (os, "link", is_publication),
    "ledger": (os, "fsync", lambda fileno: file_behind(fileno).endswith(".written.json.tmp")),
    "ledger rename": (os, "rename", lambda source, target, **_: str(target).endswith(LEDGER)),
}


class TestPruning:
    @pytest.mark.parametrize("failure", FAILURES)
    def test_nothing_is_pruned_for_a_save_that_failed(
        self, directory: Path, monkeypatch: Any, failure: str, blocking: bool, recycle: bool
    ) -> None:
        with Checkpointer(directory, keep_last=None) as checkpointer:
            save_all(checkpointer, 1, 2, 3)
        owner, name, fails = FAILURES[failure]
        with Checkpointer(directory, keep_last=1, recycle=recycle) as checkpointer:
            for _ in range(2):
                with monkeypatch.context() as patch:
                    patch.setattr(owner, name, raises(errno.EIO, fails, getattr(owner, name)))
                    with pytest.raises(OSError, match="Input/output error"):
                        save_all(checkpointer, 4, blocking=blocking)
                assert_loads(checkpointer, 1, 2, 3)
                assert not (directory / f"{LEDGER}.tmp").exists()
            save_all(checkpointer, 4, blocking=blocking)
            assert_loads(checkpointer, 4)
        assert json.loads((directory / LEDGER).read_text())["written"] == [4]

    def test_nothing_is_pruned_before_the_directory_is_synced(
        self, directory: Path, monkeypatch: Any, blocking: bool, recycle: bool
    ) -> None:
        with Checkpointer(directory, keep_last=2, recycle=recycle) as checkpointer:
            save_all(checkpointer, 1, 2)
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", raises(errno.EIO, lambda fileno: file_behind(fileno) == str(directory), os.fsync))
                with pytest.raises(NotDurableError):
                    save_all(checkpointer, 3, blocking=blocking)
            assert_loads(checkpointer, 1, 2, 3)
            save_all(checkpointer, 4, blocking=blocking)
            assert_loads(checkpointer, 3, 4)

    def test_the_order(self, directory: Path, monkeypatch: Any, blocking: bool, recycle: bool) -> None:
        """Noted in the ledger, written, synced, published, directory synced; and only then pruned."""
        with Checkpointer(directory, keep_last=1, recycle=recycle) as checkpointer:
            save_all(checkpointer, 1)
            done: list[str] = []

            def told(what: Callable[..., str], real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **options: Any) -> Any:
                    done.append(what(*arguments, **options))
                    return real(*arguments, **options)

                return call

            def to(call: str) -> Callable[..., str]:
                return lambda source, target, **_: f"{call} to {os.path.basename(target)}"

            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", told(lambda fileno: f"fsync {os.path.basename(file_behind(fileno))}", os.fsync))
                patch.setattr(os, "rename", told(to("rename"), os.rename))
                patch.setattr(os, "link", told(to("link"), os.link))
                patch.setattr(os, "unlink", told(lambda path, **_: f"unlink {os.path.basename(path)}", os.unlink))
                patch.setattr(Engine, "sync", told(lambda *_: "sync", Engine.sync))
                save_all(checkpointer, 2, blocking=blocking)
        assert [step for step in done if step != f"unlink {SPARE}"] == [
            f"fsync {LEDGER}.tmp",
            f"rename to {LEDGER}",
            "sync",
            f"link to {name_of(2)}",
            f"fsync {directory.name}",
            f"rename to {SPARE}" if recycle else f"unlink {name_of(1)}",
        ]

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EIO])
    def test_one_that_cannot_be_removed_is_logged_and_tried_again(
        self, directory: Path, monkeypatch: Any, blocking: bool, recycle: bool, code: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Checkpointer(directory, keep_last=1, recycle=recycle) as checkpointer:
            save_all(checkpointer, 1)
            with monkeypatch.context() as patch:
                if recycle:
                    patch.setattr(os, "rename", raises(code, lambda source, target, **_: target.endswith(SPARE), os.rename))
                else:
                    patch.setattr(os, "unlink", raises(code, lambda path, **_: "step-" in str(path), os.unlink))
                save_all(checkpointer, 2, blocking=blocking)
                assert_loads(checkpointer, 1, 2)
            warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert warnings == [f"{checkpointer.path(1)} cannot be removed ({os.strerror(code)})"]
            save_all(checkpointer, 3, blocking=blocking)
            assert_loads(checkpointer, 3)

    def test_a_directory_that_cannot_be_listed_does_not_fail_the_save(
        self, directory: Path, monkeypatch: Any, blocking: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Checkpointer(directory, keep_last=1) as checkpointer:
            save_all(checkpointer, 1)
            real = checkpointer.steps

            def steps() -> list[int]:
                if threading.current_thread() is not threading.main_thread():
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real()

            monkeypatch.setattr(checkpointer, "steps", steps)
            save_all(checkpointer, 2, blocking=blocking)
            assert_loads(checkpointer, 1, 2)
        assert "what follows on the background save failed" in caplog.text
