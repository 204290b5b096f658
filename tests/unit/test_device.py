"""Storages on CUDA devices, over a double of torch.cuda: which copies are made when, and what memory is used meanwhile."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist
from fastpersist.archive.pickling import flatten
from fastpersist.engines import Engine, Memory, _gds, open_engine
from fastpersist.errors import CorruptCheckpointError
from fastpersist.memory.buffers import AlignedBuffer, BufferPool
from fastpersist.testing import Fault, FaultyEngine
from fastpersist.transfer import cuda, device, gpudirect, pinning
from fastpersist.transfer.device import GATHER_NBYTES, LOOK_AHEAD, SMALL_NBYTES, Copies, copy_out, work_so_far
from tests.archives import flip
from tests.device_double import CudaDouble
from tests.kvikio_double import KvikioDouble

MIB = 1 << 20
State = dict[str, torch.Tensor]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> CudaDouble:
    double = CudaDouble()
    double.install(monkeypatch)
    return double


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[BufferPool]:
    """The pool of saves and loads, which must have everything back after the test."""
    pool = BufferPool(4 * MIB)
    use(pool, monkeypatch)
    yield pool
    assert pool.lent_nbytes == 0


def use(pool: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("saving", "loading"):
        monkeypatch.setattr(f"fastpersist.transfer.{module}.shared_pool", lambda: pool)


def model(double: CudaDouble, large: int = 5, small: int = 100) -> State:
    """Storages of all sizes on two devices and on the host."""
    state = {"host": torch.randn(300_000), "small host": torch.randn(5), "empty": torch.empty(0)}
    for index in range(large):
        state[f"large.{index}"] = double.put(torch.randn(300_000 + index), index % 2)
    for index in range(small):
        state[f"small.{index}"] = double.put(torch.randn(index + 1), index * 3 // small % 2)
        if index % 10 == 0:
            state[f"between.{index}"] = torch.randn(7)
    state["a view"] = state["large.0"][10:20] if large else torch.randn(3)
    return state


def assert_same(found: State, expected: State) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key


def assert_all_idle(double: CudaDouble) -> None:
    assert double.under_way == []


# Saving


@pytest.mark.parametrize("block_nbytes", [4096, 65536, 8 * MIB])
@pytest.mark.parametrize("pool_nbytes", [64 << 10, 4 * MIB, 64 * MIB])
@pytest.mark.parametrize("layout", ["auto", "torch"])
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_what_is_saved_is_what_the_devices_hold(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, layout: str, pool_nbytes: int,
    block_nbytes: int,
) -> None:  # fmt: skip
    if block_nbytes > pool_nbytes:
        pytest.skip("a block is larger than the pool")
    pool = BufferPool(pool_nbytes)
    use(pool, monkeypatch)
    state = model(double)
    report = fastpersist.save(state, tmp_path / "a.pt", engine=engine, layout=layout, block_nbytes=block_nbytes)
    assert_same(torch.load(tmp_path / "a.pt"), state)
    use(BufferPool(), monkeypatch)
    assert fastpersist.verify(tmp_path / "a.pt").records_without_checksum == 0
    assert_all_idle(double)
    assert pool.lent_nbytes == 0
    assert report.zero_copy_nbytes <= state["host"].nbytes


def test_the_file_is_that_of_the_same_tensors_in_host_memory(double: CudaDouble, tmp_path: Path) -> None:
    state = model(double)
    fastpersist.save(state, tmp_path / "a.pt", layout="torch")
    double.homes.clear()
    fastpersist.save(state, tmp_path / "c.pt", layout="torch")
    with zipfile.ZipFile(tmp_path / "a.pt") as one, zipfile.ZipFile(tmp_path / "c.pt") as other:
        for name in one.namelist():
            if name.startswith("a/data/"):
                assert one.read(name) == other.read(name.replace("a/", "c/", 1))


@pytest.mark.parametrize("nbytes", [100, SMALL_NBYTES + 4])
def test_what_produces_a_tensor_is_waited_for(double: CudaDouble, tmp_path: Path, nbytes: int) -> None:
    state, value = {"t": double.put(torch.zeros(nbytes // 4), 1)}, torch.randn(nbytes // 4)
    double.produce(state["t"], value)
    fastpersist.save(state, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["t"], value)


def test_the_work_is_that_of_the_thread_that_asks(double: CudaDouble, tmp_path: Path) -> None:
    state, value = {"t": double.put(torch.zeros(1000), 1)}, torch.randn(1000)
    double.produce(state["t"], value)
    flat = double.flatten(state)
    work = work_so_far(flat)
    later = double.current[1]
    double.current[1] = double._stream(1, "current")  # as in another thread
    job = fastpersist.transfer.saving.SaveJob.check(tmp_path / "a.pt")
    job.run(flat, work=work)
    assert later.done == len(later.work)
    assert torch.equal(torch.load(tmp_path / "a.pt")["t"], value)


def test_a_save_without_devices_asks_nothing_of_cuda(double: CudaDouble, tmp_path: Path) -> None:
    fastpersist.save({"a": torch.randn(1000), "b": torch.empty(0)}, tmp_path / "a.pt")
    assert set(double.counts) <= {"device_of"}
    assert double.counts["lock"] == 0


def test_copies_run_ahead_of_the_writer_but_not_too_far(double: CudaDouble, tmp_path: Path, pool: BufferPool) -> None:
    state = {"t": double.put(torch.randn(2 * MIB))}
    fastpersist.save(state, tmp_path / "a.pt", block_nbytes=65536)
    steps = [name for name in double.calls if name in ("copy_to_host", "synchronize", "write")]
    before_the_first_write = list(itertools.takewhile(lambda name: name != "write", steps))
    assert before_the_first_write.count("copy_to_host") == LOOK_AHEAD
    ahead = list(itertools.accumulate({"copy_to_host": 1, "synchronize": -1, "write": 0}[name] for name in steps))
    assert max(ahead) == LOOK_AHEAD
    assert double.counts["synchronize"] <= double.counts["copy_to_host"] + 1  # one event each, and no more than the drain's


def test_copies_are_issued_while_a_write_is_in_flight(double: CudaDouble, tmp_path: Path, pool: BufferPool) -> None:
    seen: list[int] = []
    double.before = lambda name, number: seen.append(len(double.in_flight)) if name == "copy_to_host" else None
    fastpersist.save({"t": double.put(torch.randn(2 * MIB))}, tmp_path / "a.pt", block_nbytes=65536)
    assert max(seen) > 0


@pytest.mark.parametrize("small", [1, 2, 1000])
def test_small_storages_go_together(double: CudaDouble, tmp_path: Path, small: int) -> None:
    state = model(double, large=0, small=small)
    double.homes.update({tensor.untyped_storage(): 0 for key, tensor in state.items() if key.startswith("small.")})
    fastpersist.save(state, tmp_path / "a.pt")
    assert_same(torch.load(tmp_path / "a.pt"), state)
    assert double.counts["copy_to_host"] + double.counts["gather_to_host"] <= 2


def test_what_is_gathered_on_a_device_is_bounded(double: CudaDouble, tmp_path: Path) -> None:
    tensors = [double.put(torch.randn(50_000)) for _ in range(120)]
    fastpersist.save(tensors, tmp_path / "a.pt", layout="torch", block_nbytes=32 * MIB)
    memory, flat = AlignedBuffer(24 * MIB), double.flatten(tensors)
    addresses = [memory.address + index * 200_000 for index in range(120)]
    assert list(copy_out(flat, range(120), addresses, memory))[-1] == 120
    assert bytes(memory.view[23_800_000:24_000_000]) == tensors[-1].numpy().tobytes()
    assert len(double.gathered_nbytes) > 2
    assert max(double.gathered_nbytes) <= GATHER_NBYTES


def test_a_device_without_memory_to_gather_in(double: CudaDouble, tmp_path: Path) -> None:
    def no_memory(name: str, number: int) -> None:
        if name == "gather_to_host":
            raise torch.OutOfMemoryError("none left")

    double.before = no_memory
    state = model(double)
    fastpersist.save(state, tmp_path / "a.pt")
    assert_same(torch.load(tmp_path / "a.pt"), state)


def test_each_device_has_one_side_stream_for_good(double: CudaDouble, tmp_path: Path) -> None:
    for _ in range(3):
        fastpersist.save(model(double), tmp_path / "a.pt")
    assert double.counts["new_stream"] == 2


def test_saves_that_share_a_pool_do_not_wait_for_each_other(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool(256 << 10)
    use(pool, monkeypatch)
    states = [{"t": torch.randn(100_000), "u": double.put(torch.randn(200_000), index % 2)} for index in range(4)]
    errors: list[BaseException] = []
    lock = threading.Lock()  # the double is no device: it has one thread at a time
    for name in [name for name in vars(cuda.Cuda) if not name.startswith("_")]:
        monkeypatch.setattr(cuda.CUDA, name, _locked(getattr(cuda.CUDA, name), lock))

    def save(index: int) -> None:
        try:
            fastpersist.save(states[index], tmp_path / f"{index}.pt", engine="posix", block_nbytes=65536)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert errors == []
    for index, state in enumerate(states):
        assert_same(torch.load(tmp_path / f"{index}.pt"), state)


def _locked(call: Callable[..., Any], lock: threading.Lock) -> Callable[..., Any]:
    def locked(*arguments: Any) -> Any:
        with lock:
            return call(*arguments)

    return locked


def test_nothing_waits_for_a_whole_device() -> None:
    for module in (cuda, device, gpudirect, pinning):
        assert "cuda.synchronize(" not in inspect.getsource(module).replace("CUDA.synchronize(", "")


# Page-locked memory


def test_the_pools_memory_is_locked_once_and_unlocked_with_its_end(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool(4 * MIB)
    use(pool, monkeypatch)
    state = {"t": double.put(torch.randn(MIB))}
    fastpersist.save(state, tmp_path / "a.pt", block_nbytes=MIB)
    locks = double.counts["lock"]
    assert 0 < double.most_locked_nbytes <= 4 * MIB
    fastpersist.save(state, tmp_path / "a.pt", block_nbytes=MIB)
    assert double.counts["lock"] - double.counts["unlock"] == len(double.locked) <= locks
    pool.trim()
    gc.collect()
    assert double.locked == {}


def test_memory_is_unlocked_while_it_is_still_mapped(double: CudaDouble) -> None:
    buffer = AlignedBuffer(MIB)
    pinning.page_lock(buffer)
    pinning.page_lock(buffer)
    address, mapped = buffer.address, []

    def unlock(name: str, number: int) -> None:
        if name == "unlock":
            ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
            mapped.append(any(int(low, 16) <= address < int(high, 16) for low, high in ranges))

    double.before = unlock
    del buffer
    gc.collect()
    assert mapped == [True]


def test_memory_that_cannot_be_locked(double: CudaDouble, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    double.lock_problem = "operation not supported (801)"
    state = model(double)
    fastpersist.save(state, tmp_path / "a.pt", block_nbytes=65536)
    assert_same(torch.load(tmp_path / "a.pt"), state)
    assert [record.levelname for record in caplog.records if "page-locked" in record.message] == ["WARNING"]
    assert double.counts["unlock"] == 0


# Failures while saving


def _calls_of(double: CudaDouble, act: Callable[[], object]) -> dict[str, int]:
    double.counts.clear()
    act()
    return dict(double.counts)


def _fail_at(double: CudaDouble, wanted: str, at: int, error: BaseException) -> None:
    def before(name: str, number: int) -> None:
        if (name, number) == (wanted, at):
            raise error

    double.counts.clear()
    double.before = before


ERRORS = [RuntimeError("CUDA error: an illegal memory access was encountered"), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_device_that_fails_or_an_interrupt_at_any_call_of_a_save(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a.pt"
    state = model(double, large=2, small=20)

    def save() -> None:
        monkeypatch.setattr(device, "_side_streams", {})
        pools.append(BufferPool(512 << 10))
        use(pools[-1], monkeypatch)
        fastpersist.save(state, path, engine="posix", block_nbytes=65536)

    pools: list[BufferPool] = []
    calls = _calls_of(double, save)
    before = path.read_bytes()
    state["host"].zero_()  # it would be another file
    for name, count in calls.items():
        if name in ("device_of", "unlock"):
            continue
        for at in range(1, count + 1):
            _fail_at(double, name, at, error)
            with pytest.raises(type(error)):
                save()
            double.before = lambda name, number: None
            assert path.read_bytes() == before, (name, at)
            assert os.listdir(tmp_path) == ["a.pt"]
            assert_all_idle(double)
            assert pools[-1].lent_nbytes == 0, (name, at)
    assert device._lost == []


def test_memory_of_a_device_that_stays_broken_is_never_given_back(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool(512 << 10)
    use(pool, monkeypatch)

    def broken(name: str, number: int) -> None:
        if name == "synchronize":
            raise RuntimeError("CUDA error: unspecified launch failure")

    double.before = broken
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        fastpersist.save({"t": double.put(torch.randn(MIB))}, tmp_path / "a.pt", engine="posix", block_nbytes=65536)
    gc.collect()
    kept = [transfer.memory for transfer in device._lost if transfer.memory is not None]
    assert double.under_way
    for touched in double.under_way:
        assert any(memory.address <= touched.start < memory.address + memory.nbytes for memory in kept)
    assert 0 < pool.lent_nbytes <= LOOK_AHEAD * 65536
    fastpersist.save({"t": torch.randn(MIB)}, tmp_path / "b.pt", block_nbytes=65536)  # the others go on


def test_an_engine_that_fails_leaves_no_copy_under_way(double: CudaDouble, tmp_path: Path, pool: BufferPool) -> None:
    for failing in range(1, 20):
        with FaultyEngine(open_engine("posix"), {failing: Fault.error(28)}) as engine, pytest.raises(OSError, match="No space"):
            fastpersist.save({"t": double.put(torch.randn(MIB))}, tmp_path / "a.pt", engine=engine, block_nbytes=65536)
        assert_all_idle(double)
        assert pool.lent_nbytes == 0
        assert os.listdir(tmp_path) == []


def test_copies_that_nobody_drained_are_waited_for_by_the_last_reference(double: CudaDouble) -> None:
    flat = double.flatten([double.put(torch.randn(1000))])
    buffer = AlignedBuffer(65536)
    copies = Copies(work_so_far(flat))
    copies.to_host([cuda.Piece(flat.storages[0], 0, 0, 4000, buffer.address)], buffer)
    assert copies.uses(buffer)
    assert double.under_way
    del copies
    gc.collect()
    assert_all_idle(double)


# Loading


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("pool_nbytes", [8 * MIB, 64 * MIB])
@pytest.mark.parametrize("block_nbytes", [65536, 8 * MIB])
@pytest.mark.parametrize("engine", ["posix", "io_uring"])
def test_what_is_loaded_is_what_the_file_holds(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, block_nbytes: int, pool_nbytes: int,
    verify: bool,
) -> None:  # fmt: skip
    pool = BufferPool(pool_nbytes)
    use(pool, monkeypatch)
    state = model(double)
    torch.save(state, tmp_path / "a.pt")
    double.current[1].work.append(lambda: None)  # whoever had the memory before
    found = fastpersist.load(tmp_path / "a.pt", map_location="cuda:1", engine=engine, block_nbytes=block_nbytes, verify=verify)
    double.current[1].run(len(double.current[1].work))
    assert_same(found, state)
    for key, tensor in found.items():
        assert double.homes[tensor.untyped_storage()] == 1
        assert tensor.untyped_storage().nbytes() == state[key].untyped_storage().nbytes()
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}
    assert len(storages) == len(found) - 2  # the view shares one, and the empty tensor has none
    assert_all_idle(double)
    assert pool.lent_nbytes == 0


def test_memory_is_loaded_into_when_its_last_user_is_done(double: CudaDouble, tmp_path: Path) -> None:
    torch.save({"t": torch.randn(MIB)}, tmp_path / "a.pt")
    order: list[str] = []
    double.current[0].work.append(partial(order.append, "the last user"))
    double.before = lambda name, number: order.append(name)
    fastpersist.load(tmp_path / "a.pt", map_location=torch.device("cuda", 0))
    assert order.index("the last user") > order.index("synchronize")  # on the device, not before the load begins
    assert double.current[0].done == 1


def test_only_what_is_wanted_is_loaded(double: CudaDouble, tmp_path: Path) -> None:
    state = model(double)
    fastpersist.save(state, tmp_path / "a.pt")
    found = fastpersist.load(tmp_path / "a.pt", map_location="cuda:1", only=["large.1", "small.3"])
    assert_same(found, {key: state[key] for key in state if key in ("large.1", "small.3")})
    assert double.counts["allocate"] == 2


@pytest.mark.parametrize("map_location", [None, "cpu", {"cpu": "cpu"}, lambda storage, location: storage])
def test_other_places_take_the_usual_way(double: CudaDouble, tmp_path: Path, map_location: Any) -> None:
    torch.save({"t": torch.randn(MIB)}, tmp_path / "a.pt")
    fastpersist.load(tmp_path / "a.pt", map_location=map_location)
    assert set(double.counts) <= {"device_named"}


@pytest.mark.parametrize("large", [True, False])
def test_a_damaged_storage_is_found(double: CudaDouble, tmp_path: Path, pool: BufferPool, large: bool) -> None:
    path = tmp_path / "a.pt"
    fastpersist.save({"t": torch.full((400_000 if large else 400,), 1.5)}, path)
    flip(path, path.read_bytes().index(torch.full((8,), 1.5).numpy().tobytes()) + 16)
    with pytest.raises(CorruptCheckpointError, match="data/0"):
        fastpersist.load(path, map_location="cuda", verify=True, block_nbytes=65536)
    assert_all_idle(double)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_device_that_fails_or_an_interrupt_at_any_call_of_a_load(
    double: CudaDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a.pt"
    torch.save(model(double, large=2, small=20), path)
    pools: list[BufferPool] = []

    def load() -> None:
        monkeypatch.setattr(device, "_side_streams", {})
        pools.append(BufferPool(8 * MIB))
        use(pools[-1], monkeypatch)
        fastpersist.load(path, map_location="cuda:0", engine="posix", block_nbytes=262144)

    for name, count in _calls_of(double, load).items():
        if name in ("device_named", "unlock"):
            continue
        for at in range(1, count + 1):
            _fail_at(double, name, at, error)
            with pytest.raises(type(error)):
                load()
            double.before = lambda name, number: None
            assert_all_idle(double)
            assert pools[-1].lent_nbytes == 0, (name, at)


# GPUDirect Storage


@pytest.fixture
def gds(monkeypatch: pytest.MonkeyPatch) -> KvikioDouble:
    double = KvikioDouble()
    double.install(monkeypatch)
    return double


@pytest.mark.parametrize("layout", ["auto", "torch"])
def test_device_memory_is_written_where_it_lies(double: CudaDouble, gds: KvikioDouble, tmp_path: Path, layout: str) -> None:
    state = model(double)
    value = torch.randn(state["large.1"].shape)
    double.produce(state["large.1"], value)
    report = fastpersist.save(state, tmp_path / "a.pt", engine="kvikio", layout=layout)
    assert torch.equal(state["large.1"], value)
    assert_same(torch.load(tmp_path / "a.pt"), state)
    direct = [nbytes for kind, nbytes, offset, _ in gds.begun if kind == "write"]
    assert len(direct) == 5
    assert all(nbytes % 4096 == 0 == offset % 4096 for _, nbytes, offset, _ in gds.begun)
    assert report.zero_copy_nbytes >= sum(direct)
    assert report.zero_copy_nbytes + report.copied_nbytes == report.nbytes
    checked = fastpersist.verify(tmp_path / "a.pt", engine="posix")
    assert checked.records_without_checksum == 5
    records = {record.name.rpartition("/")[2]: record for record in fastpersist.inspect(tmp_path / "a.pt").records}
    assert sum(record.checksum is None for record in records.values()) >= 5


@pytest.mark.parametrize("verify", [False, True])
def test_device_memory_is_read_where_it_lies(
    double: CudaDouble, gds: KvikioDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    state = {"large": torch.randn(3 * MIB + 5), "small": torch.randn(100), "aligned": torch.randn(MIB)}
    torch.save(state, tmp_path / "a.pt")
    double.current[0].work.append(lambda: None)  # whoever had the memory before
    done: list[int] = []
    gds.outcome = lambda kind, nbytes, file_offset: done.append(double.current[0].done)
    found = fastpersist.load(tmp_path / "a.pt", map_location="cuda:0", engine="kvikio", verify=verify, block_nbytes=MIB)
    assert_same(found, state)
    direct = sum(nbytes for kind, nbytes, *_ in gds.begun if kind == "read")
    assert direct == 0 if verify else direct > 0.99 * (state["large"].nbytes + state["aligned"].nbytes - 2 * 8192)
    assert all(nbytes % 4096 == 0 == offset % 4096 for _, nbytes, offset, _ in gds.begun)
    assert all(done)


STATS = "Reads\t: n=1 ok={count} err=0\nWrites\t: n=1 ok={count} err=0\n"


def _counting_kernel(gds: KvikioDouble, stats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats.write_text(STATS.format(count=1))
    monkeypatch.setattr(_gds, "NVIDIA_FS_STATS", stats)
    gds.driver["is_gds_available"] = True

    def count(kind: str, nbytes: int, file_offset: int) -> None:
        stats.write_text(STATS.format(count=2 + len(gds.begun)))

    gds.outcome = count
    monkeypatch.setattr(gpudirect, "_verdicts", {})


def test_auto_takes_gpudirect_storage_where_it_is_proven(
    double: CudaDouble, gds: KvikioDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _counting_kernel(gds, tmp_path / "stats", monkeypatch)
    state = model(double)
    assert fastpersist.save(state, tmp_path / "a.pt").engine == "kvikio"
    trials = [begun for begun in gds.begun if begun[1:3] == (gpudirect.TRIAL_NBYTES, 0)]
    assert len(trials) == 1
    assert fastpersist.save(state, tmp_path / "a.pt").engine == "kvikio"
    assert len([begun for begun in gds.begun if begun[1:3] == (gpudirect.TRIAL_NBYTES, 0)]) == 1
    assert_same(torch.load(tmp_path / "a.pt"), state)
    assert fastpersist.save({"t": torch.randn(3)}, tmp_path / "b.pt").engine != "kvikio"
    assert fastpersist.save(state, tmp_path / "a.pt", engine="posix").engine == "posix"
    assert fastpersist.save(state, tmp_path / "c.pt", recycle=tmp_path / "b.pt").engine != "kvikio"  # it opens files twice more
    monkeypatch.setenv("FASTPERSIST_ENGINE", "posix")
    assert fastpersist.save(state, tmp_path / "a.pt").engine == "posix"


@pytest.mark.parametrize("why", ["compat", "uncounted", "refused", "missing"])
def test_auto_is_as_ever_where_it_is_not(
    double: CudaDouble, gds: KvikioDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    _counting_kernel(gds, tmp_path / "stats", monkeypatch)
    if why == "compat":
        gds.compat_mode = True
    elif why == "uncounted":
        gds.outcome = lambda *_: None
    elif why == "refused":
        gds.outcome = lambda *_: RuntimeError("cuFile error at: a.cpp:1: GPU memory pinning failed")
    else:
        monkeypatch.setattr(_gds, "find_gpus", lambda: _gds.Gpus((), "no GPU"))
    state = model(double)
    assert fastpersist.save(state, tmp_path / "a.pt").engine in ("io_uring", "posix")
    assert_same(torch.load(tmp_path / "a.pt"), state)


# Copies of whole storages


@pytest.mark.parametrize("ascending", [True, False])
def test_copy_out_copies_whole_storages(double: CudaDouble, ascending: bool) -> None:
    tensors = [double.put(torch.randn(size), index // 40 % 2) for index, size in enumerate([70, 16, 5, 100_000] * 20)]
    late = torch.randn(tensors[0].shape)
    double.produce(tensors[0], late)
    hosts = {10, 11, 50}  # they lie between the others, and were copied before
    flat = double.flatten(tensors)
    memory = AlignedBuffer(16 * MIB)
    addresses, cursor = [0] * len(tensors), 0
    for index in range(len(tensors)) if ascending else reversed(range(len(tensors))):
        addresses[index] = memory.address + cursor
        cursor = -(-(cursor + flat.storage_nbytes[index]) // 64) * 64
    place = {index: addresses[index] - memory.address for index in range(len(tensors))}
    for index in hosts:
        memory.view[place[index] : place[index] + flat.storage_nbytes[index]] = tensors[index].numpy().tobytes()
    indices = [index for index in range(len(tensors)) if index not in hosts]
    for done in copy_out(flat, indices, addresses, memory):
        for index in indices[:done]:
            content = memory.view[place[index] : place[index] + flat.storage_nbytes[index]]
            assert bytes(content) == tensors[index].numpy().tobytes()
    assert done == len(indices)
    for index in hosts:
        assert bytes(memory.view[place[index] : place[index] + flat.storage_nbytes[index]]) == tensors[index].numpy().tobytes()
    assert torch.equal(tensors[0], late)
    assert_all_idle(double)
    assert list(double.locked) == [memory.address]


def test_copy_out_that_is_given_up_leaves_no_copy_under_way(double: CudaDouble) -> None:
    tensors = [double.put(torch.randn(100_000)) for _ in range(10)]
    flat, memory = double.flatten(tensors), AlignedBuffer(16 * MIB)
    steps = copy_out(flat, range(10), [memory.address + index * MIB for index in range(10)], memory)
    assert next(steps) == 1
    assert double.under_way
    steps.close()
    assert_all_idle(double)


def test_copy_out_takes_other_accelerators_too(double: CudaDouble) -> None:
    tensor = torch.randn(1000)
    memory = AlignedBuffer(65536)
    assert list(copy_out(flatten([tensor]), [0], [memory.address], memory)) == [1]
    assert bytes(memory.view[:4000]) == tensor.numpy().tobytes()


def test_the_double_has_all_that_torch_cuda_is_asked_for() -> None:
    for name in [name for name in vars(cuda.Cuda) if not name.startswith("_")]:
        real, stand_in = getattr(cuda.Cuda, name), getattr(CudaDouble, name)
        assert list(inspect.signature(real).parameters) == list(inspect.signature(stand_in).parameters), name


def test_engines_without_device_memory_get_none(double: CudaDouble, tmp_path: Path, pool: BufferPool) -> None:
    kinds: set[Memory] = set()
    real = Engine.submit
    state = model(double)
    with open_engine("null") as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Engine, "submit", lambda self, *requests: (kinds.update(r.memory for r in requests), real(self, *requests))[1]
        )
        fastpersist.save(state, tmp_path / "a.pt", engine=engine, block_nbytes=65536)
    assert kinds == {Memory.HOST}
