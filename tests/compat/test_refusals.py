"""What torch.save refuses, and what it should: the kind of error, and that nothing is left behind."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat_describe import describe
from compat_zoo import DTYPE_NAMES, random_bytes, randoms

import fastpersist

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

RARE_DTYPES = sorted(
    {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    - set(DTYPE_NAMES)
    - {"qint8", "quint8", "qint32", "quint4x2"}
)


def _error_of(act: Callable[[], Any]) -> type[BaseException] | None:
    try:
        act()
    except Exception as error:
        return type(error)
    return None


@pytest.fixture
def refused_alike(tmp_path) -> Callable[[object], type[BaseException] | None]:
    """A function of an object: the type of the error that both savers raise; an old file survives it, alone."""

    def check(obj: object) -> type[BaseException] | None:
        path = tmp_path / "model.pt"
        path.write_bytes(b"old")
        expected = _error_of(lambda: torch.save(obj, io.BytesIO()))
        actual = _error_of(lambda: fastpersist.save(obj, path, engine="posix", durable=False))
        assert actual == expected
        if expected is not None:
            assert path.read_bytes() == b"old"
        assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]
        return expected

    return check


@pytest.mark.parametrize("name", RARE_DTYPES)
def test_dtypes_without_a_storage_type(name, refused_alike):
    """float and its like are other names of dtypes in the zoo; int1 to int7 have no storage that torch could name."""
    dtype = getattr(torch, name)
    source = random_bytes(4 * max(1, dtype.itemsize))
    try:
        tensor = torch.empty(0, dtype=dtype).set_(source.untyped_storage(), 0, (4,), (1,))
    except RuntimeError as error:
        pytest.skip(f"torch makes no such tensor: {error}")
    refused_alike(tensor)


class Unpicklable:
    """Raises an error of its own."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("on purpose")


def _half_good() -> object:
    return [randoms(3), lambda: None]


def _lock() -> object:
    return {"lock": threading.Lock(), "weights": randoms(2)}


def _local_class() -> object:
    class Local:
        pass

    return Local()


def _one_memory_as_two_dtypes() -> object:
    floats = randoms(4)
    return [floats, floats.view(torch.int32)]


def _tensor_and_its_untyped_storage() -> object:
    floats = randoms(4)
    return [floats.untyped_storage(), floats]


def _storages_over_one_memory() -> object:
    # Two storages of torch, one address: the dtype is compared by address, not by storage.
    memory = bytearray(64)
    return [torch.frombuffer(memory, dtype=torch.float32), torch.frombuffer(memory, dtype=torch.int64)]


def _mkldnn() -> object:
    return randoms(4, 4).to_mkldnn()


@pytest.mark.parametrize(
    "make", [
        Unpicklable, _half_good, _lock, _local_class, _one_memory_as_two_dtypes, _tensor_and_its_untyped_storage,
        _storages_over_one_memory,
    ],
)  # fmt: skip
def test_refused_as_torch_refuses(make, refused_alike):
    assert refused_alike(make()) is not None


@pytest.mark.skipif(not hasattr(torch.Tensor, "refine_names"), reason="this torch has no named tensors")
def test_named_tensors_are_refused(refused_alike):
    assert refused_alike(randoms(2, 3).refine_names("rows", "columns")) is RuntimeError


def test_one_dtype_over_one_memory_is_taken(tmp_path):
    memory = bytearray(range(64))
    obj = [torch.frombuffer(memory, dtype=torch.int32), torch.frombuffer(memory, dtype=torch.int32, offset=4)]
    fastpersist.save(obj, tmp_path / "model.pt", engine="posix", durable=False)
    assert [t.tolist() for t in torch.load(tmp_path / "model.pt")] == [t.tolist() for t in obj]


@pytest.mark.parametrize("protocol", [0, 1, 4, 5, -1, None, "2"])
def test_other_protocols_are_refused(protocol, tmp_path):
    with pytest.raises(ValueError, match="pickle_protocol"):
        fastpersist.save(randoms(2), tmp_path / "model.pt", engine="posix", pickle_protocol=protocol)
    assert list(tmp_path.iterdir()) == []


def test_meta_storages_are_refused(tmp_path):
    with pytest.raises(ValueError, match="meta"):
        fastpersist.save(torch.UntypedStorage(16, device="meta"), tmp_path / "model.pt", engine="posix")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nbytes", [4, 13, 14, 15, 400_003])
def test_storages_with_odd_ends_load(nbytes, layout, tmp_path):
    """torch saves such a storage whole and cannot load it again; the whole elements are what counts."""
    storage = random_bytes(nbytes).untyped_storage()
    tensor = torch.empty(0, dtype=torch.float32).set_(storage, 0, (nbytes // 4,), (1,))
    fastpersist.save([tensor, tensor[1:]], tmp_path / "model.pt", layout=layout, engine="posix", durable=False)
    for mmap in (False, True):
        whole, part = torch.load(tmp_path / "model.pt", mmap=mmap)
        assert describe(whole.view(torch.int32)) == describe(tensor.view(torch.int32).clone())
        assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata
