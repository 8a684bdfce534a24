"""DRAWDOC"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.plotting.lines import Frame, Series, blank, draw, paper_style
from trainer.plotting.style import UNKNOWN

Array = np.ndarray
MAP, SIGNED = "cividis", "RdBu_r"


@dataclass(frozen=True)
class Scale:
    """What a map's colours mean: ``label`` with its unit, from ``low`` to ``high`` (None: of the
    values), ``log``arithmic or not, ``signed`` around 0 or not."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    signed: bool = False

    def norm(self, values: Sequence[Array]) -> Normalize:
        """The one for all these panels."""
        known = np.concatenate([v[np.isfinite(v)] for v in values])
        if self.log:
            known = known[known > 0]
            # A thousandth of the cells may lie below the darkest colour.
            low, high = np.quantile(known, [0.001, 1]) if len(known) else (0.1, 1)
            return LogNorm(self.low or low, self.high or max(high, 1.001 * low))
        low, high = (known.min(), known.max()) if len(known) else (0, 1)
        return Normalize(
            low if self.low is None else self.low, high if self.high is None else self.high
        )

    @property
    def colours(self) -> Colormap:
        """Grey where there is no number."""
        return colormaps[SIGNED if self.signed else MAP].with_extremes(bad=UNKNOWN)


def heat_maps(
    panels: Mapping[str, Array],
    scale: Scale | Sequence[Scale],
    *,
    x: str,
    y: str,
    columns: int = 2,
    cell: tuple[float, float] = (1, 1),
    height: float = 2.0,
) -> Figure:
    """``panels``: by title, ``[rows, columns]`` with row 0 at the top, NaN for no number.

    Args:
        panels: the maps.
        scale: one for all, or one for each panel.
        x: label of the columns.
        y: label of the rows.
        columns: of panels.
        cell: how many units of x and y a cell is wide and high.
        height: inches a row of panels.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    with paper_style():
        figure = blank(height * rows + 0.3)
        grid = figure.subplots(rows, columns, squeeze=False)
        images = []
        own = [scale] * len(panels) if isinstance(scale, Scale) else list(scale)
        for axes, (title, values), look in zip(grid.flat, panels.items(), own, strict=False):
            among = list(panels.values()) if isinstance(scale, Scale) else [values]
            tall, wide = values.shape
            image = axes.imshow(
                np.ma.masked_invalid(values),
                cmap=look.colours,
                norm=look.norm(among),
                aspect="auto",
                interpolation="nearest",
                extent=(-cell[0] / 2, (wide - 0.5) * cell[0], (tall - 0.5) * cell[1], -cell[1] / 2),
                rasterized=True,
            )
            images.append(image)
            axes.set_title(title, pad=3)
            axes.grid(visible=False)
            axes.locator_params(integer=True, nbins=6)
            if not isinstance(scale, Scale):
                figure.colorbar(image, label=look.label, pad=0.02)
        _tidy(grid, len(panels))
        figure.supxlabel(x, fontsize=8)
        figure.supylabel(y, fontsize=8)
        if isinstance(scale, Scale):
            shown = list(grid.flat[: len(panels)])
            figure.colorbar(images[0], ax=shown, label=scale.label, pad=0.02, aspect=30)
    return figure


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x: str,
    y: str,
    log_y: bool = False,
    marked: bool = True,
    vertical: tuple[float, str] | None = None,
) -> Figure:
    """``lines``: by label, x and y. ``vertical``: a place on x and its name."""

    def prepare(axes: Axes) -> None:
        if log_y:
            axes.set_yscale("log")
        if all(isinstance(value, int) for xs, _ in lines.values() for value in xs):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    series = [
        Series(label, number, xs, ys, marked=marked)
        for number, (label, (xs, ys)) in enumerate(lines.items())
    ]
    with paper_style():
        return draw(series, Frame(x, y, prepare, vertical))


def by_position(
    panels: Mapping[str, Sequence[float]],
    starts: Sequence[int],
    *,
    marked: tuple[int, int],
    x: str,
    y: str,
) -> Figure:
    """``panels``: by title, a value from each of ``starts`` on; two in a row, each with a scale of
    its own. ``marked``: from where to where all are shaded, with a line."""
    rows = math.ceil(len(panels) / 2)
    with paper_style():
        figure = blank(1.7 * rows + 0.3)
        grid = figure.subplots(rows, 2, sharex=True, squeeze=False)
        for axes, (title, values) in zip(grid.flat, panels.items(), strict=False):
            # In a long text the span alone is too narrow to be seen.
            axes.axvspan(*marked, color="#D55E00", alpha=0.35, linewidth=0)
            axes.axvline(sum(marked) / 2, color="#D55E00", linewidth=0.9, linestyle="--", zorder=3)
            axes.plot(starts, values, linewidth=0.8, rasterized=True)
            axes.set_title(title, pad=3)
            axes.set_ylim(bottom=0)
        _tidy(grid, len(panels))
        figure.supxlabel(x, fontsize=8)
        figure.supylabel(y, fontsize=8)
    return figure


def _tidy(grid: Array, used: int) -> None:
    for axes in grid.flat[used:]:
        axes.remove()
