"""Alignment arithmetic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastpersist.memory.alignment import is_aligned, is_power_of_two, next_power_of_two, round_down, round_up

sizes = st.integers(0, 1 << 62)
alignments = st.integers(1, 1 << 20)


@given(sizes, alignments)
def test_rounding_brackets_the_value(value: int, alignment: int) -> None:
    low, high = round_down(value, alignment), round_up(value, alignment)
    assert low <= value <= high
    assert is_aligned(low, alignment)
    assert is_aligned(high, alignment)
    assert high - low in (0, alignment)
    assert (high == low) == is_aligned(value, alignment)


@given(sizes)
def test_next_power_of_two_is_the_smallest_that_holds_the_value(value: int) -> None:
    power = next_power_of_two(value)
    assert is_power_of_two(power)
    assert power >= value
    assert power == 1 or power // 2 < value
