"""For all tests: neither profiles that a developer has saved nor the kind of disk may change what is tested."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from fastpersist.transfer import temporary
from tests import gated


@pytest.fixture(scope="session", autouse=True)
def cache_directory_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point XDG_CACHE_HOME to an empty directory, for child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def zero_copy_on_every_disk() -> Iterator[None]:
    """Tensors are written from where they lie unless a test says otherwise, in child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTPERSIST_ZERO_COPY", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def abandoned_files_are_looked_for_each_time() -> Iterator[None]:
    """Not once a minute; child processes of the fault tests do so by themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(temporary, "LOOK_AGAIN_SECONDS", 0.0)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: the tensors are tiny, and its threads spin where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[gated.Gate]:
    """The gate of engine "gated", which exists within the test; it is opened at the end."""
    gate = gated.install(monkeypatch)
    yield gate
    gate.open()
    gated.wait_until_idle()


@pytest.fixture
def nothing_left(gate: gated.Gate) -> Iterator[None]:
    """The test must leave no background save, no failure unheard of, no memory lent."""
    older = threading.enumerate()  # tests of interrupts leave some
    gated.assert_nothing_left(older)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's threads spin where the machine is busy
    yield
    torch.set_num_threads(before)
    gate.open()
    gated.assert_nothing_left(older)
