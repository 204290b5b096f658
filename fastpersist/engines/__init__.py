"""Engines: how bytes move between memory and files. Knows nothing of torch or zip.

open_engine("io_uring")     an open engine, by name
available()                 which engines can run here, and why the others cannot
"""

from __future__ import annotations

import functools
import importlib
import logging
import os

from fastpersist.engines.base import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    MAX_QUEUE_DEPTH,
    MAX_TRANSFER_NBYTES,
    Availability,
    Capabilities,
    Completion,
    Engine,
    Memory,
    Read,
    Request,
    Write,
)
from fastpersist.engines.files import File
from fastpersist.errors import EngineUnavailableError

__all__ = [
    "DEFAULT_BLOCK_NBYTES", "DEFAULT_QUEUE_DEPTH", "MAX_QUEUE_DEPTH", "MAX_TRANSFER_NBYTES", "Availability", "Capabilities",
    "Completion", "Engine", "File", "Memory", "Read", "Request", "Write", "available", "engine_class", "open_engine",
]  # fmt: skip

log = logging.getLogger("fastpersist")

# Imported at first use, so that no engine's library is needed to import this package.
_REGISTRY = {
    "posix": ("fastpersist.engines.posix", "PosixEngine"),
    "io_uring": ("fastpersist.engines.io_uring", "IoUringEngine"),
    "kvikio": ("fastpersist.engines.kvikio", "KvikioEngine"),
    "memory": ("fastpersist.engines.memory", "MemoryEngine"),
    "null": ("fastpersist.engines.memory", "NullEngine"),
}
_AUTO_ORDER = ("io_uring", "posix")
_AUTO_ORDER_FOR_ONE = ("posix",)  # one transfer at a time needs no ring, which takes as long to open as that transfer
_announced: set[str] = set()


def engine_class(name: str) -> type[Engine]:
    """The class registered under ``name``; ValueError lists the known names."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown engine {name!r}: use 'auto' or one of {', '.join(map(repr, _REGISTRY))}")
    return _imported(*_REGISTRY[name])


@functools.cache
def _imported(module: str, attribute: str) -> type[Engine]:
    found: type[Engine] = getattr(importlib.import_module(module), attribute)
    return found


def available() -> dict[str, Availability]:
    """For each engine: usable here or not, and if not, the reason and the remedy."""
    return {name: engine_class(name).availability() for name in _REGISTRY}


def open_engine(
    name: str = "auto",
    *,
    path: str | os.PathLike[str] | None = None,
    block_nbytes: int | None = None,
    queue_depth: int | None = None,
) -> Engine:
    """An open engine, to be closed by the caller (it is a context manager) and used by one thread.

    ``name`` "auto" takes the first of io_uring and posix that can run, posix for a ``queue_depth`` of 1, and logs its choice
    once; a named engine that cannot run raises EngineUnavailableError, it never turns into another one. ``path`` names the
    file or directory it will serve. ``block_nbytes`` and ``queue_depth`` default to 8 MiB and 8.
    """
    sizes = {
        "block_nbytes": DEFAULT_BLOCK_NBYTES if block_nbytes is None else block_nbytes,
        "queue_depth": DEFAULT_QUEUE_DEPTH if queue_depth is None else queue_depth,
    }
    return engine_class(name)(**sizes) if name != "auto" else _open_first(path, sizes)


def _open_first(path: str | os.PathLike[str] | None, sizes: dict[str, int]) -> Engine:
    refusals: list[str] = []
    for name in _AUTO_ORDER_FOR_ONE if sizes["queue_depth"] == 1 else _AUTO_ORDER:
        try:
            engine = engine_class(name)(**sizes)
        except EngineUnavailableError as error:
            refusals.append(f"{name} cannot: {error.reason}")
            continue
        reason = "one transfer at a time" if sizes["queue_depth"] == 1 else "the first choice can run"
        message = f"engine 'auto' is {name!r}: {'; '.join(refusals) or reason}"
        if message not in _announced:
            _announced.add(message)
            log.info("%s (first used for %s)", message, path or "no path yet")
        return engine
    raise EngineUnavailableError("auto", "; ".join(refusals), "see fastpersist.engines.available()")
