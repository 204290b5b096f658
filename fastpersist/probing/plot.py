"""A heatmap per engine: block size against bytes in flight, coloured by the rate of fresh writes."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastpersist.probing.scratch import ProbeError
from fastpersist.probing.tables import words_of_nbytes
from fastpersist.probing.trial import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CELL_INCHES = 0.55
_DOTS_PER_INCH = 100


def check_plotting(file: Path) -> None:
    """Raises ProbeError where no plot can be written to ``file``: to be asked before minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ProbeError("--plot needs matplotlib, which is not installed", "pip install fastpersist[plot]")
    if not file.resolve().parent.is_dir():
        raise ProbeError(f"the directory of {file} does not exist", f"mkdir -p {file.parent}")


def draw(rates: Mapping[Settings, float], best: Settings | None, title: str, file: Path) -> None:
    """Write a PNG. ``rates`` are units of 1e9 bytes per second; ``best`` gets a frame. Raises OSError."""
    from matplotlib.figure import Figure

    engines = sorted({settings.engine for settings in rates})
    blocks = sorted({settings.block_nbytes for settings in rates})
    depths = sorted({settings.in_flight_nbytes for settings in rates})
    figure = Figure(figsize=(len(engines) * (1.8 + _CELL_INCHES * len(depths)), 1.6 + _CELL_INCHES * len(blocks)))
    for place, engine in enumerate(engines):
        axes = figure.add_subplot(1, len(engines), place + 1)
        grid = np.full((len(blocks), len(depths)), np.nan)
        for settings, rate in rates.items():
            if settings.engine == engine:
                grid[blocks.index(settings.block_nbytes), depths.index(settings.in_flight_nbytes)] = rate
        axes.imshow(grid, cmap="viridis", vmin=0, vmax=max(rates.values()), origin="lower", aspect="auto")
        _label(axes, grid, blocks, depths)
        axes.set_title(engine)
        if best is not None and best.engine == engine:
            _frame(axes, depths.index(best.in_flight_nbytes), blocks.index(best.block_nbytes))
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(file, dpi=_DOTS_PER_INCH, format="png")


def _label(axes: Axes, grid: np.ndarray[tuple[int, ...], np.dtype[np.float64]], blocks: list[int], depths: list[int]) -> None:
    axes.set_xticks(range(len(depths)), [words_of_nbytes(nbytes) for nbytes in depths], rotation=45, ha="right")
    axes.set_yticks(range(len(blocks)), [words_of_nbytes(nbytes) for nbytes in blocks])
    axes.set_xlabel("in flight")
    axes.set_ylabel("block")
    half = np.nanmax(grid) / 2 if not np.isnan(grid).all() else 0.0
    for (row, column), rate in np.ndenumerate(grid):
        if not np.isnan(rate):
            axes.text(column, row, f"{rate:.1f}", ha="center", va="center", color="black" if rate > half else "white")


def _frame(axes: Axes, column: int, row: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="red", linewidth=2))
