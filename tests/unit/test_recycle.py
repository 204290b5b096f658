"""Saving over a retired file: what is refused, and what is left of it when it is not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import RecycleRefusedError
from fastpersist.engines import Engine, File
from fastpersist.engines.memory import MemoryEngine
from tests.faults.scene import state_of

NOBODY = 65534


@pytest.fixture(params=["posix", "io_uring"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """An older checkpoint, of ones, to be replaced."""
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    fastpersist.save(torch.ones(300_000), directory / "model.pt", engine="posix")
    return directory / "model.pt"


@pytest.fixture
def retired(target: Path) -> Path:
    """A retired checkpoint beside it."""
    fastpersist.save(torch.zeros(300_000), target.parent / "retired.pt", engine="posix")
    return target.parent / "retired.pt"


def assert_refused(target: Path, reason: str, recycle: Path, **options: Any) -> None:
    """A save into target is refused for the reason, and changes nothing in the directory."""
    before = state_of(target.parent)
    inodes = {entry.name: entry.lstat().st_ino for entry in target.parent.iterdir()}
    with pytest.raises(RecycleRefusedError, match=reason) as caught:
        fastpersist.save([2], target, recycle=recycle, **options)
    assert state_of(target.parent) == before
    assert {entry.name: entry.lstat().st_ino for entry in target.parent.iterdir()} == inodes
    assert caught.value.path == str(recycle)
    assert caught.value.reason in str(caught.value)
    assert caught.value.remedy in str(caught.value)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("words", [1000, 299_999, 300_000, 300_001, 500_000])
@pytest.mark.parametrize("exists", [True, False])
def test_the_new_file_takes_the_place_and_the_inode(target: Path, retired: Path, engine: str, words: int, exists: bool) -> None:
    if not exists:
        target.unlink()
    inode = retired.stat().st_ino
    obj = torch.arange(words)
    report = fastpersist.save(obj, target, engine=engine, block_nbytes=1 << 16, recycle=retired)
    assert target.stat().st_ino == inode
    assert target.stat().st_size == report.file_nbytes
    assert torch.equal(torch.load(target), obj)
    fastpersist.verify(target)
    assert os.listdir(target.parent) == [target.name]


def test_the_bytes_are_those_of_a_save_without_it(target: Path, retired: Path, engine: str) -> None:
    obj = [torch.full((100_000 + index,), index) for index in range(5)]
    fastpersist.save(obj, target, engine=engine, layout="torch")
    expected = target.read_bytes()
    fastpersist.save(obj, target, engine=engine, layout="torch", recycle=retired)
    assert target.read_bytes() == expected


def test_a_file_that_never_was_a_checkpoint(target: Path) -> None:
    other = target.parent / "other"
    other.write_bytes(b"x" * 5_000_001)
    fastpersist.save([2], target, recycle=other)
    assert torch.load(target) == [2]
    assert os.listdir(target.parent) == [target.name]


def test_files_in_turn(tmp_path: Path, engine: str) -> None:
    steps = [tmp_path / f"step{index}.pt" for index in range(6)]
    for index, path in enumerate(steps):
        fastpersist.save(torch.full((50_000,), index), path, engine=engine, recycle=steps[index - 2] if index > 1 else None)
        kept = steps[max(0, index - 1) : index + 1]
        assert sorted(tmp_path.iterdir()) == kept
        assert [torch.load(step)[0] for step in kept] == [int(step.stem[4:]) for step in kept]


def test_a_file_of_another_directory_and_a_relative_path(target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = target.parent / "old"
    other.mkdir()
    retired.rename(other / "retired.pt")
    monkeypatch.chdir(other)
    synced: list[str] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fileno: (synced.append(os.readlink(f"/proc/self/fd/{fileno}")), real(fileno)))
    fastpersist.save([2], target, recycle="retired.pt")
    assert torch.load(target) == [2]
    assert os.listdir(other) == []
    assert synced == [str(target.parent), str(other), str(target.parent)]  # both before the first byte, one in the end


@pytest.mark.parametrize("durable", [True, False])
def test_the_hidden_name_is_durable_before_anything_is_written(
    target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    calls: list[str] = []
    for owner, name in ((os, "rename"), (os, "fsync"), (os, "ftruncate"), (os, "fdatasync"), (Engine, "reserve")):
        monkeypatch.setattr(owner, name, noting(calls, getattr(owner, name)))
    fastpersist.save([2], target, durable=durable, recycle=retired)
    written = ["rename", "fsync", "reserve", "ftruncate"]
    assert calls == ([*written, "fdatasync", "rename", "fsync"] if durable else [*written, "rename"])


def noting(calls: list[str], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(real.__name__)
        return real(*arguments, **options)

    return call


@pytest.mark.parametrize(("exists", "mode"), [(True, 0o604), (False, 0o640)])
def test_the_mode_is_that_of_the_target_or_of_the_retired_file(target: Path, retired: Path, exists: bool, mode: int) -> None:
    target.chmod(0o604)
    retired.chmod(0o640)
    if not exists:
        target.unlink()
    fastpersist.save([2], target, recycle=retired)
    assert stat.S_IMODE(target.stat().st_mode) == mode


def test_what_cannot_be_pickled_changes_nothing(target: Path, retired: Path) -> None:
    before = state_of(target.parent)
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        fastpersist.save(lambda: None, target, recycle=retired)
    assert state_of(target.parent) == before


def test_a_missing_file_is_refused(target: Path) -> None:
    assert_refused(target, "cannot be found", target.parent / "nonesuch.pt")
    assert_refused(target, "cannot be found", target.parent / "nonesuch" / "x.pt")
    assert_refused(target, "cannot be found", target / "x.pt")


def test_a_symlink_is_refused(target: Path, retired: Path) -> None:
    link = target.parent / "link.pt"
    link.symlink_to(retired)
    assert_refused(target, "symlink", link)
    link.unlink()
    link.symlink_to("nowhere")
    assert_refused(target, "symlink", link)


def test_what_is_no_regular_file_is_refused(target: Path) -> None:
    os.mkfifo(target.parent / "fifo")
    assert_refused(target, r"no regular file \(p", target.parent / "fifo")
    (target.parent / "folder").mkdir()
    with pytest.raises(RecycleRefusedError, match=r"no regular file \(d"):
        fastpersist.save([2], target, recycle=target.parent)


def test_a_file_of_two_names_is_refused(target: Path, retired: Path) -> None:
    os.link(retired, target.parent / "second.pt")
    assert_refused(target, "has 2 names", retired)


def test_the_target_is_refused(target: Path, tmp_path: Path) -> None:
    assert_refused(target, "is the target", target)
    (tmp_path / "way").symlink_to(target.parent)
    assert_refused(target, "is the target", tmp_path / "way" / target.name)


def test_a_file_of_another_filesystem_is_refused(target: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as other:
        if os.fstat(other.fileno()).st_dev == target.stat().st_dev:
            pytest.skip("the test's directory lies on the filesystem of /dev/shm")
        assert_refused(target, "another filesystem", Path(other.name))


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_an_open_file_is_refused(target: Path, retired: Path, engine: str, flags: int) -> None:
    fileno = os.open(retired, flags)
    try:
        assert_refused(target, "open or mapped", retired, engine=engine)
    finally:
        os.close(fileno)
    fastpersist.save([2], target, engine=engine, recycle=retired)


def test_a_mapped_file_is_refused(target: Path, retired: Path) -> None:
    with retired.open("rb") as source:
        mapping = mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)
    assert_refused(target, "open or mapped", retired)
    mapping.close()
    loaded = torch.load(retired, mmap=True)
    assert_refused(target, "open or mapped", retired)
    del loaded
    fastpersist.save([2], target, recycle=retired)


_READER = "import sys; source = open(sys.argv[1]); print('open', flush=True); sys.stdin.read()"


def test_a_file_that_another_process_reads_is_refused(target: Path, retired: Path) -> None:
    command = [sys.executable, "-c", _READER, str(retired)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        assert_refused(target, "open or mapped", retired)
        reader.kill()
    fastpersist.save([2], target, recycle=retired)


def test_a_file_that_another_save_recycles_is_refused(target: Path, retired: Path) -> None:
    before = state_of(target.parent)
    with leased(retired), pytest.raises(RecycleRefusedError, match="open or mapped"):
        fastpersist.save([2], target, recycle=retired)
    assert state_of(target.parent) == before


@contextlib.contextmanager
def leased(path: Path) -> Iterator[None]:
    """The file under a write lease, as a save has it."""
    fileno = os.open(path, os.O_RDWR)
    fcntl.fcntl(fileno, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(fileno, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    fcntl.fcntl(fileno, fcntl.F_SETOWN, 0)
    try:
        yield
    finally:
        os.close(fileno)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(errno.EINVAL, "has no leases"), (errno.EACCES, "another user"), (errno.ENOLCK, "No locks available")],
)
def test_without_a_lease_it_is_refused(
    target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    real = fcntl.fcntl

    def refuse(fileno: int, command: int, argument: Any = 0) -> Any:
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            raise OSError(code, os.strerror(code))
        return real(fileno, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert_refused(target, reason, retired)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(("mode", "reason"), [(0o666, "another user"), (0o644, "Permission denied")])
def test_the_file_of_another_user_is_refused(mode: int, reason: str) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to other users
        directory = Path(name)
        target, retired = directory / "model.pt", directory / "retired.pt"
        for path in (target, retired):
            fastpersist.save([1], path)
            path.chmod(mode)
        directory.chmod(0o777)
        os.seteuid(NOBODY)
        try:
            assert_refused(target, reason, retired, engine="posix")
        finally:
            os.seteuid(0)


def test_an_engine_that_keeps_nothing_is_refused(target: Path, retired: Path) -> None:
    assert_refused(target, "'null' keeps no files", retired, engine="null")
    with MemoryEngine() as engine:
        assert_refused(target, "'memory' keeps no files", retired, engine=engine)


def test_a_file_that_is_exchanged_before_it_is_opened_is_refused(
    target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(path: str) -> None:
        fastpersist.save([3], path)

    before_opening(monkeypatch, exchange)
    with pytest.raises(RecycleRefusedError, match="another file took its place"):
        fastpersist.save([2], target, recycle=retired)
    assert torch.load(retired) == [3]
    assert sorted(os.listdir(target.parent)) == ["model.pt", "retired.pt"]


def test_a_symlink_that_appears_before_it_is_opened_is_refused(
    target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(path: str) -> None:
        os.unlink(path)
        os.symlink(target, path)

    before_opening(monkeypatch, exchange)
    content = target.read_bytes()
    with pytest.raises(RecycleRefusedError, match="symbolic links"):
        fastpersist.save([2], target, recycle=retired)
    assert target.read_bytes() == content


def before_opening(monkeypatch: pytest.MonkeyPatch, action: Callable[[str], None]) -> None:
    """Let this happen just before a retired file is opened."""
    real = Engine.open

    def opened(self: Engine, path: str, mode: str, **options: Any) -> File:
        if mode == "recycle":
            action(path)
        return real(self, path, mode, **options)

    monkeypatch.setattr(Engine, "open", opened)


def around_renaming(
    monkeypatch: pytest.MonkeyPatch,
    retired: Path,
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Let something happen just before or just after the retired file gets its hidden name."""
    real = os.rename

    def rename(source: Any, *arguments: Any, **options: Any) -> None:
        hides = source == retired.name
        if hides and before:
            before()
        real(source, *arguments, **options)
        if hides and after:
            after()

    monkeypatch.setattr(os, "rename", rename)


