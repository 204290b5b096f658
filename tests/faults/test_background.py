"""Background saves that fail, are interrupted, killed or forked: nothing is torn, nothing is lost, nothing is left behind."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fastpersist
from fastpersist import EngineUnavailableError, NotDurableError, PendingSave, SaveCancelledError, TransferError
from fastpersist.memory import staging
from fastpersist.memory.staging import shared_staging
from fastpersist.pending import _failures
from fastpersist.saving_thread import saving_thread
from fastpersist.transfer import publish, snapshot
from tests.faults.scene import Scene, content, generation_in, renew
from tests.faults.test_interrupts import Profiler
from tests.gated import LIMIT_SECONDS, Call, Gate, GatedEngine, wait_until_idle

BLOCK_NBYTES = 65536

# A hang is a failure like any other here: it must end the test, and not the run.
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_left")]


def save(obj: Any, path: Path, **options: Any) -> PendingSave:
    """async_save in small blocks, through the gate."""
    return fastpersist.async_save(obj, path, **{"engine": "gated", "block_nbytes": BLOCK_NBYTES, **options})


# Failures in the thread.


def fail_writes(code: int) -> Callable[[pytest.MonkeyPatch, Gate], None]:
    def arrange(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
        monkeypatch.setattr(gate, "failing", lambda _: code)

    return arrange


def fail_late_writes(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    monkeypatch.setattr(gate, "failing", lambda request: errno.EIO if request.file_offset > 1_000_000 else 0)


def fail_call(name: str, code: int) -> Callable[[pytest.MonkeyPatch, Gate], None]:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return lambda monkeypatch, _: monkeypatch.setattr(GatedEngine, name, fail)


FAILURES = {
    "write": (fail_writes(errno.EIO), errno.EIO),
    "late write": (fail_late_writes, errno.EIO),
    "full disk": (fail_writes(errno.ENOSPC), errno.ENOSPC),
    "reserve": (fail_call("reserve", errno.ENOSPC), errno.ENOSPC),
    "sync": (fail_call("sync", errno.EIO), errno.EIO),
    "open": (fail_call("open", errno.EACCES), errno.EACCES),
}
MODES: dict[str, dict[str, Any]] = {
    "snapshot": {},
    "written before the call returns": {"max_staging_nbytes": 0},
    "partly": {"max_staging_nbytes": 600_000},
    "no snapshot": {"snapshot": False},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_leaves_everything_as_it_was(
    scene: Scene, gate: Gate, monkeypatch: pytest.MonkeyPatch, failure: str, mode: str
) -> None:
    arrange, code = FAILURES[failure]
    obj = content(2)
    with scene.unharmed(), pytest.MonkeyPatch.context() as patch:
        arrange(patch, gate)
        pending = save(obj, scene.path, **MODES[mode])
        error = pending.exception()
        assert isinstance(error, OSError)
        assert error.errno == code
        assert pending.staged()
        wait_until_idle()
    assert save(obj, scene.path).wait()
    scene.assert_holds(2)


def test_an_engine_that_cannot_run(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise EngineUnavailableError("gated", "it is a test", "none")

    with scene.unharmed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatedEngine, "__init__", refuse)
        pending = save(content(2), scene.path)
        assert isinstance(pending.exception(), EngineUnavailableError)
        wait_until_idle()
    assert save(content(2), scene.path).wait()
    scene.assert_holds(2)


def test_a_directory_that_cannot_be_synced(scene: Scene) -> None:
    real = os.fsync

    def fsync(fileno: int) -> None:
        if Path(f"/proc/self/fd/{fileno}").is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fileno)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publish.os, "fsync", fsync)
        pending = save(content(2), scene.path)
        with pytest.raises(NotDurableError):
            pending.result()
        assert not pending.succeeded()
        wait_until_idle()
    scene.assert_holds(2)
    assert save(content(3), scene.path).wait()
    scene.assert_holds(3)


def test_what_save_raises_before_it_opens_a_file_is_raised_at_once(scene: Scene) -> None:
    with scene.unharmed():
        for _ in range(3):  # with its place not given back, the second call would wait for ever
            with pytest.raises(AttributeError):
                save({"x": torch.ones(3), "unpicklable": lambda: None}, scene.path)
            with pytest.raises(FileNotFoundError):
                save(content(2), scene.directory / "missing" / "a.pt")
            with pytest.raises(IsADirectoryError):
                save(content(2), scene.directory)
    assert not saving_thread()._unfinished
    assert save(content(2), scene.path).wait()
    scene.assert_holds(2)


def test_no_memory_for_the_copies(scene: Scene) -> None:
    def refuse(nbytes: int) -> None:
        raise MemoryError

    with scene.unharmed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "AlignedBuffer", refuse)
        for _ in range(3):
            with pytest.raises(MemoryError):
                save(content(2), scene.path)
    assert save(content(2), scene.path).wait()


def test_a_copy_that_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real, copied = snapshot._copy, 0

    def copy(*arguments: Any) -> None:
        nonlocal copied
        copied += 1
        if copied % 7 == 0:
            raise ZeroDivisionError
        real(*arguments)

    monkeypatch.setattr(snapshot, "_copy", copy)
    with scene.unharmed():
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                save(content(2), scene.path)
            wait_until_idle()
    assert len(shared_staging().buffers()) == 1  # given back, and lent again
    monkeypatch.undo()


def test_a_progress_function_that_fails(scene: Scene) -> None:
    def progress(done_nbytes: int, total_nbytes: int) -> None:
        raise ZeroDivisionError

    with scene.unharmed():
        assert isinstance(save(content(2), scene.path, progress=progress).exception(), ZeroDivisionError)
        wait_until_idle()


# A failure that nobody has asked about.


def test_it_is_logged_and_raised_by_the_next_call_once(scene: Scene, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.failing = lambda _: errno.EIO
    save(content(2), scene.path)
    wait_until_idle()
    gate.failing = lambda _: 0
    (record,) = caplog.records
    assert (record.levelno, record.name) == (logging.ERROR, "fastpersist")
    assert str(scene.path) in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is TransferError
    with scene.unharmed():
        with pytest.raises(TransferError) as raised:
            save(content(3), scene.directory / "other.pt")
        (note,) = raised.value.__notes__
        assert str(scene.path) in note
        assert "was not begun" in note
    assert save(content(3), scene.path).wait()  # told once
    assert len(caplog.records) == 1


def test_it_is_raised_by_the_call_that_waited_for_it(scene: Scene, gate: Gate) -> None:
    gate.close()
    gate.failing = lambda _: errno.EIO
    save(content(2), scene.path)
    gate.wait_until_reached()
    waiting = Call(lambda: save(content(3), scene.path))
    assert not waiting.returned.wait(0.05)
    gate.open()
    with pytest.raises(TransferError, match="Input/output"):
        waiting.result()
    scene.assert_holds(1)


def test_two_of_them_are_raised_one_after_another(scene: Scene, gate: Gate) -> None:
    gate.failing = lambda _: errno.EIO
    gate.close()
    save(content(2), scene.directory / "a.pt", max_pending=2)
    save(content(2), scene.directory / "b.pt", max_pending=2)
    gate.open()
    wait_until_idle()
    for name in ("a.pt", "b.pt"):
        with pytest.raises(TransferError, match=name):
            save(content(3), scene.path)
    gate.failing = lambda _: 0
    assert save(content(3), scene.path).wait()


def in_a_with_block(pending: PendingSave) -> None:
    with pending:
        pass


ASKING: dict[str, Callable[[PendingSave], object]] = {
    "wait": PendingSave.wait,
    "result": PendingSave.result,
    "exception": PendingSave.exception,
    "with": in_a_with_block,
    "callback": lambda pending: pending.add_done_callback(PendingSave.exception),
}


@pytest.mark.parametrize("how", ASKING)
@pytest.mark.parametrize("early", [True, False])
def test_who_has_asked_is_told_and_nobody_else(
    scene: Scene, gate: Gate, caplog: pytest.LogCaptureFixture, how: str, early: bool
) -> None:
    gate.close()
    gate.failing = lambda _: errno.EIO
    pending = save(content(2), scene.path)
    gate.wait_until_reached()
    asking = Call(lambda: ASKING[how](pending))
    if early and how != "callback":
        while not pending._askers:
            assert not asking.returned.wait(0.001)
    elif how == "callback":
        asking.result()
    else:
        gate.open()
    gate.open()
    if how not in ("callback", "exception"):
        with pytest.raises(TransferError):
            asking.result()
    asking.returned.wait(LIMIT_SECONDS)
    wait_until_idle()
    gate.failing = lambda _: 0
    if early or how == "callback":
        assert caplog.records == []
    assert save(content(3), scene.path).wait()


def test_an_interrupted_question_leaves_the_failure_to_others(
    scene: Scene, gate: Gate, caplog: pytest.LogCaptureFixture, interrupt: Callable[[Callable[[], bool]], None]
) -> None:
    gate.close()
    gate.failing = lambda _: errno.EIO
    pending = save(content(2), scene.path)
    gate.wait_until_reached()
    interrupt(lambda: pending._askers > 0)
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    gate.open()
    wait_until_idle()
    assert len(caplog.records) == 1
    with pytest.raises(TransferError):
        save(content(3), scene.path)


# Interrupts.


@pytest.fixture
def interrupt() -> Iterator[Callable[[Callable[[], bool]], None]]:
    """interrupt(condition): a signal whose handler raises KeyboardInterrupt, sent to the main thread when condition() holds.

    Not SIGINT, which may be ignored where the tests run.
    """

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handle)
    senders: list[threading.Thread] = []
    pause = threading.Event()

    def when(condition: Callable[[], bool]) -> None:
        def send() -> None:
            while not condition():
                pause.wait(0.001)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

        senders.append(threading.Thread(target=send, name="sender", daemon=True))
        senders[-1].start()

    yield when
    for sender in senders:
        sender.join(LIMIT_SECONDS)
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_while_the_call_waits_for_room(
    scene: Scene, gate: Gate, interrupt: Callable[[Callable[[], bool]], None]
) -> None:
    gate.close()
    first = save(content(2), scene.path)
    gate.wait_until_reached()
    for _ in range(2):
        interrupt(lambda: bool(saving_thread()._changed._waiters))  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            save(content(3), scene.path)
        assert saving_thread()._unfinished == 1
    gate.open()
    assert first.wait()
    assert save(content(4), scene.path).wait()
    scene.assert_holds(4)


def test_an_interrupt_while_the_call_waits_for_writes(
    scene: Scene, gate: Gate, interrupt: Callable[[Callable[[], bool]], None]
) -> None:
    obj = content(2)
    gate.close(passes=2)
    released = threading.Event()

    def release() -> None:
        released.wait(0.1)  # time enough for a call that does not wait
        released.set()
        gate.open()

    def reached() -> bool:
        if not gate.reached.is_set():
            return False
        threading.Thread(target=release, name="release", daemon=True).start()
        return True

    interrupt(reached)
    with pytest.raises(KeyboardInterrupt):
        save(obj, scene.path, max_staging_nbytes=0, queue_depth=2)
    assert released.is_set()  # what is in flight is waited for
    renew(obj, 3)  # nothing reads it any more
    wait_until_idle()
    scene.assert_holds(1)
    assert save(obj, scene.path).wait()
    scene.assert_holds(3)


def test_an_interrupt_while_the_call_copies(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    real, copied, failing = snapshot._copy, 0, 0

    def copy(*arguments: Any) -> None:
        nonlocal copied
        copied += 1
        if copied == failing:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(snapshot, "_copy", copy)
    for number in (1, 5, 15):
        copied, failing = 0, number
        with scene.unharmed():
            with pytest.raises(KeyboardInterrupt):
                save(content(2), scene.path)
            wait_until_idle()
    assert len(shared_staging().buffers()) == 1
    failing = 0
    assert save(content(3), scene.path).wait()
    scene.assert_holds(3)


def test_an_interrupt_while_result_waits(scene: Scene, gate: Gate, interrupt: Callable[[Callable[[], bool]], None]) -> None:
    gate.close()
    pending = save(content(2), scene.path)
    gate.wait_until_reached()
    interrupt(lambda: pending._askers > 0)
    with pytest.raises(KeyboardInterrupt):
        pending.result()
    assert not pending.done()
    gate.open()
    assert pending.result().nbytes
    scene.assert_holds(2)


@pytest.mark.parametrize("mode", ["snapshot", "written before the call returns", "guard"])
# An interrupt in a finalizer or a weak reference's callback cannot be raised: Python reports it, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_wherever_python_handles_signals(scene: Scene, mode: str) -> None:
    saved = content(1)
    parameter = torch.nn.Parameter(torch.ones(70_000))
    saved["parameter"] = parameter
    optimizer = torch.optim.SGD([parameter])
    options = MODES.get(mode, {"snapshot": False, "guard": optimizer})

    def begin() -> None:
        fastpersist.async_save(saved, scene.path, engine="posix", block_nbytes=BLOCK_NBYTES, durable=False, **options)

    survey = Profiler()
    survey.run(begin)
    wait_until_idle()
    assert len(survey.places) > 80
    interrupts = 0
    for place in survey.places:
        interrupts += Profiler(place).run(begin)
        step = Call(optimizer.step)  # nothing holds it for ever
        step.result()
        wait_until_idle()
        assert torch.load(scene.path)["generation"] == 1, place
        assert list(shared_staging()._lent) == [], place
    assert interrupts > 60
    begin()
    wait_until_idle()
    assert os.listdir(scene.directory) == [scene.path.name]


# Cancelling, with a checkpoint at the path.


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_save_leaves_everything_as_it_was(scene: Scene, gate: Gate, mode: str) -> None:
    with scene.unharmed():
        gate.close(passes=1)
        made: list[PendingSave] = []
        with pytest.MonkeyPatch.context() as patch:
            real = PendingSave._run
            patch.setattr(PendingSave, "_run", lambda self: (made.append(self), real(self)))
            calling = Call(lambda: save(content(2), scene.path, queue_depth=2, **MODES[mode]))
            gate.wait_until_reached()
        assert made[0].cancel()
        gate.open()
        with pytest.raises(SaveCancelledError):
            calling.result().result()
        wait_until_idle()
    assert save(content(3), scene.path).wait()
    scene.assert_holds(3)


# What a long run must not gather.


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_two_hundred_saves(scene: Scene, engine: str) -> None:
    obj = content(1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])

    def once(turn: int) -> None:
        guarded: dict[str, Any] = {"snapshot": False, "guard": optimizer} if turn % 2 else {}
        renew(obj, turn % 250)
        pending = save(obj, scene.path, engine=engine, durable=False, **guarded)
        if turn % 3 == 0:
            assert pending.wait()

    for turn in range(20):
        once(turn)
    wait_until_idle()
    buffers = {buffer.address for buffer in shared_staging().buffers()}
    before = (threading.active_count(), descriptors())
    mapped, resident = mappings(), psutil.Process().memory_info().rss
    for turn in range(20, 220):
        once(turn)
    wait_until_idle()
    assert (threading.active_count(), descriptors()) == before
    assert mappings() <= mapped + 20
    assert psutil.Process().memory_info().rss < resident + (64 << 20)
    assert {buffer.address for buffer in shared_staging().buffers()} == buffers
    assert len(buffers) == 1
    assert len(optimizer._optimizer_step_pre_hooks) <= 1
    assert generation_in(scene.path) == 219


def watched(nbytes: int) -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor, and a reference that dies with its memory."""
    array = np.ones(nbytes, np.uint8)
    return torch.from_numpy(array), weakref.ref(array)


