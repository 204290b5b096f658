"""async_save and PendingSave: what is saved is what was there at the call, and what can be asked about a save."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import errno
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import PendingSave, SaveCancelledError, TransferError, background
from fastpersist.memory.staging import shared_staging
from fastpersist.transfer import publish, snapshot
from tests.gated import LIMIT_SECONDS, Call, Gate, wait_until_idle

BLOCK_NBYTES = 65536
LARGE_NBYTES = 262_144  # from here on a storage is written from where it lies

# A hang is a failure like any other here: it must end the test, and not the run.
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


def state() -> dict[str, Any]:
    """A state of its own, always the same."""
    return copy.deepcopy(_first_state())


@functools.cache
def _first_state() -> dict[str, Any]:
    """Large and small storages of odd sizes in turn, shared ones, views, several dtypes; each byte tells where it is."""
    generator = torch.Generator().manual_seed(0)

    def some(nbytes: int) -> torch.Tensor:
        return torch.randint(1, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    base = torch.randn(100_001, generator=generator)
    return {
        "scalar": torch.tensor(3.5),
        "large": some(400_001),
        "odd": some(37),
        "threshold": some(LARGE_NBYTES),
        "below": some(LARGE_NBYTES - 1),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(301, 501, generator=generator).bfloat16(),
        "base": base,
        "view": base[1000:3000:7],
        "shared": {"again": base, "transposed": base[:10_000].view(100, 100).t()},
        "list": [some(1), (some(2), some(65_537)), "text", 7],
        "copied in parallel": some(4_200_003),
    }


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(member)


def wipe(value: Any) -> None:
    """Zero every byte that the caller may change."""
    for tensor in tensors_of(value):
        tensor.untyped_storage().fill_(0)


def assert_saved(path: str | Path, expected: Any) -> None:
    """The file holds ``expected``, bit for bit and with the same storages shared; its checksums are right."""
    found = torch.load(path)
    assert str(found.keys()) == str(expected.keys())
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs)
    assert all(one.stride() == other.stride() for one, other in pairs)
    assert len({one.untyped_storage()._cdata for one, _ in pairs}) == len({two.untyped_storage()._cdata for _, two in pairs})
    fastpersist.verify(path)


def save(obj: Any, path: Path, **options: Any) -> PendingSave:
    """async_save in many small blocks."""
    return fastpersist.async_save(obj, path, **{"block_nbytes": BLOCK_NBYTES, "durable": False, **options})


def payload(obj: Any) -> dict[int, int]:
    """Bytes of each storage by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors_of(obj)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


# The caller changes everything as soon as it may.


@pytest.mark.parametrize("max_staging_nbytes", [None, 0, 70_000, 1_200_000])
@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_what_is_changed_after_the_call_is_saved_as_it_was(
    tmp_path: Path, engine: str, layout: str, max_staging_nbytes: int | None
) -> None:
    original, obj = state(), state()
    for turn in range(3):
        for tensor, source in zip(tensors_of(obj), tensors_of(original), strict=True):
            tensor.copy_(source)
        path = tmp_path / f"{turn}.pt"
        pending = save(obj, path, engine=engine, layout=layout, max_staging_nbytes=max_staging_nbytes, queue_depth=3)
        wipe(obj)
        assert pending.staged()
        report = pending.result()
        assert_saved(path, original)
        assert report.nbytes == report.zero_copy_nbytes + report.copied_nbytes


def test_the_engine_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPERSIST_ENGINE", "posix")
    assert save(state(), tmp_path / "a.pt").result().engine == "posix"


def test_layout_torch_gives_the_bytes_of_save(tmp_path: Path) -> None:
    obj = state()
    fastpersist.save(obj, tmp_path / "a" / ".." / "a.pt", layout="torch")
    (tmp_path / "b").mkdir()
    save(obj, tmp_path / "b" / "a.pt", layout="torch").result()
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b" / "a.pt").read_bytes()


@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_a_snapshot_returns_while_all_writes_are_held(tmp_path: Path, gate: Gate, layout: str) -> None:
    obj, original = state(), state()
    gate.close()
    pending = save(obj, tmp_path / "a.pt", engine="gated", layout=layout)
    wipe(obj)  # certainly before a byte was written
    gate.wait_until_reached()
    assert gate.written == []
    assert pending.staged()
    assert not pending.done()
    assert not pending.wait(0)
    gate.open()
    report = pending.result()
    assert_saved(tmp_path / "a.pt", original)
    assert (report.zero_copy_nbytes, report.copied_nbytes) == (0, report.nbytes)


