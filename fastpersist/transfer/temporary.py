"""Temporary files that have a name: how they are called, locked, and cleaned up after a process that was killed."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import re
import secrets
import time

log = logging.getLogger("fastpersist")

LOOK_AGAIN_SECONDS = 60.0

_MAX_LOOKED_THROUGH = 256
_looked_through: dict[str, float] = {}  # directories, and when (of time.monotonic)

_TEMPORARY_NAME = re.compile(r"\.fastpersist-[0-9a-f]{16}\.tmp")


def new_name() -> str:
    """A hidden name that nobody else has."""
    return f".fastpersist-{secrets.token_hex(8)}.tmp"


def try_lock(fileno: int) -> bool:
    """False if another process holds the lock. A filesystem without locks protects nothing, and nobody cleans up there."""
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info("temporary files cannot be locked here (%s)", error.strerror)
    return True


def remove_abandoned(directory: str, directory_fileno: int) -> None:
    """Remove temporary files that killed processes left: those that nobody has locked.

    A process looks for them when it first saves to a directory, and again after a minute: a directory may be long.
    """
    now = time.monotonic()
    if now - _looked_through.get(directory, -math.inf) < LOOK_AGAIN_SECONDS:  # one look: another thread may clear it
        return
    if len(_looked_through) >= _MAX_LOOKED_THROUGH:
        _looked_through.clear()
    _looked_through[directory] = now
    for name in os.listdir(directory_fileno):
        if _TEMPORARY_NAME.fullmatch(name):
            try:
                _remove_if_unlocked(name, directory_fileno)
            except BlockingIOError:
                pass  # in use: locked, or under a lease, which already refuses to have it opened
            except OSError as error:
                log.info("%s: the abandoned file %s cannot be removed (%s)", directory, name, error.strerror)


def _remove_if_unlocked(name: str, directory_fileno: int) -> None:
    fileno = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory_fileno)
    try:
        fcntl.flock(fileno, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=directory_fileno)
        log.info("removed %s, which a save that was killed had left", name)
    finally:
        os.close(fileno)
