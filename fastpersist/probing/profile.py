"""Profiles: the configuration that a probe found best, one small file per filesystem in the user's cache directory.

    {"version": 1, "created": seconds since 1970, "host": name, "kernel": "6.18", "directory": where it was measured,
     "engine": name, "block_nbytes": n, "queue_depth": n, "gb_per_s": fresh writes in units of 1e9 bytes}

A profile is a hint and never a reason to fail: one that cannot be used is ignored, and a log line says why.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpersist.engines import DEFAULT_BLOCK_NBYTES, engine_class
from fastpersist.engines.base import MAX_QUEUE_DEPTH
from fastpersist.memory.alignment import PAGE_NBYTES, is_aligned
from fastpersist.memory.buffers import DEFAULT_POOL_NBYTES

log = logging.getLogger("fastpersist")

VERSION = 1
MAX_AGE_SECONDS = 180 * 86400
_CLOCK_TOLERANCE_SECONDS = 86400
_MAX_FILE_NBYTES = 64 << 10
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class Profile:
    """What engine "auto" and default sizes become on one filesystem."""

    engine: str
    block_nbytes: int = DEFAULT_BLOCK_NBYTES
    queue_depth: int = 8


class _UnusableError(Exception):
    """Why a profile is ignored."""


# By file: its modification time and the verdict on it, so that a save parses once, and complains once.
_judged: dict[str, tuple[int, Profile | None]] = {}
_MAX_JUDGED = 64


def profile_file(path: str | os.PathLike[str]) -> Path | None:
    """The profile's place for the filesystem on which ``path`` lies, or will lie: its directory must exist.

    None where there is no such place (no home directory, a path that is none).
    """
    folder = _folder()
    place = None if folder is None else _place(folder, path)
    return None if place is None else Path(place)


# Strings, as they are asked for before every save: objects of pathlib take several times as long.


def _folder() -> str | None:
    cache = _cache_directory()
    return None if cache is None else f"{cache}/fastpersist/profiles"


def _place(folder: str, path: str | os.PathLike[str]) -> str | None:
    try:
        where = os.fsdecode(path)
        if not os.path.exists(where):
            where = os.path.dirname(where) or os.curdir
        return f"{folder}/{_filesystem_key(where)}.json"
    except (OSError, TypeError, ValueError):
        return None


def save_profile(directory: str | os.PathLike[str], profile: Profile, *, gb_per_s: float) -> Path:
    """Store the profile of the filesystem of ``directory``; whoever reads meanwhile sees the old one or the new one.

    Raises OSError where the cache directory cannot be written.
    """
    target = profile_file(directory)
    if target is None:
        raise FileNotFoundError(2, "there is no cache directory: set XDG_CACHE_HOME or HOME", os.fspath(directory))
    content = {
        "version": VERSION,
        "created": int(time.time()),
        "host": platform.node(),
        "kernel": _kernel_series(),
        "directory": os.path.realpath(directory),
        "engine": profile.engine,
        "block_nbytes": profile.block_nbytes,
        "queue_depth": profile.queue_depth,
        "gb_per_s": round(gb_per_s, 3),
    }
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _replace(target, json.dumps(content, indent=2) + "\n")
    return target


def load_profile(path: str | os.PathLike[str]) -> Profile | None:
    """The profile for the filesystem of ``path``; None if there is none, or (with one log line) none that can be used."""
    folder = _folder()
    if folder is None or not os.access(folder, os.F_OK):  # most have none
        return None
    file = _place(folder, path)
    if file is None:
        return None
    try:
        modified = os.stat(file).st_mtime_ns
    except OSError:
        return None
    known = _judged.get(file)
    if known is not None and known[0] == modified:
        return known[1]
    profile = _judge(Path(file))
    if len(_judged) >= _MAX_JUDGED:
        _judged.clear()
    _judged[file] = (modified, profile)
    return profile


def _judge(file: Path) -> Profile | None:
    try:
        with file.open("rb") as source:
            content = json.loads(source.read(_MAX_FILE_NBYTES))
        profile = _checked(content)
    except (OSError, ValueError, RecursionError, _UnusableError) as error:
        log.warning("the profile %s is ignored (%s): 'fastpersist probe DIRECTORY --save-profile' makes a new one", file, error)
        return None
    log.info("profile %s: engine %s, %d bytes a block, %d in flight", file, *_fields(profile))
    return profile


def _fields(profile: Profile) -> tuple[str, int, int]:
    return profile.engine, profile.block_nbytes, profile.queue_depth


def _checked(content: Any) -> Profile:
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise _UnusableError(f"it has not the version {VERSION}")
    if content.get("host") != platform.node() or content.get("kernel") != _kernel_series():
        raise _UnusableError("it was measured on another machine or another kernel")
    created, engine = content.get("created"), content.get("engine")
    if type(created) is not int or not -_CLOCK_TOLERANCE_SECONDS < time.time() - created < MAX_AGE_SECONDS:
        raise _UnusableError(f"it is older than {MAX_AGE_SECONDS // 86400} days, or from the future")
    block_nbytes, queue_depth = content.get("block_nbytes"), content.get("queue_depth")
    if type(block_nbytes) is not int or not (
        PAGE_NBYTES <= block_nbytes <= DEFAULT_POOL_NBYTES and is_aligned(block_nbytes, PAGE_NBYTES)
    ):
        raise _UnusableError(f"block_nbytes is {block_nbytes!r}")
    if type(queue_depth) is not int or not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
        raise _UnusableError(f"queue_depth is {queue_depth!r}")
    _check_engine(engine)
    return Profile(str(engine), block_nbytes, queue_depth)


def _check_engine(name: Any) -> None:
    if not isinstance(name, str):
        raise _UnusableError(f"engine is {name!r}")
    found = engine_class(name)  # ValueError for an unknown name
    if not found.capabilities.persistent:
        raise _UnusableError(f"engine {name!r} keeps nothing")
    verdict = found.availability()
    if not verdict.usable:
        raise _UnusableError(f"engine {name!r} cannot run here any more: {verdict.reason}")


def _cache_directory() -> str | None:
    named = os.environ.get("XDG_CACHE_HOME", "")
    if named.startswith("/"):  # the specification: relative paths are to be ignored
        return named
    home = os.environ.get("HOME") or os.path.expanduser("~")
    return f"{home.rstrip('/')}/.cache" if home.startswith("/") else None


def _filesystem_key(directory: str) -> str:
    """Identifies a mounted filesystem: its own id with its device; where it has no id, with this boot of the machine."""
    device = os.stat(directory).st_dev
    identity = f"{os.statvfs(directory).f_fsid & 0xFFFFFFFFFFFFFFFF:016x}"
    if not identity.strip("0"):  # anonymous device numbers alone are dealt out anew at each boot
        with contextlib.suppress(OSError):
            identity = "boot-" + Path(_BOOT_ID).read_text().strip()
    return f"{identity}-{os.major(device)}-{os.minor(device)}"


def _kernel_series() -> str:
    """The first two numbers of the kernel's release: updates within a series leave a profile in force."""
    return ".".join(platform.release().split(".")[:2])


def _replace(target: Path, text: str) -> None:
    fileno, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(fileno, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
