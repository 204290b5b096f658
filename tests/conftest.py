"""For all tests: profiles that a developer has saved must not change what is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_directory_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point XDG_CACHE_HOME to an empty directory, for child processes too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
