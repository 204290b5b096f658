"""Loading with ``only``: the values that are wanted, exactly as in a full load, and not a byte of the others."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_describe import describe, storages_of
from compat_zoo import Settings, make, randoms, trained_net

import fastpersist
from fastpersist import CheckpointFormatError, CorruptCheckpointError
from fastpersist.archive.selection import as_predicate, select
from fastpersist.engines import Engine, Request
from tests.archives import big_endian, flip, places_of, rewrite

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

LARGE_NUMEL = 300_001  # as float32 over 1 MiB: from there on a storage gets pages of its own


def save(obj: object, path: Path) -> Path:
    """Save with the least effort."""
    fastpersist.save(obj, path, engine="posix", durable=False)
    return path


def training_state() -> dict[str, Any]:
    """A model, an optimizer whose state has integer keys, and values that are no tensors."""
    net, optimizer = trained_net()
    return {
        "model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "big": {"x": randoms(LARGE_NUMEL)},
        "bigger": randoms(LARGE_NUMEL + 5),
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A training state, saved."""
    return save(training_state(), tmp_path / "model.pt")


SELECTIONS: dict[str, Any] = {
    "a dict": "model",
    "with a dot": "model.",
    "deeper": "model.first.weight",
    "part of a dotted key": "model.first",
    "integer keys": "optimizer.state.0",
    "under an integer key": ["optimizer.state.1.exp_avg"],
    "a list of dicts is one value": "optimizer.param_groups",
    "a value that is no tensor": "step",
    "no half names": "big",
    "several": ["step", "big.x", "model.last"],
    "a tuple": ("bigger",),
    "a generator": lambda: (prefix for prefix in ("big", "bigger")),
    "a function": lambda path: path.endswith("weight"),
    "a function of everything": lambda path: True,
    "a truthy function": lambda path: 1 if "norm" in path else None,
    "one that is there, one that is not": ["step", "missing"],
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_is_wanted_is_as_in_a_full_load(name: str, weights_only: bool, path: Path) -> None:
    def only() -> Any:
        return SELECTIONS[name]() if name == "a generator" else SELECTIONS[name]

    expected = select(torch.load(path, weights_only=weights_only), as_predicate(only()))
    found = fastpersist.load(path, only=only(), weights_only=weights_only, verify=True)
    assert describe(found) == describe(expected)
    assert describe(fastpersist.load(path, only=only(), mmap=True)) == describe(expected)


def test_prefixes_end_at_dots(path: Path) -> None:
    """Spelled out, since the comparisons above use the same predicate."""
    assert fastpersist.load(path, only="big").keys() == {"big"}
    assert fastpersist.load(path, only="optimizer.state.0").keys() == {"optimizer"}
    assert fastpersist.load(path, only="optimizer.state.0")["optimizer"].keys() == {"state"}
    assert fastpersist.load(path, only="optimizer.state.0")["optimizer"]["state"].keys() == {0}
    assert fastpersist.load(path, only="model.first")["model"].keys() == {"first.weight", "first.bias"}
    assert fastpersist.load(path, only="step") == {"step": 7}


def test_types_and_attributes_of_dicts_stay(path: Path) -> None:
    found = fastpersist.load(path, only="model.norm")
    assert type(found["model"]) is collections.OrderedDict
    assert found["model"]._metadata == torch.load(path)["model"]._metadata
    net, _ = trained_net()
    missing = net.load_state_dict(found["model"], strict=False).missing_keys
    assert set(missing) == {"first.weight", "first.bias", "last.weight"}


class Registry(dict[str, Any]):
    """A dict of the user's own, with an attribute."""

    origin = "nowhere"


@pytest.mark.parametrize("name", ["OrderedDict", "defaultdict", "Counter", "subclass"])
def test_dicts_of_other_types(name: str, tmp_path: Path) -> None:
    kinds: dict[str, Callable[[], Any]] = {
        "OrderedDict": collections.OrderedDict, "defaultdict": lambda: collections.defaultdict(list),
        "Counter": collections.Counter, "subclass": Registry,
    }  # fmt: skip
    state = kinds[name]()
    state["a"], state["b"] = randoms(3), randoms(4)
    if name == "subclass":
        state.origin = "here"
    save({"outer": state, "other": 1}, tmp_path / "m.pt")
    found = fastpersist.load(tmp_path / "m.pt", only="outer.b", weights_only=False)
    del state["a"]
    assert describe(found) == describe({"outer": state})


def test_empty_dicts_are_values(tmp_path: Path) -> None:
    save({"none": {}, "some": {"x": 1, "empty": {}}}, tmp_path / "m.pt")
    assert fastpersist.load(tmp_path / "m.pt", only="none") == {"none": {}}
    assert fastpersist.load(tmp_path / "m.pt", only="some.empty") == {"some": {"empty": {}}}
    assert fastpersist.load(tmp_path / "m.pt", only="some.x") == {"some": {"x": 1}}


@pytest.mark.parametrize(
    "name",
    [
        "sparse_coo", "sparse_compressed", "quantized_per_channel", "nested_jagged", "nested_strided", "subclass", "parameters",
        "module", "own_classes", "numpy_values", "conjugate_and_negative", "python_attributes", "meta_beside_real", "generator",
        "typed_storage", "untyped_storage", "empty_between_full", "shared_storages_with_keys_of_two_digits", "large_views",
        "same_tensor_twice", "optimizer", "uninitialized_parameter", "dtype_bits16", "dtype_float4_e2m1fn_x2",
    ],
)  # fmt: skip
@pytest.mark.parametrize("swap", [False, True], ids=["little", "big"])
def test_values_of_every_kind(name: str, swap: bool, tmp_path: Path) -> None:
    if (name, swap) == ("generator", True):
        pytest.skip("a generator checks its state, and the helper unpickles zeros")
    path = save({"kept": make(name), "dropped": [randoms(LARGE_NUMEL), make(name)]}, tmp_path / "m.pt")
    if swap:
        path = big_endian(path, tmp_path / "big.pt")
    expected = {"kept": torch.load(path, weights_only=False)["kept"]}
    found = fastpersist.load(path, only="kept", weights_only=False, verify=True)
    assert describe(found) == describe(expected)


def test_shared_storages_stay_shared(tmp_path: Path) -> None:
    base = randoms(LARGE_NUMEL)
    save({"a": base[:10], "b": {"c": base[5:], "d": randoms(3)}, "e": base}, tmp_path / "m.pt")
    found = fastpersist.load(tmp_path / "m.pt", only=["a", "b.c"])
    assert describe(found) == describe({"a": base[:10], "b": {"c": base[5:]}})
    assert len(list(storages_of(found))) == 1
    found["a"].fill_(4)
    assert found["b"]["c"][:5].eq(4).all()


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_one_dict_under_two_keys_is_refused(order: tuple[str, str], tmp_path: Path) -> None:
    """Cut for one of its places, it would be cut for the other as well: nothing may be lost in silence."""
    save(dict(zip(order, [{"x": randoms(3), "y": randoms(4)}] * 2, strict=True)), tmp_path / "m.pt")
    for load in (fastpersist.load, lambda path, only: fastpersist.load(path, only=only, mmap=True)):
        with pytest.raises(ValueError, match="stands in two places"):
            load(tmp_path / "m.pt", only="first")


def test_paths_that_two_values_have(tmp_path: Path) -> None:
    """Both are read, and both are verified."""
    state = {"a.b": randoms(LARGE_NUMEL), "a": {"b": randoms(7)}, "1": randoms(3), 1: randoms(4)}
    path = save(state, tmp_path / "m.pt")
    assert describe(fastpersist.load(path, only=["a.b", "1"])) == describe(state)
    for key in range(4):
        flip(path, places_of(path)[f"data/{key}"].data_offset)
        with pytest.raises(CorruptCheckpointError, match=f"'data/{key}'"):
            fastpersist.load(path, only=["a.b", "1"], verify=True)
        flip(path, places_of(path)[f"data/{key}"].data_offset)


# What is not read


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, end) of all reads that engines are asked for."""
    real, seen = Engine.submit, []

    def note(self: Engine, *requests: Request) -> None:
        seen.extend((request.file_offset, request.file_offset + request.nbytes) for request in requests)
        real(self, *requests)

    monkeypatch.setattr(Engine, "submit", note)
    return seen


def test_other_storages_are_not_read(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    path = save({str(index): randoms(LARGE_NUMEL, seed=index) for index in range(6)}, tmp_path / "m.pt")
    reads.clear()
    fastpersist.load(path, only="3", engine="posix")
    assert sum(end - start for start, end in reads) < 4 * LARGE_NUMEL + 4 * 4096
    places = places_of(path)
    for index in {*range(6)} - {3}:
        place = places[f"data/{index}"]
        inside = [min(end, place.descriptor_offset) - max(start, place.data_offset) for start, end in reads]
        assert max(inside) <= 2 * 4096  # a page at either end, and the pages of the header


def test_nothing_is_read_for_values_without_storages(path: Path, reads: list[tuple[int, int]]) -> None:
    reads.clear()
    assert fastpersist.load(path, only="step") == {"step": 7}
    assert reads == []


def test_damage_elsewhere_does_not_matter(path: Path) -> None:
    """The others are not even looked at: their checksums would tell."""
    names = [name for name in places_of(path) if name.startswith("data/")]
    tensors = fastpersist.inspect(path).tensors
    assert tensors is not None
    wanted = {tensor.record for tensor in tensors if tensor.path.startswith("model.")}
    for name in set(names) - wanted:
        flip(path, places_of(path)[name].data_offset)
    assert describe(fastpersist.load(path, only="model", verify=True)) == describe({"model": training_state()["model"]})
    for name in wanted:
        assert name is not None
        flip(path, places_of(path)[name].data_offset)
        with pytest.raises(CorruptCheckpointError, match=f"'{name}'"):
            fastpersist.load(path, only="model", verify=True)
        flip(path, places_of(path)[name].data_offset)


def test_no_mapping_of_the_file_remains(path: Path) -> None:
    found = fastpersist.load(path, only=["model", "big"])
    assert str(path) not in Path("/proc/self/maps").read_text()
    before = describe(found)
    path.write_bytes(b"")  # a tensor over the file's mapping would be gone now
    assert describe(found) == before


def test_only_what_is_wanted_is_moved(path: Path) -> None:
    """A function may copy to a device: that of the others would read them all, and fill its memory."""
    sizes: list[int] = []

    def locate(storage: Any, location: str) -> Any:
        sizes.append(storage.nbytes())
        return storage

    fastpersist.load(path, only="bigger", map_location=locate)
    assert sizes == [4 * (LARGE_NUMEL + 5)]


def test_big_endian_sparse_tensors_are_checked_in_their_own_order(tmp_path: Path) -> None:
    """Read in the wrong order, the indices would lie far outside of the tensor."""
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True)
    path = big_endian(save({"sparse": sparse, "dense": randoms(3)}, tmp_path / "m.pt"), tmp_path / "big.pt")
    with torch.sparse.check_sparse_tensor_invariants(True):
        assert describe(fastpersist.load(path)) == describe(torch.load(path))
        assert describe(fastpersist.load(path, only="sparse")) == describe({"sparse": sparse})
        assert fastpersist.load(path, only="dense").keys() == {"dense"}
        assert fastpersist.inspect(path).tensors is not None


def test_offsets_of_any_kind(tmp_path: Path) -> None:
    state = {"a": randoms(LARGE_NUMEL), "b": randoms(9), "c": randoms(LARGE_NUMEL)}
    path = rewrite(save(state, tmp_path / "m.pt"), tmp_path / "odd.pt", shift=3)
    assert describe(fastpersist.load(path, only=["b", "c"])) == describe({"b": state["b"], "c": state["c"]})


def test_the_older_format_is_cut_afterwards(tmp_path: Path) -> None:
    torch.save(training_state(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    found = fastpersist.load(tmp_path / "old.pt", only="model.norm")
    assert describe(found) == describe(select(torch.load(tmp_path / "old.pt"), as_predicate("model.norm")))


# Refusals


@pytest.mark.parametrize("obj", [[randoms(2)], (1,), randoms(3), "text", None, 5, {1, 2}], ids=lambda obj: type(obj).__name__)
@pytest.mark.parametrize("older", [False, True])
def test_what_is_no_state_dict(obj: object, older: bool, tmp_path: Path) -> None:
    torch.save(obj, tmp_path / "m.pt", _use_new_zipfile_serialization=not older)
    with pytest.raises(TypeError, match=f"state dict.*{type(obj).__name__}"):
        fastpersist.load(tmp_path / "m.pt", only="a")


def test_a_module_is_no_state_dict(tmp_path: Path) -> None:
    save(make("module"), tmp_path / "m.pt")
    with pytest.raises(TypeError, match=r"state dict.*Net"):
        fastpersist.load(tmp_path / "m.pt", only="first", weights_only=False)


@pytest.mark.parametrize("key", [(1, 2), 1.5, None, b"k"], ids=repr)
@pytest.mark.parametrize("depth", [0, 1])
def test_keys_of_other_types(key: Any, depth: int, tmp_path: Path) -> None:
    inner = {"a": randoms(2), key: randoms(3)}
    save({"outer": inner} if depth else inner, tmp_path / "m.pt")
    with pytest.raises(TypeError, match="keys that are strings or integers") as caught:
        fastpersist.load(tmp_path / "m.pt", only="a", weights_only=False)
    assert ("'outer'" in str(caught.value)) == bool(depth)


@pytest.mark.parametrize("only", ["missing", ["nothing", "at all"], "mode", "model.fir", "step.x", lambda path: False], ids=str)
def test_a_selection_of_nothing_names_the_keys(only: Any, path: Path) -> None:
    with pytest.raises(KeyError, match="selects nothing") as caught:
        fastpersist.load(path, only=only)
    assert all(repr(key) in str(caught.value) for key in training_state())


@pytest.mark.parametrize(
    ("only", "error"),
    [
        ([], ValueError), ((), ValueError), (iter(()), ValueError), ("", TypeError), (["a", ""], TypeError), ([1], TypeError),
        (["a", None], TypeError), (b"model", TypeError), (5, TypeError), ([("a", "b")], TypeError),
    ],
    ids=repr,
)  # fmt: skip
def test_selections_of_no_known_form(only: Any, error: type[Exception], path: Path, reads: list[tuple[int, int]]) -> None:
    reads.clear()
    with pytest.raises(error, match=r"only=|not iterable"):
        fastpersist.load(path, only=only)
    assert reads == []


def test_errors_of_a_predicate_reach_the_caller(path: Path) -> None:
    def predicate(path: str) -> bool:
        raise ZeroDivisionError(path)

    with pytest.raises(ZeroDivisionError):
        fastpersist.load(path, only=predicate)


def test_a_dict_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": 1}
    state["self"] = state
    save(state, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="contains itself"):
        fastpersist.load(tmp_path / "m.pt", only="x")


@pytest.mark.timeout(10)
def test_dicts_that_are_shared_at_every_level_do_not_hang(tmp_path: Path) -> None:
    """A file of some kilobytes with 2**60 paths: it must be refused, or be walked by the dict, not by the path."""
    state: dict[str, Any] = {"x": randoms(1)}
    for _ in range(60):
        state = {"a": state, "b": state}
    save(state, tmp_path / "m.pt")
    with pytest.raises((ValueError, KeyError)):
        fastpersist.load(tmp_path / "m.pt", only="missing")


def test_values_that_only_trusting_loads_take(tmp_path: Path) -> None:
    path = save({"settings": Settings("x", randoms(3)), "big": randoms(LARGE_NUMEL)}, tmp_path / "m.pt")
    found = fastpersist.load(path, only="settings", weights_only=False)
    assert describe(found) == describe({"settings": Settings("x", randoms(3))})


def test_format_errors_name_the_path(path: Path) -> None:
    flip(path, places_of(path)["data/0"].header_offset)
    with pytest.raises(CheckpointFormatError, match=str(path)):
        fastpersist.load(path, only="model")
