"""What a failed save must leave behind: exactly what it found."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.engines import Engine
from fastpersist.memory.buffers import shared_pool
from fastpersist.transfer import temporary

temporary.LOOK_AGAIN_SECONDS = 0.0  # victims are killed more often than once a minute

LARGE_NBYTES = (400_001, 524_288, 300_000)  # from 256 KiB on they are written from where they lie
SMALL_COUNT = 12


def content(generation: int) -> dict[str, Any]:
    """Large and small tensors, each of which tells in every element which generation (0..250) it belongs to."""
    large = {f"large{index}": torch.empty(nbytes, dtype=torch.uint8) for index, nbytes in enumerate(LARGE_NBYTES)}
    small = {f"small{index}": torch.empty(37 + index) for index in range(SMALL_COUNT)}
    return renew({"empty": torch.zeros(0), **large, **small}, generation)


def renew(saved: dict[str, Any], generation: int) -> dict[str, Any]:
    """Turn a content into that of another generation, in the same memory: its file is then cut at the same places."""
    for value in saved.values():
        if isinstance(value, torch.Tensor):
            value.fill_(generation)
    saved["generation"] = generation
    return saved


def generation_in(path: Path) -> int:
    """The generation that the file holds. Raises AssertionError unless every record is complete and of that one."""
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    found = torch.load(path)
    assert_same(found, content(found["generation"]))
    return int(found["generation"])


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal keys, and equal values bit for bit."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


def without_nameless_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every filesystem be one without O_TMPFILE."""
    real = Engine.open

    def open_named(self: Engine, path: str, mode: str, **options: Any) -> Any:
        if mode == "tmpfile":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(self, path, mode, **options)

    monkeypatch.setattr(Engine, "open", open_named)


@dataclass(frozen=True)
class State:
    """All that a save may change beside its target: files, descriptors, buffers, threads."""

    files: dict[str, bytes | str]
    descriptors: dict[str, str]
    lent_nbytes: int
    threads: list[str]


def state_of(directory: Path) -> State:
    """The state now. Files that are not regular are described and not opened: a FIFO would block."""
    return State(
        {entry.name: _describe(entry) for entry in directory.iterdir()},
        dict(_descriptors()),
        shared_pool().lent_nbytes,
        sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("fastpersist")),
    )


def _describe(entry: Path) -> bytes | str:
    status = entry.lstat()
    if stat.S_ISREG(status.st_mode):
        return entry.read_bytes()
    target = os.readlink(entry) if stat.S_ISLNK(status.st_mode) else ""
    return f"{stat.filemode(status.st_mode)} {status.st_rdev} {target}"


def _descriptors() -> Iterator[tuple[str, str]]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that listed the directory is gone again
            yield name, os.readlink(f"/proc/self/fd/{name}")


class Scene:
    """A directory with a good checkpoint in it, of generation 1."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "checkpoint.pt"
        fastpersist.save(content(1), self.path, engine="posix")

    @contextlib.contextmanager
    def unharmed(self, note: str = "") -> Iterator[None]:
        """The block must leave the directory, the descriptors, the pool and the threads as it found them."""
        before = state_of(self.directory)
        yield
        after = state_of(self.directory)
        assert sorted(after.files) == sorted(before.files), note
        changed = [name for name in before.files if after.files[name] != before.files[name]]
        assert not changed, f"{note}: {changed} changed"
        assert after.descriptors == before.descriptors, note
        assert after.lent_nbytes == 0, note
        assert after.threads == before.threads, note

    def assert_holds(self, generation: int, note: str = "") -> None:
        """The checkpoint is complete, of that generation, and alone in its directory."""
        assert generation_in(self.path) == generation, note
        assert os.listdir(self.directory) == [self.path.name], note
        assert shared_pool().lent_nbytes == 0, note
