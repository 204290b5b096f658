"""How much memory a save takes beside what it saves, measured in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from room import remove_and_settle
from saving import Saver
from workloads import random_tensors

_STATUS = Path("/proc/self/status")


def peak_growth_nbytes(make_saver: Callable[[], Saver], path: Path, *, tensors: int, nbytes_each: int) -> int:
    """Growth of the peak resident memory during the first save of a new process, libraries it loads included.

    ``make_saver`` is called there and must be picklable. The page cache does not count as the process's memory.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(_grow, make_saver, path, tensors, nbytes_each).result()


def _grow(make_saver: Callable[[], Saver], path: Path, tensors: int, nbytes_each: int) -> int:
    obj = random_tensors(tensors, nbytes_each)
    saver = make_saver()
    with contextlib.suppress(OSError):  # if refused, the peak so far counts as the start: it is little above
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is resident now; see proc(5)
    before = _peak_nbytes()
    try:
        saver.save(obj, path)
        return _peak_nbytes() - before
    finally:
        remove_and_settle(path)


def _peak_nbytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
