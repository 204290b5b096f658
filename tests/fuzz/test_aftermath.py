"""What a bad file leaves behind: nothing that a later call could stumble over."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch

import fastpersist
from tests.fuzz.forge import checkpoint, good_checkpoint, name, program
from tests.fuzz.test_pickles import HUGE, sparse, state, with_indices

BROKEN = {
    "refused": checkpoint(program(name("os.system"))),
    "refused after a bad sparse tensor": with_indices(program(b"]" + sparse(10) + b"aQ"), 0, HUGE),
    "broken after a bad sparse tensor": with_indices(program(b"]" + sparse(10) + b"at"), 0, HUGE),
    "cut off": good_checkpoint()[:-30],
}


@pytest.fixture(params=BROKEN)
def broken(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file that no verb accepts."""
    path = tmp_path / "broken.pt"
    path.write_bytes(BROKEN[request.param])
    return path


def meet(path: Path) -> None:
    """Load and inspect, and see the first fail at least."""
    with pytest.raises(Exception, match=r"."):
        fastpersist.load(path)
    with contextlib.suppress(fastpersist.CheckpointFormatError):
        fastpersist.inspect(path)


def test_torch_keeps_no_tensor_to_validate(broken: Path) -> None:
    meet(broken)
    # They would be held in memory for ever, and fail the next load of a good file where invariants are checked.
    assert torch._utils._sparse_tensors_to_validate == []


def test_torch_keeps_no_map_location(broken: Path) -> None:
    meet(broken)
    assert getattr(torch.serialization._serialization_tls, "map_location", None) is None


def test_no_descriptor_stays_open(broken: Path) -> None:
    meet(broken)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        meet(broken)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_bad_sparse_tensor_is_a_format_error_where_invariants_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "sparse.pt"
    path.write_bytes(with_indices(state(sparse(10)), 0, HUGE))
    with torch.sparse.check_sparse_tensor_invariants():
        for verb in (fastpersist.load, fastpersist.inspect):
            with pytest.raises(fastpersist.CheckpointFormatError, match=r"sparse\.pt"):
                verb(path)
