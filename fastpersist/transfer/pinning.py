"""Page-locked host memory: what a CUDA device copies to or from without waiting, and at full speed."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable

from fastpersist.memory.pages import Pages
from fastpersist.transfer.cuda import CUDA

log = logging.getLogger("fastpersist")

_met: weakref.WeakSet[Pages] = weakref.WeakSet()
_warned = False


def page_lock(pages: Pages) -> None:
    """Lock ``pages`` for all CUDA devices, once and until they go away. Where that fails, one warning says so."""
    global _warned
    if pages in _met:
        return
    # The undoing comes first: memory that CUDA takes for locked must never be unmapped.
    undo = weakref.finalize(pages, _unlock, CUDA.unlock, pages.address, os.getpid())
    undo.atexit = False  # the end of the process unlocks all
    _met.add(pages)
    problem = CUDA.lock(pages.address, pages.nbytes)
    if problem:
        undo.detach()
        if not _warned:
            _warned = True
            log.warning(
                "%d bytes of memory cannot be page-locked (%s): copies from and to devices are slow", pages.nbytes, problem
            )


def _unlock(unlock: Callable[[int], object], address: int, process: int) -> None:
    if process == os.getpid():  # CUDA does not work in a forked child
        unlock(address)
