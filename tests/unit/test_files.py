"""Opening files for direct I/O, and falling back where there is none."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
from pathlib import Path

import pytest

from fastpersist.engines import Engine, Read, Write, _libc, files, open_engine
from fastpersist.engines.files import open_file
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.testing import Fault, FaultyEngine, collect


@pytest.fixture(autouse=True)
def no_memory_of_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_refused_devices", set())


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "file")


def test_unknown_modes_are_refused_with_the_known_ones(path: str) -> None:
    with pytest.raises(ValueError, match=r"unknown open mode 'a'.*tmpfile"):
        open_file(path, "a", direct=True)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_is_opened_as_it_is(path: str, tmp_path: Path, direct: bool) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(path, "recycle", direct=direct)
    Path(path).write_bytes(b"x" * 5000)
    with open_file(path, "recycle", direct=direct) as file:
        assert os.fstat(file.fileno).st_size == 5000
        assert not fcntl.fcntl(file.fileno, fcntl.F_GETFL) & os.O_NONBLOCK
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        open_file(str(tmp_path / "link"), "recycle", direct=direct)


@pytest.mark.parametrize("direct", [True, False])
def test_a_lease_is_not_waited_for(path: str, direct: bool) -> None:
    with open(path, "wb") as holder:
        fcntl.fcntl(holder, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with pytest.raises(BlockingIOError):
            open_file(path, "recycle", direct=direct)


def test_a_buffered_file_demands_nothing(path: str) -> None:
    with open_file(path, "w", direct=False) as file:
        assert (file.direct, file.memory_alignment, file.offset_alignment) == (False, 1, 1)
        assert not fcntl.fcntl(file.fileno, fcntl.F_GETFL) & os.O_DIRECT


def test_what_the_kernel_states_is_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "statx_direct_alignment", lambda fileno: (4, 512))
    monkeypatch.setattr(_libc, "filesystem_magic", lambda fileno: 0)
    with open_file(path, "w", direct=True) as file:
        assert (file.direct, file.memory_alignment, file.offset_alignment) == (True, 4, 512)


def test_a_kernel_that_states_no_direct_io_is_believed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "statx_direct_alignment", lambda fileno: (0, 0))
    with open_file(path, "w", direct=True) as file:
        assert (file.direct, file.memory_alignment) == (False, 1)


def test_without_a_statement_the_logical_block_is_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "statx_direct_alignment", lambda fileno: None)
    monkeypatch.setattr(_libc, "filesystem_magic", lambda fileno: 0)
    monkeypatch.setattr(files, "_logical_block_nbytes", lambda device: 2048)
    monkeypatch.setattr(files.fcntl, "ioctl", _refuse_ioctl)
    with open_file(path, "w", direct=True) as file:
        assert (file.memory_alignment, file.offset_alignment) == (2048, 2048)


def _refuse_ioctl(*_: object) -> bytes:
    raise OSError(errno.ENOTTY, "not xfs")


def test_an_unknown_device_is_taken_to_need_pages() -> None:
    assert files._logical_block_nbytes(os.makedev(4000, 4000)) == 4096


def test_a_memory_filesystem_is_never_called_direct(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_libc, "filesystem_magic", lambda fileno: 0x01021994)
    with open_file(path, "w", direct=True) as file:
        assert not file.direct


def test_an_open_that_refuses_o_direct_is_repeated_without(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def refuse_direct(name: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            real_open(name, flags & ~os.O_DIRECT, *rest)  # as some filesystems do: the file is made, then the flag refused
            raise OSError(errno.EINVAL, "no direct I/O")
        return real_open(name, flags, *rest)

    monkeypatch.setattr(files.os, "open", refuse_direct)
    with caplog.at_level(logging.WARNING, "fastpersist"), open_file(path, "x", direct=True) as file:
        assert not file.direct
    assert "refuses to open files for direct I/O" in caplog.text


@pytest.mark.parametrize("name", ["posix", "io_uring"])
def test_the_first_refused_transfer_turns_the_file_to_buffered_io(
    name: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = os.urandom(16384)
    with FaultyEngine(open_engine(name), {1: Fault.error(errno.EINVAL)}) as engine, engine.open(path, "w") as file:
        if not file.direct:
            pytest.skip("direct I/O is not to be had in the test's directory")
        with caplog.at_level(logging.WARNING, "fastpersist"):
            assert _write_with_residuals(engine, file, content) == 1
        assert not file.direct
        assert not fcntl.fcntl(file.fileno, fcntl.F_GETFL) & os.O_DIRECT
    assert "buffered I/O is used on this filesystem from now on" in caplog.text
    assert Path(path).read_bytes() == content
    with open_file(path, "r", direct=True) as file:  # the verdict is remembered for the filesystem
        assert not file.direct


def test_a_truly_invalid_transfer_fails_after_the_fallback(path: str) -> None:
    faults = {1: Fault.error(errno.EINVAL), 2: Fault.error(errno.EINVAL)}
    with FaultyEngine(open_engine("posix"), faults) as engine, engine.open(path, "w") as file:
        if not file.direct:
            pytest.skip("direct I/O is not to be had in the test's directory")
        with pytest.raises(OSError, match="Invalid argument"):
            _write_with_residuals(engine, file, bytes(4096))


def _write_with_residuals(engine: Engine, file: files.File, content: bytes) -> int:
    """Write ``content`` in one request, following its residuals; returns how many there were."""
    buffer = AlignedBuffer(len(content))
    buffer.view[: len(content)] = content
    engine.submit(Write(file, buffer.address, len(content), 0, owner=buffer))
    residuals = 0
    while engine.in_flight:
        for completion in engine.wait():
            if completion.error is not None:
                raise completion.error
            if completion.residual is not None:
                residuals += 1
                engine.submit(completion.residual)
    return residuals


@pytest.mark.parametrize("short", [1, 511, 512, 4096, 5000])
@pytest.mark.parametrize("direct", [True, False])
def test_a_residual_continues_where_aligned_progress_ended(path: str, short: int, direct: bool) -> None:
    content = os.urandom(16384)
    with FaultyEngine(open_engine("posix"), {1: Fault.short(short)}) as engine, engine.open(path, "w", direct=direct) as file:
        assert _write_with_residuals(engine, file, content) == 1
    assert Path(path).read_bytes() == content


def test_a_short_read_at_the_end_is_the_end(path: str) -> None:
    Path(path).write_bytes(b"x" * 5000)
    buffer = AlignedBuffer(16384)
    with open_engine("posix") as engine, engine.open(path, "r") as file:
        if not file.direct:
            pytest.skip("direct I/O is not to be had in the test's directory")
        engine.submit(Read(file, buffer.address, 16384, 0, owner=buffer))
        (completion,) = collect(engine)
    assert (completion.transferred, completion.error, completion.residual) == (5000, None, None)
    assert bytes(buffer.view[:5000]) == b"x" * 5000
