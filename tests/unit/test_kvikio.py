"""The kvikio engine: the gate before KvikIO, its errors, what keeps memory safe, and what is said of the way taken."""

from __future__ import annotations

import errno
import importlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.engines import Engine, File, Memory, Read, Request, Write, _gds, available, open_engine
from fastpersist.engines.kvikio import KvikioEngine
from fastpersist.errors import EngineStateError, EngineUnavailableError, QueueFull
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.testing import collect
from tests.kvikio_double import KvikioDouble

NBYTES = 16384
DEPTH = 4

pytestmark = pytest.mark.timeout(120)  # a hang is what some of these tests look for


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[KvikioDouble]:
    double = KvikioDouble()
    double.install(monkeypatch)
    yield double
    double.go.set()


@pytest.fixture
def engine(double: KvikioDouble) -> Iterator[KvikioEngine]:
    with KvikioEngine(queue_depth=DEPTH) as engine:
        yield engine


@pytest.fixture
def file(engine: KvikioEngine, tmp_path: Path) -> Iterator[File]:
    with engine.open(str(tmp_path / "file"), "w") as file:
        yield file


def _write(file: File, buffer: AlignedBuffer, index: int = 0, memory: Memory = Memory.DEVICE) -> Write:
    return Write(file, buffer.address, NBYTES, index * NBYTES, memory=memory, owner=buffer)


# The gate


@pytest.mark.skipif(not _gds.find_gpus().problem, reason="shows what happens where there is no GPU")
def test_without_a_gpu_it_is_refused_at_once_with_the_remedy() -> None:
    # In a process of its own, so that nothing is cached and a hang has an end; kvikio must not even be imported.
    script = (
        "import sys, fastpersist\n"
        "verdict = fastpersist.available()['kvikio']\n"
        "try: fastpersist.open_engine('kvikio')\n"
        "except fastpersist.EngineUnavailableError as error: print(verdict.usable, 'kvikio' in sys.modules, error)\n"
    )
    command = [sys.executable, "-c", script]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert output.startswith("False False engine 'kvikio' cannot run here: no GPU")
    for part in ("pip install 'fastpersist[gds]'", "driver", "engine='io_uring'"):
        assert part in output


def test_a_driver_that_finds_no_gpu_ends_at_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_gds, "find_gpus", lambda: _gds.Gpus((), "no GPU that works: cuInit answers 100"))
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(EngineUnavailableError, match=r"cuInit answers 100.*fastpersist\[gds\]"):
        open_engine("kvikio")


