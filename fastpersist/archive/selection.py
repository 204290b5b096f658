"""Parts of a state dict: which of its values are wanted, and what it is without the others.

A value's path is the dict keys that lead to it, joined by dots: ``model.layers.0.weight`` may be
``obj["model"]["layers.0.weight"]``, and ``optimizer.state.3.exp_avg`` is ``obj["optimizer"]["state"][3]["exp_avg"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastpersist.errors import brief

Selection = str | Iterable[str] | Callable[[str], bool]
"""A prefix, several prefixes, or a function of the path. A prefix selects the value at that path and all below it."""

MAX_DEPTH = 100


def as_predicate(only: Selection) -> Callable[[str], bool]:
    """The function of the path that ``only`` stands for. TypeError for what is none of its forms, ValueError if empty."""
    if callable(only):
        return only
    prefixes = [only] if isinstance(only, str) else list(only)
    if not prefixes:
        raise ValueError("only= names no prefix: nothing would be loaded")
    for prefix in prefixes:
        if not isinstance(prefix, str) or not prefix:
            raise TypeError(f"only= takes a function of the path, or prefixes as non-empty strings, not {prefix!r}")
    starts = tuple(prefix if prefix.endswith(".") else f"{prefix}." for prefix in prefixes)
    return lambda path: f"{path}.".startswith(starts)


def walk(obj: Any, visit: Callable[[str, Any], bool]) -> None:
    """Call ``visit(path, value)`` for every value of a nest of dicts that is no dict itself; delete it where that is False.

    Dicts that lose all their values are deleted, too. Raises TypeError for an object that is no dict and for keys other
    than strings and integers, ValueError for a dict that stands in two places: it could not be cut to fit both.
    """
    if not isinstance(obj, dict):
        raise TypeError(
            f"only= needs a state dict, a dict of values or of further dicts; this checkpoint holds a {type(obj).__name__}"
        )
    _walk(obj, "", visit, {}, 0)


def _walk(obj: dict[Any, Any], path: str, visit: Callable[[str, Any], bool], seen: dict[int, str], depth: int) -> bool:
    if depth > MAX_DEPTH:
        raise ValueError(f"only= goes no deeper than {MAX_DEPTH} dicts: {brief(path)}")
    seen[id(obj)] = path
    for key in list(obj):
        if not isinstance(key, str | int):
            message = f"only= knows keys that are strings or integers, not a {type(key).__name__} at {brief(path or 'the top')}"
            raise TypeError(message)
        value, place = obj[key], f"{path}.{key}" if path else str(key)
        if id(value) in seen:  # asked first: what was cut for its first place may be empty by now
            places = f"{brief(seen[id(value)] or 'the top')} and {brief(place)}"
            raise ValueError(f"only= cannot take a dict that stands in two places or contains itself: {places}")
        nested = isinstance(value, dict) and bool(value)
        if not (_walk(value, place, visit, seen, depth + 1) if nested else visit(place, value)):
            del obj[key]
    return bool(obj)


def select(obj: Any, wanted: Callable[[str], bool]) -> Any:
    """``obj`` with only those values whose path is wanted. KeyError, naming the top-level keys, if there is none."""
    keys = list(obj) if isinstance(obj, dict) else []
    walk(obj, lambda path, _: bool(wanted(path)))
    if not obj:
        raise KeyError(f"only= selects nothing; the top-level keys are {', '.join(brief(str(key)) for key in keys[:20])}")
    return obj
