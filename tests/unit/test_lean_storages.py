"""Plain tensors come straight from the memory that was read; whatever looks at their storage finds an ordinary one."""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any

import pytest
import torch

from fastpersist.archive.pickling import flatten
from fastpersist.archive.unpickling import Raw, unflatten
from fastpersist.errors import CheckpointFormatError
from fastpersist.memory.pages import Pages


def reload(obj: object, *, weights_only: bool = False) -> Any:
    """The object through data.pkl and raw memory."""
    flat = flatten(obj)
    raws: dict[str, Raw] = {}
    for key, (storage, nbytes) in enumerate(zip(flat.storages, flat.storage_nbytes, strict=True)):
        pages = Pages(max(nbytes, 1))
        if nbytes:
            pages.view[64 : 64 + nbytes] = bytes(storage)[:nbytes]
        raws[str(key)] = (pages.view, 64 if nbytes else 0, nbytes)
    return unflatten(flat.pickle_bytes, lambda key: raws.pop(key, None), weights_only=weights_only)


GEOMETRIES = {
    "1-d": lambda: torch.arange(6.0),
    "2-d": lambda: torch.arange(6.0).view(2, 3),
    "4-d": lambda: torch.arange(24.0).view(2, 3, 2, 2),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "part": lambda: torch.arange(6.0)[2:5],
    "every other": lambda: torch.arange(6.0)[::2],
    "expanded": lambda: torch.arange(6.0)[:1].expand(4, 3),
    "scalar": lambda: torch.tensor(3.0),
    "one in each dimension": lambda: torch.ones(1, 1, 1),
    "empty": lambda: torch.empty(0, 3),
    "none of many": lambda: torch.arange(6.0)[:0],
    "channels last": lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "bytes": lambda: torch.arange(5, dtype=torch.uint8),
    "bool": lambda: torch.tensor([True, False]),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(3, dtype=torch.complex128),
}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("case", GEOMETRIES)
def test_geometry_and_storage_are_torchs(case: str, weights_only: bool) -> None:
    tensor = GEOMETRIES[case]()
    stream = io.BytesIO()
    torch.save(tensor, stream)
    stream.seek(0)
    theirs = torch.load(stream, weights_only=weights_only)
    ours = reload(tensor, weights_only=weights_only)
    assert torch.equal(ours, theirs)
    for what in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset, torch.Tensor.is_contiguous):
        assert what(ours) == what(theirs)
    assert (ours.dtype, ours._base, ours.is_leaf) == (theirs.dtype, None, True)
    assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("first", ["whole", "part", "storage", "parameter"])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_all_mentions_share_one_storage(first: str, weights_only: bool) -> None:
    whole = torch.arange(8.0)
    mentions = {"whole": whole, "part": whole[3:], "storage": whole.storage(), "parameter": torch.nn.Parameter(whole)}
    order = [first, *(name for name in mentions if name != first), "whole"]
    values = reload([mentions[name] for name in order], weights_only=weights_only)
    loaded = dict(zip([*order[:-1], "again"], values, strict=True))
    loaded["whole"][5] = 50.0
    assert loaded["part"][2] == loaded["storage"][5] == loaded["parameter"][5] == loaded["again"][5] == 50.0
    assert type(loaded["storage"]) is torch.storage.TypedStorage
    assert loaded["parameter"].requires_grad


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_that_no_tensor_views_is_an_ordinary_one(weights_only: bool) -> None:
    loaded = reload({"storage": torch.arange(3).storage()}, weights_only=weights_only)["storage"]
    assert type(loaded) is torch.storage.TypedStorage
    assert vars(loaded).keys() == {"dtype", "_untyped_storage"}
    assert loaded.tolist() == [0, 1, 2]


class Keeper:
    """A class of a user's, which gets a storage to work with in the middle of a load."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.state = tensor.storage()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.total = sum(state["state"])
        self.kind = type(state["state"])


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_storage_can_be_used_in_the_middle_of_a_load() -> None:
    keeper = reload(Keeper(torch.arange(4)))
    assert (keeper.total, keeper.kind) == (6, torch.storage.TypedStorage)


def as_pickle(size: Any, stride: Any, offset: Any = 0) -> bytes:
    """data.pkl of a tensor over a storage of six floats, with a geometry of one's own."""

    class Strange:
        def __reduce__(self) -> tuple[Any, ...]:
            storage = torch.zeros(6).storage()
            return torch._utils._rebuild_tensor_v2, (storage, offset, size, stride, False, collections.OrderedDict())

    return flatten(Strange()).pickle_bytes


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((7,), (1,), 0), ((6,), (2,), 0), ((6,), (1,), 1), ((6,), (1,), -1), ((1 << 40,), (1 << 40,), 0), ((2, 3), (3,), 0),
     ((-2, -3), (-3, 1), 0), ((6,), (-1,), 0), ((1 << 62, 4), (4, 1), 0), ("six", (1,), 0)],
)  # fmt: skip
@pytest.mark.parametrize("weights_only", [True, False])
def test_no_tensor_reaches_beyond_its_record(size: Any, stride: Any, offset: Any, weights_only: bool) -> None:
    pages = Pages(24)
    with pytest.raises((CheckpointFormatError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError)):
        unflatten(as_pickle(size, stride, offset), {"0": (pages.view, 0, 24)}.pop, weights_only=weights_only)
