"""Copies between CUDA devices and page-locked host memory, beside whatever else the devices do.

Each device has one side stream for them, which first waits for the work that produced the data. Nothing waits for a whole
device: each transfer has events of its own. Small pieces are put together on the device and copied in one go: a copy takes
some 10 us, however short it is.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fastpersist.archive.layout import DATA_ALIGNMENT
from fastpersist.archive.pickling import FlatObject
from fastpersist.memory.pages import Pages, copy_memory, view_memory
from fastpersist.transfer.cuda import CUDA, Event, Piece, Stream
from fastpersist.transfer.pinning import page_lock
from fastpersist.transfer.staging import copy_from_device, without_address

log = logging.getLogger("fastpersist")

SMALL_NBYTES = 256 << 10
"""Pieces below this are put together on the device."""
GATHER_NBYTES = 8 << 20
"""So much of a device's memory at most is taken for that."""
LOOK_AHEAD = 4
"""So many transfers at most are under way ahead of the one that is needed next."""
BATCH_NBYTES = 32 << 20
"""``copy_out`` tells its progress in steps of about this size."""

WorkSoFar = dict[int, Event]
"""For each device: an event that comes when the work is done that was under way at some moment."""

_side_streams: dict[int, Stream] = {}
_lost: list[Transfer] = []  # the device failed, and may still use their memory: it stays


@dataclass(slots=True, eq=False)
class Transfer:
    """Copies under way between ``memory`` and devices. Both sides stay alive in here."""

    memory: Pages | None
    pieces: Sequence[Piece]
    events: list[Event] = field(default_factory=list)
    moves: list[tuple[int, int, int]] = field(default_factory=list)  # (from, to, nbytes), once the copies have arrived


class Copies:
    """The copies of one save or load. What ``work`` tells of comes before the first of them.

    After ``drain`` none is under way, nor are any of a Copies that has gone away.
    """

    def __init__(self, work: WorkSoFar) -> None:
        self._streams = {device: _side_stream(device) for device in work}
        for device, event in work.items():
            CUDA.wait(self._streams[device], event)
        self._under_way: set[Transfer] = set()
        # An interrupt may strike before drain has begun: what is in flight then keeps its memory, until here.
        weakref.finalize(self, _settle, self._streams, self._under_way).atexit = False

    def to_host(self, pieces: Sequence[Piece], memory: Pages) -> Transfer:
        """Begin to copy pieces, in ascending order of their addresses in ``memory``. What lies between two of them may be
        overwritten until ``finish`` has returned.
        """
        transfer = self._begin(pieces, memory)
        for run in _runs(pieces):
            stream = self._streams[run[0].device]
            if len(run) == 1 or not _gather(stream, run, transfer.moves):
                for piece in run:
                    CUDA.copy_to_host(stream, piece)
        self._mark(transfer)
        return transfer

    def to_device(self, piece: Piece, memory: Pages) -> Transfer:
        """Begin to copy a piece from its address in ``memory``."""
        transfer = self._begin([piece], memory)
        CUDA.copy_to_device(self._streams[piece.device], piece)
        self._mark(transfer)
        return transfer

    def scatter(self, pieces: Sequence[Piece], memory: Pages, nbytes: int) -> Transfer:
        """Begin to copy pieces of one device, all in the first ``nbytes`` of ``memory``, which go over together."""
        transfer = self._begin(pieces, memory)
        if pieces:
            CUDA.scatter_to_device(self._streams[pieces[0].device], pieces, memory.address, nbytes)
        self._mark(transfer)
        return transfer

    def finish(self, transfer: Transfer) -> None:
        """Wait until the copies of a transfer are done, and each byte is in its place."""
        for event in transfer.events:
            CUDA.synchronize(event)
        for source, target, nbytes in transfer.moves:
            copy_memory(target, source, nbytes)
        self._under_way.discard(transfer)

    def uses(self, memory: Pages) -> bool:
        """True while a copy from or to ``memory`` may be under way."""
        return any(transfer.memory is memory for transfer in self._under_way)

    def drain(self) -> None:
        """Wait until no copy is under way. If a device fails meanwhile, ``uses`` stays true for the memory it was given.

        A KeyboardInterrupt that arrives meanwhile is raised afterwards.
        """
        _settle(self._streams, self._under_way)

    def _begin(self, pieces: Sequence[Piece], memory: Pages) -> Transfer:
        if not pieces:
            return Transfer(None, pieces)
        page_lock(memory)
        transfer = Transfer(memory, pieces)
        self._under_way.add(transfer)  # before the first copy: an interrupt may strike anywhere
        return transfer

    def _mark(self, transfer: Transfer) -> None:
        transfer.events = [CUDA.record(self._streams[device]) for device in {piece.device for piece in transfer.pieces}]


