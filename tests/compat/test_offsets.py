"""Loads without data tell where the data lies; what lies there must be the data. torch calculates these offsets or reads
them from headers, depending on records of the file: a wrong guess is silent, so every one is followed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_describe import storage_bytes, tensors_of
from compat_files import offsets_of
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def _fake(path: Path) -> Any:
    with FakeTensorMode():
        return torch.load(path, weights_only=False)


def _meta(path: Path) -> Any:
    return torch.load(path, weights_only=False, map_location="meta")


@pytest.mark.parametrize("load", [_fake, _meta])
def test_offsets_lead_to_the_data(load, twins):
    real, empty = _tensors_that_came_from_the_file(load, twins)
    content, true_offsets = twins.ours.read_bytes(), set(offsets_of(twins.ours).values())
    for tensor, placeholder in zip(real, empty, strict=True):
        storage = tensor.untyped_storage()
        offset = placeholder.untyped_storage()._checkpoint_offset
        assert offset in true_offsets
        assert content[offset : offset + storage.nbytes()] == storage_bytes(storage)


def _tensors_that_came_from_the_file(load: Callable[[Path], Any], twins: Any) -> tuple[list[Any], list[Any]]:
    try:
        load(twins.theirs)
    except Exception as error:
        pytest.skip(f"torch cannot load its own file in this mode: {type(error).__name__}")
    real = tensors_of(torch.load(twins.ours, weights_only=False))
    empty = tensors_of(load(twins.ours))
    had_data = [not tensor.is_meta for tensor in real]
    assert len(real) == len(empty)
    return [t for t, had in zip(real, had_data, strict=True) if had], [t for t, had in zip(empty, had_data, strict=True) if had]