def succeed(pending: PendingSave, gate: Gate) -> None:
    gate.open()
    assert pending.wait()


def fail(pending: PendingSave, gate: Gate) -> None:
    gate.failing = lambda _: errno.EIO
    gate.open()
    assert isinstance(pending.exception(), TransferError)


def cancel(pending: PendingSave, gate: Gate) -> None:
    assert pending.cancel()
    gate.open()
    assert pending.exception()


@pytest.mark.parametrize("end", [succeed, fail, cancel])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("mode", ["snapshot", "no snapshot"])
def test_an_ended_save_keeps_no_tensor_alive(
    scene: Scene, gate: Gate, end: Callable[[PendingSave, Gate], None], queued: bool, mode: str
) -> None:
    gc.collect()
    gc.disable()
    try:
        large, large_memory = watched(500_000)
        small, small_memory = watched(1000)
        gate.close(passes=0 if queued else 1)
        if queued:
            save({"x": 1}, scene.directory / "other.pt")
        pending = save({"large": large, "small": small}, scene.path, max_pending=2, **MODES[mode])
        gate.wait_until_reached()
        del large, small
        end(pending, gate)
        error = pending.exception()
        wait_until_idle()
        assert (large_memory(), small_memory()) == (None, None)
        assert (error is None) == (end is succeed)
    finally:
        gc.enable()
    _failures.clear()


def test_copies_free_no_tensor_later_than_the_call(scene: Scene, gate: Gate) -> None:
    # The sources are in use until the save has ended: it may still have to look at their sizes. Not longer.
    gate.close()
    tensor, memory = watched(500_000)
    pending = save({"x": tensor}, scene.path)
    del tensor
    gate.open()
    assert pending.wait()
    assert memory() is None


# The end of the interpreter, kills and forks: in processes of their own.


Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run a scenario of background_victim.py: its exit status, and what it wrote to stderr."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.background_victim"], cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None
    assert server.stdout is not None

    def run(*words: str | Path) -> tuple[int, str]:
        print(json.dumps([str(word) for word in words]), file=server.stdin, flush=True)
        status, stderr = json.loads(server.stdout.readline())  # type: ignore[union-attr]
        return status, stderr

    yield run
    server.stdin.close()
    assert server.wait(LIMIT_SECONDS) == 0
    server.stdout.close()


@pytest.mark.parametrize(
    ("ending", "status"),
    [("return", 0), ("exit", 3), ("exception", 1), ("atexit", 0), ("atexit without threads", 0), ("thread", 0)],
)
def test_the_interpreter_ends_after_all_saves(run: Run, scene: Scene, ending: str, status: int) -> None:
    found, stderr = run("ends", scene.path, ending)
    assert found == status, stderr
    assert ("Error" in stderr) == (ending == "exception"), stderr
    assert generation_in(scene.path) == 2
    assert generation_in(scene.directory / "second.pt") == 3
    assert sorted(os.listdir(scene.directory)) == ["checkpoint.pt", "second.pt"]


