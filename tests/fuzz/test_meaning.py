"""Odd but honest files: what is loaded of them is what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file goes."""
    return tmp_path / "odd.pt"


def test_a_dict_that_stands_in_two_places(path: Path) -> None:
    # To take it from one place would take it from the other, too: refused, rather than loaded empty.
    shared = {"weight": torch.arange(4.0)}
    torch.save({"model": shared, "average": shared}, path)
    with pytest.raises(ValueError, match="a dict that stands in two places"):
        fastpersist.load(path, only="model")


EXOTIC = ("plain", "sparse", "csr", "nested", "meta", "parameter", "expanded", "empty", "bytes")


def exotic() -> dict[str, Any]:
    """A value of each kind, by the names above."""
    return {
        "plain": torch.arange(3.0),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(3, device="meta"),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "expanded": torch.ones(1).expand(1000),
        "empty": torch.empty(0, 5),
        "bytes": bytearray(b"abc"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inspect_knows_all_kinds_of_tensors(path: Path) -> None:
    torch.save(exotic(), path)
    tensors = fastpersist.inspect(path).tensors
    assert tensors is not None
    assert {tensor.path for tensor in tensors} == {name for name, value in exotic().items() if isinstance(value, torch.Tensor)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("only", EXOTIC)
def test_one_of_all_kinds_of_values(path: Path, only: str) -> None:
    torch.save(exotic(), path)
    loaded = fastpersist.load(path, only=only)
    assert list(loaded) == [only]
    assert repr(loaded[only]) == repr(exotic()[only])
