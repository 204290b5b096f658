"""Warnings: those of torch.save, and none of our own."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import torch
from compat_zoo import make, randoms

import fastpersist


def _warnings_of(act: Callable[[], object]) -> set[tuple[type[Warning], str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return {(warning.category, str(warning.message)) for warning in caught}


def test_save_warns_no_more_than_torch(specimen_name, tmp_path):
    obj = make(specimen_name)
    ours = _warnings_of(lambda: fastpersist.save(obj, tmp_path / "model.pt", engine="posix", durable=False))
    assert ours <= _warnings_of(lambda: torch.save(obj, io.BytesIO()))


def test_lost_hooks_are_told(tmp_path):
    tensor = randoms(3).requires_grad_()
    tensor.register_hook(lambda grad: grad)
    ours = _warnings_of(lambda: fastpersist.save(tensor, tmp_path / "model.pt", engine="posix", durable=False))
    assert ours == _warnings_of(lambda: torch.save(tensor, io.BytesIO()))
    assert len(ours) == 1
