"""io_uring where the kernel, the container or the installation refuses it, and where submission meets resistance."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.engines import Write, _liburing, available, engine_class, open_engine
from fastpersist.engines import io_uring as module
from fastpersist.engines.io_uring import IoUringEngine
from fastpersist.errors import EngineStateError, EngineUnavailableError, TransferError
from fastpersist.memory.buffers import AlignedBuffer, shared_pool
from fastpersist.testing import collect

needs_io_uring = pytest.mark.skipif(not IoUringEngine.availability().usable, reason=IoUringEngine.availability().reason or "-")


class _RefusingRing:
    """Stands in for a ring that cannot be set up."""

    code = errno.EPERM
    attempts: list[int]

    def __init__(self, entries: int, flags: int) -> None:
        self.attempts.append(flags)
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize(
    ("code", "reason", "remedy"),
    [
        (errno.EPERM, "forbids io_uring", "io_uring_disabled=0"),
        (errno.ENOSYS, "has no io_uring", "engine='posix'"),
        (errno.ENOMEM, "locked memory", "ulimit -l"),
        (errno.EMFILE, "io_uring_setup failed", "engine='posix'"),
    ],
)
def test_each_refusal_has_its_reason_and_remedy(monkeypatch: pytest.MonkeyPatch, code: int, reason: str, remedy: str) -> None:
    monkeypatch.setattr(_liburing, "Ring", type("Ring", (_RefusingRing,), {"code": code, "attempts": []}))
    verdict = available()["io_uring"]
    assert not verdict.usable
    assert reason in verdict.reason
    assert remedy in verdict.remedy
    with pytest.raises(EngineUnavailableError, match=reason):
        open_engine("io_uring")


def test_auto_takes_posix_where_io_uring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_liburing, "Ring", type("Ring", (_RefusingRing,), {"attempts": []}))
    with open_engine("auto") as engine:
        assert engine.name == "posix"


def test_flags_newer_than_the_kernel_are_dropped_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = type("Ring", (_RefusingRing,), {"code": errno.EINVAL, "attempts": []})
    monkeypatch.setattr(_liburing, "Ring", ring)
    with pytest.raises(EngineUnavailableError):
        open_engine("io_uring")
    assert ring.attempts == list(module.SETUP_FLAGS)
    assert ring.attempts[-1] == 0


@needs_io_uring
@pytest.mark.parametrize("flags", module.SETUP_FLAGS)
def test_every_set_of_flags_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: int) -> None:
    monkeypatch.setattr(module, "SETUP_FLAGS", (flags,))
    _write_blocks(tmp_path / "file", 8)


@pytest.fixture
def no_cached_library() -> Iterator[None]:
    _liburing.load.cache_clear()
    yield
    _liburing.load.cache_clear()


@pytest.mark.usefixtures("no_cached_library")
def test_without_any_liburing_both_ways_to_get_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_liburing, "_candidates", lambda: ["no-such-library.so"])
    verdict = engine_class("io_uring").availability()
    assert not verdict.usable
    assert "no-such-library.so" in verdict.reason
    assert "pip install liburing" in verdict.remedy
    assert "liburing2" in verdict.remedy


@pytest.mark.usefixtures("no_cached_library")
def test_a_library_without_the_functions_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_liburing, "_candidates", lambda: ["libc.so.6"])
    verdict = engine_class("io_uring").availability()
    assert "libc.so.6: lacks io_uring_queue_init_params" in verdict.reason


def test_the_system_library_is_the_last_resort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_liburing.importlib.util, "find_spec", lambda name: None)
    assert _liburing._candidates() == ["liburing-ffi.so.2"]


@needs_io_uring
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ENOMEM])
def test_a_submission_refused_for_now_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    monkeypatch.setattr(module, "SUBMIT_PAUSE_SECONDS", 0.0)
    refusals = _refuse_submissions(monkeypatch, code, times=5)
    _write_blocks(tmp_path / "file", 8)
    assert refusals == [code] * 5


@needs_io_uring
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EFAULT])
def test_a_submission_refused_for_good_fails_and_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    monkeypatch.setattr(module, "SUBMIT_PAUSE_SECONDS", 0.0)
    _refuse_submissions(monkeypatch, code, times=10**9)
    buffer = AlignedBuffer(4096)
    with open_engine("io_uring") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        request = Write(file, buffer.address, 4096, 0, owner=buffer)
        engine.submit(request)
        (completion,) = collect(engine)
        assert completion.error is not None or completion.residual is not None
        with pytest.raises(EngineStateError, match="interrupted"):
            engine.submit(request)


@needs_io_uring
def test_several_refused_for_now_are_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SUBMIT_PAUSE_SECONDS", 0.0)
    refusals = _refuse_submissions(monkeypatch, errno.EAGAIN, times=3)
    buffer = AlignedBuffer(4 * 4096)
    buffer.view[:] = content = os.urandom(4 * 4096)
    with open_engine("io_uring") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        engine.submit(
            *(Write(file, buffer.address + start, 4096, start, owner=buffer) for start in range(0, len(content), 4096))
        )
        assert [completion.error for completion in collect(engine)] == [None] * 4
    assert len(refusals) == 3
    assert (tmp_path / "file").read_bytes() == content


@needs_io_uring
@pytest.mark.parametrize("accepted", [1, 2])
def test_what_the_kernel_has_taken_is_waited_for_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, accepted: int
) -> None:
    """The memory of requests in flight belongs to the kernel, whatever became of those after them."""
    monkeypatch.setattr(module, "SUBMIT_PAUSE_SECONDS", 0.0)
    nbytes = 1 << 20
    buffer = AlignedBuffer(nbytes)
    with open_engine("io_uring") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        assert isinstance(engine, IoUringEngine)
        for number in range(accepted):
            engine.submit(Write(file, buffer.address, nbytes, number * nbytes, owner=buffer))
        _refuse_submissions(monkeypatch, errno.EFAULT, times=10**9)
        more = [Write(file, buffer.address, nbytes, number * nbytes, owner=buffer) for number in range(accepted, accepted + 3)]
        engine.submit(*more)
        refused = engine.wait()
        assert [completion.request for completion in refused if completion.error is not None] == more
        engine.drain()
        assert engine.in_flight == 0
        assert engine._ring.inside_kernel == 0
        with pytest.raises(EngineStateError, match="interrupted"):
            engine.submit(more[0])


@needs_io_uring
def test_a_save_that_is_refused_on_the_way_leaves_nothing_in_flight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SUBMIT_PAUSE_SECONDS", 0.0)
    real, calls = _liburing.Ring.submit, itertools.count(1)
    monkeypatch.setattr(_liburing.Ring, "submit", lambda ring: real(ring) if next(calls) <= 2 else -errno.EFAULT)
    tensors = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(9)]
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(TransferError, match="Bad address"):
        fastpersist.save(tensors, tmp_path / "m.pt", engine="io_uring", block_nbytes=1 << 18)
    assert shared_pool().lent_nbytes == 0
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == descriptors


@needs_io_uring
def test_a_refused_registration_does_no_harm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_liburing.Ring, "register", lambda self, ranges: -errno.ENOMEM)
    buffer = AlignedBuffer(4096)
    with open_engine("io_uring") as engine, engine.open(str(tmp_path / "file"), "w") as file:
        assert not engine.register([(buffer.address, buffer.nbytes)])
        engine.submit(Write(file, buffer.address, 4096, 0, owner=buffer))
        (completion,) = collect(engine)
    assert completion.error is None


@needs_io_uring
def test_registered_ranges_are_found_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = sorted((AlignedBuffer(8192) for _ in range(3)), key=lambda buffer: buffer.address)
    with open_engine("io_uring") as engine:
        assert isinstance(engine, IoUringEngine)
        assert engine.register((buffer.address, buffer.nbytes) for buffer in reversed(buffers))
        for index, buffer in enumerate(buffers):
            inside = Write(None, buffer.address + 4096, 4096, 0)  # type: ignore[arg-type]
            beyond = Write(None, buffer.address + 4096, 8192, 0)  # type: ignore[arg-type]
            assert engine._registered_index(inside) == index
            assert engine._registered_index(beyond) is None


def _write_blocks(path: Path, count: int) -> None:
    content = os.urandom(4096 * count)
    buffer = AlignedBuffer(len(content))
    buffer.view[: len(content)] = content
    with open_engine("io_uring") as engine, engine.open(str(path), "w") as file:
        for start in range(0, len(content), 4096):
            engine.submit(Write(file, buffer.address + start, 4096, start, owner=buffer))
        assert all(completion.error is None for completion in collect(engine))
    assert path.read_bytes() == content


def _refuse_submissions(monkeypatch: pytest.MonkeyPatch, code: int, times: int) -> list[int]:
    """Let the next ``times`` submissions be refused; returns the list that the refusals are noted in."""
    refusals: list[int] = []
    real_submit = _liburing.Ring.submit

    def submit(self: Any) -> int:
        if len(refusals) < times:
            refusals.append(code)
            return -code
        return real_submit(self)

    monkeypatch.setattr(_liburing.Ring, "submit", submit)
    return refusals
