"""Every specimen of the zoo, pickled directly: what small objects are spared otherwise."""

from __future__ import annotations

import contextlib

import pytest
import torch
from compat_zoo import make

from fastpersist.archive.direct_pickling import DirectPickler, PicklingInCIsFasterError
from fastpersist.archive.pickling import _pickle_in_c

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def test_the_same_bytes_as_in_c(specimen_name):
    """Between many tensors, so that places in the memo are of both lengths, and once more, to be met again."""
    obj = make(specimen_name)
    whole = [obj, [torch.zeros(3) for _ in range(60)], obj, make(specimen_name)]
    pickler = DirectPickler(2)
    with contextlib.suppress(PicklingInCIsFasterError):
        assert pickler.run(whole) == _pickle_in_c(whole, 2)[0]
