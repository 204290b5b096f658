"""Alignment arithmetic. Pure functions over non-negative integers; nothing here touches memory."""

from __future__ import annotations

PAGE_NBYTES = 4096
"""The unit that every filesystem and device accepts for direct I/O, and the smallest page of the CPUs we run on."""


def round_up(value: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is >= ``value``."""
    return -(-value // alignment) * alignment


def round_down(value: int, alignment: int) -> int:
    """Largest multiple of ``alignment`` that is <= ``value``."""
    return value // alignment * alignment


def is_aligned(value: int, alignment: int) -> bool:
    """True when ``value`` is a multiple of ``alignment``."""
    return value % alignment == 0


def is_power_of_two(value: int) -> bool:
    """True for 1, 2, 4, ..."""
    return value > 0 and value & (value - 1) == 0


def next_power_of_two(value: int) -> int:
    """Smallest power of two that is >= ``value`` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
