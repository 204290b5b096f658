"""The kvikio engine keeps the contract for both kinds of memory: over a double of KvikIO, and on a GPU where there is one."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch

from fastpersist import testing
from fastpersist.engines import Engine, Memory, Read, Write, engine_class, open_engine
from fastpersist.engines.kvikio import KvikioEngine
from fastpersist.errors import AlignmentError
from fastpersist.memory.buffers import AlignedBuffer
from fastpersist.testing import BLOCK_NBYTES, QUEUE_DEPTH, EngineContract, collect
from tests.kvikio_double import KvikioDouble


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> KvikioDouble:
    double = KvikioDouble()
    double.install(monkeypatch)
    return double


@pytest.mark.usefixtures("double")
class TestHostMemory(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return open_engine("kvikio", queue_depth=queue_depth)


@pytest.mark.usefixtures("double", "device_requests")
class TestDeviceMemory(EngineContract):
    """The same contract, with every request for device memory."""

    @pytest.fixture
    def device_requests(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kind in (Write, Read):
            monkeypatch.setattr(testing, kind.__name__, functools.partial(kind, memory=Memory.DEVICE))

    def make_engine(self, queue_depth: int) -> Engine:
        return open_engine("kvikio", queue_depth=queue_depth)

    def test_misalignment_is_refused_on_a_direct_file(self, engine: Engine, path: str) -> None:
        buffer = AlignedBuffer(2 * BLOCK_NBYTES)
        with engine.open(path, "w") as file:
            if not file.direct:
                pytest.skip("direct I/O is not to be had in the test's directory")
            for nbytes, file_offset in ((BLOCK_NBYTES - 512, 0), (BLOCK_NBYTES, 512)):
                with pytest.raises(AlignmentError, match="multiples of 4096"):
                    engine.submit(Write(file, buffer.address, nbytes, file_offset, memory=Memory.DEVICE, owner=buffer))
            engine.submit(Write(file, buffer.address + 1, BLOCK_NBYTES, 0, memory=Memory.DEVICE, owner=buffer))
            (completion,) = collect(engine)
        assert completion.transferred == BLOCK_NBYTES


def _open_on_gpu(queue_depth: int) -> KvikioEngine:
    verdict = engine_class("kvikio").availability()
    if not verdict.usable:
        pytest.skip(f"kvikio: {verdict.reason}")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA to make device memory with")
    engine = open_engine("kvikio", queue_depth=queue_depth)
    assert isinstance(engine, KvikioEngine)
    return engine


@pytest.mark.gpu
class TestHostMemoryBesideAGpu(EngineContract):
    def make_engine(self, queue_depth: int) -> Engine:
        return _open_on_gpu(queue_depth)


@pytest.mark.gpu
def test_a_device_tensor_is_written_and_read_back(tmp_path: Path) -> None:
    nbytes = 8 * BLOCK_NBYTES
    with _open_on_gpu(QUEUE_DEPTH) as engine, engine.open(str(tmp_path / "file"), "w") as file:
        source = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
        written, read = source.cuda(), torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        for kind, tensor in ((Write, written), (Read, read)):
            for start in range(0, nbytes, BLOCK_NBYTES):
                while engine.in_flight >= QUEUE_DEPTH:
                    assert all(completion.error is None for completion in engine.wait())
                address = tensor.data_ptr() + start
                engine.submit(kind(file, address, BLOCK_NBYTES, start, memory=Memory.DEVICE, owner=tensor))
            assert all((completion.error, completion.residual) == (None, None) for completion in collect(engine))
    assert (tmp_path / "file").read_bytes() == bytes(source.numpy())
    assert torch.equal(read.cpu(), source)
    print(f"device memory went this way: {engine.route}")
    assert engine.route.name in ("GDS", "P2P", "cuFile compat", "unverified")
    assert engine.route.evidence


@pytest.mark.gpu
def test_a_device_read_at_the_end_of_a_file_is_short_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(BLOCK_NBYTES + 100))
    with _open_on_gpu(QUEUE_DEPTH) as engine, engine.open(str(tmp_path / "file"), "r") as file:
        tensor = torch.zeros(2 * BLOCK_NBYTES, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        engine.submit(Read(file, tensor.data_ptr(), 2 * BLOCK_NBYTES, 0, memory=Memory.DEVICE, owner=tensor))
        (completion,) = collect(engine)
    assert (completion.transferred, completion.error, completion.residual) == (BLOCK_NBYTES + 100, None, None)
    assert bytes(tensor.cpu().numpy()[: BLOCK_NBYTES + 100]) == (tmp_path / "file").read_bytes()
