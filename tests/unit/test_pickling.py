"""From objects to pickles and storages: the parts that no comparison of files shows."""

from __future__ import annotations

import copyreg
import gc
import io
import pickle
import weakref
import zipfile
from collections.abc import Iterator

import pytest
import torch

from fastpersist.archive.pickling import FlatObject, flatten


def torchs_pickle(obj: object, protocol: int = 2) -> bytes:
    """data.pkl as torch.save writes it."""
    stream = io.BytesIO()
    torch.save(obj, stream, pickle_protocol=protocol)
    with zipfile.ZipFile(stream) as archive:
        return archive.read("archive/data.pkl")


def test_storages_are_the_objects_own():
    """No copy: the very memory, in the order of first meeting, one entry for each storage."""
    first, second = torch.arange(6.0), torch.arange(3, dtype=torch.int16)
    flat = flatten({"view": first[2:], "second": second, "whole": first, "again": second.view(3, 1)})
    assert [storage.data_ptr() for storage in flat.storages] == [first.data_ptr(), second.data_ptr()]
    assert flat.storage_nbytes == [24, 6]
    assert flat.nbytes == 30


def test_storages_stay_alive():
    def short_lived() -> FlatObject:
        return flatten([torch.full((1000,), float(number)) for number in range(20)])

    flat = short_lived()
    gc.collect()
    values = [torch.empty(0).set_(storage)[-1].item() for storage in flat.storages]
    assert values == list(range(20))


class MakesTensors:
    """Each pickling makes a tensor that nothing else keeps: the next one could take its address."""

    def __reduce__(self) -> tuple[type, tuple[object]]:
        return list, ([torch.zeros(100)],)


def test_a_freed_storage_does_not_lend_its_key():
    flat = flatten([MakesTensors() for _ in range(50)])
    assert len(flat.storages) == 50


def test_objects_without_tensors_have_no_storages():
    flat = flatten({"step": 3})
    assert (flat.storages, flat.storage_nbytes, flat.nbytes) == ([], [], 0)
    assert pickle.loads(flat.pickle_bytes) == {"step": 3}


@pytest.mark.parametrize("protocol", [2, 3])
def test_protocols_that_torch_loads(protocol):
    obj = {"a": torch.arange(3), "b": b"bytes", "c": "é"}
    assert flatten(obj, protocol).pickle_bytes == torchs_pickle(obj, protocol)


@pytest.mark.parametrize("protocol", [0, 1, 4, 5, -1])
def test_other_protocols_are_refused(protocol):
    with pytest.raises(ValueError, match="pickle_protocol must be 2 or 3"):
        flatten([], protocol)


@pytest.mark.parametrize("nbytes", [0, 16])
def test_meta_storages_are_refused(nbytes):
    with pytest.raises(ValueError, match="meta"):
        flatten([torch.UntypedStorage(nbytes, device="meta")])


def test_meta_tensors_need_no_storage():
    tensor = torch.empty(3, device="meta")
    flat = flatten(tensor)
    assert flat.storages == []
    assert flat.pickle_bytes == torchs_pickle(tensor)


@pytest.mark.parametrize("views", [(torch.float32, torch.int32), (torch.uint8, torch.int8), (torch.uint16, torch.int16)])
def test_one_memory_as_two_dtypes_is_torchs_error(views):
    base = torch.zeros(64, dtype=torch.uint8)
    obj = [base.view(dtype) for dtype in views]
    with pytest.raises(RuntimeError) as theirs:
        torch.save(obj, io.BytesIO())
    with pytest.raises(RuntimeError) as ours:
        flatten(obj)
    assert str(ours.value) == str(theirs.value)


def test_newer_dtypes_share_memory_with_bytes():
    """uint16 and its like are pickled as untyped storages, which count as uint8."""
    base = torch.arange(8, dtype=torch.uint8)
    obj = [base, base.view(torch.uint16)]
    flat = flatten(obj)
    assert len(flat.storages) == 1
    assert flat.pickle_bytes == torchs_pickle(obj)


def test_empty_storages_may_differ_in_dtype():
    obj = [torch.empty(0, dtype=dtype) for dtype in (torch.float32, torch.int64, torch.float32)]
    flat = flatten(obj)
    assert flat.storage_nbytes == [0, 0, 0]
    assert flat.pickle_bytes == torchs_pickle(obj)


def test_whole_elements_count():
    storage = torch.UntypedStorage(15)
    tensor = torch.empty(0).set_(storage, 0, (3,), (1,))
    flat = flatten(tensor)
    assert flat.storage_nbytes == [12]
    assert flatten(storage).storage_nbytes == [15]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint16])
