"""The disk's own speed, as fio measures it: what a save or a load can hope for."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from room import remove_and_settle

QUEUE_DEPTH = 8
BLOCKS_NBYTES = (4 << 20, 8 << 20, 16 << 20)
_ENGINES = ("io_uring", "psync")
_TIMEOUT_SECONDS = 300


def usable_engine(folder: Path) -> tuple[str | None, str]:
    """fio's I/O engine that works in ``folder`` (io_uring, else psync), or None, and what to tell the reader."""
    if shutil.which("fio") is None:
        return None, "fio is not installed: no ratio to the disk's own speed"
    failure = ""
    for engine in _ENGINES:
        try:
            write_rate(folder / "fio-trial", 1 << 20, 1 << 20, engine)
        except RuntimeError as error:
            failure = str(error)
        else:
            return engine, f"fio: ioengine {engine}, direct, queue depth {QUEUE_DEPTH}"
    return None, f"fio cannot write here ({failure}): no ratio to the disk's own speed"


def write_rate(path: Path, nbytes: int, block_nbytes: int, engine: str) -> float:
    """Bytes per second, fsync included, of writing ``nbytes`` of fresh random data to the new file ``path``.

    The file is deleted. Raises RuntimeError with fio's words if it fails.
    """
    try:
        return _rate(path, "write", block_nbytes, engine, size=nbytes, end_fsync=1, refill_buffers=1)
    finally:
        path.unlink(missing_ok=True)


def overwrite_rate(path: Path, nbytes: int, block_nbytes: int, engine: str) -> float:
    """The same, over the first ``nbytes`` of the existing file ``path``, which are allocated. The file stays."""
    return _rate(path, "write", block_nbytes, engine, size=nbytes, end_fsync=1, refill_buffers=1)


@dataclass(slots=True)
class Ceiling:
    """fio's bytes per second, per block size and round: of a fresh file, or of overwriting the file ``allocated``."""

    engine: str
    nbytes: int
    allocated: Path | None = None
    rates: dict[int, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        # A file shorter than a block is written in one.
        self.rates = {size: [] for size in BLOCKS_NBYTES if size <= self.nbytes} or {self.nbytes: []}

    def run(self, path: Path) -> None:
        """One round. ``path`` is where a fresh file may be."""
        for block_nbytes, rates in self.rates.items():
            remove_and_settle(path)
            if self.allocated is None:
                rates.append(write_rate(path, self.nbytes, block_nbytes, self.engine))
            else:
                rates.append(overwrite_rate(self.allocated, self.nbytes, block_nbytes, self.engine))

    @property
    def best_block_nbytes(self) -> int:
        """The block size with the best median. The best of each round would count chance as speed."""
        return max(self.rates, key=lambda size: statistics.median(self.rates[size]))

    @property
    def best_rates(self) -> list[float]:
        """Those of the best block size, round by round."""
        return self.rates[self.best_block_nbytes]


def read_rate(path: Path, block_nbytes: int, engine: str) -> float:
    """Bytes per second of reading the existing file ``path`` from beginning to end. Raises RuntimeError with fio's words."""
    return _rate(path, "read", block_nbytes, engine)


def _rate(path: Path, way: str, block_nbytes: int, engine: str, **more: int) -> float:
    arguments = {
        "name": "ceiling",
        "filename": path.name,  # with a path it would split at colons
        "rw": way,
        "bs": block_nbytes,
        "ioengine": engine,
        "iodepth": QUEUE_DEPTH,
        "direct": 1,
        "output-format": "json",
        **more,
    }
    command = ["fio", *(f"--{key}={value}" for key, value in arguments.items())]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip() or f"fio ended with status {done.returncode}")
    # Warnings may stand before the JSON.
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]["bw_bytes"])
