"""Figures of the measurements at several lengths during training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from trainer.report.dark import ON_BRIGHT
from trainer.report.drawn import Plan
from trainer.report.plotting import Frame, Series, blank, draw
from trainer.report.results import Reach, Report
from trainer.report.words import factor_label

Reaches = dict[str, tuple[Reach, ...]]
"""Measurements by arm, the run itself first."""
HEAD = ("arm", "step", "dropped", "length", "loss", "retrieval")


def reach_figures(report: Report, looks: Mapping[str, int]) -> Iterator[Plan]:
    """``reach`` and ``reach_by_position``, or nothing where no arm was measured in training.

    ``looks``: by the arms' names; of several lengths the longest looks so, shorter ones are paler.
    """
    arms = {name: history for name, history in report.reach.items() if history}
    if not arms:
        return
    yield Plan(
        "reach",
        "Reach while training",
        "How far models reach while they train, on validation text: the run at every length, its "
        "controls at the longest. Where the encoding was dropped the run was measured on both "
        "sides.",
        "Line chart over training steps of retrieval, or of loss where that was not measured, with "
        "a line for each length.",
        lambda: _lines(report, arms, looks),
        HEAD,
        by_length(arms),
    )
    yield Plan(
        "reach_by_position",
        "Loss by position while training",
        "Held-out loss of the run by position in its longest validation sequences, less the mean "
        "over the positions within the training length. A column is a measurement; steps are not "
        "to scale. Positions above the dotted line were never seen in training; the dashed line is "
        "the drop.",
        "Heat map of the excess loss over measurements and positions.",
        lambda: _heat_map(next(iter(arms.values()))),
        ("arm", "step", "dropped", "from_position", "to_position", "loss"),
        _by_position(arms),
    )


def _lines(report: Report, arms: Reaches, looks: Mapping[str, int]) -> Figure:
    retrieval = any(reach.retrieval for history in arms.values() for reach in history)
    series = []
    for number, (name, history) in enumerate(arms.items()):
        lengths = history[-1].lengths
        shown = lengths if number == 0 else lengths[-1:]
        for rank, length in enumerate(shown, 1):
            label = f"{name}, {factor_label(length / history[-1].training_length)}"
            y = [_value(reach, length, retrieval) for reach in history]
            steps = [reach.step for reach in history]
            strength = rank / len(shown)
            series.append(Series(label, looks[name], steps, y, marked=False, opacity=strength))

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if retrieval:
            axes.set_ylim(-4, 106)
            axes.set_yticks(range(0, 101, 25))

    drop = report.drop
    note = (float(drop.step), f"encoding dropped at step {drop.step}") if drop else None
    label = "retrieval (%)" if retrieval else "held-out loss (nats/token)"
    return draw(series, Frame("training step", label, prepare, note))


def _value(reach: Reach, length: int, retrieval: bool) -> float:
    """What lines show of one measurement, not a number where it is missing."""
    values = [100 * rate for rate in reach.retrieval] if retrieval else reach.loss
    value = dict(zip(reach.lengths, values, strict=False)).get(length)
    return math.nan if value is None else value


def _heat_map(history: tuple[Reach, ...]) -> Figure:
    # A run may go on with other lengths; only what is like the last measurement shares its axis.
    history = tuple(reach for reach in history if reach.edges == history[-1].edges)
    edges, seen = history[-1].edges, history[-1].training_length
    losses = np.array([reach.losses for reach in history], dtype=float).T
    excess = losses - losses[[edge <= seen for edge in edges[1:]]].mean(axis=0)
    figure = blank(2.6)
    axes = figure.add_subplot()
    columns = np.arange(len(history) + 1)
    mesh = axes.pcolormesh(columns, edges, excess, cmap="RdBu_r", norm=CenteredNorm())
    figure.colorbar(mesh, label="excess loss (nats/token)")
    every = math.ceil(len(history) / 10)
    axes.set_xticks(columns[:-1:every] + 0.5, [str(reach.step) for reach in history[::every]])
    axes.set_yticks([edge for edge in edges if edge % seen == 0])
    axes.axhline(seen, color=ON_BRIGHT, linewidth=0.8, linestyle=":")
    crossings = [i for i in columns[1:-1] if history[i].dropped and not history[i - 1].dropped]
    for column in crossings:
        axes.axvline(column, color=ON_BRIGHT, linewidth=0.8, linestyle="--")
    axes.grid(visible=False)
    axes.set_xlabel("training step of the measurement")
    axes.set_ylabel("position (tokens)")
    return figure


def by_length(arms: Reaches) -> Iterator[tuple[Any, ...]]:
    """Rows under :data:`HEAD`, one a measurement and length."""
    for name, history in arms.items():
        for reach in history:
            retrieval = reach.retrieval or [None] * len(reach.lengths)
            for values in zip(reach.lengths, reach.loss, retrieval, strict=True):
                yield name, reach.step, reach.dropped, *values


def _by_position(arms: Reaches) -> Iterator[tuple[Any, ...]]:
    for name, history in arms.items():
        for reach in history:
            for start, stop, loss in zip(
                reach.edges[:-1], reach.edges[1:], reach.losses, strict=True
            ):
                yield name, reach.step, reach.dropped, start, stop, loss
