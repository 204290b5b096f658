"""Stands in for torch.cuda: "devices" are host memory, and a stream works only when somebody waits for it.

Whoever reads too early, waits for the wrong event, or gives memory back too soon finds wrong bytes or a failed assertion.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from fastpersist.archive.pickling import FlatObject, flatten
from fastpersist.engines import Engine, Memory, Request, Write
from fastpersist.transfer import device as device_module
from fastpersist.transfer import pinning
from fastpersist.transfer.cuda import CUDA, Cuda, Piece


@dataclass(eq=False)
class Stream:
    """Work in the order in which it was given; ``done`` pieces of it have been carried out."""

    device: int
    name: str
    work: list[Callable[[], object]] = field(default_factory=list)
    done: int = 0

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.done += 1  # first: what fails is not tried again
            self.work[self.done - 1]()


@dataclass(frozen=True)
class Event:
    stream: Stream
    position: int


@dataclass(eq=False)
class Touched:
    """Host memory that a copy under way reads or writes."""

    start: int
    stop: int
    written: bool


class CudaDouble:
    """What the tests see of it, and how they steer it."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.calls: list[str] = []
        self.counts: Counter[str] = Counter()
        self.before: Callable[[str, int], None] = lambda name, number: None  # may raise
        self.homes: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self.streams: list[Stream] = []
        self.current = [self._stream(index, "current") for index in range(devices)]
        self.under_way: list[Touched] = []
        self.most_under_way = 0
        self.in_flight: list[Request] = []
        self.locked: dict[int, int] = {}
        self.most_locked_nbytes = 0
        self.lock_problem = ""
        self.gathered_nbytes: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of torch.cuda, with side streams and locked memory of its own, and watch all engines."""
        for name in [name for name in vars(Cuda) if not name.startswith("_")]:
            monkeypatch.setattr(CUDA, name, self._counted(name))
        monkeypatch.setattr(device_module, "_side_streams", {})
        monkeypatch.setattr(device_module, "_lost", [])
        monkeypatch.setattr(pinning, "_met", weakref.WeakSet())
        monkeypatch.setattr(pinning, "_warned", False)
        for module in ("fastpersist.checkpoint", "fastpersist.background"):
            monkeypatch.setattr(f"{module}.flatten", self.flatten)
        self._watch_engines(monkeypatch)

    def _counted(self, name: str) -> Callable[..., Any]:
        method = getattr(self, name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            self.counts[name] += 1
            self.before(name, self.counts[name])
            return method(*arguments)

        return call

    def _watch_engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        submit, complete = Engine.submit, Engine._complete

        def watched_submit(engine: Engine, *requests: Request) -> None:
            for request in requests:
                if request.memory is Memory.HOST:
                    self._check(request.address, request.nbytes, written=not isinstance(request, Write))
                self.calls.append("write" if isinstance(request, Write) else "read")
            submit(engine, *requests)
            self.in_flight.extend(requests)

        def watched_complete(engine: Engine, request: Request, *rest: Any) -> Any:
            if request in self.in_flight:
                self.in_flight.remove(request)
            return complete(engine, request, *rest)

        monkeypatch.setattr(Engine, "submit", watched_submit)
        monkeypatch.setattr(Engine, "_complete", watched_complete)

    def _check(self, address: int, nbytes: int, *, written: bool) -> None:
        for touched in self.under_way:
            if written or touched.written:
                assert touched.stop <= address or address + nbytes <= touched.start, "memory is used by a copy under way"

    # Tensors

    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        """Make the storage of ``tensor`` count as one on a device."""
        self.homes[tensor.untyped_storage()] = device
        return tensor

    def flatten(self, obj: object, protocol: int = 2) -> FlatObject:
        flat = flatten(obj, protocol)
        addresses = [
            0 if storage in self.homes else address for storage, address in zip(flat.storages, flat.addresses, strict=True)
        ]
        return replace(flat, addresses=addresses)

    def produce(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Have the current stream of the tensor's device fill it: it holds nonsense until somebody waits for that."""
        self.current[self.homes[tensor.untyped_storage()]].work.append(partial(tensor.copy_, value))

    # What Cuda offers

    def _stream(self, device: int, name: str) -> Stream:
        self.streams.append(Stream(device, name))
        return self.streams[-1]

    def device_of(self, storage: torch.UntypedStorage) -> int:
        return self.homes.get(storage, -1)

    def device_named(self, map_location: object) -> int:
        text = str(map_location)
        return int(text.partition(":")[2] or 0) if text.startswith("cuda") else -1

    def current_stream(self, device: int) -> Stream:
        return self.current[device]

    def new_stream(self, device: int) -> Stream:
        return self._stream(device, "side")

    def record(self, stream: Stream) -> Event:
        return Event(stream, len(stream.work))

    def wait(self, stream: Stream, event: Event) -> None:
        stream.work.append(lambda: event.stream.run(event.position))

    def synchronize(self, event: Event) -> None:
        event.stream.run(event.position)

    def allocate(self, device: int, nbytes: int) -> torch.UntypedStorage:
        storage = torch.full((nbytes,), 0xEE, dtype=torch.uint8).untyped_storage()
        self.homes[storage] = device
        return storage

    def copy_to_host(self, stream: Stream, piece: Piece) -> None:
        self._put_on(stream, [piece], piece.address, piece.nbytes, written=True, move=_to_host)

    def gather_to_host(self, stream: Stream, pieces: Sequence[Piece], address: int) -> None:
        nbytes = sum(piece.nbytes for piece in pieces)
        self.gathered_nbytes.append(nbytes)
        self._put_on(stream, pieces, address, nbytes, written=True, move=_gather)

    def copy_to_device(self, stream: Stream, piece: Piece) -> None:
        self._put_on(stream, [piece], piece.address, piece.nbytes, written=False, move=_to_device)

    def scatter_to_device(self, stream: Stream, pieces: Sequence[Piece], address: int, nbytes: int) -> None:
        self.gathered_nbytes.append(nbytes)
        assert all(address <= piece.address and piece.address + piece.nbytes <= address + nbytes for piece in pieces)
        self._put_on(stream, pieces, address, nbytes, written=False, move=_to_device)

    def lock(self, address: int, nbytes: int) -> str:
        if self.lock_problem:
            return self.lock_problem
        for start, length in self.locked.items():
            assert address + nbytes <= start or start + length <= address, "locked twice"
        self.locked[address] = nbytes
        self.most_locked_nbytes = max(self.most_locked_nbytes, sum(self.locked.values()))
        return ""

    def unlock(self, address: int) -> str:
        return "" if self.locked.pop(address, None) else "it was not locked"

    def _put_on(
        self, stream: Stream, pieces: Iterable[Piece], address: int, nbytes: int, *, written: bool, move: Callable[..., None]
    ) -> None:
        for request in self.in_flight:
            if request.memory is Memory.HOST and (written or not isinstance(request, Write)):
                overlap = request.address < address + nbytes and address < request.address + request.nbytes
                assert not overlap, "memory is in a transfer of the engine"
        self._check(address, nbytes, written=written)
        assert all(piece.device == stream.device == self.homes[piece.storage] for piece in pieces)
        touched = Touched(address, address + nbytes, written)
        if written:  # nonsense until the copy has been made
            ctypes.memset(address, 0xDD, nbytes)
        # As the real one it keeps nothing alive.
        parts = [(weakref.ref(p.storage), p.storage.data_ptr() + p.start, p.nbytes, p.address) for p in pieces]

        def work() -> None:
            self.under_way.remove(touched)
            assert all(alive() is not None for alive, *_ in parts), "a storage went away before its copy was made"
            move([part[1:] for part in parts], address)

        self.under_way.append(touched)
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        stream.work.append(work)


Parts = list[tuple[int, int, int]]


def _to_host(parts: Parts, address: int) -> None:
    for source, nbytes, target in parts:
        ctypes.memmove(target, source, nbytes)


def _gather(parts: Parts, address: int) -> None:
    for source, nbytes, _ in parts:
        ctypes.memmove(address, source, nbytes)
        address += nbytes


def _to_device(parts: Parts, address: int) -> None:
    for target, nbytes, source in parts:
        ctypes.memmove(target, source, nbytes)
