"""What cannot be saved is refused with an error that names the thing and the remedy, and leaves all as it was."""

from __future__ import annotations

import io
import os
import pickle
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist import AlignmentError, EngineStateError
from fastpersist.archive.pickling import FlatObject, flatten
from fastpersist.engines import MAX_TRANSFER_NBYTES, engine_class
from tests.faults.scene import Scene, assert_same, content, generation_in
from tests.mounting import Mounts

ENGINES = ("posix", "io_uring")


class Unreducible:
    """Pickling it fails in its own code, as a class with a broken __reduce__ does."""

    def __reduce__(self) -> str:
        raise ConnectionError("the handle of this object is gone")


def as_two_dtypes() -> dict[str, torch.Tensor]:
    """One storage under two dtypes, which the format cannot express."""
    tensor = torch.zeros(1000)
    return {"float": tensor, "int": tensor.view(torch.int32)}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: lambda: None, (AttributeError, pickle.PicklingError), "lambda"),
        (lambda: (number for number in ()), TypeError, "generator"),
        (Unreducible, ConnectionError, "the handle of this object is gone"),
        (as_two_dtypes, RuntimeError, "view the same data as different types"),
        (lambda: torch.empty(10, device="meta").untyped_storage(), ValueError, "'meta': it has no data .save tensors on"),
    ],
    ids=["lambda", "generator", "reduce raises", "two dtypes", "meta storage"],
)
@pytest.mark.parametrize("engine", [*ENGINES, "null"])
def test_an_object_that_cannot_be_pickled(
    scene: Scene, engine: str, make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    # The tensors before it are met first: nothing of them may be on disk by the time the pickling fails.
    with scene.unharmed(), pytest.raises(error, match=message):
        fastpersist.save({**content(2), "bad": make()}, scene.path, engine=engine)


def test_a_pickle_that_fails_creates_no_file_at_all(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    engine = fastpersist.open_engine("posix")
    monkeypatch.setattr(engine, "open", lambda path, *_, **__: opened.append(path))
    with engine, pytest.raises(ConnectionError):
        fastpersist.save(Unreducible(), scene.path, engine=engine)
    assert opened == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_directory(scene: Scene, engine: str) -> None:
    missing = scene.directory / "missing"
    with scene.unharmed(), pytest.raises(FileNotFoundError, match="the directory does not exist: create it first") as caught:
        fastpersist.save(content(2), missing / "checkpoint.pt", engine=engine)
    assert caught.value.filename == str(missing)


def test_a_file_in_the_place_of_the_directory(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(NotADirectoryError, match="parent is no directory") as caught:
        fastpersist.save(content(2), scene.path / "checkpoint.pt")
    assert caught.value.filename == str(scene.path)


def assert_refused_by_directory(directory: Path, engine: str) -> None:
    """A save to an old and to a new name fails, and names the directory and what it must be."""
    for name in ("checkpoint.pt", "new.pt"):
        with pytest.raises(OSError, match=r"in the target's directory .*: it must be writable") as caught:
            fastpersist.save(content(2), directory / name, engine=engine)
        assert caught.value.filename == str(directory)


@pytest.mark.mounts
@pytest.mark.parametrize("engine", ENGINES)
def test_a_filesystem_mounted_read_only(mounts: Mounts, engine: str) -> None:
    mounted = mounts.tmpfs()
    scene = Scene(mounted.root)
    mounts.remount(mounted, "ro")
    with scene.unharmed():
        assert_refused_by_directory(scene.directory, engine)


@pytest.fixture
def unwritable(scene: Scene) -> Iterator[Scene]:
    """A directory in which this process may not create files: by its mode, or for root by its immutable flag."""
    if os.geteuid() != 0:
        scene.directory.chmod(0o555)
        yield scene
        scene.directory.chmod(0o755)
        return
    done = subprocess.run(["chattr", "+i", scene.directory], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"root writes to any directory, and none can be made immutable here: {done.stderr.strip()}")
    yield scene
    subprocess.run(["chattr", "-i", scene.directory], check=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_directory_without_permission(unwritable: Scene, engine: str) -> None:
    with unwritable.unharmed(), pytest.raises(PermissionError, match="it must be writable"):
        fastpersist.save(content(2), unwritable.path, engine=engine)
    with unwritable.unharmed():
        assert_refused_by_directory(unwritable.directory, engine)


@pytest.mark.parametrize("suffix", ["", "/", "/new/", "/checkpoint.pt/", "/."])
def test_a_directory_as_path(scene: Scene, suffix: str) -> None:
    path = f"{scene.directory}{suffix}"
    with scene.unharmed(), pytest.raises(IsADirectoryError, match="give the checkpoint a file name in it") as caught:
        fastpersist.save(content(2), path)
    assert caught.value.filename == path


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("", ValueError, "the path is empty"),
        (b"", ValueError, "the path is empty"),
        ("a\0b", ValueError, "null"),
        (None, TypeError, "NoneType"),
        (7, TypeError, "int"),
        (io.BytesIO(), TypeError, r"BytesIO.*use torch\.save"),
    ],
    ids=["empty", "empty bytes", "null character", "None", "descriptor", "file-like object"],
)
def test_what_is_no_path(scene: Scene, path: Any, error: type[Exception], message: str) -> None:
    with scene.unharmed(), pytest.raises(error, match=message):
        fastpersist.save(content(2), path)


def test_an_open_file_as_path(scene: Scene) -> None:
    with scene.path.open("r+b") as file, scene.unharmed(), pytest.raises(TypeError, match=r"BufferedRandom.*use torch\.save"):
        fastpersist.save(content(2), file)  # type: ignore[arg-type]


def test_a_name_that_is_too_long(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(OSError, match="File name too long"):
        fastpersist.save(content(2), scene.directory / ("n" * 256))


def test_the_longest_name_is_no_bad_input(scene: Scene) -> None:
    path = scene.directory / ("n" * 255)
    fastpersist.save(content(2), path)
    assert generation_in(path) == 2


def test_a_loop_of_symlinks(scene: Scene) -> None:
    path = scene.directory / "loop.pt"
    path.symlink_to(path.name)
    with scene.unharmed(), pytest.raises(OSError, match="Too many levels of symbolic links"):
        fastpersist.save(content(2), path)


def test_a_fifo_as_path(scene: Scene) -> None:
    path = scene.directory / "pipe"
    os.mkfifo(path)
    with scene.unharmed(), pytest.raises(ValueError, match=r"pipe exists and is no regular file .*: .* give another path"):
        fastpersist.save(content(2), path)


def test_a_socket_as_path(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(scene.directory)  # the whole path would be too long for a socket's address
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        with scene.unharmed(), pytest.raises(ValueError, match="socket exists and is no regular file"):
            fastpersist.save(content(2), "socket")


@pytest.mark.parametrize("linked", [False, True])
def test_a_device_as_path(scene: Scene, linked: bool) -> None:
    before = os.stat("/dev/null")
    path = Path("/dev/null")
    if linked:
        path = scene.directory / "link.pt"
        path.symlink_to("/dev/null")
    with scene.unharmed(), pytest.raises(ValueError, match=f"{path} exists and is no regular file"):
        fastpersist.save(content(2), path)
    assert os.stat("/dev/null").st_ino == before.st_ino


@pytest.mark.parametrize("protocol", [0, 1, 4, 5, "2", None])
def test_a_pickle_protocol_that_torch_refuses(scene: Scene, protocol: Any) -> None:
    with scene.unharmed(), pytest.raises(ValueError, match=r"pickle_protocol must be 2 or 3, not .*torch\.load"):
        fastpersist.save(content(2), scene.path, pickle_protocol=protocol)


@pytest.mark.parametrize("block_nbytes", [-4096, 0, 1, 512, 4095, 6144, (1 << 20) + 512])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_block_that_is_no_multiple_of_the_alignment(scene: Scene, engine: str, block_nbytes: int) -> None:
    message = f"block_nbytes must be a positive multiple of 4096, not {block_nbytes}"
    with scene.unharmed(), pytest.raises(AlignmentError, match=message):
        fastpersist.save(content(2), scene.path, block_nbytes=block_nbytes, engine=engine)


def test_a_block_that_no_transfer_can_move(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(ValueError, match=f"block_nbytes must be at most {MAX_TRANSFER_NBYTES}"):
        fastpersist.save(content(2), scene.path, block_nbytes=1 << 31)


@pytest.mark.parametrize("engine", [*ENGINES, "null"])
@pytest.mark.parametrize("queue_depth", [0, -1, 1025])
def test_a_queue_depth_out_of_range(scene: Scene, engine: str, queue_depth: int) -> None:
    with scene.unharmed(), pytest.raises(ValueError, match=f"queue_depth must .*1.*not {queue_depth}"):
        fastpersist.save(content(2), scene.path, queue_depth=queue_depth, engine=engine)


@pytest.mark.parametrize("option", ["block_nbytes", "queue_depth"])
@pytest.mark.parametrize("value", ["8M", "3", 2.5, 8192.0])
def test_a_number_that_is_none(scene: Scene, option: str, value: Any) -> None:
    options: dict[str, Any] = {option: value}
    with scene.unharmed(), pytest.raises((TypeError, ValueError), match=option):
        fastpersist.save(content(2), scene.path, **options)


def test_a_queue_deeper_than_that_of_the_open_engine(scene: Scene) -> None:
    message = "queue_depth=3 exceeds the 2 that the engine was opened with"
    with fastpersist.open_engine("posix", queue_depth=2) as engine, scene.unharmed(), pytest.raises(ValueError, match=message):
        fastpersist.save(content(2), scene.path, queue_depth=3, engine=engine)


def test_an_unknown_engine_lists_the_known_ones(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(ValueError, match="unknown engine 'warp'") as caught:
        fastpersist.save(content(2), scene.path, engine="warp")
    for name in fastpersist.available():
        assert repr(name) in str(caught.value)


def test_the_memory_engine_by_name(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(ValueError, match=r"open_engine\('memory'\).*contents"):
        fastpersist.save(content(2), scene.path, engine="memory")


def test_what_is_no_engine(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(TypeError, match="a name or an open engine, not int"):
        fastpersist.save(content(2), scene.path, engine=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ENGINES)
def test_a_closed_engine(scene: Scene, name: str) -> None:
    engine = fastpersist.open_engine(name)
    engine.close()
    with scene.unharmed(), pytest.raises(EngineStateError, match="is closed"):
        fastpersist.save(content(2), scene.path, engine=engine)


def test_an_engine_that_cannot_run_here(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("fastpersist.engines._liburing.Ring", refuse)
    with scene.unharmed(), pytest.raises(fastpersist.EngineUnavailableError, match=r"EPERM.*Remedy: .*engine='posix'"):
        fastpersist.save(content(2), scene.path, engine="io_uring")


def test_an_unknown_layout(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(ValueError, match="unknown layout 'tight': use one of 'auto', 'torch'"):
        fastpersist.save(content(2), scene.path, layout="tight")


@pytest.mark.parametrize(
    ("variable", "value", "error", "message"),
    [
        ("FASTPERSIST_BLOCK_NBYTES", "8M", ValueError, "FASTPERSIST_BLOCK_NBYTES must be a whole number, not '8M'"),
        ("FASTPERSIST_BLOCK_NBYTES", "4095", AlignmentError, "BLOCK_NBYTES must be a positive multiple of 4096, not 4095"),
        ("FASTPERSIST_BLOCK_NBYTES", "0", AlignmentError, "BLOCK_NBYTES must be a positive multiple of 4096, not 0"),
        ("FASTPERSIST_QUEUE_DEPTH", "many", ValueError, "FASTPERSIST_QUEUE_DEPTH must be a whole number, not 'many'"),
        ("FASTPERSIST_QUEUE_DEPTH", "0", ValueError, "QUEUE_DEPTH must be at least 1"),
        ("FASTPERSIST_ENGINE", "warp", ValueError, "unknown engine 'warp'"),
        ("FASTPERSIST_ENGINE", "memory", ValueError, "open_engine"),
    ],
)
def test_an_environment_variable_that_cannot_work(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: type[Exception], message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with scene.unharmed(), pytest.raises(error, match=f"(?i){message}"):
        fastpersist.save(content(2), scene.path)


class FakeDevice:
    """Makes every storage count as one on a device, whose copies to the host fail from the N-th on (0: never)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
        self.failing = failing
        self.copies = 0
        monkeypatch.setattr("fastpersist.checkpoint.flatten", self.flatten)
        monkeypatch.setattr("fastpersist.transfer.saving.copy_from_device", self.copy)

    def flatten(self, obj: object, protocol: int) -> FlatObject:
        flat = flatten(obj, protocol)
        return replace(flat, addresses=[0] * len(flat.storages))

    def copy(self, storage: torch.UntypedStorage, start: int, target: memoryview) -> None:
        self.copies += 1
        if self.copies == self.failing:
            raise RuntimeError("device error: an illegal memory access was encountered")
        source = torch.empty(0, dtype=torch.uint8).set_(storage)
        torch.frombuffer(target, dtype=torch.uint8).copy_(source[start : start + len(target)])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_a_device_whose_copies_work(scene: Scene, monkeypatch: pytest.MonkeyPatch, engine: str, layout: str) -> None:
    # Without this one the next would pass for any device that is not used at all.
    device = FakeDevice(monkeypatch, failing=0)
    report = fastpersist.save(content(2), scene.path, engine=engine, layout=layout, block_nbytes=65536)
    assert device.copies > len(content(2)) - 2
    assert report.copied_nbytes == report.nbytes
    assert_same(torch.load(scene.path), content(2))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_device_whose_copy_fails(scene: Scene, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    device = FakeDevice(monkeypatch, failing=0)
    fastpersist.save(content(1), scene.path, engine=engine, block_nbytes=65536)
    copies = device.copies
    for failing in range(1, copies + 1):
        device.failing, device.copies = failing, 0
        with scene.unharmed(f"copy {failing} of {copies}"), pytest.raises(RuntimeError, match="illegal memory access"):
            fastpersist.save(content(2), scene.path, engine=engine, block_nbytes=65536)


def test_an_old_file_behind_a_symlink_is_left_alone(scene: Scene) -> None:
    link = scene.directory / "link.pt"
    link.symlink_to(scene.path.name)
    with scene.unharmed(), pytest.raises(ConnectionError):
        fastpersist.save(Unreducible(), link)


def test_a_progress_that_is_no_function_of_two_numbers(scene: Scene) -> None:
    with scene.unharmed(), pytest.raises(TypeError):
        fastpersist.save(content(2), scene.path, progress=lambda: None)  # type: ignore[arg-type, misc]


def test_every_engine_that_is_tested_here_exists() -> None:
    assert [engine_class(name).name for name in ENGINES] == list(ENGINES)