def test_a_file_that_is_exchanged_before_it_is_renamed_keeps_its_name(
    target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around_renaming(monkeypatch, retired, before=lambda: os.replace(other, retired))
    other = target.parent / "other"
    other.write_bytes(b"somebody's")
    with pytest.raises(RecycleRefusedError, match="another file took its place"):
        fastpersist.save([2], target, recycle=retired)
    assert retired.read_bytes() == b"somebody's"
    assert sorted(os.listdir(target.parent)) == ["model.pt", "retired.pt"]


def test_a_file_that_is_linked_before_it_is_renamed_is_refused(
    target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = target.parent / "second.pt"
    content = retired.read_bytes()
    around_renaming(monkeypatch, retired, before=lambda: os.link(retired, second))
    with pytest.raises(RecycleRefusedError, match="another name"):
        fastpersist.save([2], target, recycle=retired)
    assert retired.read_bytes() == second.read_bytes() == content
    assert sorted(os.listdir(target.parent)) == ["model.pt", "retired.pt", "second.pt"]


def try_to_open(path: Path) -> None:
    """What a reader does who does not wait."""
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_RDONLY | os.O_NONBLOCK)


def test_a_reader_who_comes_before_the_rename_is_noticed(target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    around_renaming(monkeypatch, retired, before=lambda: try_to_open(retired))
    assert_refused(target, "began to open it", retired)


def test_an_open_that_the_lease_did_not_see_is_noticed(target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = os.fsync

    def open_meanwhile(fileno: int) -> None:
        real(fileno)
        (own,) = [int(name) for name in os.listdir("/proc/self/fd") if names_temporary(name, target.parent)]
        fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        opened.append(os.open(f"/proc/self/fd/{own}", os.O_RDONLY))

    monkeypatch.setattr(os, "fsync", open_meanwhile)
    content = retired.read_bytes()
    with pytest.raises(RecycleRefusedError, match="open or mapped"):
        fastpersist.save([2], target, recycle=retired)
    os.close(opened[0])
    assert retired.read_bytes() == content
    assert sorted(os.listdir(target.parent)) == ["model.pt", "retired.pt"]


def names_temporary(fileno: str, directory: Path) -> bool:
    """Whether the descriptor is of a file with a hidden name in the directory."""
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{fileno}").startswith(f"{directory}/.fastpersist-")
    return False


def test_a_name_that_is_taken_meanwhile_is_not_replaced(target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = retired.read_bytes()

    def disturb() -> None:
        retired.write_bytes(b"somebody's")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    around_renaming(monkeypatch, retired, after=disturb)
    with pytest.raises(fastpersist.TransferError) as caught:
        fastpersist.save([2], target, recycle=retired)
    (note,) = caught.value.__notes__
    (other,) = set(os.listdir(target.parent)) - {"model.pt", "retired.pt"}
    assert other in note
    assert (target.parent / other).read_bytes() == content
    assert retired.read_bytes() == b"somebody's"
    fastpersist.save([2], target)
    assert (target.parent / other).read_bytes() == content  # it is no temporary file


def test_a_name_that_cannot_be_restored_is_told(target: Path, retired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    content = retired.read_bytes()
    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(fastpersist.TransferError, match="cannot sync the directory") as caught:
        fastpersist.save([2], target, recycle=retired)
    (note,) = caught.value.__notes__
    (hidden,) = set(os.listdir(target.parent)) - {"model.pt"}
    assert hidden in note
    assert (target.parent / hidden).read_bytes() == content


def test_the_lease_is_held_while_writing_and_gone_before_the_file_is_public(
    target: Path, retired: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases: list[int] = []
    renames: list[int] = []
    signals: list[int] = []

    def lease() -> int:
        (own,) = [int(name) for name in os.listdir("/proc/self/fd") if names_temporary(name, target.parent)]
        assert fcntl.fcntl(own, fcntl.F_GETOWN) == 0  # nobody is signalled
        return int(fcntl.fcntl(own, fcntl.F_GETLEASE))

    real = os.rename

    def rename(source: Any, *arguments: Any, **options: Any) -> None:
        if source != retired.name:
            renames.append(lease())
            with open(target.parent / source) as reader, pytest.raises(BlockingIOError):
                fcntl.flock(reader, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so no other save takes it for abandoned
        real(source, *arguments, **options)

    monkeypatch.setattr(os, "rename", rename)
    real_fcntl = fcntl.fcntl

    def note_signal(fileno: int, command: int, argument: Any = 0) -> Any:
        if (command, argument) == (fcntl.F_SETLEASE, fcntl.F_WRLCK):
            signals.append(real_fcntl(fileno, fcntl.F_GETSIG))
        return real_fcntl(fileno, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", note_signal)
    fastpersist.save(torch.ones(10_000), target, engine=engine, recycle=retired, progress=lambda *_: leases.append(lease()))
    assert signals == [signal.SIGURG] * 2  # which is ignored, if somebody opens the file before the owner is taken away
    assert set(leases) == {fcntl.F_WRLCK}
    assert renames == [fcntl.F_UNLCK]


def test_another_save_in_the_directory_leaves_the_file_alone(
    target: Path, retired: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = target.parent / "other.pt"
    nested: list[str] = []

    def save_another(*_: int) -> None:
        if not nested:
            nested.extend(os.listdir(target.parent))
            fastpersist.save([3], other)

    caplog.set_level("INFO", "fastpersist")
    fastpersist.save(torch.arange(50_000), target, block_nbytes=1 << 16, recycle=retired, progress=save_another)
    assert len(nested) == 2
    assert torch.equal(torch.load(target), torch.arange(50_000))
    assert sorted(os.listdir(target.parent)) == ["model.pt", "other.pt"]
    assert "cannot be removed" not in caplog.text
