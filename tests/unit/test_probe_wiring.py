"""The verbs use the profile of the path's filesystem, engine and sizes alike."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

import fastpersist
from fastpersist.probing.profile import Profile, save_profile


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE", "BLOCK_NBYTES", "QUEUE_DEPTH"):
        monkeypatch.delenv(f"FASTPERSIST_{name}", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_profile(tmp_path, Profile("posix", 1 << 20, 3), gb_per_s=1.5)


def test_save_uses_it_and_its_arguments_win(tmp_path: Path) -> None:
    tensor = torch.randn(1 << 20)
    report = fastpersist.save(tensor, tmp_path / "new.pt")
    assert (report.engine, report.block_nbytes, report.queue_depth) == ("posix", 1 << 20, 3)
    report = fastpersist.save(tensor, tmp_path / "new.pt", block_nbytes=1 << 16, queue_depth=2)
    assert (report.engine, report.block_nbytes, report.queue_depth) == ("posix", 1 << 16, 2)
    assert torch.equal(fastpersist.load(tmp_path / "new.pt"), tensor)
    assert fastpersist.verify(tmp_path / "new.pt").engine == "posix"


def test_what_is_no_path_is_refused_as_ever() -> None:
    with pytest.raises(TypeError, match="saves to a path"):
        fastpersist.save(1, io.BytesIO())  # type: ignore[arg-type]
