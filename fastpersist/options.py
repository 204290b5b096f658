"""Options of the verbs: arguments win over FASTPERSIST_* environment variables, those over the profile that a probe saved for
the path's filesystem (used with engine "auto" only), and that over defaults. Checked here.
"""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from fastpersist.engines import (
    DEFAULT_BLOCK_NBYTES,
    DEFAULT_QUEUE_DEPTH,
    MAX_QUEUE_DEPTH,
    MAX_TRANSFER_NBYTES,
    Engine,
    engine_class,
    open_engine,
)
from fastpersist.errors import AlignmentError
from fastpersist.memory.alignment import PAGE_NBYTES, is_aligned
from fastpersist.probing.profile import Profile, load_profile
from fastpersist.probing.small_pages import slowed_by_small_pages

Path = str | os.PathLike[str]

_ZERO_COPY = "FASTPERSIST_ZERO_COPY"

BESIDE_TRAINING_NBYTES = 32 << 20
"""Blocks of this size keep a disk as busy as those of 8 MiB, and take the interpreter's lock from others a quarter as often."""


class Choice(NamedTuple):
    """Engine and sizes, each with its last word: what says "auto" was chosen by nobody."""

    engine: str | Engine
    block_nbytes: int
    queue_depth: int


def choose(
    engine: str | Engine, block_nbytes: int | None, queue_depth: int | None, path: Path, *, beside_training: bool = False
) -> Choice:
    """The engine and the sizes to use for ``path``.

    engine: an open one as it is; a name as it is, but for "auto" that of FASTPERSIST_ENGINE or the profile. block_nbytes and
    queue_depth: argument, else FASTPERSIST_BLOCK_NBYTES and FASTPERSIST_QUEUE_DEPTH, else the open engine's or the profile's,
    else 8 MiB and 8. beside_training: blocks for which nobody has asked are of 32 MiB at least.

    Raises TypeError for what is no engine or no whole number, AlignmentError unless block_nbytes is a multiple of 4096,
    ValueError for an unknown engine or one that makes no sense by name, for more bytes than one transfer can move, and for a
    depth below 1, above 1024, or above that of the open engine.
    """
    engine, profile = _named(engine, path)
    _check_engine(engine)
    least_nbytes = BESIDE_TRAINING_NBYTES if beside_training else 0
    return Choice(
        engine,
        _block_nbytes(block_nbytes, engine, profile, least_nbytes),
        _queue_depth(queue_depth, engine, profile),
    )


def check_zero_copy(zero_copy: bool | None) -> bool | None:
    """Whether tensors are written from where they lie: argument, else FASTPERSIST_ZERO_COPY (1 or 0), else None.

    Raises TypeError and ValueError for what is neither true nor false.
    """
    if zero_copy is not None:
        if not isinstance(zero_copy, bool):
            raise TypeError(f"zero_copy must be True, False or None, not {zero_copy!r}")
        return zero_copy
    text = os.environ.get(_ZERO_COPY)
    if text and text not in ("0", "1"):
        raise ValueError(f"the environment variable {_ZERO_COPY} must be 0 or 1, not {text!r}")
    return text == "1" if text else None


def choose_zero_copy(zero_copy: bool | None, directory: str) -> bool:
    """The last word for direct I/O to a file in ``directory``, where check_zero_copy left it open."""
    return not slowed_by_small_pages(directory) if zero_copy is None else zero_copy


def _given(option: str, value: int | None) -> int | None:
    """The argument, else what the environment says; None if neither does."""
    if value is not None:
        if not isinstance(value, int):
            raise TypeError(f"{option} must be a whole number, not {value!r}")
        return value
    variable = f"FASTPERSIST_{option.upper()}"
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {variable} must be a whole number, not {text!r}") from None


def _named(engine: str | Engine, path: Path) -> tuple[str | Engine, Profile | None]:
    """What "auto" means, and the profile of the path's filesystem, unless its sizes are those of another engine."""
    if engine != "auto":
        return engine, None
    profile, named = load_profile(path), os.environ.get("FASTPERSIST_ENGINE")
    if profile is None or (named and named not in ("auto", profile.engine)):
        return named or "auto", None
    return named or profile.engine, profile


def _block_nbytes(block_nbytes: int | None, engine: str | Engine, profile: Profile | None, least_nbytes: int) -> int:
    block_nbytes = _given("block_nbytes", block_nbytes)
    if block_nbytes is None:
        if profile is not None:
            block_nbytes = profile.block_nbytes
        else:
            block_nbytes = DEFAULT_BLOCK_NBYTES if isinstance(engine, str) else engine.block_nbytes
        block_nbytes = max(block_nbytes, least_nbytes)
    if block_nbytes <= 0 or not is_aligned(block_nbytes, PAGE_NBYTES):
        raise AlignmentError(f"block_nbytes must be a positive multiple of {PAGE_NBYTES}, not {block_nbytes}")
    if block_nbytes > MAX_TRANSFER_NBYTES:
        raise ValueError(f"block_nbytes must be at most {MAX_TRANSFER_NBYTES}, not {block_nbytes}")
    return block_nbytes


def _queue_depth(queue_depth: int | None, engine: str | Engine, profile: Profile | None) -> int:
    is_argument = queue_depth is not None
    queue_depth = _given("queue_depth", queue_depth)
    if queue_depth is None and profile is not None:
        queue_depth = profile.queue_depth
    opened = None if isinstance(engine, str) else engine.queue_depth
    if queue_depth is None:
        queue_depth = DEFAULT_QUEUE_DEPTH if opened is None else opened
    if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
        raise ValueError(f"queue_depth must be at least 1 and at most {MAX_QUEUE_DEPTH}, not {queue_depth}")
    if opened is not None and queue_depth > opened:
        if not is_argument:
            return opened
        raise ValueError(f"queue_depth={queue_depth} exceeds the {opened} that the engine was opened with")
    return queue_depth


def _check_engine(engine: str | Engine) -> None:
    if not isinstance(engine, str):
        if isinstance(engine, Engine):
            return
        raise TypeError(f"engine must be a name or an open engine, not {type(engine).__name__}")
    if engine == "memory":
        raise ValueError(
            "engine='memory' would drop the bytes with the engine: open it with open_engine('memory'), pass that, and read "
            "the file back with its contents(path)"
        )
    if engine != "auto":
        engine_class(engine)


def ready_engine(
    engine: str | Engine, path: str, block_nbytes: int, queue_depth: int
) -> contextlib.AbstractContextManager[Engine]:
    """The engine that was chosen: an open one as it is (and left open), or one opened by name for the block.

    Raises EngineUnavailableError for one that cannot run here.
    """
    if not isinstance(engine, str):
        return contextlib.nullcontext(engine)
    return open_engine(engine, path=path, block_nbytes=block_nbytes, queue_depth=queue_depth)
