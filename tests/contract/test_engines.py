"""Every engine passes the shipped contract."""

from __future__ import annotations

import pytest

from fastpersist.engines import Engine, engine_class, open_engine
from fastpersist.engines.memory import MemoryEngine
from fastpersist.testing import EngineContract, FaultyEngine


def _open_or_skip(name: str, queue_depth: int) -> Engine:
    verdict = engine_class(name).availability()
    if not verdict.usable:
        pytest.skip(f"{name}: {verdict.reason}")
    return open_engine(name, queue_depth=queue_depth)


class TestPosix(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return _open_or_skip("posix", queue_depth)


class TestIoUring(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return _open_or_skip("io_uring", queue_depth)


class TestMemory(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return MemoryEngine(queue_depth=queue_depth)

    def read_back(self, engine: Engine, path: str) -> bytes:
        assert isinstance(engine, MemoryEngine)
        return engine.contents(path)


class TestNull(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return open_engine("null", queue_depth=queue_depth)

    def read_back(self, engine: Engine, path: str) -> None:
        return None

    @pytest.mark.skip(reason="the null engine keeps nothing that could be read")
    def test_reads_find_what_the_file_holds(self) -> None: ...


class TestFaultyWithoutFaults(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return FaultyEngine(open_engine("posix", queue_depth=queue_depth), {})
