"""A file that is replaced, or removed, in the middle of a load: what is loaded is one checkpoint, and not parts of two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.engines import Engine


def content(generation: int) -> dict[str, Any]:
    """Large and small tensors that tell which generation they are of."""
    return {"generation": generation, "large": torch.full((1 << 19,), float(generation)), "small": torch.tensor([generation])}


@pytest.mark.parametrize("engine", ["posix", "io_uring"])
@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_load_is_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, change: str) -> None:
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    fastpersist.save(content(1), path)
    fastpersist.save(content(2), other)
    real = Engine.open

    def open_late(self: Engine, name: str, mode: str, **options: Any) -> Any:
        if other.exists():
            if change == "removed":
                path.unlink()
                other.unlink()
            else:
                os.rename(other, path)
        return real(self, name, mode, **options)

    monkeypatch.setattr(Engine, "open", open_late)
    loaded = fastpersist.load(path, engine=engine)
    assert loaded["generation"] == 1
    assert torch.equal(loaded["large"], content(1)["large"])
    assert loaded["small"].item() == 1


def test_a_check_is_of_one_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "model.pt", tmp_path / "other.pt"
    fastpersist.save(content(1), path)
    other.write_bytes(b"no checkpoint")
    real = Engine.open

    def open_late(self: Engine, name: str, mode: str, **options: Any) -> Any:
        if other.exists():
            os.rename(other, path)
        return real(self, name, mode, **options)

    monkeypatch.setattr(Engine, "open", open_late)
    assert fastpersist.verify(path).records > 2