@pytest.mark.parametrize("how", ["nobody", "wait", "result", "exception", "with", "callback", "await", "next call", "cancel"])
def test_a_failure_that_nobody_has_asked_about_is_printed_at_the_end(run: Run, scene: Scene, how: str) -> None:
    status, stderr = run("fails", scene.path, how)
    assert status == 0, stderr
    lines = [line for line in stderr.splitlines() if line.startswith("fastpersist: the background save to ")]
    assert len(lines) == (1 if how == "nobody" else 0), stderr
    assert ("nobody has asked" in stderr) == (how in ("nobody", "next call")), stderr
    if how == "nobody":
        assert re.search(rf"{re.escape(str(scene.path))} failed: TransferError\(5", lines[0])
    scene.assert_holds(1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["first write", "some writes", "before rename", "after rename"])
def test_a_killed_process_leaves_an_old_file_or_a_new_one(run: Run, scene: Scene, moment: str, number: signal.Signals) -> None:
    status, stderr = run("killed", scene.path, moment, str(int(number)))
    assert status == -number, stderr
    assert generation_in(scene.path) == (2 if moment == "after rename" else 1)
    assert save(content(3), scene.path).wait()
    scene.assert_holds(3)


@pytest.mark.parametrize("scenario", ["forks", "loads_data", "saves_in_child"])
def test_a_fork_in_the_middle_of_a_save(run: Run, scene: Scene, scenario: str) -> None:
    status, stderr = run(scenario, scene.path)
    assert status == 0, stderr
    assert generation_in(scene.path) == 2
    assert not [name for name in os.listdir(scene.directory) if name.startswith(".")]


@pytest.fixture(autouse=True)
def engines_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment of whoever runs the tests says must not count."""
    for name in ("FASTPERSIST_ENGINE", "FASTPERSIST_BLOCK_NBYTES", "FASTPERSIST_QUEUE_DEPTH"):
        monkeypatch.delenv(name, raising=False)
