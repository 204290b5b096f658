"""Files to compare: each specimen of the zoo, saved by torch and by fastpersist, once for all tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.utils.serialization import config

import fastpersist

# The zoo's classes are pickled by name, and a subprocess loads them: they need a module that any process can import.
sys.path.insert(0, str(Path(__file__).parent))

from compat_zoo import SPECIMENS, make

LAYOUTS = ("auto", "torch")


@dataclass(frozen=True)
class Twins:
    """The same object saved twice: by fastpersist, and by torch at the alignment that layout "torch" takes as well."""

    name: str
    layout: str
    ours: Path
    theirs: Path


@pytest.fixture(scope="session")
def twins_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Twins]:
    """A function of (specimen, layout): the two files, saved at first use."""
    directory = tmp_path_factory.mktemp("twins")
    made: dict[tuple[str, str], Twins] = {}

    def get(name: str, layout: str) -> Twins:
        if (name, layout) not in made:
            made[name, layout] = _save_twins(directory, name, layout)
        return made[name, layout]

    return get


def _save_twins(directory: Path, name: str, layout: str) -> Twins:
    # One file name in two directories: the name is part of the bytes.
    twins = Twins(name, layout, directory / f"ours-{layout}" / f"{name}.pt", directory / "theirs" / f"{name}.pt")
    for path in (twins.ours, twins.theirs):
        path.parent.mkdir(exist_ok=True)
    fastpersist.save(make(name), twins.ours, layout=layout, engine="posix", durable=False)
    if not twins.theirs.exists():
        with config.patch("save.storage_alignment", 4096):
            torch.save(make(name), twins.theirs)
    return twins


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """Each layout in turn."""
    return str(request.param)


@pytest.fixture(params=SPECIMENS)
def specimen_name(request: pytest.FixtureRequest) -> str:
    """Each specimen in turn."""
    return str(request.param)


@pytest.fixture
def twins(twins_of: Callable[[str, str], Twins], specimen_name: str, layout: str) -> Twins:
    """Each specimen in each layout."""
    return twins_of(specimen_name, layout)
