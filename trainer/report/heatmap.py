"""Heat maps of success by needle depth and text length, a panel for each model and method."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainer.report.dark import ON_BRIGHT, UNKNOWN
from trainer.report.plotting import blank, trim
from trainer.report.results import Cell

_COLUMNS = 5
_MOST, _BINS = 11, 10  # more different depths than _MOST are put into _BINS
# Perceptually uniform, for all kinds of colour vision.
_MAP = colormaps["cividis"].with_extremes(bad=UNKNOWN)


@dataclass(frozen=True)
class Depths:
    """Rows of a heat map: trials of depth ``edges[i]`` (included) to ``edges[i + 1]`` (excluded)
    are in row i, which is called ``names[i]``."""

    edges: tuple[float, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Depths:
        """A row for each depth that occurs, or for each tenth where they are many."""
        found = sorted({depth for cell in cells for depth in cell.depths})
        if len(found) <= _MOST:
            return cls((*found, math.inf), tuple(f"{100 * depth:.0f}" for depth in found))
        names = (f"{100 * i // _BINS}–{100 * (i + 1) // _BINS}" for i in range(_BINS))
        return cls((*(i / _BINS for i in range(_BINS)), math.inf), tuple(names))

    def means(self, cell: Cell) -> list[float]:
        """The mean score of every row, NaN where there is no trial."""
        index = np.searchsorted(self.edges, cell.depths, side="right") - 1
        counts = np.bincount(index, minlength=len(self.names))
        sums = np.bincount(index, weights=cell.scores, minlength=len(self.names))
        return [s / n if n else math.nan for s, n in zip(sums, counts, strict=True)]


def draw_heatmaps(
    panels: Mapping[str, np.ndarray], depths: Depths, lengths: Mapping[int, str]
) -> Figure:
    """``panels``: by title, the mean scores with axes [depth, length]. ``lengths``: their names."""
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    tall = min(2.2, 0.45 + 0.17 * len(depths.names))
    figure = blank(0.5 + tall * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    image = None
    for axes, (title, values) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(100 * values, cmap=_MAP, vmin=0, vmax=100, aspect="auto")
        _numbers(axes, 100 * values)
        axes.set_title(textwrap.fill(title, 24), pad=3, fontsize=7)
        axes.set_xticks(range(len(lengths)), list(lengths.values()), fontsize=6)
        axes.set_yticks(range(len(depths.names)), depths.names, fontsize=6)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    trim(list(grid.flat), len(panels), columns)
    figure.supxlabel("sequence length (multiple of the training length)", fontsize=8)
    figure.supylabel("depth (% of the text)", fontsize=8)
    if image is not None:
        bar = figure.colorbar(
            image, ax=list(grid.flat[: len(panels)]), aspect=30, pad=0.02, fraction=0.03
        )
        bar.set_label("success (%)")
        bar.outline.set_visible(False)
    return figure


def _numbers(axes: Axes, values: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(values):
        known = math.isfinite(value)
        axes.text(
            *(x, y, f"{value:.0f}" if known else "·"),
            color=ON_BRIGHT if not known or value > 55 else "white",
            ha="center",
            va="center",
            fontsize=5.5,
        )