def _fail_import(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(_gds, "find_gpus", lambda: _gds.Gpus(("A GPU",)))
    real = importlib.import_module

    def failing(name: str, package: str | None = None) -> Any:
        if name.startswith("kvikio"):
            raise error
        return real(name, package)

    monkeypatch.setattr(_gds.importlib, "import_module", failing)


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_import(monkeypatch, ModuleNotFoundError("No module named 'kvikio'", name="kvikio"))
    verdict = available()["kvikio"]
    assert (verdict.usable, verdict.reason) == (False, "kvikio is not installed")
    assert "pip install 'fastpersist[gds]'" in verdict.remedy


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libcudart.so.13: cannot open shared object file"),
        ModuleNotFoundError("No module named 'libkvikio'", name="libkvikio"),
        RuntimeError("out of order"),
    ],
)
def test_an_import_that_fails_otherwise_says_how(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    _fail_import(monkeypatch, error)
    verdict = available()["kvikio"]
    assert not verdict.usable
    assert str(error) in verdict.reason.replace('"', "").replace("\\", "")
    assert "kvikio-cu12" in verdict.remedy


def test_auto_never_takes_it(double: KvikioDouble) -> None:
    assert available()["kvikio"].usable
    with open_engine("auto") as engine:
        assert engine.name in ("io_uring", "posix")


# Two kinds of memory, one queue


def test_both_kinds_of_memory_share_one_queue(double: KvikioDouble, engine: KvikioEngine, file: File, tmp_path: Path) -> None:
    content = os.urandom(DEPTH * NBYTES)
    buffers = [AlignedBuffer(NBYTES) for _ in range(DEPTH)]
    double.go.clear()
    for index, buffer in enumerate(buffers):
        buffer.view[:] = content[index * NBYTES : (index + 1) * NBYTES]
        engine.submit(_write(file, buffer, index, Memory.DEVICE if index % 2 else Memory.HOST))
    with pytest.raises(QueueFull):
        engine.submit(_write(file, buffers[0]))
    host = engine.wait(min_completions=2)  # a device transfer that takes its time holds up no host memory
    assert [completion.request.memory for completion in host] == [Memory.HOST] * 2
    assert engine.wait(timeout=0.01) == []
    double.go.set()
    assert {completion.request.memory for completion in collect(engine)} == {Memory.DEVICE}
    assert (tmp_path / "file").read_bytes() == content
    assert [begun[0] for begun in double.begun] == ["write", "write"]


def test_no_more_than_queue_depth_are_in_flight_and_all_of_them_at_once(
    double: KvikioDouble, engine: KvikioEngine, file: File
) -> None:
    buffer = AlignedBuffer(NBYTES)
    full = threading.Event()

    def outcome(kind: str, nbytes: int, file_offset: int) -> None:
        if double.most_at_once == DEPTH:
            full.set()
        full.wait()  # the first ones wait for the last one

    double.outcome = outcome
    for index in range(5 * DEPTH):
        if engine.in_flight == DEPTH:
            engine.wait()
        engine.submit(_write(file, buffer, index))
    assert len(collect(engine)) > 0
    assert double.most_at_once == DEPTH
    assert double.settings["num_threads"] == DEPTH


def test_a_larger_pool_of_kvikio_is_left_as_it_is(double: KvikioDouble) -> None:
    double.settings["num_threads"] = 32
    KvikioEngine(queue_depth=DEPTH).close()
    assert double.settings["num_threads"] == 32


def test_nothing_is_polled(double: KvikioDouble, engine: KvikioEngine, file: File) -> None:
    double.go.clear()
    engine.submit(_write(file, AlignedBuffer(NBYTES)))
    assert engine.wait(timeout=0.05) == []
    double.go.set()
    collect(engine)
    assert double.done_calls == 0


def test_a_transfer_is_one_task(double: KvikioDouble, engine: KvikioEngine, file: File) -> None:
    # Of several tasks KvikIO does not wait for the others when the last one fails.
    engine.submit(_write(file, AlignedBuffer(NBYTES)))
    collect(engine)
    assert double.begun == [("write", NBYTES, 0, NBYTES)]


def test_a_file_of_another_engine_is_refused(engine: KvikioEngine, tmp_path: Path) -> None:
    buffer = AlignedBuffer(NBYTES)
    with open_engine("posix") as other, other.open(str(tmp_path / "file"), "w") as file:
        with pytest.raises(ValueError, match="engine 'kvikio' has opened"):
            engine.submit(_write(file, buffer))
        engine.submit(_write(file, buffer, memory=Memory.HOST))
        assert collect(engine)[0].error is None


# Files


@pytest.mark.parametrize("mode", ["x", "w", "r+", "tmpfile"])
def test_kvikio_works_on_the_same_file_whatever_its_name(
    double: KvikioDouble, engine: KvikioEngine, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "file"
    if mode in ("w", "r+"):
        path.write_bytes(bytes(NBYTES))
    buffer = AlignedBuffer(NBYTES)
    buffer.view[:] = content = os.urandom(NBYTES)
    with engine.open(str(tmp_path if mode == "tmpfile" else path), mode) as file:
        engine.submit(_write(file, buffer))
        assert collect(engine)[0].error is None
        assert Path(f"/proc/self/fd/{file.fileno}").read_bytes() == content
        assert double.open_files == 1
    assert double.open_files == 0
    file.close()


@pytest.mark.parametrize(("text", "code"), [("Unable to open file: Permission denied", errno.EACCES), ("?", errno.EIO)])
def test_a_file_that_kvikio_cannot_open_is_not_left_open(
    double: KvikioDouble, engine: KvikioEngine, tmp_path: Path, text: str, code: int
) -> None:
    double.open_error = RuntimeError(text)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="KvikIO cannot open the file") as caught:
        engine.open(str(tmp_path / "file"), "w")
    assert (caught.value.errno, caught.value.filename) == (code, str(tmp_path / "file"))
    assert text in str(caught.value)
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_checkpoint_is_saved_and_loaded_with_it(double: KvikioDouble, tmp_path: Path) -> None:
    state = {"weight": torch.randn(300_000), "step": 7}
    report = fastpersist.save(state, tmp_path / "model.pt", engine="kvikio")
    assert report.engine == "kvikio"
    for loaded in (torch.load(tmp_path / "model.pt"), fastpersist.load(tmp_path / "model.pt", engine="kvikio")):
        assert torch.equal(loaded["weight"], state["weight"])
    assert double.open_files == 0
    assert os.listdir(tmp_path) == ["model.pt"]


# Results


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("KvikIO failure at: a.hpp:1: POSIX error on pwrite: No space left on device"), errno.ENOSPC),
        (RuntimeError("KvikIO failure at: a.hpp:1: POSIX error: Operation not permitted"), errno.EBADF),
        (RuntimeError("cuFile error at: a.cpp:1: Invalid argument"), errno.EINVAL),
        (RuntimeError("cuFile error at: a.cpp:1: GPU memory pinning failed"), errno.EIO),
        (OSError(errno.EROFS, "as it is"), errno.EROFS),
        (ValueError("Array must be contiguous"), errno.EIO),
        (MemoryError(), errno.EIO),
    ],
)
def test_an_error_keeps_its_text_and_gets_its_errno(
    double: KvikioDouble, engine: KvikioEngine, file: File, error: Exception, code: int
) -> None:
    direct = file.direct
    double.outcome = lambda kind, nbytes, file_offset: error
    engine.submit(_write(file, AlignedBuffer(NBYTES)))
    (completion,) = collect(engine)
    assert completion.error is not None
    assert (completion.error.errno, completion.transferred, completion.residual) == (code, 0, None)
    assert (str(error) or repr(error)) in str(completion.error)
    assert file.direct is direct  # even EINVAL: cuFile's is no verdict on direct I/O


