"""The options of fastpersist.load: those of torch.load do what they do there, and ours what they promise."""

from __future__ import annotations

import collections
import errno
import io
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_describe import describe, storages_of, tensors_of
from compat_zoo import Settings, Tagged, make, randoms
from torch._subclasses.fake_tensor import FakeTensorMode

import fastpersist
from fastpersist import AlignmentError, CheckpointFormatError, CorruptCheckpointError
from fastpersist.engines import Engine, _libc
from fastpersist.transfer.reader import RecordReader
from tests.archives import flip, places_of, rewrite, tagged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

LARGE_NUMEL = 300_001  # as float32 over 1 MiB: from there on a storage gets pages of its own


@pytest.fixture
def state() -> dict[str, Any]:
    """Large and small tensors, two of which share a storage."""
    base = randoms(20)
    return {"large": randoms(LARGE_NUMEL), "head": base[:5], "tail": base[5:], "none": randoms(0), "number": 3}


@pytest.fixture
def path(state: dict[str, Any], tmp_path: Path) -> Path:
    """The state, saved."""
    fastpersist.save(state, tmp_path / "model.pt", engine="posix", durable=False)
    return tmp_path / "model.pt"


# map_location


def _identity(storage: Any, location: str) -> Any:
    return storage


def _nothing(storage: Any, location: str) -> None:
    return None


