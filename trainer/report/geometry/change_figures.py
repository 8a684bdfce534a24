"""Figures of rotary pairs in two models (Rotary Offset Features, Fig. 15 and 16)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from trainer.report.geometry.offset_figures import ANGLES, BLACK, BLUE, GREY, ORANGE
from trainer.report.plotting import GRADED, blank, paper_style, whole_ticks

Array = np.ndarray
_DASHES = ("--", ":")


@dataclass(frozen=True)
class Changes:
    """Pairs that two models share, ``[n]`` each: ``radius``, how much longer the mean key became;
    ``angle``, how far its angle to the query turned, radians, NaN where it means little."""

    layer: Array
    pair: Array
    radius: Array
    angle: Array


def changes_by_pair(found: Changes, first: Mapping[str, Sequence[int]]) -> Figure:
    """Above the change of radii, below that of angles, a point a head with its layer's colour.

    ``first``: by model, indices of the first pair under its upper bound.
    """
    layers = max(int(found.layer.max()), 1)
    with paper_style():
        figure = blank(4.2)
        grid = figure.subplots(2, 1, sharex=True)
        # Layers side by side within the width of a pair.
        x = found.pair + 0.6 * (found.layer / layers - 0.5)
        for axes, values in zip(grid, (found.radius, found.angle), strict=True):
            look = {"s": 4, "alpha": 0.7, "linewidths": 0, "rasterized": True}
            points = axes.scatter(
                x, values, c=found.layer, cmap=GRADED, norm=Normalize(0, layers), **look
            )
            axes.axhline(0, color=GREY, linewidth=0.6)
            for (name, indices), dash in zip(first.items(), _DASHES, strict=True):
                for number, index in enumerate(indices):
                    label = f"upper bound, {name}" if not number else None
                    style = {"color": BLACK, "linewidth": 0.9, "linestyle": dash}
                    axes.axvline(index - 0.5, label=label, **style)
        pairs = np.unique(found.pair)
        middle = [np.median(found.radius[found.pair == pair]) for pair in pairs]
        grid[0].plot(pairs, middle, color=ORANGE, linewidth=1.4, label="median over heads")
        grid[0].set_ylabel("change of the radius")
        grid[1].set_ylabel("change of the angle φ (rad)")
        grid[1].set_xlabel("pair index, from the fastest on")
        grid[1].locator_params(axis="x", integer=True)
        figure.legend(
            *grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False
        )
        bar = figure.colorbar(points, ax=list(grid), label="layer", aspect=30)
        assert bar.solids is not None
        bar.solids.set_alpha(1)
        whole_ticks(bar.locator)
    return figure


@dataclass(frozen=True)
class OnePair:
    """One pair index of all heads, ``radius`` and ``angle`` ``[2, n]`` of two models; ``lower``:
    their lower bounds, radians, None where the pair is not under the upper bound."""

    pair: int
    radius: Array
    angle: Array
    lower: tuple[float | None, float | None]


def pairs_in_both(panels: Sequence[OnePair], names: Sequence[str]) -> Figure:
    """Radius and angle of every head in both models, with a line from the one to the other."""
    with paper_style():
        figure = blank(2.9)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, panel in zip(grid, panels, strict=True):
            # A line over 2 pi would cross the panel: such pairs are points alone.
            near = np.abs(np.diff(panel.angle, axis=0)[0]) < math.pi
            ends = np.stack([panel.radius, panel.angle], axis=-1)[:, near]
            moves = LineCollection(list(ends.transpose(1, 0, 2)), colors=GREY, rasterized=True)
            moves.set(linewidths=0.4, alpha=0.5)
            axes.add_collection(moves)
            for model, (name, colour) in enumerate(zip(names, (BLUE, ORANGE), strict=True)):
                at = panel.radius[model], panel.angle[model]
                look = {"s": 7, "alpha": 0.7, "linewidths": 0, "rasterized": True}
                axes.scatter(*at, color=colour, label=name, **look)
                if (bound := panel.lower[model]) is not None:
                    axes.axhline(bound, color=colour, linewidth=1, linestyle=_DASHES[model])
            axes.set_title(f"pair {panel.pair}", pad=3)
            axes.set_xlabel("radius of the mean key")
            axes.set_xlim(left=0)
        grid[0].set_yticks(*ANGLES)
        grid[0].set_ylim(0, 2 * math.pi)
        grid[0].set_ylabel("angle φ, query to key (rad)")
        handles = grid[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
    return figure
