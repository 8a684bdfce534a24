"""Heat maps in a grid of panels, with colour bars or with a number in every cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from trainer.plotting.panels import panel_grid
from trainer.plotting.style import blank, paper_style

Array = np.ndarray
_BRIGHT = 0.55  # relative height in the colour map above which text is black
# Perceptually uniform and readable for colour-blind readers.
_COLOURS, _SIGNED, _UNKNOWN = "cividis", "RdBu_r", "#e3e3e3"


@dataclass(frozen=True)
class Scale:
    """Meaning of a map's colours: ``label`` with its unit, and the range ``low`` to ``high``.

    A limit that is None comes from the values. ``signed``: colours for values around 0.
    """

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    signed: bool = False

    def norm(self, panels: Sequence[Array]) -> Normalize:
        """Return one normalization for all these panels."""
        known = np.concatenate([values[np.isfinite(values)] for values in panels])
        if self.log:
            known = known[known > 0]
            # A thousandth of the cells may lie below the darkest colour.
            low, high = np.quantile(known, [0.001, 1]) if len(known) else (0.1, 1)
            return LogNorm(self.low or low, self.high or max(high, 1.001 * low))
        low, high = (known.min(), known.max()) if len(known) else (0, 1)
        return Normalize(
            low if self.low is None else self.low, high if self.high is None else self.high
        )


def heat_maps(
    panels: Mapping[str, Array],
    scale: Scale,
    *,
    x: str,
    y: str,
    columns: int = 2,
    cell: tuple[float, float] = (1, 1),
    height: float = 2.0,
    names: tuple[Sequence[str], Sequence[str]] | None = None,
) -> Figure:
    """Draw maps ``[rows, columns]`` by title, with row 0 at the top and NaN for no number.

    ``x``, ``y``: labels of the columns and of the rows. ``columns``: panels in a row. ``cell``:
    width and height of a cell in units of x and y. ``height``: inches of a row of panels.
    ``names``: of the columns and of the rows; every cell then shows its number.
    """
    columns = min(columns, len(panels))
    norm, named = scale.norm(list(panels.values())), names is not None
    colours = colormaps[_SIGNED if scale.signed else _COLOURS].with_extremes(bad=_UNKNOWN)
    with paper_style():
        figure = blank(height * math.ceil(len(panels) / columns) + 0.3)
        grid = panel_grid(figure, len(panels), columns, x=x, y=y, share=named)
        for axes, (title, values) in zip(grid, panels.items(), strict=True):
            tall, wide = values.shape
            image = axes.imshow(
                np.ma.masked_invalid(values),
                cmap=colours,
                norm=norm,
                aspect="auto",
                interpolation="nearest",
                extent=(-cell[0] / 2, (wide - 0.5) * cell[0], (tall - 0.5) * cell[1], -cell[1] / 2),
                rasterized=True,
            )
            axes.grid(visible=False)
            axes.set_title(title, pad=3, fontsize=7 if named else 8)
            if names is None:
                axes.locator_params(integer=True, nbins=6)
            else:
                _number(axes, values, norm, names)
        look: dict[str, Any] = {"pad": 0.02, "aspect": 30, "format": "%g"}
        bar = figure.colorbar(image, ax=grid, label=scale.label, **look)
        if scale.log:
            bar.minorformatter = LogFormatter()  # the default one writes formulas
    return figure


def _number(
    axes: Axes, values: Array, norm: Normalize, names: tuple[Sequence[str], Sequence[str]]
) -> None:
    """Write a whole number into every cell, a dot for NaN, and name columns and rows."""
    for (row, column), value in np.ndenumerate(values):
        known = math.isfinite(value)
        colour = "black" if not known or norm(value) > _BRIGHT else "white"
        text = f"{value:.0f}" if known else "·"
        axes.text(column, row, text, color=colour, fontsize=5.5, ha="center", va="center")
    axes.set_xticks(range(len(names[0])), names[0], fontsize=6)
    axes.set_yticks(range(len(names[1])), names[1], fontsize=6)
    axes.tick_params(length=0)
