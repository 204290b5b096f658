"""Checkpointers that are killed, with readers beside them: python -m tests.faults.checkpointing SCENARIO DIRECTORY.

As in victim.py a scenario forks its victims, prints what it saw as JSON, and ends with an exception where it saw what must
never be seen.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import random
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import Checkpointer, CheckpointerBusyError
from fastpersist.engines import Engine
from tests.faults.scene import assert_same, content, renew, without_nameless_files
from tests.faults.victim import ATTEMPTS, BLOCK_NBYTES, fork, kill_myself, wait_for_death

LOCK, LEDGER, SPARE = ".step.lock", ".step.written.json", ".step.spare"
OURS = re.compile(rf"step-\d{{10}}\.pt|\.fastpersist-[0-9a-f]{{16}}\.tmp|{LOCK}|{LEDGER}(\.tmp)?|{SPARE}")
FOREIGN = {"step-0000000000.pt", "step-1.pt", "notes.txt", ".fastpersist-mine.tmp"}
GENERATIONS = 251


def state(step: int) -> dict[str, Any]:
    """A content that tells its step everywhere."""
    return {**content(step % GENERATIONS), "step": step}


def renewed(saved: dict[str, Any], step: int) -> dict[str, Any]:
    renew(saved, step % GENERATIONS)
    saved["step"] = step
    return saved


def assert_holds(found: dict[str, Any], step: int) -> None:
    assert found["step"] == step, f"step {step} holds the content of step {found['step']}"
    assert_same(found, state(step))


def assert_complete(directory: Path) -> list[int]:
    """Every step that is listed loads completely, checksums included; the steps."""
    reader = Checkpointer(directory)
    steps = reader.steps()
    for step in steps:
        assert_holds(reader.load(step, verify=True), step)
    return steps


def save_until_alone(directory: Path, foreign: set[str], **options: Any) -> list[int]:
    """Go on from the latest step, as a training that is started again does, until nothing but checkpoints is left.

    The kernel winds up the ring of a killed process in its own time, and its temporary file stays locked until then.
    """
    with Checkpointer(directory, **options) as checkpointer:
        for _ in range(ATTEMPTS):
            latest = checkpointer.latest()
            step = 1 if latest is None else latest + 1
            if latest is not None:
                assert_holds(checkpointer.load(), latest)
            checkpointer.save(state(step), step, blocking=True)
            steps = checkpointer.steps()
            spare = {SPARE} if options.get("recycle", True) and options["keep_last"] < step else set()
            expected = {os.path.basename(checkpointer.path(step)) for step in steps} | {LOCK, LEDGER} | spare | foreign
            if set(os.listdir(directory)) == expected:
                return steps
            time.sleep(0.02)
    raise AssertionError(f"{sorted(set(os.listdir(directory)) - expected)} are still there after {ATTEMPTS} saves")


class Board:
    """Numbers that all processes see."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def __getitem__(self, place: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * place)[0])

    def __setitem__(self, place: int, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, number)


DURABLE, STOP, LISTINGS, LOADS, MISSES = range(5)


def read_until_stopped(directory: Path, board: Board, keep_last: int, keep_every: int | None) -> None:
    """List and load, over and over: nothing is torn, nothing that is to be kept is missing, and the latest never goes back."""
    reader, highest = Checkpointer(directory), 0
    while not board[STOP]:
        durable = board[DURABLE]
        steps = reader.steps()
        assert steps[-1] >= max(durable, highest), f"{steps}, with {durable} durable and {highest} seen before"
        highest = steps[-1]
        kept = set(range(max(0, highest - keep_last + 1), highest + 1))
        kept |= {0} | (set(range(0, highest + 1, keep_every)) if keep_every else set())
        assert kept <= set(steps), f"{sorted(kept - set(steps))} are missing"
        board[LISTINGS] += 1
        for step in steps[-keep_last - 1 :]:
            try:
                assert_holds(reader.load(step), step)
                board[LOADS] += 1
            except FileNotFoundError:
                later = reader.steps()
                assert step not in later
                assert step <= later[-1] - keep_last, f"{step} was removed, and {later} are there"
                board[MISSES] += 1
        loaded = reader.load()
        assert loaded["step"] >= highest
        assert_holds(loaded, loaded["step"])


@contextlib.contextmanager
def reading(directory: Path, board: Board, keep_last: int, keep_every: int | None) -> Iterator[None]:
    """A reader in a process of its own, which must not find anything to complain of."""
    board[STOP] = 0
    child = fork(lambda: read_until_stopped(directory, board, keep_last, keep_every))
    try:
        yield
    finally:
        board[STOP] = 1
        _, status = os.waitpid(child, 0)
    assert status == 0, "the reader failed"


