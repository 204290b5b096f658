"""Plain torch.load, in every mode it has, sees in our file what it sees in its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_describe import describe, storages_of
from compat_zoo import SPECIMENS, make
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config

import fastpersist

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

NOT_RESTORED_BY_TORCH = {
    "attribute_that_refers_back": "its attribute is lost",
    "empty_between_full": "storages without bytes are not shared again",
    "same_untyped_storage_twice": "untyped storages come back typed",
    "untyped_storage": "untyped storages come back typed",
    "empty_untyped_storage": "untyped storages come back typed",
    "optimizer": "it keeps some attributes out of its state",
}
REFUSED_BY_WEIGHTS_ONLY = {
    "attribute_that_refers_back", "frozen_set", "generator", "library_objects", "module",
    "numpy_values", "optimizer", "other_mappings", "own_classes", "parameter_list", "subclass", "text_and_bytes",
    "uninitialized_parameter",
}  # fmt: skip


def _weights_only(path: Path) -> object:
    return torch.load(path, weights_only=True)


def _anything(path: Path) -> object:
    return torch.load(path, weights_only=False)


def _mapped(path: Path) -> object:
    return torch.load(path, weights_only=False, mmap=True)


def _mapped_weights_only(path: Path) -> object:
    return torch.load(path, weights_only=True, mmap=True)


def _mapped_at_calculated_offsets(path: Path) -> object:
    with config.patch("load.calculate_storage_offsets", True):
        return torch.load(path, weights_only=False, mmap=True)


def _fake(path: Path) -> object:
    with FakeTensorMode():
        return torch.load(path, weights_only=False)


def _to_meta(path: Path) -> object:
    return torch.load(path, weights_only=False, map_location="meta")


def _to_meta_weights_only(path: Path) -> object:
    return torch.load(path, weights_only=True, map_location="meta")


def _from_file_object(path: Path) -> object:
    with path.open("rb") as file:
        return torch.load(file, weights_only=False)


def _from_bytes(path: Path) -> object:
    return torch.load(io.BytesIO(path.read_bytes()), weights_only=False)


def _to_cpu(path: Path) -> object:
    return torch.load(path, weights_only=False, map_location="cpu")


def _by_dictionary(path: Path) -> object:
    return torch.load(path, weights_only=False, map_location={"cpu": "cpu"})


def _by_function(path: Path) -> object:
    locations: list[str] = []

    def locate(storage: Any, location: str) -> Any:
        locations.append(location)
        return storage

    return [torch.load(path, weights_only=False, map_location=locate), locations]


MODES: dict[str, Callable[[Path], object]] = {
    mode.__name__.lstrip("_"): mode
    for mode in (
        _weights_only, _anything, _mapped, _mapped_weights_only, _mapped_at_calculated_offsets, _fake, _to_meta,
        _to_meta_weights_only, _from_file_object, _from_bytes, _to_cpu, _by_dictionary, _by_function,
    )
}  # fmt: skip


def _outcome(load: Callable[[Path], object], path: Path) -> Any:
    """What was loaded, or the kind of refusal."""
    try:
        loaded = load(path)
    except Exception as error:
        return ("refused", type(error))
    return describe(loaded)


@pytest.mark.parametrize("mode", MODES)
def test_loads_as_torchs_own_file(mode, twins):
    load = MODES[mode]
    assert _outcome(load, twins.ours) == _outcome(load, twins.theirs)


def test_debug_checks_pass_in_every_mode(twins, monkeypatch):
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")  # torch then compares calculated offsets with the headers'
    for load in (_anything, _mapped_at_calculated_offsets, _to_meta):
        assert _outcome(load, twins.ours) == _outcome(load, twins.theirs)


def test_round_trip_is_exact(twins):
    if twins.name in NOT_RESTORED_BY_TORCH:
        pytest.skip(f"torch.load does not restore this from its own file either: {NOT_RESTORED_BY_TORCH[twins.name]}")
    assert describe(_anything(twins.ours)) == describe(make(twins.name))


def test_weights_only_takes_all_that_is_weights(twins):
    """Guards the comparisons above: two refusals are equal as well."""
    refused = _outcome(_weights_only, twins.ours)[0] == "refused"
    assert refused == (twins.name in REFUSED_BY_WEIGHTS_ONLY)


def test_mapped_storages_are_aligned_for_every_dtype(twins):
    mapped = _mapped(twins.ours)
    assert [s.data_ptr() % 64 for s in storages_of(mapped) if s.nbytes() and s.device.type == "cpu" and s.data_ptr() % 64] == []


def test_a_mapped_checkpoint_is_saved_over_itself(layout, tmp_path):
    """The source of the data is the file that is replaced: it lives on until the last mapping goes."""
    path = tmp_path / "model.pt"
    fastpersist.save(make("large_among_small"), path, engine="posix", durable=False)
    mapped = torch.load(path, mmap=True)
    fastpersist.save(mapped, path, layout=layout, engine="posix", durable=False)
    assert describe(mapped) == describe(torch.load(path)) == describe(make("large_among_small"))


LOAD_ALL_UNDER_DEBUG = """
import sys, warnings, torch
warnings.simplefilter("ignore")
from torch.utils.serialization import config
failures = []
for path in sys.argv[1:]:
    try:
        torch.load(path, weights_only=False)
        with config.patch("load.calculate_storage_offsets", True):
            torch.load(path, weights_only=False, mmap=True)
    except Exception as error:
        failures.append(f"{path}: {error!r}")
print(*failures, sep="\\n")
sys.exit(bool(failures))
"""


def test_another_process_loads_all_with_debug_checks(twins_of, layout):
    paths = [str(twins_of(name, layout).ours) for name in SPECIMENS]
    environment = os.environ | {"TORCH_SERIALIZATION_DEBUG": "1", "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(
        [sys.executable, "-c", LOAD_ALL_UNDER_DEBUG, *paths], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
