"""What the verbs return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. Sizes are bytes, times seconds.

    nbytes is the payload (all storages), of which zero_copy_nbytes were handed to the engine where they lie and
    copied_nbytes went through a buffer. seconds is the whole call; sync_seconds is the part spent making the file durable
    and moving its name. direct says whether the page cache was bypassed. records counts the zip records.
    """

    path: str
    nbytes: int
    file_nbytes: int
    seconds: float
    engine: str
    direct: bool
    zero_copy_nbytes: int
    copied_nbytes: int
    sync_seconds: float
    records: int
    block_nbytes: int
    queue_depth: int

    @property
    def gb_per_s(self) -> float:
        """Payload in units of 1e9 bytes, per second of the whole call."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        mode = "direct" if self.direct else "buffered"
        return (
            f"{self.path}: {self.nbytes / 1e9:.3f} GB in {self.seconds:.3f} s, {self.gb_per_s:.2f} GB/s "
            f"({self.engine}, {mode}, {self.zero_copy_nbytes / max(self.nbytes, 1):.1%} zero-copy, "
            f"sync {self.sync_seconds:.3f} s)"
        )


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """A file without fault. nbytes is its length; records_without_checksum counts those that store none."""

    path: str
    nbytes: int
    records: int
    records_without_checksum: int
    seconds: float
    engine: str

    @property
    def gb_per_s(self) -> float:
        """File bytes in units of 1e9, per second of the whole call."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        unchecked = f", {self.records_without_checksum} of them without a checksum" if self.records_without_checksum else ""
        return f"{self.path}: {self.records} records sound{unchecked} ({self.nbytes / 1e9:.3f} GB, {self.gb_per_s:.2f} GB/s)"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the pickle describes it: path (dict keys and indices, joined by dots), dtype, shape, its record's name."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    record: str | None


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """A zip record. offset is where its data starts, alignment the largest power of two that divides it (4096 at most).

    checksum is the stored CRC-32, None where the writer stored none.
    """

    name: str
    nbytes: int
    offset: int
    alignment: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """What a checkpoint file holds. Sizes are bytes; nbytes is the payload, all storages.

    tensors is None where the pickle names classes that weights_only refuses; ``note`` then says so. torch_offsets says what
    torch makes of the layout: "read" (from the headers), "calculated" (and the calculation is right), or "wrong" (torch would
    calculate offsets that are not those of the records).
    """

    path: str
    file_nbytes: int
    nbytes: int
    prefix: str
    byteorder: str
    torch_offsets: str
    records: tuple[RecordInfo, ...]
    tensors: tuple[TensorInfo, ...] | None
    note: str = ""