MAP_LOCATIONS: dict[str, Any] = {
    "None": None,
    "str": "cpu",
    "device": torch.device("cpu"),
    "dict": {"cpu": "cpu"},
    "dict of others": {"cuda:0": "cpu"},
    "function": _identity,
    "function of nothing": _nothing,
    "torch's own": torch.serialization.default_restore_location,
    "str meta": "meta",
    "device meta": torch.device("meta"),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", MAP_LOCATIONS)
def test_map_location_is_torchs(name: str, weights_only: bool, path: Path, state: dict[str, Any]) -> None:
    found = fastpersist.load(path, map_location=MAP_LOCATIONS[name], weights_only=weights_only)
    expected = torch.load(path, map_location=MAP_LOCATIONS[name], weights_only=weights_only)
    # Value by value: on "meta" torch forgets which of them share a storage.
    assert {key: describe(value) for key, value in found.items()} == {key: describe(value) for key, value in expected.items()}
    assert (describe(found) == describe(state)) == (not name.endswith("meta"))


@pytest.mark.parametrize("name", ["training_state", "quantized_per_channel", "nested_jagged", "empty_between_full", "subclass"])
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_function_is_called_as_torch_calls_it(name: str, device: str, tmp_path: Path) -> None:
    torch.save(make(name), tmp_path / "plain.pt")
    path = tagged(tmp_path / "plain.pt", tmp_path / "model.pt", device)

    def calls_of(load: Callable[..., Any]) -> list[Any]:
        calls: list[Any] = []

        def locate(storage: Any, location: str) -> Any:
            calls.append((type(storage), describe(storage), location))
            return storage

        return [describe(load(path, map_location=locate, weights_only=False)), calls]

    ours = calls_of(fastpersist.load)
    assert ours == calls_of(torch.load)
    assert {location for _, _, location in ours[1]} == {device}


def test_a_function_may_replace_storages(path: Path) -> None:
    def locate(storage: Any, location: str) -> Any:
        return torch.UntypedStorage(storage.nbytes()).fill_(0)

    assert describe(fastpersist.load(path, map_location=locate)) == describe(torch.load(path, map_location=locate))


@pytest.mark.parametrize(
    "location",
    [{"cpu": "meta"}, lambda storage, _: torch.UntypedStorage(storage.nbytes(), device="meta")],
    ids=["dict", "function"],
)
def test_storages_may_go_to_meta_after_all(location: Any, path: Path) -> None:
    found, expected = fastpersist.load(path, map_location=location), torch.load(path, map_location=location)
    for key in ("large", "head", "tail", "none"):
        assert found[key].device.type == "meta"
        assert describe(found[key]) == describe(expected[key])


@pytest.mark.parametrize(
    "error", [ZeroDivisionError, KeyError, RuntimeError, pickle.UnpicklingError, CheckpointFormatError, EOFError]
)
@pytest.mark.parametrize("weights_only", [True, False])
def test_errors_of_a_function_reach_the_caller(error: type[Exception], weights_only: bool, path: Path) -> None:
    raised = error("on purpose")

    def locate(storage: Any, location: str) -> Any:
        raise raised

    with pytest.raises(error, match="on purpose"):
        fastpersist.load(path, map_location=locate, weights_only=weights_only)
    assert torch.serialization._serialization_tls.map_location is None


@pytest.mark.parametrize("location", ["nowhere", torch.device("meta", 3), "metal", b"meta", 7])
def test_impossible_locations_are_refused_as_by_torch(location: Any, path: Path) -> None:
    assert _failure(fastpersist.load, path, map_location=location) == _failure(torch.load, path, map_location=location)


def _failure(load: Callable[..., Any], path: Path, **options: Any) -> tuple[type[BaseException], str] | None:
    try:
        load(path, **options)
    except Exception as error:
        return type(error), str(error)
    return None


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where there is no CUDA device")


@without_cuda
@pytest.mark.parametrize("weights_only", [True, False])
def test_cuda_without_a_device_is_torchs_own_error(weights_only: bool, path: Path, tmp_path: Path) -> None:
    cuda = tagged(path, tmp_path / "cuda.pt", "cuda:0")
    failure = _failure(fastpersist.load, cuda, weights_only=weights_only)
    assert failure == _failure(torch.load, cuda, weights_only=weights_only)
    assert failure is not None
    assert failure[0] is RuntimeError
    failure = _failure(fastpersist.load, path, map_location="cuda")
    assert failure == _failure(torch.load, path, map_location="cuda")
    assert failure is not None


@pytest.mark.parametrize("location", ["cpu", torch.device("cpu"), {"cuda:0": "cpu"}, _identity], ids=str)
def test_cuda_checkpoints_load_on_the_host(location: Any, path: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    cuda = tagged(path, tmp_path / "cuda.pt", "cuda:0")
    assert describe(fastpersist.load(cuda, map_location=location)) == describe(state)
    assert describe(fastpersist.load(cuda, map_location=location, only="tail")) == describe({"tail": state["tail"]})


def test_cuda_checkpoints_are_inspected_and_verified_on_the_host(path: Path, tmp_path: Path) -> None:
    cuda = tagged(path, tmp_path / "cuda.pt", "cuda:0")
    assert fastpersist.inspect(cuda).tensors == fastpersist.inspect(path).tensors
    assert fastpersist.verify(cuda).records == 7


# Loads that read no data


@pytest.fixture
def saved_by_torch(state: dict[str, Any], tmp_path: Path) -> Path:
    """The state, saved without us: torch then calculates offsets."""
    torch.save(state, tmp_path / "theirs.pt")
    return tmp_path / "theirs.pt"


@pytest.fixture
def no_reads(path: Path, saved_by_torch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading any record fails, from when the files are there."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("no tensor data is to be read")

    monkeypatch.setattr(RecordReader, "reading", refuse)
    monkeypatch.setattr(Engine, "submit", refuse)


def test_the_guard_against_reads_works(path: Path, no_reads: None) -> None:
    with pytest.raises(AssertionError, match="no tensor data"):
        fastpersist.load(path)


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("only", [None, "large"])
@pytest.mark.parametrize("location", ["meta", torch.device("meta")])
def test_meta_reads_no_data(location: Any, only: str | None, path: Path) -> None:
    found = fastpersist.load(path, map_location=location, only=only)
    assert found["large"].device.type == "meta"
    assert found["large"].shape == (LARGE_NUMEL,)
    assert (found.keys() == {"large"}) == (only is not None)


@pytest.mark.usefixtures("no_reads")
def test_fake_tensors_read_no_data(saved_by_torch: Path) -> None:
    with FakeTensorMode():
        found, expected = fastpersist.load(saved_by_torch), torch.load(saved_by_torch)
        assert {key: describe(value) for key, value in found.items()} == {k: describe(value) for k, value in expected.items()}
        ours, theirs = ([t.untyped_storage()._checkpoint_offset for t in tensors_of(obj)] for obj in (found, expected))
        assert ours == theirs
    assert {type(t).__name__ for t in tensors_of(found)} == {"FakeTensor"}


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("location", [None, "cpu", "cuda:1", torch.device("cpu"), {"cuda:0": "cpu"}, "meta"], ids=str)
@pytest.mark.parametrize("weights_only", [True, False])
def test_fake_tensors_are_on_the_device_of_torchs(
    location: Any, weights_only: bool, saved_by_torch: Path, tmp_path: Path
) -> None:
    """A fake tensor may be on a device that is not there."""
    path = tagged(saved_by_torch, tmp_path / "cuda.pt", "cuda:0")
    for file in (saved_by_torch, path):
        with FakeTensorMode():
            found = fastpersist.load(file, map_location=location, weights_only=weights_only)
            expected = torch.load(file, map_location=location, weights_only=weights_only)
        assert {key: getattr(value, "device", value) for key, value in found.items()} == {
            key: getattr(value, "device", value) for key, value in expected.items()
        }


@pytest.mark.usefixtures("no_reads")
def test_skip_data_reads_no_data(saved_by_torch: Path) -> None:
    with torch.serialization.skip_data():
        assert fastpersist.load(saved_by_torch)["large"].shape == (LARGE_NUMEL,)


# weights_only


class Marks:
    """Unpickling it leaves a mark: whoever finds it knows that the pickle's code ran."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


class Global:
    """Pickles as a reference to any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


MALICIOUS: dict[str, Callable[[Path], object]] = {
    "mkdir": Marks,
    "beside weights": lambda mark: {"weights": randoms(LARGE_NUMEL), "more": Marks(mark)},
    "system": lambda mark: Global(os.system, f"mkdir {mark}"),
    "eval": lambda mark: Global(eval, f"__import__('os').mkdir({str(mark)!r})"),
    "exec": lambda mark: [Global(exec, f"import os; os.mkdir({str(mark)!r})")],
    "getattr": lambda mark: Global(getattr, os, "mkdir"),
    "partial": lambda mark: Global(__import__("functools").partial, os.mkdir, str(mark)),
    "a class of the user": lambda mark: Settings("x", randoms(2)),
}


def _malicious(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """The file, and the mark that its code would leave. Written by hand: some of it cannot be pickled as it is."""
    mark, path = tmp_path / "mark", tmp_path / "evil.pt"
    obj = MALICIOUS[name](mark) if name != "getattr" else Global(getattr, "text", "upper")
    torch.save(obj, path)
    return path, mark


@pytest.mark.parametrize("name", MALICIOUS)
def test_malicious_pickles_are_refused_in_torchs_words(name: str, tmp_path: Path) -> None:
    path, mark = _malicious(name, tmp_path)
    for options in ({}, {"weights_only": True}, {"verify": True}, {"engine": "io_uring"}, {"mmap": True}):
        failure = _failure(fastpersist.load, path, **options)
        assert failure == _failure(torch.load, path)
        assert failure is not None
        assert failure[0] is pickle.UnpicklingError
    assert "Weights only load failed" in failure[1]
    with pytest.raises(pickle.UnpicklingError):
        fastpersist.load(path, only="weights")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["mkdir", "beside weights"])
def test_those_who_trust_a_file_run_its_code(name: str, tmp_path: Path) -> None:
    """Guards the refusals: the code is there."""
    path, mark = _malicious(name, tmp_path)
    fastpersist.load(path, weights_only=False)
    assert mark.exists()


def test_none_means_torchs_default(tmp_path: Path) -> None:
    """torch.load's own default is None, and stands for True: programs hand it on."""
    path, mark = _malicious("mkdir", tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        fastpersist.load(path, weights_only=None)  # type: ignore[arg-type]
    assert not mark.exists()


@pytest.mark.parametrize("value", ["1", "y", "YES", "true"])
def test_the_environment_forces_weights_only(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mark = _malicious("mkdir", tmp_path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", value)
    with pytest.raises(pickle.UnpicklingError):
        fastpersist.load(path, weights_only=False)
    assert not mark.exists()


def test_the_environment_does_not_force_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mark = _malicious("mkdir", tmp_path)
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError):
        fastpersist.load(path)
    assert not mark.exists()


def test_safe_globals_are_honoured(tmp_path: Path) -> None:
    tensor = randoms(4).as_subclass(Tagged)
    torch.save([tensor], tmp_path / "m.pt")
    with pytest.raises(pickle.UnpicklingError, match="Tagged"):
        fastpersist.load(tmp_path / "m.pt")
    with torch.serialization.safe_globals([Tagged]):
        assert describe(fastpersist.load(tmp_path / "m.pt")) == describe([tensor])
        assert fastpersist.inspect(tmp_path / "m.pt").tensors is not None
    with pytest.raises(pickle.UnpicklingError, match="Tagged"):
        fastpersist.load(tmp_path / "m.pt")


class Strict:
    """Refuses the state that it is restored from, with an error of its own."""

    def __init__(self) -> None:
        self.version = 1

    def __setstate__(self, state: Any) -> None:
        raise ConnectionError("version 1 is no longer read")


def test_errors_of_the_users_classes_reach_the_caller(tmp_path: Path) -> None:
    """As they are where the file is trusted, else as the cause: an error of the pickle cannot be told from one of a class."""
    torch.save(Strict(), tmp_path / "m.pt")
    with pytest.raises(ConnectionError, match="no longer read"):
        fastpersist.load(tmp_path / "m.pt", weights_only=False)
    with torch.serialization.safe_globals([Strict]), pytest.raises(CheckpointFormatError, match="no longer read") as caught:
        fastpersist.load(tmp_path / "m.pt")
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_a_class_that_is_gone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(Settings("x", randoms(2)), tmp_path / "m.pt")
    monkeypatch.delattr("compat_zoo.Settings")
    assert _failure(fastpersist.load, tmp_path / "m.pt", weights_only=False) == _failure(
        torch.load, tmp_path / "m.pt", weights_only=False
    )
    with pytest.raises(AttributeError, match="Settings"):
        fastpersist.load(tmp_path / "m.pt", weights_only=False)


def test_a_failed_load_leaves_no_trace_in_torch(tmp_path: Path, path: Path) -> None:
    evil, _ = _malicious("mkdir", tmp_path)
    with pytest.raises(pickle.UnpicklingError):
        fastpersist.load(evil, map_location="cpu")
    assert torch.serialization._serialization_tls.map_location is None


# mmap, paths


def _mapped_file_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.partition(" ")[0].split("-"))
        if start <= address < stop:
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) == 6 else ""
    return ""


@pytest.mark.usefixtures("no_reads")
def test_mmap_is_torchs_own_mapping(path: Path, state: dict[str, Any]) -> None:
    found = fastpersist.load(path, mmap=True)
    assert describe(found) == describe(torch.load(path, mmap=True))
    assert _mapped_file_at(found["large"].data_ptr()) == str(path)
    assert fastpersist.load(path, mmap=True, only=["head"]).keys() == {"head"}


def test_without_mmap_nothing_is_mapped(path: Path) -> None:
    found = fastpersist.load(path)
    assert {_mapped_file_at(storage.data_ptr()) for storage in storages_of(found) if storage.nbytes()} == {""}
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_mmap_of_the_older_format_is_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointFormatError, match="mmap can only be used"):
        fastpersist.load(tmp_path / "old.pt", mmap=True)


@pytest.mark.parametrize("call", [fastpersist.load, fastpersist.inspect, fastpersist.verify])
def test_file_objects_are_refused(call: Callable[..., Any], path: Path) -> None:
    with path.open("rb") as file, pytest.raises(TypeError, match=r"torch\.load for file-like"):
        call(file)
    with pytest.raises(TypeError, match=r"torch\.load for file-like"):
        call(io.BytesIO(path.read_bytes()))


@pytest.mark.parametrize("form", [str, Path, os.fsencode])
def test_paths_of_any_form(form: Callable[[Path], Any], path: Path, state: dict[str, Any]) -> None:
    assert describe(fastpersist.load(form(path))) == describe(state)


def test_relative_paths_and_links(path: Path, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    Path("link.pt").symlink_to("model.pt")
    assert describe(fastpersist.load("model.pt")) == describe(fastpersist.load("link.pt")) == describe(state)


@pytest.mark.parametrize("call", [fastpersist.load, fastpersist.inspect, fastpersist.verify])
def test_what_is_no_file(call: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        call(tmp_path / "missing.pt")
    assert caught.value.errno == errno.ENOENT
    os.mkfifo(tmp_path / "pipe")
    for entry in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(CheckpointFormatError, match=str(entry)):
            call(entry)


# Options of our own


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"engine": "floppy"}, ValueError), ({"engine": 5}, TypeError), ({"engine": "memory"}, ValueError),
        ({"block_nbytes": 1000}, AlignmentError), ({"block_nbytes": 0}, AlignmentError), ({"queue_depth": 0}, ValueError),
    ],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, Any], error: type[Exception], path: Path) -> None:
    with pytest.raises(error):
        fastpersist.load(path, **options)


