"""The calls of torch.cuda that are made here, all of them in one class, so that a test can put a double in its place."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastpersist.memory.pages import view_memory

Stream = Any
Event = Any

HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices


class Piece(NamedTuple):
    """``nbytes`` bytes of a storage on a device, from byte ``start`` on, and the host ``address`` that belongs to them."""

    storage: torch.UntypedStorage
    device: int
    start: int
    nbytes: int
    address: int


class Cuda:
    """Devices are indices. What is put on a stream runs in order, later; what it uses must stay alive until it is done.

    Raises RuntimeError where a device fails, which may be long after the call that is to blame.
    """

    def device_of(self, storage: torch.UntypedStorage) -> int:
        """The device that holds ``storage``, -1 if it is no CUDA device."""
        device = storage.device
        return int(device.index) if device.type == "cuda" else -1

    def device_named(self, map_location: object) -> int:
        """The device that ``map_location`` names, -1 where it names none or one that is not there."""
        if not isinstance(map_location, str | torch.device) or not str(map_location).startswith("cuda"):
            return -1
        try:
            device = torch.device(map_location)
        except RuntimeError:
            return -1
        if device.type != "cuda" or not torch.cuda.is_available():
            return -1
        index = torch.cuda.current_device() if device.index is None else device.index
        return index if index < torch.cuda.device_count() else -1

    def current_stream(self, device: int) -> Stream:
        """The stream that the calling thread works on."""
        return torch.cuda.current_stream(device)

    def new_stream(self, device: int) -> Stream:
        """Another stream."""
        return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, stream: Stream) -> Event:
        """An event that comes when all is done that ``stream`` has been given so far."""
        # blocking: whoever waits sleeps meanwhile
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on comes after ``event``."""
        stream.wait_event(event)

    def synchronize(self, event: Event) -> None:
        """Wait here for ``event``, without the GIL."""
        event.synchronize()

    def allocate(self, device: int, nbytes: int) -> torch.UntypedStorage:
        """A storage of exactly so many bytes, for the current stream."""
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device)).untyped_storage()

    def copy_to_host(self, stream: Stream, piece: Piece) -> None:
        """Put a copy on the stream."""
        with torch.cuda.stream(stream):
            _host(piece.address, piece.nbytes).copy_(_bytes_of(piece), non_blocking=True)

    def gather_to_host(self, stream: Stream, pieces: Sequence[Piece], address: int) -> None:
        """Put the pieces together on the device, and copy them, without gaps, to ``address``. torch.OutOfMemoryError: nothing
        was done.
        """
        with torch.cuda.stream(stream):
            # Allocated and freed on this stream: the next one gets the same memory, after this has been copied.
            gathered = torch.cat([_bytes_of(piece) for piece in pieces])
            _host(address, gathered.numel()).copy_(gathered, non_blocking=True)

    def copy_to_device(self, stream: Stream, piece: Piece) -> None:
        """Put a copy on the stream."""
        with torch.cuda.stream(stream):
            _bytes_of(piece).copy_(_host(piece.address, piece.nbytes), non_blocking=True)

    def scatter_to_device(self, stream: Stream, pieces: Sequence[Piece], address: int, nbytes: int) -> None:
        """Copy ``nbytes`` from ``address`` to the device, and there each piece, which lies within them, to its storage."""
        with torch.cuda.stream(stream):
            together = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", pieces[0].device))
            together.copy_(_host(address, nbytes), non_blocking=True)
            places = [piece.address - address for piece in pieces]
            sources = [together[place : place + piece.nbytes] for place, piece in zip(places, pieces, strict=True)]
            torch._foreach_copy_([_bytes_of(piece) for piece in pieces], sources)

    def lock(self, address: int, nbytes: int) -> str:
        """Lock host memory for all devices; what is in the way, if anything is."""
        return _problem(_cudart().cudaHostRegister(address, nbytes, HOST_REGISTER_PORTABLE))

    def unlock(self, address: int) -> str:
        """Undo ``lock``."""
        return _problem(_cudart().cudaHostUnregister(address))


CUDA = Cuda()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _problem(code: Any) -> str:
    """What a call of CUDA's runtime answered, "" for success."""
    if int(code) == 0:
        return ""
    # CUDA remembers a failure, and torch's next kernel is blamed for it: it shall be this one, which clears it.
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return f"{_cudart().cudaGetErrorString(code)} ({int(code)})"


def _host(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(view_memory(address, nbytes), dtype=torch.uint8)


def _bytes_of(piece: Piece) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=piece.storage.device)
    return empty.set_(piece.storage, piece.start, (piece.nbytes,), (1,))
