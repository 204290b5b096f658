"""Fixtures of the fuzz tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.court import Court


@pytest.fixture(scope="package")
def court() -> Iterator[Court]:
    """One court for all tests: starting a judge imports torch."""
    with Court() as court:
        yield court
