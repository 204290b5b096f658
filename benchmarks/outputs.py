"""Comparisons as JSON and as a bar chart."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import OURS, Comparison, Result
from measuring import GB, Machine, Spread

import fastpersist

FORMAT, VERSION = "fastpersist-benchmark", 1
_OUR_COLOUR, _OTHER_COLOUR, _CEILING_COLOUR = "#d1495b", "#8d99ae", "#222222"


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where to put the figures beside the terminal; None: nowhere."""

    json_path: Path | None = None
    plot_path: Path | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is any."""
        return self.json_path is not None or self.plot_path is not None

    def problem(self) -> str | None:
        """What would make ``write`` fail, to be asked before the work: a missing folder, no matplotlib. None if nothing."""
        for path in (self.json_path, self.plot_path):
            if path and not path.absolute().parent.is_dir():
                return f"{path.parent} is no folder"
        if self.plot_path and importlib.util.find_spec("matplotlib") is None:
            return "--plot needs matplotlib: install the extra that brings it, pip install 'fastpersist[plot]'"
        if self.plot_path and self.plot_path.suffix != ".png":
            return f"--plot writes PNG: {self.plot_path.name} should end in .png"
        return None

    def write(self, machine: Machine, workload: str, settings: Mapping[str, object], comparisons: Sequence[Comparison]) -> None:
        """Write what is wanted. Raises OSError."""
        if self.json_path:
            document = as_document(machine, workload, settings, comparisons)
            self.json_path.write_text(json.dumps(document, indent=2) + "\n")
        if self.plot_path:
            draw(self.plot_path, f"{workload}\n{machine}", comparisons)


def as_document(
    machine: Machine, workload: str, settings: Mapping[str, object], comparisons: Sequence[Comparison]
) -> dict[str, object]:
    """What --json holds. Sizes are bytes, times seconds, rates bytes per second; lists go round by round."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "fastpersist": fastpersist.__version__,
        "machine": dataclasses.asdict(machine),
        "workload": workload,
        "settings": dict(settings),
        "comparisons": [_as_dict(comparison) for comparison in comparisons],
    }


def _as_dict(comparison: Comparison) -> dict[str, object]:
    return {
        "title": comparison.title,
        "nbytes": comparison.nbytes,
        "baseline": comparison.baseline_tag,
        "ceiling_bytes_per_second": comparison.ceiling,
        "tests": [_test(comparison, result) for result in comparison.results],
        "left_out": [dataclasses.asdict(left_out) for left_out in comparison.left_out],
    }


def _test(comparison: Comparison, result: Result) -> dict[str, object]:
    of_ceiling = comparison.ratio_to_ceiling(result)
    return {
        "tag": result.tag,
        comparison.state_title.replace(" ", "_"): result.state,
        "verified": result.verified,
        "seconds": result.seconds,
        "cpu_seconds": [cost.cpu_seconds for cost in result.costs],
        "bytes_per_second": Spread.of(result.rates(comparison.nbytes)).median,
        "ratio_to_baseline": comparison.ratio_to_baseline(result).median,
        "ratio_to_ceiling": of_ceiling.median if of_ceiling else None,
    }


def draw(path: Path, title: str, comparisons: Sequence[Comparison]) -> None:
    """A PNG with one chart per comparison: medians as bars, ranges as whiskers, the disk's own speed as a line."""
    # Here and not above: only --plot needs it. The object-oriented interface needs no display.
    from matplotlib.figure import Figure

    rows = sum(len(comparison.results) for comparison in comparisons)
    figure = Figure(figsize=(9, 1.4 + 0.4 * rows + 0.8 * len(comparisons)), layout="constrained")
    heights = [len(comparison.results) + 1 for comparison in comparisons]
    charts = figure.subplots(len(comparisons), 1, squeeze=False, height_ratios=heights)
    for chart, comparison in zip(charts[:, 0], comparisons, strict=True):
        spreads = [Spread.of([rate / GB for rate in result.rates(comparison.nbytes)]) for result in comparison.results]
        medians = [spread.median for spread in spreads]
        whiskers = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        colours = [_OUR_COLOUR if result.tag.startswith(OURS) else _OTHER_COLOUR for result in comparison.results]
        labels = [f"{result.tag}\n{comparison.state_title}: {result.state}" for result in comparison.results]
        bars = chart.barh(labels, medians, xerr=whiskers, color=colours, capsize=2)
        chart.bar_label(bars, fmt="%.2f", padding=6, fontsize=8)
        if comparison.ceiling:
            ceiling = Spread.of(comparison.ceiling).median / GB
            chart.axvline(ceiling, color=_CEILING_COLOUR, linestyle="--", label=f"fio: {ceiling:.2f} GB/s")
            chart.legend(fontsize=8)
        chart.invert_yaxis()
        chart.tick_params(axis="y", labelsize=8)
        chart.margins(x=0.15)
        chart.set_xlabel("GB/s (1e9 bytes)")
        chart.set_title(comparison.title, fontsize=10)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=80)
