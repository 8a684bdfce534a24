"""Figures of two models: heads, positions, indicators by length, the loss around a drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from trainer.plotting.lines import Frame, Panel, Series, draw, log_if_wide, side_by_side, unscaled
from trainer.plotting.points import HeadCloud, head_points
from trainer.plotting.style import style_numbers

Array = np.ndarray
"""Of the model before and of the one after."""


def head_figure(panels: Mapping[str, tuple[Array, Array]], names: Sequence[str]) -> Figure:
    """``panels``: by measure, ``[layers, heads]`` before and after."""
    layers = len(next(iter(panels.values()))[0])
    return head_points(
        [
            HeadCloud.of_layers(title, before, after, names[0], names[1], diagonal=True)
            for title, (before, after) in panels.items()
        ],
        layers,
    )


def position_figure(
    middles: Array, divergence: Array, losses: Sequence[Array], names: Sequence[str], trained: int
) -> Figure:
    """Means over buckets of positions, whose ``middles`` are given; nats a token."""

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")

    vertical = (float(trained), "training length")
    curves = [
        Series(name, style_numbers(names)[name], middles.tolist(), loss.tolist(), marked=False)
        for name, loss in zip(names, losses, strict=True)
    ]
    apart = Series(
        f"KL({names[0]} ‖ {names[1]})", 0, middles.tolist(), divergence.tolist(), marked=False
    )
    frames = [
        Frame("tokens read", label, prepare, vertical)
        for label in ("KL divergence (nats)", "loss (nats/token)")
    ]
    return side_by_side(
        [
            Panel("next-token predictions", [apart], frames[0]),
            Panel("loss", curves, frames[1]),
        ]
    )


def indicator_figure(
    lengths: Sequence[int],
    panels: Mapping[str, tuple[Array, Array]],
    names: Sequence[str],
    trained: int,
) -> Figure:
    """``panels``: by indicator, ``[lengths]`` before and after; the first on a logarithmic axis."""

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths[:: -(-len(lengths) // 6)])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_locator(NullLocator())

    def first(axes: Axes) -> None:
        log_if_wide(axes)
        prepare(axes)

    vertical = (float(trained), "training length")
    return side_by_side(
        [
            Panel(
                title,
                [
                    Series(name, style_numbers(names)[name], lengths, values.tolist())
                    for name, values in zip(names, both, strict=True)
                ],
                Frame("tokens read", "", prepare if number else first, vertical),
            )
            for number, (title, both) in enumerate(panels.items())
        ]
    )


def recovery_figure(steps: Sequence[int], losses: Sequence[float], drop_step: int) -> Figure:
    """Training loss by step."""
    mark = (float(drop_step), f"dropped at step {drop_step}")
    curve = Series("training loss", 1, steps, losses, marked=False)
    return draw([curve], Frame("training step", "loss (nats/token)", unscaled, mark))