def test_errors_arrive_with_the_request_they_belong_to(double: KvikioDouble, engine: KvikioEngine, file: File) -> None:
    double.outcome = lambda kind, nbytes, at: RuntimeError("Input/output error") if at == NBYTES else None
    buffer = AlignedBuffer(NBYTES)
    for index in range(DEPTH):
        engine.submit(_write(file, buffer, index))
    failed = {completion.request.file_offset: completion.error is not None for completion in collect(engine)}
    assert failed == {index * NBYTES: index == 1 for index in range(DEPTH)}


def test_a_short_write_leaves_whole_pages_to_write(double: KvikioDouble, engine: KvikioEngine, file: File) -> None:
    if not file.direct:
        pytest.skip("direct I/O is not to be had in the test's directory")
    buffer = AlignedBuffer(NBYTES)
    buffer.view[:] = content = os.urandom(NBYTES)
    shorts: list[int] = [4608, 4096]
    double.outcome = lambda kind, nbytes, file_offset: shorts.pop(0) if shorts else None
    left: Request | None = _write(file, buffer)
    moved: list[int] = []
    while left is not None:
        engine.submit(left)
        (completion,) = collect(engine)
        moved.append(completion.transferred)
        left = completion.residual
    assert moved == [4096, 4096, NBYTES - 8192]
    assert Path(file.path).read_bytes() == content


def test_a_read_is_short_at_the_end_of_the_file(double: KvikioDouble, engine: KvikioEngine, tmp_path: Path) -> None:
    content = os.urandom(NBYTES - 100)
    (tmp_path / "other").write_bytes(content)
    buffer = AlignedBuffer(NBYTES)
    with engine.open(str(tmp_path / "other"), "r") as file:
        for file_offset, expected in ((0, NBYTES - 100), (NBYTES, 0)):
            engine.submit(Read(file, buffer.address, NBYTES, file_offset, memory=Memory.DEVICE, owner=buffer))
            (completion,) = collect(engine)
            assert (completion.transferred, completion.error) == (expected, None)
    assert bytes(buffer.view[: len(content)]) == content


