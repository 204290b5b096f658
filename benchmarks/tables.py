"""Markdown tables of what several rounds gave. GB is 1e9 bytes; ratios are medians of paired rounds, with their range."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from measuring import GB, Series, Spread, paired_ratios

Cells = dict[str, str]
"""One line of a table: cells by the title of their column."""


def print_table(lines: Sequence[Cells]) -> None:
    """One Markdown table with all columns that the lines have. What a line does not have is "-"."""
    titles = list(dict.fromkeys(title for line in lines for title in line))
    print(f"\n| {' | '.join(titles)} |")
    print(f"|{'---|' * len(titles)}")
    for line in lines:
        print(f"| {' | '.join(line.get(title, '-') for title in titles)} |")
    print(flush=True)


def rate_cells(series: Series, nbytes: int, fio_rates: Sequence[float], baselines: Mapping[str, Series]) -> Cells:
    """For large tensors: speed by bytes. ``fio_rates``: of the same rounds, empty where fio has no part in it."""
    rates = series.rates(nbytes)
    cells = _speed_cells(series.tag, series.seconds, rates)
    if fio_rates:
        cells["of fio (range)"] = str(paired_ratios(rates, fio_rates))
    cells |= {_times(name): times_as_fast(series, other) for name, other in baselines.items()}
    cells["CPU s/GB"] = f"{statistics.median(series.cpu_seconds) / (nbytes / GB):.3f}"
    return cells


def fio_cells(tag: str, rates: Sequence[float], nbytes: int, baselines: Mapping[str, Series]) -> Cells:
    """The line of the ceiling: fio's bytes per second, round by round."""
    seconds = [nbytes / rate for rate in rates]
    ratios = {_times(name): str(paired_ratios(other.seconds, seconds)) for name, other in baselines.items()}
    return _speed_cells(tag, seconds, rates) | {"of fio (range)": "1"} | ratios


def item_cells(series: Series, count: int, name: str, baseline: Series) -> Cells:
    """For ``count`` small tensors: speed by tensors, and times and CPU seconds against ``baseline``, called ``name``."""
    median_seconds = statistics.median(series.seconds)
    return {
        "": series.tag,
        "median s": f"{median_seconds:.3f}",
        "microseconds per tensor": f"{median_seconds / count * 1e6:.2f}",
        _times(name): times_as_fast(series, baseline),
        f"CPU, of {name} (range)": share_of_cpu(series, baseline),
    }


def _speed_cells(tag: str, seconds: Sequence[float], rates: Sequence[float]) -> Cells:
    return {
        "": tag,
        "median s": f"{statistics.median(seconds):.3f}",
        "GB/s (range)": str(Spread.of([rate / GB for rate in rates])),
    }


def _times(name: str) -> str:
    return f"x {name} (range)"


def times_as_fast(series: Series, baseline: Series) -> str:
    """How many times as fast as the baseline."""
    return "1" if series is baseline else str(paired_ratios(baseline.seconds, series.seconds))


def share_of_cpu(series: Series, baseline: Series) -> str:
    """CPU seconds, of those of the baseline."""
    return "1" if series is baseline else str(paired_ratios(series.cpu_seconds, baseline.cpu_seconds))
