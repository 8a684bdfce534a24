"""Frequency entropies of rotary pairs: a point for every pair of every head, and single heads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from trainer.report.geometry.entropy_figures import Array, Scale
from trainer.report.plotting import GRADED, WIDTH, blank, paper_style, trim


def pair_scatter(
    panels: Mapping[str, Mapping[str, Array]],
    thresholds: Mapping[str, Sequence[float]],
    x_label: str,
    colours: tuple[str, Sequence[str]] = ("head", ()),
) -> Figure:
    """Entropy over pair index, a point for every pair of every head, coloured by head.

    ``panels``: by measure (a row of panels), then by layer (a column): ``[heads, pairs]``.
    ``thresholds``: of every measure, dashed lines. ``colours``: what the rows of a panel are, and
    their names where they are no numbers.
    """
    columns = max(map(len, panels.values()))
    with paper_style():
        figure = blank(0.5 + 1.75 * len(panels))
        grid = figure.subplots(len(panels), columns, sharex=True, sharey=True, squeeze=False)
        heads = max(len(v) for row in panels.values() for v in row.values())
        points = None
        for number, (measure, layers) in enumerate(panels.items()):
            line = grid[number]
            for axes, (title, values) in zip(line, layers.items(), strict=False):
                points = _points(axes, values, heads, size=5)
                _entropy_axis(axes, thresholds.get(measure, ()))
                if number == 0:
                    axes.set_title(title, pad=3)
            line[0].set_ylabel(measure)
        figure.supxlabel(x_label, fontsize=8)
        if points is not None:
            _colour_bar(figure, points, list(grid.flat), heads, *colours)
    return figure


def layer_panels(
    panels: Mapping[str, Array], thresholds: Sequence[float], x_label: str, y_label: str
) -> Figure:
    """A small panel for every layer, ``[heads, pairs]`` by title, from left to right and then down;
    a point for every pair of every head, coloured by head."""
    columns = 4 if len(panels) <= 16 else 6
    rows = math.ceil(len(panels) / columns)
    heads = max(map(len, panels.values()))
    with paper_style():
        figure = blank(0.6 + 0.85 * rows)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, (title, values) in zip(grid.flat, panels.items(), strict=False):
            points = _points(axes, values, heads, size=1.5)
            _entropy_axis(axes, thresholds)
            axes.set_title(title, pad=2, fontsize=6.5)
            axes.tick_params(labelsize=6)
        trim(list(grid.flat), len(panels), columns)
        figure.supxlabel(x_label, fontsize=8)
        figure.supylabel(y_label, fontsize=8)
        _colour_bar(figure, points, list(grid.flat[: len(panels)]), heads)
    return figure


@dataclass(frozen=True)
class HeadColumn:
    """A head: ``entropies`` ``[pairs]`` by measure, and ``norms`` ``[pairs, cells]`` of ``cell``
    tokens."""

    title: str
    entropies: Mapping[str, Array]
    norms: Array
    cell: int


def head_columns(
    columns: Sequence[HeadColumn], thresholds: Mapping[str, Sequence[float]]
) -> Figure:
    """Heads beside each other: their entropies by pair, and below them the norms by token."""
    measures = list(columns[0].entropies)
    pairs = max(len(column.norms) for column in columns)
    scale = Scale("l2 norm of the pair", log=True)
    norm = scale.norm([column.norms for column in columns])
    with paper_style():
        figure = blank(0.6 + 1.35 * len(measures) + 1.9, width=WIDTH * (0.6 + 0.1 * len(columns)))
        ratios = [1.0] * len(measures) + [1.4]
        grid = figure.subplots(
            len(measures) + 1, len(columns), squeeze=False, sharey="row", height_ratios=ratios
        )
        for line, column in zip(grid.T, columns, strict=True):
            line[0].set_title(column.title, pad=3)
            for axes, (measure, values) in zip(line, column.entropies.items(), strict=False):
                axes.plot(values, "o", color="#0072B2", markersize=2.2, markeredgewidth=0)
                _entropy_axis(axes, thresholds.get(measure, ()))
                axes.locator_params(axis="x", integer=True)
            line[len(measures) - 1].set_xlabel("pair index")
            tall, wide = column.norms.shape
            image = line[-1].imshow(
                np.ma.masked_invalid(column.norms),
                cmap=scale.colours,
                norm=norm,
                aspect="auto",
                interpolation="nearest",
                extent=(-0.5 * column.cell, (wide - 0.5) * column.cell, tall - 0.5, -0.5),
                rasterized=True,
            )
            line[-1].set_ylim(pairs - 0.5, -0.5)
            line[-1].grid(visible=False)
            line[-1].locator_params(integer=True, nbins=5)
            line[-1].set_xlabel("token")
        for axes, label in zip(grid[:, 0], [*measures, "pair index"], strict=True):
            axes.set_ylabel(label)
        figure.colorbar(image, ax=list(grid[-1]), label=scale.label, pad=0.02)
    return figure


def _points(axes: Axes, values: Array, heads: int, *, size: float) -> PathCollection:
    """``[heads, pairs]`` over the pairs, coloured by head."""
    head, pair = np.indices(values.shape)
    return axes.scatter(
        pair.ravel(),
        values.ravel(),
        c=head.ravel(),
        cmap=GRADED,
        norm=Normalize(0, max(heads - 1, 1)),
        s=size,
        linewidths=0,
        alpha=0.85,
        rasterized=True,
    )


def _entropy_axis(axes: Axes, thresholds: Sequence[float]) -> None:
    for height in thresholds:
        axes.axhline(height, color="#707070", linewidth=0.7, linestyle="--", zorder=0)
    axes.set_ylim(0, 1.02)


def _colour_bar(
    figure: Figure,
    points: PathCollection,
    axes: list[Axes],
    count: int,
    label: str = "head",
    names: Sequence[str] = (),
) -> None:
    bar = figure.colorbar(points, ax=axes, pad=0.01, aspect=30)
    bar.set_label(label)
    if names:
        bar.set_ticks(range(count), labels=names)
    else:
        bar.set_ticks(range(0, count, math.ceil(count / 9)))