def test_a_fake_device_is_the_location(dtype):
    """torch marks storages so under FakeTensorMode and skip_data; the mark has to reach the pickle."""
    storage = torch.zeros(4, dtype=dtype).untyped_storage()
    storage._fake_device = torch.device("cuda", 1)
    flat = flatten(storage)
    assert flat.pickle_bytes == torchs_pickle(storage)
    assert b"cuda:1" in flat.pickle_bytes


@pytest.fixture
def collector() -> Iterator[None]:
    """Leaves the garbage collector on, whatever a test did."""
    gc.enable()
    yield
    gc.enable()


class Watcher:
    """Notes whether the collector runs while it is pickled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[bool] = []
        self.error = error

    def __reduce__(self) -> tuple[type, tuple[()]]:
        self.seen.append(gc.isenabled())
        if self.error is not None:
            raise self.error
        return list, ()


@pytest.mark.usefixtures("collector")
class TestGarbageCollector:
    def test_rests_while_pickling(self):
        watcher = Watcher()
        flatten(watcher)
        assert watcher.seen == [False]
        assert gc.isenabled()

    @pytest.mark.parametrize("error", [ZeroDivisionError(), pickle.PicklingError("no")])
    def test_returns_after_an_error(self, error):
        with pytest.raises(type(error)):
            flatten([torch.zeros(2), Watcher(error)])
        assert gc.isenabled()

    def test_returns_after_an_interrupt(self):
        class Interrupt:
            def __reduce__(self) -> str:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            flatten(Interrupt())
        assert gc.isenabled()

    def test_stays_off_where_it_was(self):
        gc.disable()
        flatten([1])
        assert not gc.isenabled()

    def test_rests_until_the_outermost_is_done(self):
        class Nested:
            def __init__(self, after: Watcher) -> None:
                self.after = after

            def __reduce__(self) -> tuple[type, tuple[object]]:
                flatten([1])
                return list, ([self.after],)

        watcher = Watcher()
        flatten(Nested(watcher))
        assert watcher.seen == [False]
        assert gc.isenabled()


def test_names_that_begin_alike_are_memoized_as_torch_does():
    """Keys of several digits are new strings; torch mentions the first one again, and so must we."""
    tensors = [torch.zeros(1) for _ in range(120)]
    obj = [tensors, [tensor.view(1, 1) for tensor in tensors], [tensor.untyped_storage() for tensor in torch.empty(0, 3)]]
    assert flatten(obj).pickle_bytes == torchs_pickle(obj)


def test_an_object_that_cannot_be_pickled_says_so_itself():
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        flatten({"weights": torch.zeros(2), "bad": lambda: None})


def test_a_registered_way_to_pickle_tensors_is_taken(monkeypatch):
    """copyreg.pickle(torch.Tensor, ...) is the standard library's way to override; torch.save follows it."""
    monkeypatch.setitem(copyreg.dispatch_table, torch.Tensor, lambda tensor: (list, (tensor.tolist(),)))
    assert flatten(torch.arange(3)).pickle_bytes == torchs_pickle(torch.arange(3))


class Holder:
    """Hides storages from everything but its own pickling."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.typed = tensor.storage()
        self.untyped = torch.ones(5).untyped_storage()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_no_storage_is_missed_after_a_plain_tensor():
    """While a plain tensor's numbers are pickled storages are not looked for; right after it they are again."""
    tensors = [torch.full((number + 1,), float(number)) for number in range(6)]
    special = torch.nn.Parameter(torch.ones(2)), torch.zeros(2, 2).to_sparse(), torch.ones(2, dtype=torch.uint16)
    obj = [tensors[0], Holder(tensors[1]), tensors[2], *special, tensors[3], tensors[4].untyped_storage(), (tensors[5],)]
    assert flatten(obj).pickle_bytes == torchs_pickle(obj)


@pytest.mark.usefixtures("collector_off")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_what_was_pickled_is_free_at_once():
    """Without the help of the garbage collector: storages may be as large as the memory."""
    tensor = torch.zeros(1000)
    storage = weakref.ref(tensor.untyped_storage())
    flat = flatten([tensor, Holder(torch.zeros(3))])
    assert flat.nbytes == 4000 + 12 + 20
    del flat, tensor
    assert storage() is None


@pytest.mark.usefixtures("collector_off")
def test_what_could_not_be_pickled_is_free_at_once():
    tensor = torch.zeros(1000)
    storage = weakref.ref(tensor.untyped_storage())
    with pytest.raises((AttributeError, pickle.PicklingError)):
        flatten([tensor, lambda: None])
    del tensor
    assert storage() is None


@pytest.fixture
def collector_off() -> Iterator[None]:
    """No garbage collection meanwhile."""
    gc.disable()
    yield
    gc.enable()
