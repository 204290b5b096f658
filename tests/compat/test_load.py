"""fastpersist.load sees in every file what torch.load sees: the whole zoo, every layout, and tensors that are good for use."""

from __future__ import annotations

import copy
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.multiprocessing
from compat_describe import describe, storages_of, tensors_of
from compat_zoo import SPECIMENS, make, randoms
from torch.utils.serialization import config

import fastpersist
from fastpersist.engines import Engine
from fastpersist.memory.alignment import PAGE_NBYTES
from tests.archives import SINCE_TORCH_2_1, SINCE_TORCH_2_7, big_endian, places_of, rewrite, without

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

MIB = 1 << 20
LARGE_NUMEL = 300_001  # as float32 over 1 MiB: from there on a storage gets pages of its own
WRITERS = ("auto", "torch", "torch.save at 64", "torch.save at 4096")
VARIANTS: dict[str, Callable[[Path, Path], Path]] = {
    "torch 2.6": lambda source, target: rewrite(source, target, without(*SINCE_TORCH_2_7)),
    "torch 1.6": lambda source, target: rewrite(source, target, without(*SINCE_TORCH_2_7, *SINCE_TORCH_2_1)),
    "with folders": lambda source, target: rewrite(source, target, folders=True),
    "with a comment": lambda source, target: rewrite(source, target, comment=b"kept by hand"),
    "big-endian": big_endian,
}

NOT_FILLED_IN_TIME = {"nested_strided", "generator"}
"""torch's older format fills storages after all objects are made: these look into theirs before."""


def outcome(load: Callable[[], object]) -> Any:
    """What was loaded, or the kind of refusal."""
    try:
        loaded = load()
    except Exception as error:
        return ("refused", type(error))
    return describe(loaded)


@pytest.fixture(scope="module", params=["posix", "io_uring"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Each engine in turn, open for all the tests of this module."""
    with fastpersist.open_engine(request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A function of (specimen, writer): the file, written at first use."""
    directory = tmp_path_factory.mktemp("saved")

    def get(name: str, writer: str) -> Path:
        path = directory / writer.replace(" ", "-") / f"{name}.pt"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write(make(name), path, writer)
        return path

    return get


def write(obj: object, path: Path, writer: str) -> None:
    """Save as one of WRITERS does."""
    if writer in ("auto", "torch"):
        fastpersist.save(obj, path, layout=writer, engine="posix", durable=False)
    else:
        with config.patch("save.storage_alignment", int(writer.rpartition(" ")[2])):
            torch.save(obj, path)


@pytest.mark.parametrize("writer", WRITERS)
def test_loads_what_torch_loads(specimen_name: str, writer: str, saved: Callable[[str, str], Path], engine: Engine) -> None:
    path = saved(specimen_name, writer)
    for weights_only in (True, False):
        expected = outcome(lambda: torch.load(path, weights_only=weights_only))  # noqa: B023
        assert outcome(lambda: fastpersist.load(path, weights_only=weights_only, engine=engine)) == expected  # noqa: B023


@pytest.mark.parametrize("variant", VARIANTS)
def test_loads_files_of_other_writers(
    specimen_name: str, variant: str, saved: Callable[[str, str], Path], tmp_path: Path
) -> None:
    if (specimen_name, variant) == ("generator", "big-endian"):
        pytest.skip("a generator checks its state, and the helper unpickles zeros")
    path = VARIANTS[variant](saved(specimen_name, "torch.save at 64"), tmp_path / "model.pt")
    expected = outcome(lambda: torch.load(path, weights_only=False))
    assert expected == outcome(lambda: torch.load(saved(specimen_name, "torch.save at 64"), weights_only=False))
    assert outcome(lambda: fastpersist.load(path, weights_only=False, engine="posix", verify=True)) == expected


@pytest.mark.parametrize("shift", [0, 1, 2, 4, 7, 8, 15, 16, 33, 63])
def test_data_may_start_anywhere(shift: int, tmp_path: Path, engine: Engine) -> None:
    state = {
        "complex": randoms(40, dtype=torch.complex128),
        "large": randoms(LARGE_NUMEL),
        "small": randoms(7),
        "none": randoms(0),
    }
    write(state, tmp_path / "plain.pt", "torch.save at 64")
    path = rewrite(tmp_path / "plain.pt", tmp_path / "shifted.pt", shift=shift)
    assert {place.data_offset % 64 for place in places_of(path).values()} == {shift}
    loaded = fastpersist.load(path, engine=engine)
    assert describe(loaded) == describe(state)
    # Whatever the file's offsets: a kernel that works on whole elements must find them aligned.
    assert [t.data_ptr() % 16 for t in tensors_of(loaded) if t.numel() and t.data_ptr() % 16] == []


@pytest.mark.parametrize("endianness", ["LITTLE", "BIG", "NATIVE"])
def test_without_a_byteorder_record_torchs_setting_decides(endianness: str, tmp_path: Path) -> None:
    state = {"halves": randoms(9).half(), "numbers": torch.arange(5)}
    write(state, tmp_path / "plain.pt", "torch.save at 64")
    path = big_endian(tmp_path / "plain.pt", tmp_path / "big.pt", declared=False)
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness[endianness])
    try:
        loaded = describe(fastpersist.load(path))
        assert loaded == describe(torch.load(path))
        assert (loaded == describe(state)) == (endianness == "BIG")
    finally:
        torch.serialization.set_default_load_endianness(None)


@pytest.mark.parametrize("content", [b"middle", b"", b"BIG"])
def test_an_unknown_byteorder_is_refused(content: bytes, tmp_path: Path) -> None:
    write([randoms(3)], tmp_path / "plain.pt", "torch.save at 64")
    path = rewrite(tmp_path / "plain.pt", tmp_path / "x.pt", lambda name, old: content if name == "byteorder" else old)
    with pytest.raises(fastpersist.CheckpointFormatError, match="byteorder"):
        fastpersist.load(path)


@pytest.mark.parametrize(
    "name", ["m.pt", "a.tar.gz", "noext", ".pt", "..pt", "...pt", "ü.pt", "日本語.pt", "back\\slash.pt", "%s.pt"]
)
def test_what_is_saved_under_any_name_can_be_loaded(name: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / name
    fastpersist.save(make("views"), path, layout=layout, engine="posix", durable=False)
    assert describe(fastpersist.load(path)) == describe(make("views"))
    assert fastpersist.load(path, only=["row"]).keys() == {"row"}
    assert fastpersist.verify(path).records == len(fastpersist.inspect(path).records)


def test_what_is_saved_under_a_name_that_is_no_utf8_can_be_loaded(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.pt")
    fastpersist.save(make("views"), path, engine="posix", durable=False)
    assert describe(fastpersist.load(path)) == describe(make("views"))
    assert fastpersist.load(path, only=["row"]).keys() == {"row"}
    assert fastpersist.inspect(path).tensors is not None


def test_a_comment_may_look_like_an_end_record(tmp_path: Path) -> None:
    """torch takes it for one; only the record whose comment reaches to the file's end is."""
    write(make("views"), tmp_path / "x.pt", "torch.save at 64")
    path = rewrite(tmp_path / "x.pt", tmp_path / "y.pt", comment=b"PK\5\6 is no end record" + bytes(100))
    assert describe(fastpersist.load(path)) == describe(make("views"))


def test_bytes_after_the_end_record_do_no_harm(tmp_path: Path) -> None:
    """Copies padded to a block's length: torch and every unzip program take them."""
    write(make("views"), tmp_path / "x.pt", "torch.save at 64")
    with (tmp_path / "x.pt").open("ab") as file:
        file.write(bytes(512))
    assert describe(fastpersist.load(tmp_path / "x.pt")) == describe(torch.load(tmp_path / "x.pt"))


# torch before 1.6.


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_older_formats_are_left_to_torch(protocol: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "old.pt"
    torch.save(make("training_state"), path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    expected = describe(torch.load(path, weights_only=False))
    with caplog.at_level(logging.INFO, "fastpersist"):
        assert describe(fastpersist.load(path, weights_only=False)) == expected
    assert [record.getMessage() for record in caplog.records] == [f"{path}: a file of torch before 1.6, left to torch.load"]


def test_the_whole_zoo_in_the_older_format(specimen_name: str, tmp_path: Path) -> None:
    if specimen_name in NOT_FILLED_IN_TIME:
        pytest.skip("torch itself loads it from that format by chance only")
    path = tmp_path / "old.pt"
    try:
        torch.save(make(specimen_name), path, _use_new_zipfile_serialization=False)
    except Exception as error:
        pytest.skip(f"torch does not save it in that format: {error!r}")
    for weights_only in (True, False):
        expected = outcome(lambda: torch.load(path, weights_only=weights_only))  # noqa: B023
        found = outcome(lambda: fastpersist.load(path, weights_only=weights_only))  # noqa: B023
        # What torch refuses with an error of any kind is a CheckpointFormatError here.
        assert found == expected or (found[0] == expected[0] == "refused")


# Where the tensors lie, and what can be done with them.


@pytest.mark.parametrize("writer", WRITERS)
def test_large_storages_are_aligned_to_pages_where_the_file_is(writer: str, tmp_path: Path) -> None:
    state = {f"{index}": randoms(LARGE_NUMEL + index, seed=index) for index in range(4)} | {"small": randoms(9)}
    path = tmp_path / "model.pt"
    write(state, path, writer)
    loaded = fastpersist.load(path)
    offsets = {key: places_of(path)[f"data/{key}"].data_offset for key in map(str, range(4))}
    assert {key: loaded[key].data_ptr() % PAGE_NBYTES for key in offsets} == {
        key: offset % PAGE_NBYTES for key, offset in offsets.items()
    }
    if writer in ("torch", "torch.save at 4096"):
        assert {value.data_ptr() % PAGE_NBYTES for value in loaded.values() if value.numel() > LARGE_NUMEL} == {0}


@pytest.mark.parametrize(
    ("first", "second"),
    [(first, "auto") for first in WRITERS] + [(first, "torch") for first in ("torch", "torch.save at 4096")],
)
def test_a_loaded_checkpoint_is_saved_without_copies(first: str, second: str, tmp_path: Path) -> None:
    state = {f"{index}": torch.empty(2 * MIB + 4096 * index, dtype=torch.uint8) for index in range(8)} | {"small": randoms(9)}
    write(state, tmp_path / "model.pt", first)
    loaded = fastpersist.load(tmp_path / "model.pt")
    report = fastpersist.save(loaded, tmp_path / "again.pt", layout=second, engine="posix", durable=False)
    assert report.zero_copy_nbytes >= 0.99 * report.nbytes
    assert describe(fastpersist.load(tmp_path / "again.pt", verify=True)) == describe(state)


@pytest.fixture
def loaded(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A large and some small tensors, as load returns them; the small ones share memory."""
    state = {"large": randoms(LARGE_NUMEL), "small": randoms(1000, seed=1), "smaller": randoms(10, seed=2), "none": randoms(0)}
    fastpersist.save(state, tmp_path / "model.pt", engine="posix", durable=False)
    found = fastpersist.load(tmp_path / "model.pt")
    assert describe(found) == describe(state)
    return found


def test_a_loaded_model_is_trained_in_place(tmp_path: Path) -> None:
    def trained(load: Callable[[Path], Any]) -> Any:
        model, state = torch.nn.Linear(600, 600), load(tmp_path / "model.pt")
        model.load_state_dict(state, assign=True)
        for parameter in model.parameters():
            parameter.requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters())
        for seed in range(3):
            optimizer.zero_grad()
            model(randoms(4, 600, seed=seed)).square().mean().backward()
            optimizer.step()
        assert model.weight.data_ptr() == state["weight"].data_ptr()
        return describe(model.state_dict())

    state = {"weight": randoms(600, 600), "bias": randoms(600)}
    fastpersist.save(state, tmp_path / "model.pt", engine="posix", durable=False)
    assert trained(fastpersist.load) == trained(torch.load)
    assert describe(fastpersist.load(tmp_path / "model.pt")) == describe(state)  # the file is not what was trained


def test_neighbours_in_memory_do_not_touch(loaded: dict[str, torch.Tensor]) -> None:
    for key in loaded:
        others = {name: describe(value) for name, value in loaded.items() if name != key}
        loaded[key].fill_(7)
        assert {name: describe(loaded[name]) for name in others} == others


def test_copies_are_independent(loaded: dict[str, torch.Tensor]) -> None:
    before = describe(loaded)
    for copied in (copy.deepcopy(loaded), {key: value.clone() for key, value in loaded.items()}):
        assert describe(copied) == before
        for value in copied.values():
            value.zero_()
        assert describe(loaded) == before


@pytest.mark.parametrize("save", [torch.save, fastpersist.save])
def test_loaded_tensors_are_saved_again(save: Callable[..., Any], loaded: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save(loaded, tmp_path / "again.pt")
    assert describe(torch.load(tmp_path / "again.pt")) == describe(loaded)
    # A small storage is a part of a larger memory: no more than its own bytes may be written.
    assert (tmp_path / "again.pt").stat().st_size < 4 * (LARGE_NUMEL + 1010) + 100_000


def test_memory_is_moved_to_where_processes_share_it(loaded: dict[str, torch.Tensor]) -> None:
    before = describe(loaded)
    for key, value in loaded.items():
        value.share_memory_()
        assert value.is_shared(), key
    assert describe(loaded) == before


def _double_all(inbox: Any, outbox: Any) -> None:
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist here
    state = inbox.get()
    for value in state.values():
        value.mul_(2)
    outbox.put({key: float(value.sum()) for key, value in state.items()})
    outbox.close()
    outbox.join_thread()


def test_another_process_works_on_loaded_tensors(loaded: dict[str, torch.Tensor]) -> None:
    expected = {key: value * 2 for key, value in loaded.items()}
    context = torch.multiprocessing.get_context("fork")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=_double_all, args=(inbox, outbox))
    process.start()
    inbox.put(loaded)
    sums = outbox.get(timeout=60)
    process.join(60)
    assert process.exitcode == 0
    assert sums.keys() == expected.keys()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())  # it is one memory for both


def _exit_status_of(act: Callable[[], bool]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            status = 0 if act() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_has_the_loaded_tensors_for_itself(loaded: dict[str, torch.Tensor]) -> None:
    before = describe(loaded)

    def inherits() -> bool:
        same = describe(loaded) == before
        for value in loaded.values():
            value.zero_()
        return same and all(not value.any() for value in loaded.values())

    assert _exit_status_of(inherits) == 0
    assert describe(loaded) == before


def test_a_forked_child_loads_for_itself(loaded: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = describe(loaded)
    assert _exit_status_of(lambda: describe(fastpersist.load(tmp_path / "model.pt", engine="posix")) == before) == 0
    assert describe(fastpersist.load(tmp_path / "model.pt", engine="posix")) == before


def _resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_dropped_tensor_gives_its_memory_back(tmp_path: Path) -> None:
    state = {key: torch.ones(32 * MIB, dtype=torch.uint8) for key in ("first", "second")} | {"small": randoms(5)}
    fastpersist.save(state, tmp_path / "model.pt", engine="posix", durable=False)
    del state
    found = fastpersist.load(tmp_path / "model.pt", engine="posix")
    full = _resident_nbytes()
    del found["first"]
    assert full - _resident_nbytes() > 30 * MIB
    assert int(found["second"].sum()) == 32 * MIB


def test_tensors_outlive_their_file(loaded: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = describe(loaded)
    (tmp_path / "model.pt").write_bytes(b"")
    (tmp_path / "model.pt").unlink()
    assert describe(loaded) == before


def test_each_load_has_memory_of_its_own(tmp_path: Path) -> None:
    fastpersist.save(make("large_among_small"), tmp_path / "m.pt", engine="posix", durable=False)
    first, second = fastpersist.load(tmp_path / "m.pt"), fastpersist.load(tmp_path / "m.pt")
    for value in first.values():
        value.fill_(3)
    assert describe(second) == describe(make("large_among_small"))


@pytest.mark.parametrize("block_nbytes", [4096, 12288, 1 << 20])
@pytest.mark.parametrize("queue_depth", [1, 3])
def test_blocks_and_queues_of_any_size(block_nbytes: int, queue_depth: int, layout: str, tmp_path: Path) -> None:
    state = [randoms(LARGE_NUMEL), randoms(5), randoms(70_000, seed=2), randoms(LARGE_NUMEL + 1000, seed=3)]
    fastpersist.save(state, tmp_path / "m.pt", layout=layout, engine="posix", durable=False)
    found = fastpersist.load(tmp_path / "m.pt", block_nbytes=block_nbytes, queue_depth=queue_depth, verify=True)
    assert describe(found) == describe(state)


def test_many_small_tensors(tmp_path: Path) -> None:
    state = {str(index): randoms(1 + index % 700, seed=index) for index in range(3000)}
    torch.save(state, tmp_path / "m.pt")
    mappings = len(Path("/proc/self/maps").read_text().splitlines())
    found = fastpersist.load(tmp_path / "m.pt", verify=True)
    # One mapping a tensor would come to the kernel's bound (65530) with a large model.
    assert len(Path("/proc/self/maps").read_text().splitlines()) - mappings < 100
    assert describe(found) == describe(state)


def test_zoo_has_what_the_tests_above_need() -> None:
    """Guards the comparisons: most of the zoo must load, and sharing must show in descriptions."""
    base = randoms(4)
    assert describe([base, base[1:]]) != describe([base, base.clone()[1:]])
    assert len(SPECIMENS) > 60


def test_zip64_files_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file: its holes take no space, and a partial load reads only what lies behind them."""
    path = tmp_path / "huge.pt"
    state = {"huge": torch.empty(5 << 30, dtype=torch.uint8), "far": torch.empty(6), "large": torch.empty(LARGE_NUMEL)}
    with torch.serialization.skip_data():
        torch.save(state, path)
    for name, value in (("data/1", randoms(6)), ("data/2", randoms(LARGE_NUMEL, seed=1))):
        with zipfile.ZipFile(path) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith(name))
        _fill(path, info, value)
    assert path.stat().st_blocks * 512 < 64 * MIB
    tensors = fastpersist.inspect(path).tensors
    assert tensors is not None
    assert [(tensor.path, tensor.shape) for tensor in tensors] == [
        ("huge", (5 << 30,)),
        ("far", (6,)),
        ("large", (LARGE_NUMEL,)),
    ]
    assert fastpersist.inspect(path).torch_offsets == "calculated"
    for engine in ("posix", "io_uring"):
        found = fastpersist.load(path, only=["far", "large"], engine=engine)
        assert describe(found) == describe({"far": randoms(6), "large": randoms(LARGE_NUMEL, seed=1)})
    mapped = torch.load(path, mmap=True)
    assert torch.equal(mapped["far"], randoms(6))


def test_parts_of_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """What partial loads are there for. The holes of sparse files stand for the data."""
    nbytes = 2 * (psutil.virtual_memory().total + psutil.swap_memory().total)
    huge = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage.from_file(str(tmp_path / "holes"), True, nbytes))
    with torch.serialization.skip_data():
        torch.save({"huge": huge, "none": randoms(0), "words": ["a"]}, tmp_path / "m.pt")
    del huge
    info = fastpersist.inspect(tmp_path / "m.pt")
    assert info.nbytes == nbytes
    assert info.tensors is not None
    assert info.tensors[0].shape == (nbytes,)
    assert fastpersist.load(tmp_path / "m.pt", only="words") == {"words": ["a"]}


def _fill(path: Path, info: zipfile.ZipInfo, value: torch.Tensor) -> None:
    with path.open("r+b") as file:
        file.seek(info.header_offset + 26)
        lengths = file.read(4)
        file.seek(info.header_offset + 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"))
        file.write(value.numpy().tobytes())


def test_storages_are_shared_as_in_torch(tmp_path: Path) -> None:
    write(make("overlapping_views"), tmp_path / "m.pt", "auto")
    assert len(list(storages_of(fastpersist.load(tmp_path / "m.pt")))) == 1
