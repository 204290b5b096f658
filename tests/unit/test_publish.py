"""How a file gets its name: linked to a new one, renamed over an old one, and where a path leads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fastpersist
from fastpersist import NotDurableError, TransferError
from fastpersist.transfer import publish, temporary
from fastpersist.transfer.publish import resolve_target
from tests.faults.scene import without_nameless_files

CALLS = ("fchmod", "fdatasync", "link", "rename", "fsync")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """The target, alone in its directory when it exists."""
    return tmp_path / "checkpoint.pt"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that publish a file, with the names that they give."""
    noted: list[str] = []

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            noted.append(f"{name} {arguments[1]}" if name in ("link", "rename") else name)
            return real(*arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, noting(name, getattr(os, name)))
    return noted


def before(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> None:
    """Let something happen just before the first call of os.<name>."""
    real = getattr(os, name)

    def call(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(os, name, real)
        act()
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)


def assert_alone(target: Path, value: object) -> None:
    assert fastpersist.load(target) == value
    assert os.listdir(target.parent) == [target.name]


def test_a_new_target_is_linked_between_the_syncs(target: Path, calls: list[str]) -> None:
    fastpersist.save("new", target)
    assert calls == ["fdatasync", "link checkpoint.pt", "fsync"]
    assert_alone(target, "new")


def test_an_old_target_is_renamed_over_between_the_syncs(target: Path, calls: list[str]) -> None:
    fastpersist.save("old", target)
    calls.clear()
    fastpersist.save("new", target)
    hidden = calls[2].removeprefix("link ")
    assert publish.new_name()[:13] == hidden[:13] == ".fastpersist-"
    assert calls == ["fchmod", "fdatasync", f"link {hidden}", "rename checkpoint.pt", "fsync"]
    assert_alone(target, "new")


@pytest.mark.parametrize("exists", [False, True])
def test_a_named_temporary_file_is_renamed(
    target: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    without_nameless_files(monkeypatch)
    if exists:
        fastpersist.save("old", target)
    calls.clear()
    fastpersist.save("new", target)
    assert calls == [*["fchmod"][: int(exists)], "fdatasync", "rename checkpoint.pt", "fsync"]
    assert_alone(target, "new")


def test_without_a_way_to_name_it_no_nameless_file_is_made(
    target: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "_can_name_nameless_files", lambda: False)
    fastpersist.save("new", target)
    assert calls == ["fdatasync", "rename checkpoint.pt", "fsync"]


@pytest.mark.parametrize("durable", [False, True])
def test_a_target_that_appears_before_the_link_is_replaced_with_its_mode(
    target: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    def appear() -> None:
        target.write_bytes(b"somebody was quicker")
        target.chmod(0o604)

    before(monkeypatch, "link", appear)
    fastpersist.save("new", target, durable=durable)
    assert [call.split()[0] for call in calls if call[0] != "f"] == ["link", "link", "rename"]
    assert_alone(target, "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o604


@pytest.mark.parametrize("name", ["fdatasync", "link"])
def test_a_target_that_vanishes_is_made_anew(target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fastpersist.save("old", target)
    before(monkeypatch, name, target.unlink)
    fastpersist.save("new", target)
    assert_alone(target, "new")


@pytest.mark.parametrize("name", ["fdatasync", "link"])
def test_a_directory_that_appears_is_not_replaced(target: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before(monkeypatch, name, target.mkdir)
    with pytest.raises(TransferError, match="cannot publish") as caught:
        fastpersist.save("new", target)
    assert caught.value.errno == errno.EISDIR
    assert os.listdir(target.parent) == [target.name]


def test_another_save_leaves_the_hidden_name_alone(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = target.parent / "other.pt"
    fastpersist.save("old", target)
    before(monkeypatch, "rename", lambda: fastpersist.save("other", other))
    fastpersist.save("new", target)
    assert fastpersist.load(other) == "other"
    other.unlink()
    assert_alone(target, "new")


@pytest.mark.parametrize("exists", [False, True])
def test_only_the_sync_of_the_directory_fails(target: Path, monkeypatch: pytest.MonkeyPatch, exists: bool) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "no")

    if exists:
        fastpersist.save("old", target)
    before(monkeypatch, "fsync", fail)
    with pytest.raises(NotDurableError):
        fastpersist.save("new", target)
    assert_alone(target, "new")


@pytest.mark.parametrize("name", ["link", "rename"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupt_at_the_naming_leaves_the_old_file_or_the_new_one(
    target: Path, monkeypatch: pytest.MonkeyPatch, name: str, after: bool, exists: bool
) -> None:
    if exists:
        fastpersist.save("old", target)
    elif name == "rename":
        pytest.skip("a new target is not renamed to")
    real = getattr(os, name)

    def interrupted(*arguments: Any, **options: Any) -> None:
        if after:
            real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fastpersist.save("new", target)
    published = after and (name == "rename" or not exists)
    if exists or published:
        assert_alone(target, "new" if published else "old")
    else:
        assert os.listdir(target.parent) == []


def test_a_path_leads_to_the_file_behind_it(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "directory").symlink_to(real)
    (tmp_path / "link.pt").symlink_to("directory/new.pt")  # to a file that does not exist
    assert resolve_target(tmp_path / "directory" / "new.pt") == str(real / "new.pt")
    assert resolve_target(tmp_path / "link.pt") == str(real / "new.pt")
    (real / "new.pt").touch()
    assert resolve_target(tmp_path / "link.pt") == str(real / "new.pt")
    assert resolve_target(os.fsencode(real / "new.pt")) == str(real / "new.pt")


def _fifo(path: Path) -> str:
    os.mkfifo(path / "fifo")
    return str(path / "fifo")


def _loop(path: Path) -> str:
    (path / "loop").symlink_to("loop")
    return str(path / "loop")


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "the path is empty", lambda path: ""),
        (IsADirectoryError, "give the checkpoint a file name in it", str),
        (IsADirectoryError, "give the checkpoint a file name in it", lambda path: f"{path}/missing/"),
        (IsADirectoryError, "give the checkpoint a file name in it", lambda path: f"{path}/file/"),
        (FileNotFoundError, "create it first.*/missing'", lambda path: f"{path}/missing/new.pt"),
        (NotADirectoryError, "the path's parent is no directory.*/file'", lambda path: f"{path}/file/new.pt"),
        (ValueError, "no regular file", _fifo),
        (OSError, "symbolic links", _loop),
    ],
)
def test_what_cannot_be_a_target_is_refused(
    tmp_path: Path, error: type[Exception], message: str, make: Callable[[Path], str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(error, match=message):
        resolve_target(make(tmp_path))


def test_abandoned_files_are_looked_for_once_a_minute(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(temporary, "LOOK_AGAIN_SECONDS", 60.0)
    monkeypatch.setattr(temporary, "time", SimpleNamespace(monotonic=lambda: now[0]))
    other = target.parent / "other"
    other.mkdir()
    abandoned = [directory / f".fastpersist-{number:016x}.tmp" for number, directory in enumerate((target.parent, other))]

    def left_after_a_save(path: Path) -> list[bool]:
        for file in abandoned:
            file.write_bytes(b"half a checkpoint")
        fastpersist.save(1, path)
        return [file.exists() for file in abandoned]

    assert left_after_a_save(target) == [False, True]
    now[0] += 59.9
    assert left_after_a_save(target) == [True, True]
    assert left_after_a_save(other / "m.pt") == [True, False]  # each directory for itself
    now[0] += 0.1
    assert left_after_a_save(target) == [False, True]


def test_directories_that_were_looked_through_are_forgotten_in_the_end(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary, "LOOK_AGAIN_SECONDS", 60.0)
    monkeypatch.setattr(temporary, "_MAX_LOOKED_THROUGH", 3)
    for number in range(5):
        directory = target.parent / str(number)
        directory.mkdir()
        fastpersist.save(1, directory / "m.pt")
        assert len(temporary._looked_through) <= 3


def test_another_thread_may_forget_the_directories_at_any_moment(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cleared(dict[str, float]):
        def __contains__(self, key: object) -> bool:
            return True  # it was there, and is gone by now

    monkeypatch.setattr(temporary, "_looked_through", Cleared())
    fastpersist.save(1, target)
    assert_alone(target, 1)