def work_so_far(flat: FlatObject) -> WorkSoFar:
    """What the calling thread's current streams were given so far, for each CUDA device that holds storages of ``flat``.

    Other accelerators are waited for.
    """
    on_devices = [flat.storages[index] for index in without_address(flat)]
    if not on_devices:
        return {}
    devices = {CUDA.device_of(storage) for storage in on_devices}
    if -1 in devices:
        _synchronize_others({storage.device for storage in on_devices if CUDA.device_of(storage) < 0})
    return {device: CUDA.record(CUDA.current_stream(device)) for device in sorted(devices) if device >= 0}


def copy_out(flat: FlatObject, indices: Sequence[int], addresses: Sequence[int], memory: Pages) -> Generator[int, None, None]:
    """Copy whole storages of ``flat``, all on devices, to ``addresses[index]`` in ``memory``; yields how many are there.

    It does so again and again, in their order, while later ones are on their way. The calling thread's current streams have
    produced the data. Whatever ends the iteration, no copy is under way then.
    """
    devices = [CUDA.device_of(flat.storages[index]) for index in indices]
    copies = Copies({device: CUDA.record(CUDA.current_stream(device)) for device in sorted(set(devices)) if device >= 0})
    ahead: deque[tuple[Transfer, int]] = deque()
    try:
        for batch, done in _batches(flat, indices, devices, addresses):
            if len(ahead) == LOOK_AHEAD:
                yield _finish_next(copies, ahead)
            ahead.append((copies.to_host([piece for piece in batch if piece.device >= 0], memory), done))
            for piece in batch:
                if piece.device < 0:
                    copy_from_device(piece.storage, 0, view_memory(piece.address, piece.nbytes))
        while ahead:
            yield _finish_next(copies, ahead)
    finally:
        copies.drain()


def _finish_next(copies: Copies, ahead: deque[tuple[Transfer, int]]) -> int:
    transfer, done = ahead.popleft()
    copies.finish(transfer)
    return done


def _batches(
    flat: FlatObject, indices: Sequence[int], devices: Sequence[int], addresses: Sequence[int]
) -> Iterator[tuple[list[Piece], int]]:
    """(pieces that lie together in memory, with nothing between them, in ascending order; how many storages up to here)."""
    batch: list[Piece] = []
    nbytes = 0
    for done, (index, device) in enumerate(zip(indices, devices, strict=True)):
        piece = Piece(flat.storages[index], device, 0, flat.storage_nbytes[index], addresses[index])
        if batch and (nbytes >= BATCH_NBYTES or (device < 0) != (batch[-1].device < 0) or not _adjoin(batch[-1], piece)):
            yield sorted(batch, key=lambda piece: piece.address), done
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece.nbytes
    if batch:
        yield sorted(batch, key=lambda piece: piece.address), len(indices)


def _adjoin(one: Piece, other: Piece) -> bool:
    """True if nothing of 64-byte alignment lies between the two."""
    low, high = sorted((one, other), key=lambda piece: piece.address)
    return high.address - (low.address + low.nbytes) < DATA_ALIGNMENT


def _runs(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Small pieces of one device that follow each other, up to GATHER_NBYTES of them; all others one by one."""
    run: list[Piece] = []
    nbytes = 0
    for piece in pieces:
        small = piece.nbytes < SMALL_NBYTES
        if run and not (small and piece.device == run[0].device and nbytes + piece.nbytes <= GATHER_NBYTES):
            yield run
            run, nbytes = [], 0
        run.append(piece)
        nbytes += piece.nbytes
        if not small:
            yield run
            run, nbytes = [], 0
    if run:
        yield run


def _gather(stream: Stream, run: Sequence[Piece], moves: list[tuple[int, int, int]]) -> bool:
    """Copy pieces together, to where the last of them ends; False if the device has no memory for that.

    From there each can be moved to its place, front to back: none comes to lie on one that has not been moved yet.
    """
    landing = run[-1].address + run[-1].nbytes - sum(piece.nbytes for piece in run)
    try:
        CUDA.gather_to_host(stream, run, landing)
    except torch.OutOfMemoryError:
        return False
    for piece in run:
        moves.append((landing, piece.address, piece.nbytes))
        landing += piece.nbytes
    return True


def _side_stream(device: int) -> Stream:
    """One for each device and all saves and loads: memory that torch has used on one stream stays there for good."""
    if device not in _side_streams:
        _side_streams[device] = CUDA.new_stream(device)
    return _side_streams[device]


def _settle(streams: dict[int, Stream], under_way: set[Transfer]) -> None:
    interrupt: KeyboardInterrupt | None = None
    while under_way:
        try:
            for stream in streams.values():
                CUDA.synchronize(CUDA.record(stream))
            under_way.clear()
        except KeyboardInterrupt as error:
            interrupt = error
        except RuntimeError as error:
            log.warning("a device failed while copies were under way, and keeps their memory (%s)", error)
            _lost.extend(under_way)
            break
    if interrupt is not None:
        raise interrupt


def _synchronize_others(devices: set[torch.device]) -> None:
    accelerator = torch.accelerator.current_accelerator()
    for device in devices:
        if accelerator is not None and device.type == accelerator.type:
            torch.accelerator.synchronize(device)
