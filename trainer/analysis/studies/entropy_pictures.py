"""ENTROPYDOC"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from trainer.analysis.averages import Array
from trainer.analysis.pairs import Side
from trainer.analysis.studies.arrays import mean_over_heads
from trainer.analysis.studies.attenuation import NAMES
from trainer.analysis.studies.section import Picture
from trainer.plotting.heat_maps import Scale, heat_maps
from trainer.plotting.lines import GRADED, WIDTH, blank, paper_style, trim


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


LOW = {
    "spectrum": "Low values are frequency bands.",
    "sequence": "Low values are periods.",
}
SIDES: dict[Side, str] = {"query": "queries", "key": "keys"}
COLUMNS = 4
"""The most layers or heads beside each other."""
Values = Mapping[tuple[str, Side], Array]


@dataclass(frozen=True)
class HeadNorms:
    """Norms ``[pairs, cells]`` of the pairs of one query head and of the keys that it reads, means
    over ``cell`` tokens; ``key_head``: which these are."""

    layer: int
    head: int
    key_head: int
    cell: int
    norms: Mapping[Side, Array]


@dataclass(frozen=True)
class EntropyPictures:
    """``values``: entropies ``[layers, heads, pairs]`` by measure and side, NaN for no pair.
    ``still``: layers without rotation. ``x_label``: of an axis of pairs. ``thresholds``: of the
    pairs that are attenuated, by measure."""

    values: Values
    still: frozenset[int]
    x_label: str
    thresholds: Mapping[str, Sequence[float]]

    @property
    def measures(self) -> list[str]:
        """Those that there are."""
        return list(dict.fromkeys(measure for measure, _ in self.values))

    @property
    def _lines(self) -> dict[str, Sequence[float]]:
        return {NAMES[m]: taus for m, taus in self.thresholds.items()}

    @property
    def _dashed(self) -> str:
        said = [
            f"{' and '.join(f'{tau:g}' for tau in taus)} of {name}"
            for name, taus in self._lines.items()
            if taus
        ]
        return f" Dashed: the thresholds {' and '.join(said)}." if said else ""

    def scatter(self, layers: Sequence[int], side: Side) -> Picture:
        """All heads of some layers (Fig. 3)."""
        panels = {
            NAMES[m]: {self._title(layer): self.values[m, side][layer] for layer in layers}
            for m in self.measures
        }
        known = self.values[self.measures[0], side]
        rows = [
            (*at, *(float(self.values[m, side][tuple(at)]) for m in self.measures))
            for at in np.argwhere(np.isfinite(known)).tolist()
            if at[0] in layers
        ]
        return Picture(
            f"frequency_entropy_{SIDES[side]}",
            pair_scatter(panels, self._lines, self.x_label),
            f"Frequency entropy (0 to 1) of every pair of the {SIDES[side]} of some layers "
            f"by the pair's index, a colour for each head.{self._dashed} Low SpectrumFE: bands; "
            "low SequenceFE: periods.",
            ("layer", "head", "pair", *(NAMES[m] for m in self.measures)),
            rows,
        )

    def layers(self, measure: str) -> Picture:
        """All heads of all layers, queries (Fig. 6 and 7); keys are in the file."""
        queries = self.values[measure, "query"]
        panels = {self._title(layer): of_layer for layer, of_layer in enumerate(queries)}
        return Picture(
            f"frequency_entropy_all_layers_{measure}",
            layer_panels(panels, self.thresholds[measure], self.x_label, NAMES[measure]),
            f"{NAMES[measure]} (0 to 1) of every pair of the queries of all layers, a colour for "
            f"each head. Dashed: the thresholds. {LOW[measure]} The file has keys too.",
            ("side", "layer", "head", "pair", NAMES[measure]),
            [
                (side, *at, float(of_side[tuple(at)]))
                for side in SIDES
                for of_side in [self.values[measure, side]]
                for at in np.argwhere(np.isfinite(of_side)).tolist()
            ],
        )

    def heads(self, shown: Sequence[HeadNorms], side: Side, number: int = 1) -> Picture:
        """Entropies and norms of single heads, each a column (Fig. 1, 2, 5 and 8 to 10)."""
        columns = []
        for one in shown:
            norms = one.norms[side]
            head = one.head if side == "query" else one.key_head
            entropies = {
                NAMES[m]: self.values[m, side][one.layer, head, : len(norms)] for m in self.measures
            }
            title = f"layer {one.layer}, head {one.head}"
            title += "\nno rotation" if one.layer in self.still else ""
            columns.append(HeadColumn(title, entropies, norms, one.cell))
        whose = "" if side == "query" else " that these heads read"
        return Picture(
            f"frequency_entropy_heads_{SIDES[side]}" + (f"_{number}" if number > 1 else ""),
            head_columns(columns, self._lines),
            f"Frequency entropy (0 to 1) of every pair of the {SIDES[side]}{whose}, a head in a "
            f"column; below it the norms of its pairs along the first text (means over "
            f"{shown[0].cell} tokens, logarithmic colour). A bright row is a frequency band and "
            "has a low SpectrumFE, stripes across a row are periods and have a low SequenceFE.",
            ("layer", "query_head", "side", "pair", "from_token", "norm"),
            [row for one in shown for row in _norm_rows(one, side)],
        )

    def means(self) -> Picture:
        """Means over heads, by layer and pair."""
        panels, scales, rows = {}, [], []
        for (measure, side), entropy in self.values.items():
            means = mean_over_heads(entropy)
            panels[f"{NAMES[measure]} of {SIDES[side]}"] = means
            scales.append(Scale("entropy"))
            rows += [(NAMES[measure], side, *at, float(m)) for at, m in np.ndenumerate(means)]
        return Picture(
            "frequency_entropy_layers",
            heat_maps(panels, scales, x=self.x_label, y="layer"),
            "Mean frequency entropy over the heads of a layer (0 to 1, each panel with its own "
            "colours), by pair. Dark columns are bands (SpectrumFE) or periods (SequenceFE) at the "
            "same pair in many layers.",
            ("measure", "side", "layer", "pair", "mean_over_heads"),
            rows,
        )

    def _title(self, layer: int) -> str:
        return f"layer {layer}" + (", no rotation" if layer in self.still else "")


def _norm_rows(one: HeadNorms, side: Side) -> Iterator[tuple[object, ...]]:
    for (pair, cell), norm in np.ndenumerate(one.norms[side]):
        yield (one.layer, one.head, side, pair, cell * one.cell, float(norm))
