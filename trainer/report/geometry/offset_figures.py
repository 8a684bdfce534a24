"""Figures of rotary offset features: radii and angles of all pairs, with their bounds. Those of
single heads are in :mod:`trainer.report.geometry.pair_figures`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from trainer.report.plotting import blank, paper_style

Array = np.ndarray
BLUE, ORANGE, GREEN, BLACK, GREY = "#0072B2", "#D55E00", "#009E73", "#000000", "#707070"
_DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_COLOURS = (BLACK, BLUE, ORANGE, GREEN, "#CC79A7")
_RADII = ListedColormap(colormaps["viridis_r"](np.linspace(0.12, 1, 256)))
ANGLES = ([0, math.pi / 2, math.pi, 3 * math.pi / 2, 2 * math.pi], ["0", "π/2", "π", "3π/2", "2π"])


@dataclass(frozen=True)
class Radii:
    """Rotary pairs of heads, ``[n]`` each: ``pair``, its index; ``turns`` within the context
    length; ``radius`` of the mean key; ``angle`` from the mean query to the mean key, radians."""

    pair: Array
    turns: Array
    radius: Array
    angle: Array


def radius_and_angle(
    found: Radii, radii: Sequence[float], first: Sequence[int], lower: tuple[Array, Array]
) -> Figure:
    """Every pair by its index, and by how often it turns in the context length, slow ones to the
    right.

    Args:
        found: the pairs.
        radii: thresholds, drawn as lines.
        first: indices of the first pair under the upper bound, one for every spectrum.
        lower: indices of pairs and their lower bounds, radians.
    """
    order = np.argsort(found.radius)
    radius, angle = found.radius[order], found.angle[order]
    pair, turns = found.pair[order], found.turns[order]
    with paper_style():
        figure = blank(4.4)
        (above, above_turns), (below, below_turns) = figure.subplots(
            2, 2, sharex="col", sharey="row"
        )
        below_turns.set_xscale("log")
        below_turns.invert_xaxis()
        for x, top, bottom in ((pair, above, below), (turns, above_turns, below_turns)):
            top.scatter(x, radius, s=5, color=BLUE, alpha=0.5, linewidths=0, rasterized=True)
            for threshold in radii:
                top.axhline(threshold, color=GREY, linewidth=0.8, linestyle=":")
            size = 3 + 25 * radius / max(radius.max(), 1e-9)
            points = bottom.scatter(
                x, angle, c=radius, cmap=_RADII, s=size, linewidths=0, rasterized=True
            )
        above.set_ylabel("radius of the mean key")
        below.set_yticks(*ANGLES)
        below.set_ylim(0, 2 * math.pi)
        below.set_ylabel("angle φ, query to key (rad)")
        below.set_xlabel("pair index, from the fastest on")
        below.locator_params(axis="x", integer=True)
        below.scatter(*lower, marker="_", s=18, color=ORANGE, linewidths=1.2)
        slow = np.geomspace(min(turns.min(), 0.5), 1, 200)
        below_turns.plot(slow, math.pi * (1 + slow), color=ORANGE, label="lower bound π + θC/2")
        below_turns.set_xlabel("turns within the context, θC/2π (logarithmic)")
        edge = {"color": BLACK, "linewidth": 0.9, "linestyle": "--"}
        for axes in (above, below):
            for index in first:
                axes.axvline(index - 0.5, **edge)
        for axes in (above_turns, below_turns):
            axes.axvline(1, **edge, label="upper bound 2π/C")
        handles = below_turns.get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper right", ncols=2, frameon=False)
        figure.colorbar(points, ax=figure.axes, label="radius of the mean key", aspect=30)
    return figure


def radius_and_variance(radius: Array, variance: Array, of_keys: Array) -> Figure:
    """Circular variance of the angles of every pair by the length of its mean, all ``[n]``."""
    with paper_style():
        figure = blank(2.6)
        panels = figure.subplots(1, 2, sharey=True)
        for axes, of, colour, name in zip(
            panels, (~of_keys, of_keys), (BLUE, ORANGE), ("queries", "keys"), strict=True
        ):
            shown = {"s": 4, "alpha": 0.4, "linewidths": 0, "rasterized": True}
            axes.scatter(radius[of], variance[of], color=colour, **shown)
            axes.set_xlabel(f"radius of the mean, {name}")
        panels[0].set_ylim(0, 1)
        panels[0].set_ylabel("circular variance of the angle")
    return figure


@dataclass(frozen=True)
class Method:
    """A spectrum at a length: ``turns`` within it and lower bounds ``angle`` ``[pairs]``."""

    name: str
    turns: Array
    angle: Array


def extended_bounds(methods: Sequence[Method], pair: Array, angle: Array) -> Figure:
    """Turns and lower bounds of every pair by method, over the angles of large features.

    ``pair``, ``angle``: of the features, ``[n]``.
    """
    with paper_style():
        figure = blank(2.9)
        left, right = figure.subplots(1, 2)
        right.scatter(
            *(pair, angle), s=8, color="#b0b0b0", linewidths=0, label="large keys", rasterized=True
        )
        for number, one in enumerate(methods):
            style = {"color": _COLOURS[number], "linestyle": _DASHES[number], "label": one.name}
            index = np.arange(len(one.turns))
            moving = one.turns > 0
            left.plot(index[moving], one.turns[moving], **style)
            slow = moving & (one.turns < 1)
            right.plot(index[slow], one.angle[slow], **style)
        left.axhline(1, color=GREY, linewidth=0.9, linestyle="--")
        left.set_yscale("log")
        left.set_ylabel("turns within the length")
        right.set_yticks(*ANGLES)
        right.set_ylim(0, 2 * math.pi)
        right.set_ylabel("angle φ and lower bounds (rad)")
        for axes in (left, right):
            axes.set_xlim(-0.5, len(methods[0].turns) - 0.5)
            axes.set_xlabel("pair index, from the fastest on")
        figure.legend(*right.get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure
