"""The direct pickler writes what the pickler in C writes, byte for byte, and finds the same storages."""

from __future__ import annotations

import collections
import copyreg
import gc
import io
import pickle
import weakref
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastpersist.archive import pickling
from fastpersist.archive.direct_pickling import DirectPickler, PicklingInCIsFasterError
from fastpersist.archive.pickling import flatten

BASE = torch.arange(64.0)


def check(obj: object, protocol: int = 2) -> DirectPickler:
    """The bytes of torch.save, and the storages that the pickler in C finds; returns the pickler, for more questions."""
    stream = io.BytesIO()
    torch.save(obj, stream, pickle_protocol=protocol)
    pickler = DirectPickler(protocol)
    pickler._account = 1 << 30  # what does not pay must be right, too
    with zipfile.ZipFile(stream) as archive:
        assert pickler.run(obj) == archive.read("archive/data.pkl")
    in_c = pickling._pickle_in_c(obj, protocol)[1]
    assert pickler.storage_nbytes == in_c.storage_nbytes
    assert pickler.addresses == [storage.data_ptr() for storage in pickler.storages]
    return pickler


def padded(*objects: object) -> list[object]:
    """The objects after so much else that places in the memo take four bytes, as forms have them."""
    return [[f"text {number}" for number in range(300)], *objects]


def kinds() -> dict[str, Any]:
    """Makers of tensors: those of one maker are of one kind, each with a storage of its own."""
    return {
        "one dimension": lambda: torch.zeros(3),
        "no dimension": lambda: torch.tensor(1.5),
        "three dimensions": lambda: torch.zeros(2, 3, 4),
        "six dimensions": lambda: torch.zeros(1, 2, 1, 2, 1, 2),
        "empty": lambda: torch.zeros(0, 5),
        "large numbers": lambda: torch.zeros(1).expand(70_000, 3),
        "huge numbers": lambda: torch.zeros(1).as_strided((1, 1), (1 << 40, 300)),
        "a view": lambda: torch.zeros(20)[3:9:2],
        "transposed": lambda: torch.zeros(2, 3).t(),
        "with gradient": lambda: torch.zeros(3, requires_grad=True),
        "another dtype": lambda: torch.zeros(3, dtype=torch.int16),
        "with a few bytes more": lambda: torch.empty(0).set_(torch.UntypedStorage(15), 0, (3,), (1,)),
        "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        "newer dtype": lambda: torch.zeros(3, dtype=torch.uint16),
        "parameter": lambda: torch.nn.Parameter(torch.zeros(2)),
        "sparse": lambda: torch.eye(3).to_sparse(),
    }


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("name", kinds())
def test_many_of_a_kind(name, protocol):
    check(padded(*(kinds()[name]() for _ in range(30))), protocol)
    check([kinds()[name]() for _ in range(300)], protocol)


def test_forms_are_used():
    """Or all other tests would prove nothing."""
    pickler = check(padded(*(torch.zeros(3) for _ in range(30))))
    assert len(pickler._forms) == 1
    assert len(pickler.memo) < pickler._memoized


def test_kinds_in_turn():
    check(padded(*(make() for _ in range(20) for make in kinds().values())))


def test_almost_of_a_kind():
    """Each differs from those before in one thing only."""
    storages = [torch.UntypedStorage(nbytes) for nbytes in (256, 256, 256, 256, 256, 260)]
    shapes = [((2, 3), (3, 1)), ((2, 3), (3, 1)), ((3, 2), (3, 1)), ((2, 3), (1, 2)), ((2, 3), (3, 1)), ((2, 3), (3, 1))]
    offsets = [0, 0, 0, 0, 1, 0]
    tensors = [
        torch.empty(0).set_(storage, offset, *shape) for storage, shape, offset in zip(storages, shapes, offsets, strict=True)
    ]
    check(padded(torch.zeros(1), *tensors))


def test_digits_of_keys():
    """Keys of one to four digits."""
    check(padded([torch.zeros(2) for _ in range(1_200)]))


def test_storages_shared_with_earlier_tensors():
    bases = [torch.zeros(8) for _ in range(12)]
    check(padded(*bases, *(base[2:] for base in bases), *(base.view(2, 4) for base in bases)))


def test_the_same_tensor_again():
    tensors = [torch.zeros(8) for _ in range(12)]
    check(padded(*tensors, tensors, {"again": tensors[-1], "and": tensors[3]}))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_storages_by_themselves():
    tensors = [torch.zeros(8) for _ in range(12)]
    check(padded(*tensors, *(tensor.storage() for tensor in tensors)))
    check(padded(*(tensor.storage() for tensor in tensors), *tensors))


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 1999, 2000, 2001])
def test_batches_of_entries(count):
    numbers = range(count)
    check(dict.fromkeys(numbers))
    check([None for _ in numbers])
    check(tuple(numbers))
    check(collections.OrderedDict((number, None) for number in numbers))
    check({str(number): torch.zeros(1) for number in numbers})


def test_references_to_itself():
    recursive: list[object] = [1]
    recursive.append(recursive)
    mapping: dict[str, object] = {"a": recursive}
    mapping["itself"] = mapping
    within: tuple[object, ...] = ([], 1)
    within[0].append(within)  # type: ignore[attr-defined]
    longer: tuple[object, ...] = ([], 1, 2, 3)
    longer[0].append(longer)  # type: ignore[attr-defined]
    check([recursive, mapping, within, longer, recursive, within, longer])


def test_state_dicts():
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    pickler = check({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "betas": (0.9, 0.999)})
    assert pickler._forms


_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=9) | st.complex_numbers()
    | st.sampled_from([255, 256, 65535, 65536, 1 << 31, -(1 << 31) - 1, "storage", "cpu", BASE])
    | st.sampled_from([torch.float32, collections.OrderedDict])
    | st.builds(lambda start, stop: BASE[start:stop], st.integers(0, 60), st.integers(0, 64))
    | st.builds(torch.zeros, st.lists(st.integers(0, 3), max_size=4))
)  # fmt: skip
_keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text())


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=6) | st.dictionaries(_keys, inner, max_size=6) | st.tuples(inner)
        | st.tuples(inner, inner, inner) | st.lists(inner, max_size=6).map(tuple)
        | st.dictionaries(_keys, inner, max_size=4).map(collections.OrderedDict)
        | st.sets(_keys, max_size=4) | st.builds(lambda one: [one, one], inner)
    )  # fmt: skip


@given(st.recursive(_leaves, _containers, max_leaves=40), st.booleans())
@example("\ud800", False)
def test_any_object(obj, long_memo):
    check(padded(obj, obj, [torch.zeros(2) for _ in range(3)]) if long_memo else obj)


class MakesTensors:
    """Each pickling makes a tensor that nothing else keeps: the next one could take its address."""

    def __reduce__(self) -> tuple[type, tuple[object]]:
        return list, ([torch.zeros(100), "".join(["a", "b"])],)


def test_a_freed_object_does_not_lend_its_place():
    pickler = check(padded(*(MakesTensors() for _ in range(50))))
    assert len(pickler.storages) == 50


class MakesEntries:
    """Its entries live no longer than it takes to pickle each."""

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, (), None, None, ((f"name {number}", torch.zeros(3)) for number in range(20))


def test_a_freed_entry_does_not_lend_its_place():
    assert len(check(padded(*(MakesEntries() for _ in range(5)))).storages) == 100


class Lazy(dict):  # type: ignore[type-arg]
    """A dict that computes its values when they are asked for, and cannot just now; its pickle holds none."""

    def __len__(self) -> int:
        raise OSError("the data is not here")

    values = __len__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


real = DirectPickler.run


class TestGivingUp:
    """What pickle does better it is given, at once and in full."""

    @pytest.mark.parametrize(
        "obj", [list(range(200_000)), {str(n): n for n in range(100_000)}, [complex(number) for number in range(3_000)]]
    )
    def test_on_objects_without_tensors(self, obj):
        with pytest.raises(PicklingInCIsFasterError):
            DirectPickler(2).run(obj)
        assert flatten(obj).pickle_bytes == pickle.dumps(obj, 2)

    def test_not_where_tensors_make_up_for_it(self):
        DirectPickler(2).run([[torch.zeros(1) for _ in range(3000)], list(range(20_000))])

    def test_loses_no_storage(self):
        obj = [[torch.zeros(1) for _ in range(100)], list(range(100_000))]
        flat = flatten(obj)
        assert len(flat.storages) == 100
        assert flat.pickle_bytes == pickling._pickle_in_c(obj, 2)[0]

    def test_containers_with_a_mind_of_their_own_are_not_asked(self):
        """To count their entries may load them, or fail, where pickling them does not."""
        obj = {"lazy": Lazy(a=1), "also": [0] * 100}
        assert flatten(obj).pickle_bytes == pickle.dumps(obj, 2)
        assert flatten(Lazy(a=1)).pickle_bytes == pickle.dumps(Lazy(a=1), 2)

    def test_few_entries_are_not_worth_it(self, monkeypatch):
        runs: list[object] = []
        monkeypatch.setattr(DirectPickler, "run", lambda self, obj: runs.append(obj) or real(self, obj))
        flatten({"weights": torch.zeros(3)})
        assert runs == []
        many = {"model": {str(number): torch.zeros(1) for number in range(60)}}
        flatten(many)
        assert runs == [many]

    def test_deep_nesting(self):
        obj: list[object] = [0] * 60
        for _ in range(200):
            obj = [obj]
        assert flatten([obj] * 60).pickle_bytes == pickle.dumps([obj] * 60, 2)


def test_errors_are_those_of_the_pickler_in_c():
    obj: list[object] = [torch.zeros(1) for _ in range(100)]
    with pytest.raises((AttributeError, pickle.PicklingError)) as plain:
        pickle.dumps(lambda: None, 2)
    with pytest.raises(type(plain.value)) as ours:
        flatten([*obj, lambda: None])
    assert type(ours.value) is type(plain.value)
    base = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        flatten([*obj, base, base.view(torch.float32)])


def test_an_interrupt_is_not_taken_for_a_failure():
    class Interrupt:
        def __reduce__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flatten([*range(100), Interrupt()])


def test_a_registered_way_to_pickle_tensors_is_taken(monkeypatch):
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (list, (tensor.tolist(),)))
    check(padded(*(torch.arange(3) for _ in range(10))))


def test_what_was_pickled_is_free_at_once():
    gc.disable()
    try:
        tensors = [torch.zeros(1000) for _ in range(100)]
        storage = weakref.ref(tensors[-1].untyped_storage())
        flat = flatten(tensors)
        assert len(flat.storages) == 100
        del flat, tensors
        assert storage() is None
        tensors = [torch.zeros(1000) for _ in range(100)]
        storage = weakref.ref(tensors[-1].untyped_storage())
        with pytest.raises((AttributeError, pickle.PicklingError)):
            flatten([*tensors, lambda: None])
        del tensors
        assert storage() is None
    finally:
        gc.enable()


def test_a_pickler_that_writes_otherwise_makes_no_forms(monkeypatch):
    """Should a Python to come write opcodes in other pieces, tensors are pickled in the usual way."""

    def in_one_piece(pickler: Any, entries: tuple[Any, ...]) -> None:
        start = len(pickler._code)
        inherited(pickler, entries)
        pickler._code[start:] = [b"".join(pickler._code[start:])]

    inherited = DirectPickler.save_tuple
    monkeypatch.setattr(DirectPickler, "save_tuple", in_one_piece)
    assert not check(padded(*(torch.zeros(3) for _ in range(9))))._forms
