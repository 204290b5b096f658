"""CUDA tensors on a real device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.engines import engine_class
from fastpersist.memory.buffers import AlignedBuffer, shared_pool
from fastpersist.transfer.cuda import CUDA, Cuda
from fastpersist.transfer.device import GATHER_NBYTES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

MIB = 1 << 20
ENGINES = [name for name in ("io_uring", "posix") if engine_class(name).availability().usable]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64, torch.uint8,
    torch.bool, torch.float8_e4m3fn,
]  # fmt: skip
State = dict[str, torch.Tensor]


def model(device: str = "cuda") -> State:
    """Tensors of many dtypes and sizes, some of them views and some on the host."""
    state = {str(dtype): torch.randint(0, 2, (1000,), device=device).to(dtype) for dtype in DTYPES}
    state |= {f"large.{index}": torch.randn(3 * MIB + index, device=device) for index in range(4)}
    state |= {"host": torch.randn(MIB), "empty": torch.empty(0, device=device), "scalar": torch.tensor(3.0, device=device)}
    state |= {"transposed": torch.randn(300, 400, device=device).t(), "part": state["large.0"][10:20]}
    return state


def assert_same(found: dict[str, Any], expected: State, device: str | None = None) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].device.type == (device or tensor.device.type), key
        one, other = found[key].cpu().contiguous(), tensor.cpu().contiguous()
        assert one.dtype == other.dtype
        assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)), key


@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("engine", ENGINES)
def test_round_trip(tmp_path: Path, engine: str, layout: str) -> None:
    state = model()
    fastpersist.save(state, tmp_path / "a.pt", engine=engine, layout=layout)
    assert fastpersist.verify(tmp_path / "a.pt").records_without_checksum == 0
    assert_same(torch.load(tmp_path / "a.pt"), state)
    for verify in (False, True):
        assert_same(fastpersist.load(tmp_path / "a.pt", map_location="cuda", verify=verify), state, "cuda")
    assert_same(fastpersist.load(tmp_path / "a.pt", map_location="cpu"), state, "cpu")
    assert_same(fastpersist.load(tmp_path / "a.pt"), state)


def test_a_training_state(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Linear(1024, 8)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(16, 512, device="cuda")).sum().backward()
    optimizer.step()
    fastpersist.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    found = fastpersist.load(tmp_path / "a.pt", map_location="cuda")
    assert_same(found["model"], net.state_dict())
    optimizer.load_state_dict(found["optimizer"])


def test_what_a_side_stream_produces_just_before(tmp_path: Path) -> None:
    stream = torch.cuda.Stream()
    for nbytes in (4000, 64 * MIB):
        tensor = torch.zeros(nbytes // 4, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # some 0.1 s
            tensor.fill_(7)
            fastpersist.save({"t": tensor}, tmp_path / "a.pt")
        assert bool((torch.load(tmp_path / "a.pt", map_location="cpu")["t"] == 7).all())


def test_what_a_side_stream_loads(tmp_path: Path) -> None:
    torch.save({"t": torch.full((16 * MIB,), 7.0)}, tmp_path / "a.pt")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy = torch.zeros(16 * MIB, device="cuda")
        torch.cuda._sleep(200_000_000)
        busy.fill_(1)
        del busy  # its memory is loaded into next, and is still to be written
        found = fastpersist.load(tmp_path / "a.pt", map_location="cuda")["t"]
        total = (found == 7).all()
    assert bool(total)


def test_many_small_tensors(tmp_path: Path) -> None:
    state = {str(index): torch.full((index % 300,), index, device="cuda") for index in range(20_000)}
    fastpersist.save(state, tmp_path / "a.pt")
    found = fastpersist.load(tmp_path / "a.pt", map_location="cuda", verify=True)
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())
    assert all(found[key].untyped_storage().nbytes() == tensor.nbytes for key, tensor in state.items())


def test_all_devices_at_once(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one device only")
    state = {str(index): torch.randn(MIB + index, device=f"cuda:{index % torch.cuda.device_count()}") for index in range(8)}
    fastpersist.save(state, tmp_path / "a.pt")
    assert_same(torch.load(tmp_path / "a.pt"), state)
    assert all(t.device.index == 1 for t in fastpersist.load(tmp_path / "a.pt", map_location="cuda:1").values())


def test_memory_is_page_locked_and_unlocked() -> None:
    buffer = AlignedBuffer(8 * MIB)
    view = torch.frombuffer(buffer.view, dtype=torch.uint8)
    assert not view.is_pinned()
    assert CUDA.lock(buffer.address, buffer.nbytes) == ""
    assert view.is_pinned()
    assert CUDA.lock(buffer.address, buffer.nbytes) != ""  # refused, and forgotten:
    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    assert CUDA.unlock(buffer.address) == ""
    assert not view.is_pinned()
    assert CUDA.unlock(buffer.address) != ""
    torch.ones(1, device="cuda").add_(1)


def test_a_save_locks_the_pools_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []

    def lock(address: int, nbytes: int) -> str:
        problems.append(Cuda.lock(CUDA, address, nbytes))
        return problems[-1]

    shared_pool().trim()
    gc.collect()
    monkeypatch.setattr(CUDA, "lock", lock)
    fastpersist.save({"t": torch.randn(16 * MIB, device="cuda")}, tmp_path / "a.pt")
    assert problems
    assert set(problems) == {""}


def _growth(act: Callable[[], object]) -> tuple[int, int]:
    """(bytes allocated for good, bytes allocated at most) of device memory beyond what there was."""
    act()  # once for what stays
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    act()
    return torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before


def test_a_save_takes_no_more_device_memory_than_it_gathers_in(tmp_path: Path) -> None:
    state = {str(index): torch.randn(index % 60_000, device="cuda") for index in range(2000)}
    kept, most = _growth(lambda: fastpersist.save(state, tmp_path / "a.pt"))
    assert kept == 0
    assert most <= GATHER_NBYTES + MIB
    reserved = torch.cuda.memory_reserved()
    for _ in range(5):
        fastpersist.save(state, tmp_path / "a.pt")
    assert torch.cuda.memory_reserved() == reserved


def test_a_load_takes_little_device_memory_beyond_the_tensors(tmp_path: Path) -> None:
    state = {str(index): torch.randn(4096 + index) for index in range(2000)}
    torch.save(state, tmp_path / "a.pt")
    _, most = _growth(lambda: fastpersist.load(tmp_path / "a.pt", map_location="cuda"))
    assert most <= sum(t.nbytes + 512 for t in state.values()) + 16 * MIB


@pytest.mark.parametrize("snapshot", [True, False])
def test_async_save(tmp_path: Path, snapshot: bool) -> None:
    state = model()
    expected = {key: tensor.clone() for key, tensor in state.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        state["large.1"].add_(1)
        pending = fastpersist.async_save(state, tmp_path / "a.pt", snapshot=snapshot)
        if snapshot:
            for tensor in state.values():
                tensor.zero_()
    expected["large.1"] += 1
    pending.wait()
    assert_same(torch.load(tmp_path / "a.pt"), expected)


def test_direct_transfers_of_kvikio(tmp_path: Path) -> None:
    verdict = engine_class("kvikio").availability()
    if not verdict.usable:
        pytest.skip(f"kvikio cannot run here: {verdict.reason}")
    state = model()
    report = fastpersist.save(state, tmp_path / "a.pt", engine="kvikio")
    assert report.zero_copy_nbytes > 0.9 * sum(state[f"large.{index}"].nbytes for index in range(4))
    assert_same(torch.load(tmp_path / "a.pt"), state)
    assert_same(fastpersist.load(tmp_path / "a.pt", map_location="cuda", engine="kvikio"), state, "cuda")
