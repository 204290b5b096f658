"""Ctrl-C at every moment of a save: nothing hangs, no memory is in use afterwards, and the file is an old or a new one."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import EngineStateError
from fastpersist.engines import Engine, Request, _libc
from fastpersist.memory.buffers import shared_pool
from tests.faults.scene import Scene, content, generation_in, renew, without_nameless_files

ENGINES = ("posix", "io_uring")
BLOCK_NBYTES = 65536

# A hang is what these tests look for: it must end the test, and not the run.
pytestmark = pytest.mark.timeout(180)

Place = tuple[str, str, int, str]
"""(event, file, line, function): somewhere Python may run a signal's handler."""


class Profiler:
    """Python handles signals when a function begins and when a C function has returned: just where profilers are called.

    Lists these places, as far as they lie in the package or in the context managers that it uses, and raises
    KeyboardInterrupt the first time that the run comes by the one that is given.
    """

    def __init__(self, interrupt_at: Place | None = None) -> None:
        self.places: dict[Place, None] = {}
        self._interrupt_at = interrupt_at

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "c_return") or not (path.name == "contextlib.py" or "fastpersist" in path.parent.parts):
            return
        place = (event, path.name, frame.f_lineno, frame.f_code.co_name)
        if place == self._interrupt_at and place not in self.places:
            self.places[place] = None
            raise KeyboardInterrupt
        self.places[place] = None

    def run(self, function: Callable[[], object]) -> bool:
        """Whether the run was interrupted."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(before)
        return False


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "named"), [("posix", True), ("io_uring", False)])
# An interrupt in a finalizer or a weak reference's callback cannot be raised: Python reports it, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_wherever_python_handles_signals(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, engine: str, named: bool
) -> None:
    gc.collect()  # tracebacks of earlier tests hold buffers, which would then count as lent for longer than here
    if named:
        without_nameless_files(monkeypatch)
    saved = content(1)

    def save() -> None:
        fastpersist.save(saved, scene.path, engine=engine, block_nbytes=BLOCK_NBYTES)

    survey = Profiler()
    survey.run(save)
    assert len(survey.places) > 100
    interrupts, generation = 0, 1
    left: dict[str, Place] = {}
    for place in survey.places:
        new = generation % 250 + 1
        renew(saved, new)
        interrupts += Profiler(place).run(save)
        found = generation_in(scene.path)
        assert found in (generation, new), place
        assert shared_pool().lent_nbytes == 0, place
        for name in set(os.listdir(scene.directory)) - {scene.path.name}:
            left.setdefault(name, place)
        generation = found
    assert interrupts > 100
    save()
    assert {name: left.get(name) for name in os.listdir(scene.directory)} == {scene.path.name: None}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_of_a_small_save_wherever_python_handles_signals(scene: Scene, engine: str) -> None:
    gc.collect()
    state = {"value": torch.zeros(5000)}

    def save() -> None:
        fastpersist.save(state, scene.path, engine=engine)

    save()
    survey = Profiler()
    survey.run(save)
    assert {"write_small", "_begin", "_add_storage", "_finish"} <= {place[3] for place in survey.places}
    interrupts, saved = 0, 0.0
    for value, place in enumerate(survey.places, start=1):
        state["value"].fill_(value)
        interrupts += Profiler(place).run(save)
        found = torch.load(scene.path)["value"]
        assert torch.equal(found, torch.full((5000,), float(value))) or torch.equal(found, torch.full((5000,), saved)), place
        saved = float(found[0])
        assert gc.isenabled(), place
        assert shared_pool().lent_nbytes == 0, place
    assert interrupts > 100
    save()
    assert os.listdir(scene.directory) == [scene.path.name]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_of_a_load_wherever_python_handles_signals(scene: Scene, engine: str, weights_only: bool) -> None:
    gc.collect()
    saved = [torch.full((300_000,), float(index)) for index in range(4)]
    fastpersist.save(saved, scene.path)

    def load() -> None:
        loaded = fastpersist.load(
            scene.path, engine=engine, weights_only=weights_only, block_nbytes=BLOCK_NBYTES, queue_depth=4
        )
        assert all(torch.equal(found, expected) for found, expected in zip(loaded, saved, strict=True))

    survey = Profiler()
    survey.run(load)
    assert {"_look_at_next_region", "_fill_queue", "_wait", "take"} <= {place[3] for place in survey.places}
    interrupts = 0
    for place in survey.places:
        interrupts += Profiler(place).run(load)
        assert gc.isenabled(), place
        assert shared_pool().lent_nbytes == 0, place
        assert "fastpersist-populate" not in [thread.name for thread in threading.enumerate()], place
    assert interrupts > 200
    load()


@pytest.mark.slow
def test_a_signal_at_a_random_moment(run_victim: Callable[[str], dict[str, Any]]) -> None:
    assert run_victim("interrupted_at_random")["interrupts"] > 5


class Interrupting:
    """Replaces a hook of an engine: the N-th call raises KeyboardInterrupt, before or after the real one.

    Python runs a signal's handler between any two instructions, so these are the two ends of what may happen.
    """

    def __init__(self, engine: Engine, hook: str, failing: int, *, after: bool) -> None:
        self._real: Callable[..., Any] = getattr(engine, hook)
        self._failing = failing
        self._after = after
        self._calls = 0
        setattr(engine, hook, self)

    def __call__(self, *arguments: Any) -> Any:
        self._calls += 1
        if self._calls != self._failing:
            return self._real(*arguments)
        if self._after:
            self._real(*arguments)
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("hook", ["_start", "_hand_over", "_collect"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("failing", [1, 2, 7])
def test_an_interrupt_inside_a_hook(scene: Scene, name: str, hook: str, after: bool, failing: int) -> None:
    descriptors = os.listdir("/proc/self/fd")
    with fastpersist.open_engine(name, block_nbytes=BLOCK_NBYTES, queue_depth=4) as engine:
        Interrupting(engine, hook, failing, after=after)
        with pytest.raises(KeyboardInterrupt):
            fastpersist.save(content(2), scene.path, engine=engine)
        assert engine.in_flight == 0
        scene.assert_holds(1)
        with scene.unharmed(), pytest.raises(EngineStateError, match=r"interrupted.*close it and open a new one"):
            fastpersist.save(content(2), scene.path, engine=engine)
    assert os.listdir("/proc/self/fd") == descriptors
    fastpersist.save(content(3), scene.path, engine=name)
    scene.assert_holds(3)


@pytest.mark.parametrize("hook", ["_start", "_hand_over", "_collect"])
@pytest.mark.parametrize("after", [False, True])
def test_no_write_outlives_an_interrupted_save(scene: Scene, monkeypatch: pytest.MonkeyPatch, hook: str, after: bool) -> None:
    # Slow writes: when the save returns, those in flight would still be using its memory, were they not waited for.
    real, begun, ended = _libc.pwrite, [], []

    def slow(fileno: int, address: int, nbytes: int, file_offset: int) -> int:
        begun.append(file_offset)
        time.sleep(0.02)
        written = real(fileno, address, nbytes, file_offset)
        ended.append(written)
        return written

    monkeypatch.setattr(_libc, "pwrite", slow)
    with fastpersist.open_engine("posix", block_nbytes=BLOCK_NBYTES, queue_depth=4) as engine:
        Interrupting(engine, hook, 3, after=after)
        with pytest.raises(KeyboardInterrupt):
            fastpersist.save(content(2), scene.path, engine=engine)
        assert begun
        assert len(begun) == len(ended)
        assert all(written > 0 for written in ended)  # none was overtaken by the closing of its file
        scene.assert_holds(1)
        finished = len(begun)
    assert len(begun) == finished


def test_no_write_of_a_ring_outlives_an_interrupted_save(scene: Scene) -> None:
    for hook, after in (("_start", True), ("_hand_over", False), ("_hand_over", True), ("_collect", False), ("_collect", True)):
        with fastpersist.open_engine("io_uring", block_nbytes=BLOCK_NBYTES, queue_depth=4) as engine:
            Interrupting(engine, hook, 3, after=after)
            with pytest.raises(KeyboardInterrupt):
                fastpersist.save(content(2), scene.path, engine=engine)
            assert engine._ring.inside_kernel == 0  # type: ignore[attr-defined]
            scene.assert_holds(1)


def test_a_request_that_raises_inside_its_hook(scene: Scene) -> None:
    # Not an interrupt but a defect of an engine: the same care, for it may have begun the transfer.
    with fastpersist.open_engine("posix", block_nbytes=BLOCK_NBYTES) as engine:
        real = engine._start

        def defective(ticket: int, request: Request) -> None:
            real(ticket, request)
            if ticket == 3:
                raise ZeroDivisionError

        engine._start = defective  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            fastpersist.save(content(2), scene.path, engine=engine)
        scene.assert_holds(1)
