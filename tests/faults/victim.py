"""Saves that are killed or interrupted, in processes of their own: python -m tests.faults.victim SCENARIO DIRECTORY.

A scenario forks its victims, so that torch is imported once. It prints what it saw as JSON; what must never be seen
ends it with an exception.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import fastpersist
from fastpersist.memory.buffers import shared_pool
from tests.faults.scene import content, generation_in, renew, without_nameless_files

BLOCK_NBYTES = 65536
VARIANTS = [(engine, named) for engine in ("posix", "io_uring") for named in (False, True)]
GENERATIONS = 250
ATTEMPTS = 100


def kill_myself() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing runs after SIGKILL")


def leftovers(path: Path) -> list[str]:
    """Everything in the directory but the checkpoint."""
    return [name for name in os.listdir(path.parent) if name != path.name]


def save_until_alone(path: Path, generation: int, engine: str) -> None:
    """Save until nothing that a killed process left is there any more: with the first save, or a moment later.

    The kernel winds up the ring of a killed process in its own time, and the temporary file stays locked until then.
    """
    for _ in range(ATTEMPTS):
        fastpersist.save(content(generation), path, engine=engine)
        if not leftovers(path):
            return
        time.sleep(0.02)
    raise AssertionError(f"{leftovers(path)} are still there after {ATTEMPTS} saves")


def next_after(generation: int) -> int:
    return generation % GENERATIONS + 1


def fork(victim: Callable[[], None]) -> int:
    """Run ``victim`` in a child; it ends with status 0, or 1 after an exception."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        victim()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def wait_for_death(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the victim ended before it was killed"


def save_forever(path: Path, engine: str, log: int, generation: int) -> None:
    """Save one generation after the other, and tell the log before and after each."""
    saved = content(generation)
    while True:
        generation = next_after(generation)
        os.write(log, f"begin {generation}\n".encode())
        fastpersist.save(renew(saved, generation), path, engine=engine, block_nbytes=BLOCK_NBYTES)
        os.write(log, f"done {generation}\n".encode())


def killed_at_random(path: Path, rounds: int = 28) -> dict[str, Any]:
    """Kill a saving process at random moments: the file is of the last finished generation, or of the one in work."""
    fastpersist.save(content(1), path)
    generation, seen, left = 1, set(), 0
    for engine, named in itertools.islice(itertools.cycle(VARIANTS), rounds):
        begun, done = _killed_at_some_moment(path, engine, named, generation)
        found = generation_in(path)
        assert found in (begun, done), f"{found} was found, {done} was the last one finished, {begun} was in work"
        left += len(leftovers(path))
        seen.add("begun" if found == begun else "done")
        generation = found
    save_until_alone(path, 1, "posix")
    return {"left": left, "seen": sorted(seen)}