def save_forever(directory: Path, board: Board, log: int, blocking: bool, options: dict[str, Any]) -> None:
    """Save one step after the other; the log tells of each before it begins, the board when it is durable."""
    checkpointer = Checkpointer(directory, block_nbytes=BLOCK_NBYTES, **options)
    latest = checkpointer.latest()
    assert latest is not None
    saved = state(latest)

    def durable(step: int) -> Callable[[Any], None]:
        def note(pending: fastpersist.PendingSave) -> None:
            assert pending.succeeded()
            board[DURABLE] = step

        return note

    for step in itertools.count(latest + 1):
        os.write(log, f"{step}\n".encode())
        checkpointer.save(renewed(saved, step), step, blocking=blocking).add_done_callback(durable(step))


def killed_at_random(directory: Path, rounds: int = 20) -> dict[str, Any]:
    """Kill a saving process at random moments, over and over, while another one reads."""
    seen = {"kills": 0, "left": 0, "spares": 0, "unpublished": 0, "listings": 0, "loads": 0, "misses": 0}
    for keep_last, keep_every in ((1, None), (2, 7), (3, None)):
        place = directory / f"keep{keep_last}"
        place.mkdir()
        foreign = _put_foreign_files(place)
        board = Board()
        modes = itertools.cycle(itertools.product((True, False), (True, False), ("io_uring", "posix"), (False, True)))
        with reading(place, board, keep_last, keep_every):
            for blocking, recycle, engine, named in itertools.islice(modes, rounds):
                options = {"keep_last": keep_last, "keep_every": keep_every, "recycle": recycle, "engine": engine}
                begun = _killed_at_some_moment(place, board, blocking, named, options)
                steps = assert_complete(place)
                assert board[DURABLE] <= steps[-1] <= begun
                names = set(os.listdir(place))
                assert not [name for name in names - FOREIGN if not OURS.fullmatch(name)]
                seen["kills"] += 1
                seen["unpublished"] += steps[-1] < begun
                seen["left"] += any(name.endswith(".tmp") for name in names - FOREIGN)
                seen["spares"] += SPARE in names
        board[DURABLE] = Checkpointer(place).latest() or 0
        for recycle in (True, False):
            options = {"keep_last": keep_last, "keep_every": keep_every, "recycle": recycle}
            in_a_child(lambda: _go_on_and_check(place, **options))  # noqa: B023
        assert _foreign_files(place) == foreign
        for name, number in (("listings", LISTINGS), ("loads", LOADS), ("misses", MISSES)):
            seen[name] += board[number]
    return seen


def _put_foreign_files(directory: Path) -> dict[str, tuple[int, bytes]]:
    for name in FOREIGN:
        (directory / name).write_bytes(b"mine")
    fastpersist.save(state(0), directory / "step-0000000000.pt", engine="posix")
    return _foreign_files(directory)


def _foreign_files(directory: Path) -> dict[str, tuple[int, bytes]]:
    return {name: ((directory / name).stat().st_ino, (directory / name).read_bytes()) for name in FOREIGN}


def _go_on_and_check(directory: Path, keep_last: int, keep_every: int | None, recycle: bool) -> None:
    steps = save_until_alone(directory, FOREIGN, keep_last=keep_last, keep_every=keep_every, recycle=recycle)
    every = range(0, steps[-1] + 1, keep_every) if keep_every else ()
    assert steps == sorted({0, *every, *range(steps[-1] - keep_last + 1, steps[-1] + 1)})
    assert assert_complete(directory) == steps