@pytest.mark.parametrize("available", [0, 2_000_000, 1 << 30])
def test_half_of_the_available_memory_is_taken_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    shared_staging().trim()
    monkeypatch.setattr(background, "available_nbytes", lambda: available)
    report = save(state(), tmp_path / "a.pt", engine="posix").result()
    assert shared_staging().free_nbytes <= available // 2 + 4096
    assert (report.nbytes > available // 2) == (shared_staging().free_nbytes < report.nbytes)


def test_memory_at_hand_is_used_without_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which costs a hundred system calls, and might have another answer than the last time."""
    shared_staging().trim()
    save(state(), tmp_path / "a.pt", engine="posix").result()
    at_hand = shared_staging().free_nbytes
    monkeypatch.setattr(background, "available_nbytes", lambda: pytest.fail("it was asked"))
    save(state(), tmp_path / "a.pt", engine="posix").result()
    save(state(), tmp_path / "a.pt", engine="posix", snapshot=False).result()
    assert shared_staging().free_nbytes == at_hand > 1_000_000


@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_without_staging_memory_the_call_returns_after_the_writes(tmp_path: Path, gate: Gate, layout: str) -> None:
    obj, original = state(), state()
    written_at_return: list[int] = []
    depth = 256 if layout == "auto" else 2  # all at the gate at once, but for those that are copied first

    def call() -> PendingSave:
        pending = save(obj, tmp_path / "a.pt", engine="gated", max_staging_nbytes=0, layout=layout, queue_depth=depth)
        written_at_return.extend(gate.written_from(*storage) for storage in payload(obj).items())
        wipe(obj)
        return pending

    gate.close()
    calling = Call(call)
    gate.wait_until_reached()
    assert not calling.returned.wait(0.1)
    gate.close(passes=3)  # some, but not all
    gate.wait_until_reached()
    assert not calling.returned.wait(0.1)
    gate.open()
    report = calling.result().result()
    assert sum(written_at_return) == report.zero_copy_nbytes  # all that is not copied first
    assert report.zero_copy_nbytes > 0 or layout == "torch"  # whose offsets may suit no address
    assert report.zero_copy_nbytes + report.copied_nbytes == report.nbytes
    assert shared_staging().buffers() == []
    assert_saved(tmp_path / "a.pt", original)


def test_what_does_not_fit_is_written_before_the_call_returns_and_no_more(tmp_path: Path, gate: Gate) -> None:
    obj = {"first": torch.ones(400_000, dtype=torch.uint8), "last": torch.ones(800_000, dtype=torch.uint8)}
    original = copy.deepcopy(obj)
    counts: list[int] = []

    def call() -> PendingSave:
        pending = save(obj, tmp_path / "a.pt", engine="gated", max_staging_nbytes=900_000, queue_depth=1)
        counts.append(gate.written_from(obj["first"].data_ptr(), 400_000))
        wipe(obj)
        gate.close()
        return pending

    gate.close(passes=2)
    calling = Call(call)
    gate.wait_until_reached()
    assert not calling.returned.wait(0.1)
    gate.open()
    pending = calling.result()
    gate.open()
    report = pending.result()
    assert counts == [report.zero_copy_nbytes]
    assert 400_000 - 2 * 4096 <= report.zero_copy_nbytes <= 400_000
    assert_saved(tmp_path / "a.pt", original)


def test_without_a_snapshot_staged_becomes_true_with_the_last_write_from_the_tensors(tmp_path: Path, gate: Gate) -> None:
    obj, original = state(), state()
    gate.close()
    pending = save(obj, tmp_path / "a.pt", engine="gated", snapshot=False)
    gate.wait_until_reached()
    assert not pending.staged()
    gate.close(passes=5)
    gate.wait_until_reached()
    assert not pending.staged()
    assert shared_staging().buffers() == []
    gate.open()
    pending._wait_until_staged()
    written = sum(gate.written_from(*storage) for storage in payload(obj).items())
    wipe(obj)
    assert pending.staged()
    report = pending.result()
    assert written == report.zero_copy_nbytes > report.nbytes - report.copied_nbytes - 1 > 0
    assert_saved(tmp_path / "a.pt", original)


def test_reports_say_what_was_copied(tmp_path: Path) -> None:
    obj = {"small": torch.ones(1000), "large": torch.ones(1_000_000, dtype=torch.uint8)}
    nbytes = 1_004_000
    plain = fastpersist.save(obj, tmp_path / "a.pt", engine="posix", block_nbytes=BLOCK_NBYTES)
    alone = save(obj, tmp_path / "a.pt", engine="posix", snapshot=False).result()
    assert (alone.zero_copy_nbytes, alone.copied_nbytes) == (plain.zero_copy_nbytes, plain.copied_nbytes)
    whole = save(obj, tmp_path / "a.pt", engine="posix").result()
    assert (whole.zero_copy_nbytes, whole.copied_nbytes) == (0, nbytes)
    # The large one is staged and written from there: copied. The small one goes through a buffer: copied as well.
    partly = save(obj, tmp_path / "a.pt", engine="posix", max_staging_nbytes=1_000_000).result()
    assert (partly.zero_copy_nbytes, partly.copied_nbytes) == (0, nbytes)
    nothing = save(obj, tmp_path / "a.pt", engine="posix", max_staging_nbytes=0).result()
    assert nothing.zero_copy_nbytes == plain.zero_copy_nbytes
    empty = save({"number": 1, "empty": torch.zeros(0)}, tmp_path / "a.pt").result()
    assert (empty.nbytes, empty.zero_copy_nbytes, empty.copied_nbytes) == (0, 0, 0)


def test_progress_runs_in_the_thread_and_sees_the_callers_context(tmp_path: Path) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
    seen: set[tuple[str, bool]] = set()
    variable.set("of the caller")
    caller = threading.get_ident()

    def progress(done_nbytes: int, total_nbytes: int) -> None:
        seen.add((variable.get(), threading.get_ident() == caller))
        variable.set("of the thread")

    save(state(), tmp_path / "a.pt", progress=progress).result()
    assert seen == {("of the caller", False), ("of the thread", False)}
    assert variable.get() == "of the caller"


# What cannot work is said at once.


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_pending": 0}, ValueError),
        ({"max_staging_nbytes": -1}, ValueError),
        ({"layout": "other"}, ValueError),
        ({"block_nbytes": 1000}, ValueError),
        ({"queue_depth": 0}, ValueError),
        ({"pickle_protocol": 5}, ValueError),
        ({"guard": []}, ValueError),  # with snapshot=True
        ({"guard": torch.nn.Linear(1, 1), "snapshot": False}, TypeError),
        ({"guard": [1], "snapshot": False}, TypeError),
    ],
)
def test_wrong_arguments_raise_at_once(tmp_path: Path, options: dict[str, Any], error: type[Exception]) -> None:
    for _ in range(3):  # a place that is not given back would make the second call wait for ever
        with pytest.raises(error):
            fastpersist.async_save({"x": torch.ones(3)}, tmp_path / "a.pt", **options)
    assert list(tmp_path.iterdir()) == []


def test_an_open_engine_is_refused(tmp_path: Path) -> None:
    with fastpersist.open_engine("posix") as engine, pytest.raises(TypeError, match="belongs to the thread"):
        fastpersist.async_save({}, tmp_path / "a.pt", engine=engine)  # type: ignore[arg-type]


# A PendingSave.


def test_a_pending_save_from_begin_to_end(tmp_path: Path, gate: Gate) -> None:
    gate.close()
    pending = save(state(), tmp_path / "a.pt", engine="gated")
    assert pending.path == str(tmp_path / "a.pt")
    assert repr(pending) == f"<PendingSave {tmp_path}/a.pt: pending>"
    assert not pending.done()
    assert not pending.succeeded()
    assert not pending.wait(timeout=0)
    assert not pending.wait(timeout=0.01)
    with pytest.raises(TimeoutError, match=r"a\.pt"):
        pending.result(timeout=0)
    with pytest.raises(TimeoutError):
        pending.exception(timeout=0.01)
    gate.open()
    assert pending.wait()
    assert pending.wait(timeout=0)
    assert pending.done()
    assert pending.succeeded()
    assert not pending.cancelled()
    assert pending.exception() is None
    assert pending.result() is pending.result(timeout=0)
    assert pending.result().path == str(tmp_path / "a.pt")
    assert repr(pending) == f"<PendingSave {tmp_path}/a.pt: saved>"


def failing(gate: Gate, code: int = errno.EIO) -> None:
    gate.failing = lambda _: code


def test_a_failure_is_raised_wherever_it_is_asked_for(tmp_path: Path, gate: Gate) -> None:
    failing(gate)
    pending = save(state(), tmp_path / "a.pt", engine="gated")
    error = pending.exception()
    assert isinstance(error, TransferError)
    assert error.errno == errno.EIO
    for ask in (pending.wait, pending.result):
        with pytest.raises(TransferError) as raised:
            ask()
        assert raised.value is error
    assert pending.done()
    assert not pending.succeeded()
    assert not pending.cancelled()
    assert repr(pending).startswith(f"<PendingSave {tmp_path}/a.pt: failed: TransferError(")


def test_callbacks(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.close()
    pending = save(state(), tmp_path / "a.pt", engine="gated")
    calls: list[tuple[int, bool, bool]] = []

    def record(number: int) -> Callable[[PendingSave], None]:
        return lambda save: calls.append((number, save.done(), threading.current_thread() is threading.main_thread()))

    def raising(_: PendingSave) -> None:
        raise ZeroDivisionError

    def leaving(_: PendingSave) -> None:
        raise SystemExit

    for fn in (record(1), raising, record(2), leaving, record(3)):
        pending.add_done_callback(fn)
    assert calls == []
    gate.open()
    assert pending.wait()
    wait_until_idle()
    assert calls == [(1, True, False), (2, True, False), (3, True, False)]
    pending.add_done_callback(record(4))
    assert calls[-1] == (4, True, True)
    pending.add_done_callback(raising)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [
        ZeroDivisionError, SystemExit, ZeroDivisionError,
    ]  # fmt: skip
    assert save(state(), tmp_path / "b.pt", engine="gated").wait()  # the thread has survived


def test_a_callback_cannot_save_in_turn(tmp_path: Path, gate: Gate) -> None:
    gate.close()
    pending = save(state(), tmp_path / "a.pt", engine="gated")
    errors: list[BaseException] = []

    def save_again(_: PendingSave) -> None:
        with pytest.raises(RuntimeError, match="saving thread") as raised:
            save(state(), tmp_path / "b.pt")
        errors.append(raised.value)

    pending.add_done_callback(save_again)
    gate.open()
    assert pending.wait()
    wait_until_idle()
    assert len(errors) == 1


def test_a_context_manager_waits(tmp_path: Path, gate: Gate) -> None:
    with save(state(), tmp_path / "a.pt") as pending:
        pass
    assert pending.succeeded()
    failing(gate)
    with pytest.raises(TransferError), save(state(), tmp_path / "a.pt", engine="gated"):
        pass


def test_a_context_manager_whose_body_fails_waits_as_well(tmp_path: Path, gate: Gate) -> None:
    with pytest.raises(ZeroDivisionError) as raised, save(state(), tmp_path / "a.pt") as pending:
        raise ZeroDivisionError
    assert pending.succeeded()
    assert not hasattr(raised.value, "__notes__")
    failing(gate)
    with pytest.raises(ZeroDivisionError) as raised, save(state(), tmp_path / "a.pt", engine="gated"):
        raise ZeroDivisionError
    assert ["failed as well: TransferError" in note for note in raised.value.__notes__] == [True]


def test_await(tmp_path: Path, gate: Gate) -> None:
    async def main() -> None:
        report = await save(state(), tmp_path / "a.pt")
        assert report.path == str(tmp_path / "a.pt")
        pending = save(state(), tmp_path / "b.pt")
        first, second = await asyncio.gather(pending, save(state(), tmp_path / "c.pt", max_pending=2))
        assert (first, second.path) == (pending.result(), str(tmp_path / "c.pt"))
        assert await pending is first  # once more, after the end

    asyncio.run(main())


def test_await_while_the_loop_goes_on(tmp_path: Path, gate: Gate) -> None:
    async def main() -> None:
        gate.close()
        waiting = asyncio.ensure_future(save(state(), tmp_path / "a.pt", engine="gated"))
        await asyncio.to_thread(gate.wait_until_reached)
        assert not waiting.done()
        gate.open()
        assert (await waiting).engine == "posix"

    asyncio.run(main())


def test_awaiting_a_failure_is_asking(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gate.close()
        failing(gate)
        waiting = asyncio.ensure_future(save(state(), tmp_path / "a.pt", engine="gated"))
        await asyncio.to_thread(gate.wait_until_reached)
        gate.open()
        wait_until_idle()  # it fails while the loop cannot run: whoever awaits learns of it later
        with pytest.raises(TransferError):
            await waiting

    asyncio.run(main())
    assert caplog.records == []


def test_a_cancelled_task_leaves_the_save_alone(tmp_path: Path, gate: Gate) -> None:
    async def main() -> PendingSave:
        gate.close()
        pending = save(state(), tmp_path / "a.pt", engine="gated")
        waiting = asyncio.ensure_future(pending)
        await asyncio.to_thread(gate.wait_until_reached)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return pending

    pending = asyncio.run(main())  # the loop is closed before the save ends
    gate.open()
    assert pending.wait()
    assert_saved(tmp_path / "a.pt", state())


def test_a_failure_that_a_cancelled_task_would_have_been_told_is_told_to_others(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        gate.close()
        failing(gate)
        waiting = asyncio.ensure_future(save(state(), tmp_path / "a.pt", engine="gated"))
        await asyncio.to_thread(gate.wait_until_reached)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    gate.open()
    wait_until_idle()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    with pytest.raises(TransferError):
        save(state(), tmp_path / "b.pt")


def test_a_loop_that_is_closed_before_the_end(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.close()
    failing(gate)
    loop = asyncio.new_event_loop()
    pending = save(state(), tmp_path / "a.pt", engine="gated")

    async def wait() -> None:
        await pending

    waiting = wait()
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    waiting.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    gate.open()
    wait_until_idle()
    assert pending.done()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert isinstance(pending.exception(), TransferError)


# Order and bounds.


@pytest.mark.parametrize("max_pending", [1, 2, 3])
def test_so_many_saves_are_unfinished_at_most(tmp_path: Path, gate: Gate, max_pending: int) -> None:
    gate.close()
    objects = [{"x": torch.full((300_000,), number, dtype=torch.uint8)} for number in range(6)]
    ended: list[int] = []

    def save_number(number: int) -> PendingSave:
        pending = save(objects[number], tmp_path / "a.pt", engine="gated", max_pending=max_pending)
        pending.add_done_callback(lambda _: ended.append(number))
        wipe(objects[number])
        return pending

    pendings = [save_number(number) for number in range(max_pending)]
    calling = Call(lambda: save_number(max_pending))
    gate.wait_until_reached()
    assert not calling.returned.wait(0.1)
    assert ended == []
    gate.open()
    pendings.append(calling.result())
    assert pendings[0].done()  # the oldest, which it has waited for
    pendings += [save_number(number) for number in range(max_pending + 1, 6)]
    assert all(pending.wait() for pending in pendings)
    wait_until_idle()
    assert ended == list(range(6))
    assert torch.load(tmp_path / "a.pt")["x"].unique().tolist() == [5]  # all to one path: the last call counts


def test_calls_from_several_threads(tmp_path: Path) -> None:
    each, threads = 6, 4

    def work(number: int) -> list[PendingSave]:
        pendings, value = [], torch.zeros(300_001, dtype=torch.uint8)
        for turn in range(each):
            value.fill_(number * each + turn + 1)
            pendings.append(save({"x": value}, tmp_path / f"{number}-{turn}.pt", max_pending=1 + number % 3))
            value.zero_()
        return pendings

    calls = [Call(lambda number=number: work(number)) for number in range(threads)]  # type: ignore[misc]
    assert all(pending.wait() for call in calls for pending in call.result())
    for number, turn in itertools.product(range(threads), range(each)):
        assert torch.load(tmp_path / f"{number}-{turn}.pt")["x"].unique().tolist() == [number * each + turn + 1]


def test_several_ask_about_one_save(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.close()
    failing(gate)
    pending = save(state(), tmp_path / "a.pt", engine="gated")
    waiting = [Call(pending.exception) for _ in range(3)]
    short = Call(lambda: pending.wait(timeout=0.01))  # who gives up must not speak for the others
    assert short.result() is False
    deadline = threading.Event()
    while pending._askers < 3:
        assert not deadline.wait(0.001)
    gate.open()
    assert {type(call.result()) for call in waiting} == {TransferError}
    wait_until_idle()
    assert caplog.records == []


# Cancelling.


def test_cancel_while_it_runs(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.pt"
    fastpersist.save({"old": 1}, path)
    gate.close(passes=2)
    pending = save(state(), path, engine="gated", queue_depth=2)
    gate.wait_until_reached()
    assert pending.cancel()
    assert pending.cancel()  # still on its way to the end
    gate.open()
    for ask in (pending.result, pending.wait):
        with pytest.raises(SaveCancelledError, match="was cancelled"):
            ask()
    assert pending.done()
    assert pending.cancelled()
    assert pending.staged()
    assert not pending.cancel()
    assert torch.load(path) == {"old": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.pt"]
    assert caplog.records == []
    assert save({"new": 2}, path).wait()


def test_cancel_before_it_begins(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.close()
    first = save(state(), tmp_path / "a.pt", engine="gated")
    second = save(state(), tmp_path / "b.pt", engine="gated", max_pending=2)
    third = save({"x": torch.ones(3)}, tmp_path / "b.pt", engine="gated", max_pending=3)
    told: list[bool] = []
    second.add_done_callback(lambda save: told.append(save.cancelled()))
    assert second.cancel()
    assert second.done()  # at once
    assert second.staged()
    assert told == [True]
    assert not second.cancel()
    fourth = Call(lambda: save({"x": torch.ones(4)}, tmp_path / "c.pt", engine="gated", max_pending=3)).result()  # its place
    gate.open()
    assert all(pending.wait() for pending in (first, third, fourth))
    assert isinstance(second.exception(), SaveCancelledError)
    assert torch.load(tmp_path / "b.pt")["x"].tolist() == [1, 1, 1]
    assert caplog.records == []


def test_cancelled_and_never_asked_about_is_no_failure(tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    gate.close()
    pending = save(state(), tmp_path / "a.pt", engine="gated")
    gate.wait_until_reached()
    assert pending.cancel()
    gate.open()
    wait_until_idle()
    assert pending.cancelled()
    assert save({"x": 1}, tmp_path / "b.pt").wait()
    assert caplog.records == []


def test_cancel_while_the_call_waits_for_writes(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    made = of_the_calls(monkeypatch)
    gate.close(passes=2)
    calling = Call(lambda: save(state(), tmp_path / "a.pt", engine="gated", max_staging_nbytes=0, queue_depth=2))
    gate.wait_until_reached()
    assert made[0].cancel()
    assert not calling.returned.wait(0.05)  # what is in flight still reads the caller's memory
    gate.open()
    pending = calling.result()
    assert pending.cancelled()
    assert pending.staged()
    assert list(tmp_path.iterdir()) == []


def of_the_calls(monkeypatch: pytest.MonkeyPatch) -> list[PendingSave]:
    """Every PendingSave, from the moment that it is made."""
    made: list[PendingSave] = []
    real = PendingSave.__init__

    def init(self: PendingSave, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(PendingSave, "__init__", init)
    return made


def test_cancel_while_the_call_copies_and_the_save_waits_for_it(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, copies = of_the_calls(monkeypatch), itertools.count()
    real, copying, waiting, held = snapshot._copy, threading.Event(), threading.Event(), threading.Event()
    real_before = snapshot.Snapshot.before

    def before(self: Any, block: Any) -> None:
        waiting.set()
        real_before(self, block)

    def slow(*arguments: Any) -> None:
        if next(copies) == 2:
            copying.set()
            assert held.wait(LIMIT_SECONDS)
        real(*arguments)

    monkeypatch.setattr(snapshot, "_copy", slow)
    monkeypatch.setattr(snapshot.Snapshot, "before", before)
    calling = Call(lambda: save(state(), tmp_path / "a.pt"))
    assert copying.wait(LIMIT_SECONDS)
    assert waiting.wait(LIMIT_SECONDS)
    assert made[0].cancel()
    assert isinstance(made[0].exception(), SaveCancelledError)  # although the copying goes on
    held.set()
    assert calling.result().cancelled()
    assert next(copies) == 3  # no more was copied
    assert list(tmp_path.iterdir()) == []
    assert len(shared_staging().buffers()) == 1  # given back


def test_too_late_to_cancel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, publishing, go_on = publish.Publication.publish, threading.Event(), threading.Event()

    def slow(self: publish.Publication) -> None:
        publishing.set()
        assert go_on.wait(LIMIT_SECONDS)
        real(self)

    monkeypatch.setattr(publish.Publication, "publish", slow)
    pending = save(state(), tmp_path / "a.pt")
    assert publishing.wait(LIMIT_SECONDS)
    assert not pending.cancel()
    go_on.set()
    assert pending.wait()
    assert not pending.cancel()
    assert not pending.cancelled()
    assert_saved(tmp_path / "a.pt", state())


@pytest.mark.parametrize("engine", ["memory", "nonesuch", 5])
def test_an_engine_that_makes_no_sense_is_refused_in_the_call(tmp_path: Path, nothing_left: None, engine: Any) -> None:
    """And not in the thread, where it would be somebody else's failure."""
    with pytest.raises((ValueError, TypeError), match="engine"):
        fastpersist.async_save([1], tmp_path / "model.pt", engine=engine)
    assert list(tmp_path.iterdir()) == []
