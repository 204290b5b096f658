"""What the base class does for every engine: judging results, and staying safe when a hook is interrupted."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from fastpersist.engines import Completion, Engine, File, Read, Write, open_engine
from fastpersist.engines.memory import MemoryEngine
from fastpersist.errors import EngineStateError
from fastpersist.memory.buffers import AlignedBuffer


def _judge(result: int, *, read: bool = False, direct: bool = True) -> Completion:
    file = File("f", -1, direct=direct, memory_alignment=512, offset_alignment=512)
    request = (Read if read else Write)(file, 0x10000, 8192, 4096, tag="tag")
    with MemoryEngine() as engine:
        return engine._complete(request, direct, result)


def test_a_full_transfer_is_complete() -> None:
    completion = _judge(8192)
    assert (completion.transferred, completion.error, completion.residual) == (8192, None, None)


@pytest.mark.parametrize(
    ("result", "direct", "progress"), [(1024, True, 1024), (1500, True, 1024), (100, True, 0), (1500, False, 1500)]
)
def test_a_short_transfer_leaves_an_aligned_residual(result: int, direct: bool, progress: int) -> None:
    completion = _judge(result, direct=direct)
    residual = completion.residual
    assert residual is not None
    assert completion.transferred == progress
    assert (residual.address, residual.nbytes, residual.file_offset) == (0x10000 + progress, 8192 - progress, 4096 + progress)
    assert residual.tag == "tag"
    assert isinstance(residual, Write)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_an_interrupted_transfer_is_left_whole(code: int) -> None:
    completion = _judge(-code)
    assert completion.error is None
    assert completion.residual is completion.request


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EFAULT])
def test_a_failure_keeps_its_errno(code: int) -> None:
    completion = _judge(-code)
    assert completion.error is not None
    assert completion.error.errno == code
    assert completion.residual is None


def test_a_write_that_moves_nothing_is_a_failure() -> None:
    error = _judge(0).error
    assert error is not None
    assert error.errno == errno.EIO


def test_a_read_that_moves_nothing_is_the_end_of_the_file() -> None:
    completion = _judge(0, read=True)
    assert (completion.error, completion.residual) == (None, None)


def test_more_than_was_asked_for_is_a_failure() -> None:
    error = _judge(8193).error
    assert error is not None
    assert error.errno == errno.EIO


@pytest.mark.parametrize("depth", [0, -1, 100_000])
def test_queue_depth_is_bounded(depth: int) -> None:
    with pytest.raises(ValueError, match="queue_depth must lie in"):
        MemoryEngine(queue_depth=depth)


def test_block_nbytes_is_positive() -> None:
    with pytest.raises(ValueError, match="block_nbytes must be positive"):
        MemoryEngine(block_nbytes=0)


@pytest.mark.parametrize("name", ["posix", "io_uring"])
@pytest.mark.parametrize("point", ["before start", "after start", "before collect", "after collect"])
def test_an_interrupt_inside_a_hook_is_drained_and_ends_the_engine(
    name: str, point: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = AlignedBuffer(8 << 20)
    with open_engine(name) as engine, engine.open(str(tmp_path / "file"), "w") as file:
        engine.submit(Write(file, buffer.address, buffer.nbytes, 0, owner=buffer))
        _interrupt(monkeypatch, engine, point)
        with pytest.raises(KeyboardInterrupt):
            _submit_and_wait(engine, Write(file, buffer.address, buffer.nbytes, buffer.nbytes, owner=buffer))
        engine.drain()
        assert engine.in_flight == 0
        buffer.view[:] = bytes(buffer.nbytes)  # ours again: nothing in flight reads it
        with pytest.raises(EngineStateError, match="interrupted"):
            engine.submit(Write(file, buffer.address, 4096, 0, owner=buffer))


def _submit_and_wait(engine: Engine, request: Write) -> None:
    engine.submit(request)
    engine.wait()


def _interrupt(monkeypatch: pytest.MonkeyPatch, engine: Engine, point: str) -> None:
    when, hook = point.split()
    real = getattr(engine, f"_{hook}")

    def interrupted(*arguments: object) -> None:
        if when == "after":
            real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, f"_{hook}", interrupted)


def test_an_interrupt_while_draining_is_raised_after_the_last_transfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = AlignedBuffer(4096)
    content = os.urandom(4096)
    buffer.view[:] = content
    with open_engine("posix") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        engine.submit(Write(file, buffer.address, 4096, 0, owner=buffer))
        _interrupt(monkeypatch, engine, "before collect")
        with pytest.raises(KeyboardInterrupt):
            engine.drain()
        assert engine.in_flight == 0
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("name", ["posix", "io_uring", "null"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_closing_is_raised_when_all_is_released(
    name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, descriptors = threading.enumerate(), os.listdir("/proc/self/fd")
    engine = open_engine(name)
    real, interrupts = engine._shut, iter([True])

    def interrupted_once() -> None:
        if when == "after":
            real()
        if next(interrupts, False):
            raise KeyboardInterrupt
        real()

    monkeypatch.setattr(engine, "_shut", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert [thread for thread in threading.enumerate() if thread not in before] == []
    assert os.listdir("/proc/self/fd") == descriptors
    engine.close()
    with pytest.raises(EngineStateError, match="closed"):
        engine.wait()
