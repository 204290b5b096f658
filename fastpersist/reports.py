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
