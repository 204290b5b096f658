"""The three forms of the progress option."""

from __future__ import annotations

import pytest

from fastpersist.progress import progress_reporter


def test_a_function_is_called_as_it_is() -> None:
    calls: list[tuple[int, int]] = []
    with progress_reporter(lambda done, total: calls.append((done, total)), "x") as report:
        report(1, 2)
    assert calls == [(1, 2)]


def test_false_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter(False, "x") as report:
        report(1, 2)
    assert capsys.readouterr().out == ""


def test_true_shows_a_bar_with_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_reporter(True, "model.pt") as report:
        report(10, 10)
    assert "model.pt" in capsys.readouterr().out