def _killed_at_some_moment(path: Path, engine: str, named: bool, generation: int) -> tuple[int, int]:
    """(last generation begun, last one done) of a process that was killed."""
    source, sink = os.pipe()

    def victim() -> None:
        if named:
            without_nameless_files(pytest.MonkeyPatch())
        save_forever(path, engine, sink, generation)

    child = fork(victim)
    os.close(sink)
    with open(source, "rb") as log:
        first = log.readline()
        time.sleep(random.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        wait_for_death(child)
        lines = (first + log.read()).decode().split()
    steps = list(zip(lines[::2], map(int, lines[1::2]), strict=True))
    begun = [number for step, number in steps if step == "begin"]
    done = [number for step, number in steps if step == "done"]
    return begun[-1], (done or [generation])[-1]


STEPS = ["engine.open", "engine.reserve", "progress", "engine.resize", "engine.sync", "os.link", "os.rename", "os.fsync"]
"""What a save does, in this order."""


def killed_at_each_step(path: Path) -> dict[str, Any]:
    """Kill a save before and after each of its steps: the new file is there from the rename on, the old one until then."""
    fastpersist.save(content(1), path)
    left: dict[str, int] = {}
    for (engine, named), step, after in itertools.product(VARIANTS, STEPS, (False, True)):
        if named and step == "os.link":
            continue  # a file that has a name needs no link
        old = generation_in(path)
        new = next_after(old)
        wait_for_death(fork(lambda: _save_until(path, engine, named, step, after, new)))  # noqa: B023
        published = STEPS.index(step) + after > STEPS.index("os.rename")
        case = f"{engine}, {'named' if named else 'nameless'}, {'after' if after else 'before'} {step}"
        assert generation_in(path) == (new if published else old), case
        left[case] = len(leftovers(path))
        save_until_alone(path, new, engine)
    return left


def killed_while_new(path: Path) -> dict[str, Any]:
    """Kill a save to a new name before and after each of its steps: the complete file is there, or nothing."""
    steps = [step for step in STEPS if step != "os.rename"]  # a name that nobody has needs none
    left: dict[str, int] = {}
    for engine, step, after in itertools.product(("posix", "io_uring"), steps, (False, True)):
        wait_for_death(fork(lambda: _save_until(path, engine, False, step, after, 2)))  # noqa: B023
        case = f"{engine}, {'after' if after else 'before'} {step}"
        published = steps.index(step) + after > steps.index("os.link")
        assert path.exists() == published, case
        left[case] = len(leftovers(path))
        if published:
            assert generation_in(path) == 2, case
            path.unlink()
    return left


def _save_until(path: Path, engine: str, named: bool, step: str, after: bool, generation: int) -> None:
    """Save, and be killed before or after one step."""
    if named:
        without_nameless_files(pytest.MonkeyPatch())
    with fastpersist.open_engine(engine, block_nbytes=BLOCK_NBYTES) as opened:
        owner = opened if step.startswith("engine.") else os
        name = step.partition(".")[2]
        if name:
            setattr(owner, name, _deadly(getattr(owner, name), after))
        calls = itertools.count()

        def progress(done_nbytes: int, total_nbytes: int) -> None:
            if step == "progress" and (done_nbytes == total_nbytes if after else next(calls) == 3):
                kill_myself()

        fastpersist.save(content(generation), path, engine=opened, progress=progress, layout="torch")  # which takes all steps


def _deadly(real: Callable[..., Any], after: bool, skipped: int = 0) -> Callable[..., Any]:
    calls = itertools.count()

    def step(*arguments: Any, **options: Any) -> Any:
        if next(calls) < skipped:
            return real(*arguments, **options)
        if after:
            real(*arguments, **options)
        kill_myself()

    return step


RECYCLING_STEPS = [
    "engine.open", "first os.rename", "first os.fsync", "engine.reserve", "progress", "engine.resize", "engine.sync",
    "last os.rename", "last os.fsync",
]  # fmt: skip
"""What a save over a retired file does, in this order."""


def killed_while_recycling(path: Path) -> dict[str, Any]:
    """Kill a save over a retired file before and after each step: which of the retired and the hidden file are left."""
    fastpersist.save(content(1), path)
    retired = path.parent / "retired.pt"
    left: dict[str, Any] = {}
    for engine, step, after in itertools.product(("posix", "io_uring"), RECYCLING_STEPS, (False, True)):
        fastpersist.save(content(251), retired)
        old = generation_in(path)
        new = next_after(old)
        wait_for_death(fork(lambda: _recycle_until(path, retired, engine, step, after, new)))  # noqa: B023
        published = RECYCLING_STEPS.index(step) + after > RECYCLING_STEPS.index("last os.rename")
        case = f"{engine}, {'after' if after else 'before'} {step}"
        assert generation_in(path) == (new if published else old), case
        assert not retired.exists() or generation_in(retired) == 251, case
        hidden = [name for name in leftovers(path) if name != retired.name]
        left[case] = (retired.exists(), bool(hidden))
        retired.unlink(missing_ok=True)
        save_until_alone(path, new, engine)
    return left


def _recycle_until(path: Path, retired: Path, engine: str, step: str, after: bool, generation: int) -> None:
    """Save over the retired file, and be killed before or after one step."""
    with fastpersist.open_engine(engine, block_nbytes=BLOCK_NBYTES) as opened:
        owner = opened if step.startswith("engine.") else os
        name = step.rpartition(".")[2]
        if step != "progress":
            setattr(owner, name, _deadly(getattr(owner, name), after, skipped=int(step.startswith("last"))))
        calls = itertools.count()

        def progress(done_nbytes: int, total_nbytes: int) -> None:
            if step == "progress" and (done_nbytes == total_nbytes if after else next(calls) == 3):
                kill_myself()

        options = {"engine": opened, "progress": progress, "recycle": retired, "layout": "torch"}  # which takes all steps
        fastpersist.save(content(generation), path, **options)


def opened_while_recycling(path: Path) -> dict[str, Any]:
    """Open the file that is being overwritten: the opener waits for the complete new file, and nobody is killed."""
    fastpersist.save(content(1), path)
    retired = path.parent / "retired.pt"
    fastpersist.save(content(7), retired)
    read: list[int] = []
    readers: list[threading.Thread] = []

    def progress(done_nbytes: int, total_nbytes: int) -> None:
        if readers:
            return
        (hidden,) = [path.parent / name for name in leftovers(path)]
        readers.append(threading.Thread(target=lambda: read.append(_generation_behind(hidden))))
        readers[0].start()
        _wait_for_an_opener(hidden)
        with pytest.raises(BlockingIOError):
            os.open(hidden, os.O_RDONLY | os.O_NONBLOCK)

    fastpersist.save(content(2), path, block_nbytes=BLOCK_NBYTES, progress=progress, recycle=retired)
    readers[0].join()
    assert generation_in(path) == 2
    assert leftovers(path) == []
    return {"read": read}


def _generation_behind(path: Path) -> int:
    """The generation in the file, opened once, whatever its name is then."""
    with path.open("rb") as source:
        return int(torch.load(source)["generation"])


def _wait_for_an_opener(path: Path) -> None:
    """Until the kernel holds somebody in an open: the lease that this process has on the file is then to be given up."""
    (own,) = [int(fileno) for fileno in os.listdir("/proc/self/fd") if _leads_to(fileno, path)]
    for _ in range(ATTEMPTS * 100):
        if fcntl.fcntl(own, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
            return
        time.sleep(0.002)
    raise AssertionError("nobody waits")


def _leads_to(fileno: str, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the one that listed the directory is gone again
        return os.readlink(f"/proc/self/fd/{fileno}") == str(path)
    return False


def interrupted_at_random(path: Path, rounds: int = 60) -> dict[str, Any]:
    """Press Ctrl-C at random moments of a save: nothing hangs, and each file is an old or a new one."""
    saved = content(1)
    fastpersist.save(saved, path)
    interrupts = 0
    for (engine, _), number in zip(itertools.cycle(VARIANTS), range(rounds), strict=False):
        old = generation_in(path)
        new = next_after(old)
        interrupted = _save_interrupted(renew(saved, new), path, engine, delay_seconds=random.uniform(0.0, 0.012))
        found = generation_in(path)
        assert found == new or (interrupted and found == old), f"round {number}: {found} of {old} and {new}"
        assert shared_pool().lent_nbytes == 0
        interrupts += interrupted
    fastpersist.save(saved, path)
    assert leftovers(path) == []
    return {"interrupts": interrupts}


def _save_interrupted(saved: dict[str, Any], path: Path, engine: str, *, delay_seconds: float) -> bool:
    """Whether a save was interrupted by a signal that came after a delay."""
    main_thread = threading.get_ident()
    with _interrupts_while_armed() as armed:
        timer = threading.Timer(delay_seconds, lambda: signal.pthread_kill(main_thread, signal.SIGINT))
        timer.start()
        try:
            armed.append(True)
            fastpersist.save(saved, path, engine=engine, block_nbytes=BLOCK_NBYTES)
            armed.clear()
        except KeyboardInterrupt:
            return True
        finally:
            timer.join()
    return False


@contextlib.contextmanager
def _interrupts_while_armed() -> Iterator[list[bool]]:
    """SIGINT raises KeyboardInterrupt once, while the list is not empty: a late one must not end the scenario itself."""
    armed: list[bool] = []

    def handle(*_: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield armed
    finally:
        signal.signal(signal.SIGINT, before)


SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "killed_at_random": killed_at_random,
    "killed_at_each_step": killed_at_each_step,
    "killed_while_new": killed_while_new,
    "killed_while_recycling": killed_while_recycling,
    "opened_while_recycling": opened_while_recycling,
    "interrupted_at_random": interrupted_at_random,
}


if __name__ == "__main__":
    torch.set_num_threads(1)  # a process that forks should have no other threads
    print(json.dumps(SCENARIOS[sys.argv[1]](Path(sys.argv[2]) / "checkpoint.pt")))
