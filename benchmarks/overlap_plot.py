"""Step times over steps, a line for each way to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_DOTS_PER_INCH = 100
_COLOURS = ("#222222", "#8d99ae", "#edae49", "#66a182", "#d1495b", "#2e6f9e", "#8f5ea2", "#a0632d")
_MARKERS = "osv^DPX*"


def draw(path: Path, title: str, step_seconds: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Write a PNG. ``step_seconds``: of each way, round by round. Raises OSError."""
    # Here and not above: only --plot needs it. The object-oriented interface needs no display.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, rounds) in enumerate(step_seconds.items()):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        label: str | None = name
        first = 1
        for seconds in rounds:  # other ways had their steps between two rounds: no line joins them
            steps = range(first, first + len(seconds))
            axes.plot(steps, seconds, label=label, color=colour, marker=marker, markersize=4, linewidth=1.2)
            label, first = None, first + len(seconds)
    lengths = [len(one_round) for one_round in next(iter(step_seconds.values()))]
    for index in range(1, len(lengths)):
        axes.axvline(sum(lengths[:index]) + 0.5, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step (grey lines part the rounds)")
    axes.set_ylabel("seconds, save call included")
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=_DOTS_PER_INCH, format="png")