def test_a_null_engine_is_no_source_of_tensors(tmp_path: Path) -> None:
    """It reads nothing: what would be loaded is whatever the memory holds."""
    fastpersist.save({"large": randoms(LARGE_NUMEL), "small": randoms(3)}, tmp_path / "m.pt", durable=False)
    for call in (fastpersist.load, fastpersist.verify):
        with pytest.raises(ValueError, match="null"):
            call(tmp_path / "m.pt", engine="null")


STORAGES = ("data/0", "data/1")


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("block_nbytes", [4096, None])
def test_verify_finds_each_flipped_byte(name: str, engine: str, block_nbytes: int | None, path: Path) -> None:
    place = places_of(path)[name]
    steps = range(0, place.nbytes, max(1, place.nbytes // 7))
    for position in (*steps, place.nbytes - 1):
        flip(path, place.data_offset + position, 0x10)
        with pytest.raises(
            CorruptCheckpointError, match=f"'{name}' .offset {place.data_offset}, {place.nbytes} bytes"
        ) as caught:
            fastpersist.load(path, verify=True, engine=engine, block_nbytes=block_nbytes)
        assert str(caught.value).startswith(f"{path}: ")
        fastpersist.load(path, engine=engine)  # as in torch.load, nobody looks
        flip(path, place.data_offset + position, 0x10)
    fastpersist.load(path, verify=True, engine=engine)


def test_without_verify_a_flipped_byte_is_loaded(path: Path, state: dict[str, Any]) -> None:
    flip(path, places_of(path)["data/0"].data_offset)
    assert describe(fastpersist.load(path)["large"]) == describe(torch.load(path)["large"]) != describe(state["large"])


@pytest.mark.parametrize("name", ["data.pkl", "byteorder"])
def test_metadata_is_always_verified(name: str, path: Path) -> None:
    place = places_of(path)[name]
    for position in range(place.nbytes):
        flip(path, place.data_offset + position)
        with pytest.raises(CorruptCheckpointError, match=f"'{name}' .offset {place.data_offset}, {place.nbytes} bytes"):
            fastpersist.load(path)
        flip(path, place.data_offset + position)


def test_verify_takes_files_without_checksums(state: dict[str, Any], tmp_path: Path) -> None:
    fastpersist.save(state, tmp_path / "m.pt", checksum=False, durable=False)
    assert describe(fastpersist.load(tmp_path / "m.pt", verify=True)) == describe(state)


def test_a_refused_record_is_not_hidden_by_a_map_location(path: Path) -> None:
    flip(path, places_of(path)["data/1"].data_offset)
    with pytest.raises(CorruptCheckpointError, match="data/1"):
        fastpersist.load(path, verify=True, map_location="cpu")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each file was asked for directly, as engines open them."""
    real, asked = Engine.open, []

    def note(self: Engine, path: str, mode: str, *, direct: bool = True, **options: Any) -> Any:
        asked.append(direct)
        return real(self, path, mode, direct=direct, **options)

    monkeypatch.setattr(Engine, "open", note)
    return asked


@pytest.mark.parametrize(("share", "direct"), [(1.0, False), (0.95, False), (0.85, True), (0.0, True), (None, True)], ids=str)
@pytest.mark.parametrize("call", [fastpersist.load, fastpersist.verify])
def test_auto_reads_from_the_page_cache_what_lies_in_it(
    call: Callable[..., Any], share: float | None, direct: bool, path: Path, opened: list[bool],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(_libc, "cached_nbytes", lambda _, nbytes: None if share is None else int(share * nbytes))
    with caplog.at_level(logging.INFO, "fastpersist"):
        call(path)
    assert opened == [direct]
    said = [record.getMessage() for record in caplog.records if "page cache" in record.getMessage()]
    assert len(said) == (not direct)
    assert all(str(path) in line and f"{100 * (share or 0):.0f}%" in line for line in said)


def test_the_kernel_tells_what_lies_in_the_page_cache(path: Path, opened: list[bool]) -> None:
    with path.open("rb") as file:
        file.read()  # now it does
        if _libc.cached_nbytes(file.fileno(), 4096) is None:
            pytest.skip("this kernel has no cachestat (Linux 6.5)")
        assert _libc.cached_nbytes(file.fileno(), path.stat().st_size) == path.stat().st_size
    fastpersist.load(path)
    fastpersist.load(path, engine="posix")  # a named engine reads as it was told
    assert opened == [False, True]


@pytest.mark.parametrize("engine", ["auto", "posix", "io_uring"])
@pytest.mark.parametrize("verify", [False, True])
def test_progress_rises_to_all_tensor_bytes(engine: str, verify: bool, path: Path) -> None:
    calls: list[tuple[int, int]] = []
    fastpersist.load(path, engine=engine, verify=verify, block_nbytes=65536, progress=lambda *call: calls.append(call))
    total = 4 * (LARGE_NUMEL + 20)
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)
    assert len(calls) > 10


def test_progress_of_a_part_counts_that_part(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    fastpersist.load(path, only=["head"], progress=lambda *call: calls.append(call))
    assert calls[-1] == (80, 80)


def test_progress_true_shows_a_bar(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fastpersist.load(path, progress=True)
    assert "model.pt" in capsys.readouterr().out


@pytest.fixture
def shared_engine() -> Iterator[Engine]:
    """An engine that stays open between calls."""
    with fastpersist.open_engine("posix", queue_depth=4) as engine:
        yield engine


def test_an_open_engine_serves_loads_and_saves(shared_engine: Engine, path: Path, state: dict[str, Any]) -> None:
    for _ in range(3):
        found = fastpersist.load(path, engine=shared_engine)
        assert describe(found) == describe(state)
        fastpersist.save(found, path, engine=shared_engine, durable=False)
        assert fastpersist.verify(path, engine=shared_engine).engine == "posix"


def test_threads_load_at_once(path: Path, state: dict[str, Any]) -> None:
    expected, found = describe(state), []

    def work() -> None:
        for _ in range(5):
            found.append(describe(fastpersist.load(path, verify=True)))
            fastpersist.verify(path)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert collections.Counter(value == expected for value in found) == {True: 20}


def test_the_default_device_does_not_matter(path: Path, state: dict[str, Any]) -> None:
    with torch.device("meta"):
        found = [fastpersist.load(path, weights_only=weights_only) for weights_only in (True, False)]
        expected = [torch.load(path, weights_only=weights_only) for weights_only in (True, False)]
    assert describe(found) == describe(expected)
    assert describe(found[0]) == describe(state)


def test_a_checkpoint_is_found_under_any_extension(state: dict[str, Any], tmp_path: Path) -> None:
    fastpersist.save(state, tmp_path / "plain.pt", durable=False)
    for name in ("model.bin", "model.safetensors"):
        rewrite(tmp_path / "plain.pt", tmp_path / name)
        assert describe(fastpersist.load(tmp_path / name)) == describe(state)
