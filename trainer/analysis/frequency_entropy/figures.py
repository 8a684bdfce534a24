"""Pictures of frequency entropies: of some layers, of all layers, and of single heads with their
norms (Probing Rotary Position Embeddings through Frequency Entropy, Fig. 1 to 3 and 5 to 10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from trainer.analysis.arrays import Array, Side, mean_over_heads
from trainer.analysis.frequency_entropy.measure import NAMES
from trainer.analysis.studies.section import Picture
from trainer.plotting.maps import Scale, draw_map, heat_maps
from trainer.plotting.points import entropy_axis, layer_panels, pair_scatter
from trainer.plotting.style import BLUE, WIDTH, blank, paper_style


@dataclass(frozen=True)
class HeadColumn:
    """A head: ``entropies`` ``[pairs]`` by measure, ``norms`` ``[pairs, cells]`` of ``cell``
    tokens."""

    title: str
    entropies: Mapping[str, Array]
    norms: Array
    cell: int


def head_columns(
    columns: Sequence[HeadColumn], thresholds: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw heads beside each other: their entropies by pair, and below them the norms by token."""
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
                axes.plot(values, "o", color=BLUE, markersize=2.2, markeredgewidth=0)
                entropy_axis(axes, thresholds.get(measure, ()))
                axes.locator_params(axis="x", integer=True)
            line[len(measures) - 1].set_xlabel("pair index")
            image = draw_map(line[-1], column.norms, scale, norm, (column.cell, 1))
            line[-1].set_ylim(pairs - 0.5, -0.5)
            line[-1].locator_params(integer=True, nbins=5)
            line[-1].set_xlabel("token")
        for axes, label in zip(grid[:, 0], [*measures, "pair index"], strict=True):
            axes.set_ylabel(label)
        figure.colorbar(image, ax=list(grid[-1]), label=scale.label, pad=0.02)
    return figure


LOW = {
    "spectrum": "Low values are frequency bands.",
    "sequence": "Low values are periods.",
}
SIDES: dict[Side, str] = {"query": "queries", "key": "keys"}
COLUMNS = 4
"""Largest number of layers or heads beside each other."""
Values = Mapping[tuple[str, Side], Array]


@dataclass(frozen=True)
class HeadNorms:
    """Norms ``[pairs, cells]`` of the pairs of one query head and of the keys that it reads, means
    over ``cell`` tokens; ``key_head``: index of the key-value head."""

    layer: int
    head: int
    key_head: int
    cell: int
    norms: Mapping[Side, Array]


@dataclass(frozen=True)
class EntropyPictures:
    """Draws ``values``: entropies ``[layers, heads, pairs]`` by measure and side, NaN where a head
    has no such pair.

    ``still``: layers without rotation. ``x_label``: label of an axis of pairs. ``thresholds``:
    thresholds of the attenuated pairs, by measure.
    """

    values: Values
    still: frozenset[int]
    x_label: str
    thresholds: Mapping[str, Sequence[float]]

    @property
    def measures(self) -> list[str]:
        """Measures that were computed."""
        return list(dict.fromkeys(measure for measure, _ in self.values))

    @property
    def _lines(self) -> dict[str, Sequence[float]]:
        return {NAMES[m]: taus for m, taus in self.thresholds.items()}

    @property
    def _dashed(self) -> str:
        thresholds = [
            f"{' and '.join(f'{tau:g}' for tau in taus)} of {name}"
            for name, taus in self._lines.items()
            if taus
        ]
        return f" Dashed: the thresholds {' and '.join(thresholds)}." if thresholds else ""

    def scatter(self, layers: Sequence[int], side: Side) -> Picture:
        """Draw all heads of some layers (Fig. 3)."""
        panels = {
            NAMES[m]: {self._title(layer): self.values[m, side][layer] for layer in layers}
            for m in self.measures
        }
        first = self.values[self.measures[0], side]
        rows = [
            (*at, *(float(self.values[m, side][tuple(at)]) for m in self.measures))
            for at in np.argwhere(np.isfinite(first)).tolist()
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
        """Draw queries of all heads of all layers (Fig. 6 and 7); the CSV file has the keys too."""
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
        """Draw entropies and norms of single heads, a column each (Fig. 1, 2, 5 and 8 to 10)."""
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
        """Draw means over heads, by layer and pair."""
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