def _killed_at_some_moment(directory: Path, board: Board, blocking: bool, named: bool, options: dict[str, Any]) -> int:
    """The last step begun of a process that was killed."""
    source, sink = os.pipe()

    def victim() -> None:
        if named:
            without_nameless_files(pytest.MonkeyPatch())
        save_forever(directory, board, sink, blocking, options)

    child = fork(victim)
    os.close(sink)
    with open(source, "rb") as log:
        lines = [log.readline() for _ in range(random.randint(1, 4))]
        time.sleep(random.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        wait_for_death(child)
        return int((b"".join(lines) + log.read()).split()[-1])


def in_a_child(work: Callable[[], None]) -> None:
    _, status = os.waitpid(fork(work), 0)
    assert status == 0, "the child failed"


def _to(name: str) -> Callable[..., bool]:
    return lambda source, target, **_: os.path.basename(target).startswith(name)


def _behind(fileno: int) -> str:
    return os.readlink(f"/proc/self/fd/{fileno}")


def _of_directory(number: int) -> Callable[..., bool]:
    calls = itertools.count(1)
    return lambda fileno: os.path.isdir(_behind(fileno)) and next(calls) == number


POINTS: dict[str, tuple[Any, str, Callable[[], Callable[..., bool]]]] = {
    "ledger sync": (os, "fsync", lambda: lambda fileno: _behind(fileno).endswith(f"{LEDGER}.tmp")),
    "ledger rename": (os, "rename", lambda: _to(LEDGER)),
    "take the spare": (os, "rename", lambda: lambda source, target, **_: os.path.basename(source) == SPARE),
    "first directory sync": (os, "fsync", lambda: _of_directory(1)),
    "reserve": (Engine, "reserve", lambda: lambda *_: True),
    "sync": (Engine, "sync", lambda: lambda *_: True),
    "publish": (os, "rename", lambda: _to("step-")),
    "publish by link": (os, "link", lambda: _to("step-")),
    "last directory sync": (os, "fsync", lambda: _of_directory(2)),
    "remove the spare": (os, "unlink", lambda: lambda path, **_: os.path.basename(path) == SPARE),
    "retire": (os, "rename", lambda: _to(SPARE)),
    "remove": (os, "unlink", lambda: lambda path, **_: os.path.basename(path).startswith("step-")),
}
"""What a save does, which call that is, and how to tell it from others."""

WAYS = {
    "recycled": [
        "ledger sync", "ledger rename", "take the spare", "first directory sync", "reserve", "sync", "publish",
        "last directory sync", "remove the spare", "retire",
    ],
    "plain": [
        "ledger sync", "ledger rename", "reserve", "sync", "publish by link", "first directory sync", "remove the spare",
        "remove",
    ],
    "refused": ["ledger rename", "sync", "publish by link", "first directory sync", "remove the spare", "retire"],
}  # fmt: skip
"""The steps of each way to save, in their order: over the spare, without, and with a spare that somebody reads."""


def killed_at_each_step(directory: Path) -> dict[str, Any]:
    """Kill a save before and after each of its steps, and let the next process go on."""
    left: dict[str, Any] = {}
    in_a_child(lambda: _save_steps(directory, 1, 2, 3, keep_last=2))
    for (way, points), blocking, after in itertools.product(WAYS.items(), (True, False), (False, True)):
        for index, point in enumerate(points):
            case = f"{way}, {'blocking' if blocking else 'background'}, {'after' if after else 'before'} {point}"
            older, old = Checkpointer(directory).steps()
            reader = os.open(directory / SPARE, os.O_RDONLY) if way == "refused" else -1
            wait_for_death(fork(lambda: _save_until(directory, way, blocking, point, after, old + 1)))  # noqa: B023
            if reader >= 0:
                os.close(reader)
            published = index + after > points.index("publish" if way == "recycled" else "publish by link")
            pruned = index == len(points) - 1 and after
            assert assert_complete(directory) == [older, old, old + 1][pruned : 2 + published], case
            left[case] = sorted(re.sub("[0-9a-f]{16}", "N", name) for name in os.listdir(directory) if name[:4] != "step")
            in_a_child(lambda: _go_on(directory))
    return left


def _save_steps(directory: Path, *steps: int, keep_last: int) -> None:
    with Checkpointer(directory, keep_last=keep_last) as checkpointer:
        for step in steps:
            checkpointer.save(state(step), step, blocking=True)


def _go_on(directory: Path) -> None:
    steps = save_until_alone(directory, set(), keep_last=2)
    assert steps == [steps[-1] - 1, steps[-1]]


def _save_until(directory: Path, way: str, blocking: bool, point: str, after: bool, step: int) -> None:
    """Save, and be killed before or after one step."""
    owner, name, chosen = POINTS[point]
    setattr(owner, name, _deadly(getattr(owner, name), chosen(), after))
    with Checkpointer(directory, keep_last=2, recycle=way != "plain", block_nbytes=BLOCK_NBYTES) as checkpointer:
        checkpointer.save(state(step), step, blocking=blocking)


def _deadly(real: Callable[..., Any], chosen: Callable[..., bool], after: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if not chosen(*arguments, **options):
            return real(*arguments, **options)
        if after:
            with contextlib.suppress(FileNotFoundError):
                real(*arguments, **options)
        return kill_myself()

    return call


def one_saver(directory: Path) -> dict[str, Any]:
    """Who may save while another process does, and from when on."""
    seen: dict[str, Any] = {}
    for number, end in enumerate(("closed", "ended", "killed"), 1):
        with _holder(directory, number) as (tell, child):
            seen[f"before it {end}"] = _attempt(directory, 100 + number)
            assert assert_complete(directory)[-1] >= number
            if end == "killed":
                os.kill(child, signal.SIGKILL)
                wait_for_death(child)
            else:
                tell(end)
                if end == "ended":
                    os.waitpid(child, 0)
            seen[f"after it {end}"] = _attempt(directory, 200 + number)
            if end == "closed":
                tell("ended")
                os.waitpid(child, 0)
    return seen


@contextlib.contextmanager
def _holder(directory: Path, step: int) -> Iterator[tuple[Callable[[str], None], int]]:
    """A process that has saved and not closed: what it is told it does, and it answers."""
    orders, answers = os.pipe(), os.pipe()

    def hold() -> None:
        checkpointer = Checkpointer(directory, keep_last=None)
        checkpointer.save(state(step), step, blocking=True)
        os.write(answers[1], b".")
        while True:
            if os.read(orders[0], 1) == b"c":
                checkpointer.close()
                os.write(answers[1], b".")
            else:
                return

    def tell(order: str) -> None:
        os.write(orders[1], order[:1].encode())
        if order == "closed":
            os.read(answers[0], 1)

    child = fork(hold)
    os.read(answers[0], 1)
    yield tell, child
    for fileno in (*orders, *answers):
        os.close(fileno)


def _attempt(directory: Path, step: int) -> str:
    """How a save of another process ends."""
    return _told(lambda: _outcome(Checkpointer(directory, keep_last=None), step))


def _outcome(checkpointer: Checkpointer, step: int) -> str:
    try:
        checkpointer.save(state(step), step, blocking=True)
    except CheckpointerBusyError:
        return "busy"
    return "saved"


def _write(fileno: int, text: str) -> None:
    os.write(fileno, text.encode())


def _told(work: Callable[[], str]) -> str:
    source, sink = os.pipe()
    in_a_child(lambda: _write(sink, work()))
    os.close(sink)
    with open(source, "rb") as told:
        return told.read().decode()


def forked_while_saving(directory: Path) -> dict[str, Any]:
    """A child of the saving process does not hold the lock, cannot save beside its parent, and may when that is gone."""
    seen: dict[str, Any] = {}
    orders, answers = os.pipe(), os.pipe()

    def grandchild(checkpointer: Checkpointer) -> None:
        def answer(step: int) -> None:
            _write(answers[1], f"{_outcome(checkpointer, step)}\n")

        checkpointer.wait()  # its parent's saves are not its own
        answer(2)
        for step in (3, 4):
            os.read(orders[0], 1)
            answer(step)
        checkpointer.close()

    def parent() -> None:
        checkpointer = Checkpointer(directory, keep_last=None)
        checkpointer.save(state(1), 1, blocking=True)
        fork(lambda: grandchild(checkpointer))
        signal.pause()

    child = fork(parent)
    os.close(answers[1])
    with open(answers[0]) as told:
        seen["beside its parent"] = told.readline().strip()
        seen["another, beside the parent"] = _attempt(directory, 10)
        os.kill(child, signal.SIGKILL)
        wait_for_death(child)
        seen["another, when the parent is gone"] = _attempt(directory, 11)
        os.write(orders[1], b".")
        seen["when its parent is gone"] = told.readline().strip()
        seen["another, beside the orphan"] = _attempt(directory, 12)
        os.write(orders[1], b".")
        seen["once more"] = told.readline().strip()
        assert told.read() == ""  # it has ended
    assert assert_complete(directory) == [1, 3, 4, 11]
    return seen


def loaded_while_pruned(directory: Path, loads: int = 150) -> dict[str, Any]:
    """Load the latest, over and over, while another process saves and removes the one before."""
    board = Board()
    in_a_child(lambda: _save_steps(directory, 1, keep_last=1))

    def save() -> None:
        for recycle in itertools.cycle((True, False)):
            with Checkpointer(directory, keep_last=1, recycle=recycle, block_nbytes=BLOCK_NBYTES) as checkpointer:
                for _ in range(10):
                    step = (checkpointer.latest() or 0) + 1
                    checkpointer.save(state(step), step, blocking=True)
                    board[DURABLE] = step
                    if board[STOP]:
                        return

    child = fork(save)
    reader, last, different = Checkpointer(directory), 0, 0
    for _ in range(loads):
        durable = board[DURABLE]
        loaded = reader.load()
        assert loaded["step"] >= max(durable, last)
        assert_holds(loaded, loaded["step"])
        different += loaded["step"] != last
        last = loaded["step"]
    board[STOP] = 1
    assert os.waitpid(child, 0)[1] == 0
    return {"loads": loads, "different": different}


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "killed_at_random": killed_at_random,
    "killed_at_each_step": killed_at_each_step,
    "one_saver": one_saver,
    "forked_while_saving": forked_while_saving,
    "loaded_while_pruned": loaded_while_pruned,
}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks should have no other threads
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]))))