# Safety of memory


def test_memory_is_kept_until_its_transfer_is_reaped(double: KvikioDouble, engine: KvikioEngine, file: File) -> None:
    double.go.clear()
    buffer = AlignedBuffer(NBYTES)
    alive = weakref.ref(buffer)
    engine.submit(_write(file, buffer))
    del buffer
    assert engine.wait(timeout=0.05) == []
    assert alive() is not None
    double.go.set()
    assert engine.wait(timeout=60)
    for _ in range(10_000):  # a worker lets go of its last request a moment after it has reported the result
        if alive() is None:
            break
        threading.Event().wait(0.001)
    assert alive() is None


def _let_go_soon(double: KvikioDouble) -> threading.Timer:
    timer = threading.Timer(0.1, double.go.set)
    timer.start()
    return timer


@pytest.mark.parametrize("exception", [ZeroDivisionError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["_start", "_collect"])
def test_an_interrupted_hook_is_drained_to_the_last_transfer(
    double: KvikioDouble, engine: KvikioEngine, file: File, monkeypatch: pytest.MonkeyPatch, hook: str, exception: type
) -> None:
    buffer = AlignedBuffer(NBYTES)
    double.go.clear()
    engine.submit(_write(file, buffer, 0))
    real = getattr(engine, hook)

    def interrupted(*arguments: object) -> None:
        if hook == "_start":
            real(*arguments)
        raise exception

    monkeypatch.setattr(engine, hook, interrupted)
    with pytest.raises(exception):
        _submit_and_wait(engine, _write(file, buffer, 1))
    timer = _let_go_soon(double)
    engine.drain()
    timer.join()
    assert engine.in_flight == 0
    assert double.ended == len(double.begun) == 2
    with pytest.raises(EngineStateError, match="interrupted"):
        engine.submit(_write(file, buffer))


def _submit_and_wait(engine: Engine, request: Write) -> None:
    engine.submit(request)
    engine.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_close_waits_for_what_is_in_flight(double: KvikioDouble, tmp_path: Path, fails: bool) -> None:
    engine, buffer = KvikioEngine(queue_depth=DEPTH), AlignedBuffer(NBYTES)
    if fails:
        double.outcome = lambda kind, nbytes, file_offset: RuntimeError("Input/output error")
    double.go.clear()
    with engine.open(str(tmp_path / "file"), "w") as file:
        for index in range(DEPTH):
            engine.submit(_write(file, buffer, index))
        timer = _let_go_soon(double)
        engine.close()
        timer.join()
    assert engine.in_flight == 0
    assert double.ended == len(double.begun) == DEPTH
    assert not any(thread.is_alive() for thread in engine._threads)


def test_a_save_that_is_interrupted_leaves_nothing_in_flight(
    double: KvikioDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = KvikioEngine._collect

    def interrupted(self: KvikioEngine, *arguments: Any) -> list[tuple[int, int]]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(KvikioEngine, "_collect", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fastpersist.save({"weight": torch.randn(1_000_000)}, tmp_path / "model.pt", engine="kvikio", block_nbytes=65536)
    assert double.open_files == 0
    assert os.listdir(tmp_path) == []


# What really ran

STATS = """GDS Version: 1.15.1.6
NVFS statistics(ver: 4.0)
IO stats: Enabled, peer IO stats: Disabled
Batches				: n=9 ok=9 err=0 Avg-Submit-Latency(usec)=0
Reads				: n={reads} ok={reads} err=0 readMiB=0 io_state_err=0
Reads				: Bandwidth(MiB/s)=0 Avg-Latency(usec)=0
Sparse Reads		        : n=6 io=0 holes=0 pages=0
Writes				: n={writes} ok={writes} err=0 writeMiB=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Mmap				: n=183 ok=183 err=0 munmap=183
"""
STATS_THAT_ARE_OFF = "Reads				: err=0 io_state_err=0\nWrites				: err=0 io_state_err=0\n"


@pytest.fixture
def stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "stats"
    monkeypatch.setattr(_gds, "NVIDIA_FS_STATS", path)
    return path


def test_counters_of_nvidia_fs_are_read(stats: Path) -> None:
    assert _gds.count_transfers() is None
    stats.write_text(STATS_THAT_ARE_OFF)
    assert _gds.count_transfers() is None
    stats.write_text(STATS.format(reads=20, writes=3))
    assert _gds.count_transfers() == 23


def _route_of_a_write(tmp_path: Path, stats: Path, moves: int | None) -> _gds.Route:
    if moves is not None:
        stats.write_text(STATS.format(reads=10, writes=10))
    engine = KvikioEngine(queue_depth=DEPTH)
    assert engine.route.name in ("unverified", "cuFile compat")  # nothing has been moved yet
    with engine, engine.open(str(tmp_path / "file"), "w") as file:
        engine.submit(_write(file, AlignedBuffer(NBYTES)))
        collect(engine)
        if moves is not None:
            stats.write_text(STATS.format(reads=10, writes=10 + moves))
    stats.write_text(STATS.format(reads=1000, writes=1000))  # what comes after close is not its own
    return engine.route


@pytest.mark.parametrize(
    ("compat", "loaded", "fallback", "moves", "name", "evidence"),
    [
        (True, True, True, 5, "cuFile compat", "compatibility mode"),
        (False, True, True, 5, "GDS", "counted 5 transfers while 1 were made"),
        (False, True, True, 0, "unverified", "counters have not moved"),
        (False, True, True, None, "unverified", "statistics may be off"),
        (False, False, True, None, "unverified", "nvidia-fs is not loaded"),
        (False, False, False, None, "P2P", "not allowed to go through host memory"),
        (False, RuntimeError("closed"), True, None, "unverified", "does not tell"),
    ],
)
def test_the_route_is_told_with_its_evidence(
    double: KvikioDouble, tmp_path: Path, stats: Path, compat: bool, loaded: Any, fallback: bool, moves: int | None,
    name: str, evidence: str,
) -> None:  # fmt: skip
    double.compat_mode = compat
    double.driver = {"is_gds_available": loaded, "allow_compat_mode": fallback}
    route = _route_of_a_write(tmp_path, stats, moves)
    assert route.name == name
    assert evidence in route.evidence


def test_transfers_of_others_prove_nothing(double: KvikioDouble, stats: Path) -> None:
    double.driver["is_gds_available"] = True
    stats.write_text(STATS.format(reads=1, writes=1))
    with KvikioEngine(queue_depth=DEPTH) as engine:
        stats.write_text(STATS.format(reads=9, writes=9))
        assert engine.route.name == "unverified"  # it has moved nothing yet


def test_counters_that_appear_meanwhile_prove_nothing(
    double: KvikioDouble, engine: KvikioEngine, file: File, stats: Path
) -> None:
    double.driver["is_gds_available"] = True
    engine.submit(_write(file, AlignedBuffer(NBYTES)))
    collect(engine)
    stats.write_text(STATS.format(reads=9, writes=9))
    assert engine.route.name == "unverified"


def test_in_compatibility_mode_the_driver_is_not_asked(double: KvikioDouble) -> None:
    double.compat_mode, double.driver = True, {}
    verdict = available()["kvikio"]
    assert verdict.usable
    assert verdict.reason.startswith("cuFile compat: ")


def test_the_route_is_logged_at_the_end(
    double: KvikioDouble, tmp_path: Path, stats: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "fastpersist"):
        _route_of_a_write(tmp_path, stats, 5)
    assert "1 transfers of device memory (GDS: nvidia-fs counted 5" in caplog.text


def test_importing_the_engine_imports_no_kvikio() -> None:
    script = "import sys, fastpersist.engines.kvikio; print('kvikio' in sys.modules)"
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip() == "False"
