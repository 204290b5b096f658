"""A stateful model: whatever is saved, by any engine and with any sizes, the last good save is what the path holds."""

from __future__ import annotations

import contextlib
import errno
import io
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

import fastpersist
from fastpersist.engines import engine_class, open_engine
from fastpersist.engines.memory import MemoryEngine
from fastpersist.memory.buffers import shared_pool
from fastpersist.testing import Fault, FaultyEngine

ENGINES = [name for name in ("posix", "io_uring") if engine_class(name).availability().usable]
tensors = st.lists(
    st.builds(
        lambda nbytes, offset: torch.randint(0, 256, (nbytes + 64,), dtype=torch.uint8)[offset : offset + nbytes].clone(),
        st.one_of(st.integers(0, 2000), st.integers(250_000, 300_000), st.sampled_from([4096, 262144, 1 << 20])),
        st.integers(0, 64),
    ),
    max_size=6,
)
blocks = st.sampled_from([4096, 8192, 65536, 1 << 20])
depths = st.integers(1, 9)
layouts = st.sampled_from(["auto", "torch"])
faults = st.dictionaries(
    st.integers(1, 30),
    st.one_of(
        st.builds(Fault.short, st.integers(1, 70_000)), st.builds(Fault.error, st.sampled_from([errno.EINTR, errno.EAGAIN]))
    ),
    max_size=8,
)


class SavesToOnePath(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir="."))
        self.path = self.directory / "model.pt"
        self.expected: list[torch.Tensor] | None = None

    def teardown(self) -> None:
        shutil.rmtree(self.directory)

    @rule(state=tensors, engine=st.sampled_from(ENGINES), block=blocks, depth=depths, layout=layouts, checksum=st.booleans())
    def save(self, state: list[torch.Tensor], engine: str, block: int, depth: int, layout: str, checksum: bool) -> None:
        fastpersist.save(
            state,
            self.path,
            engine=engine,
            block_nbytes=block,
            queue_depth=depth,
            layout=layout,
            checksum=checksum,
            durable=False,
        )
        self.expected = state

    @rule(state=tensors, engine=st.sampled_from(ENGINES), block=blocks, depth=depths, faults=faults)
    def save_against_resistance(
        self, state: list[torch.Tensor], engine: str, block: int, depth: int, faults: dict[int, Fault]
    ) -> None:
        with FaultyEngine(open_engine(engine, queue_depth=depth), faults) as faulty:
            fastpersist.save(state, self.path, engine=faulty, block_nbytes=block, durable=False)
        self.expected = state

    @rule(state=tensors, engine=st.sampled_from(ENGINES), block=blocks, failing=st.integers(1, 5))
    def fail(self, state: list[torch.Tensor], engine: str, block: int, failing: int) -> None:
        with FaultyEngine(open_engine(engine), {failing: Fault.error(errno.ENOSPC)}) as faulty:
            outcome = (
                contextlib.nullcontext() if failing > _count_writes(state, block) else pytest.raises(OSError, match="No space")
            )
            with outcome:
                fastpersist.save(state, self.path, engine=faulty, block_nbytes=block, durable=False)
        if failing > _count_writes(state, block):
            self.expected = state

    @rule(state=tensors, block=blocks, depth=depths, layout=layouts)
    def save_to_memory(self, state: list[torch.Tensor], block: int, depth: int, layout: str) -> None:
        with MemoryEngine(queue_depth=depth) as engine:
            fastpersist.save(state, self.path, engine=engine, block_nbytes=block, layout=layout)
            content = engine.contents(str(self.path.resolve()))
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert archive.testzip() is None
        _compare(torch.load(io.BytesIO(content)), state)

    @invariant()
    def the_path_holds_the_last_good_save_and_nothing_else_is_left(self) -> None:
        assert [entry.name for entry in self.directory.iterdir()] == ([] if self.expected is None else ["model.pt"])
        assert shared_pool().lent_nbytes == 0
        if self.expected is not None:
            _compare(torch.load(self.path), self.expected)


def _count_writes(state: list[torch.Tensor], block: int) -> int:
    with FaultyEngine(open_engine("null"), {}) as counting:
        fastpersist.save(state, "model.pt", engine=counting, block_nbytes=block)
    return counting.submitted


def _compare(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_saves_to_one_path() -> None:
    run_state_machine_as_test(
        SavesToOnePath,
        settings=settings(
            max_examples=25,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
