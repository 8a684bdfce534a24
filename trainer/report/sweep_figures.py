"""The figure of a sweep: curves over what was swept, a grid of two keys, or the runs by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from trainer.common.words import factor_label
from trainer.plotting.lines import Series, draw_line, legend_above, line_handle, padded
from trainer.plotting.maps import numbered_maps
from trainer.plotting.style import BLUE, blank
from trainer.report.files import Plan
from trainer.report.sweep import Sweep, SweptRun, caveat

_WIDE = 8  # a key whose values span more than this factor has a logarithmic axis
_LEAST_SPAN = 0.2  # nats of an axis of losses: a fifth of the perplexity, as in a run's figures
_CROWDED = 12  # characters of tick names in a row; longer rows are turned
_BARS = "Bars: 95% intervals over trials."
_DESCRIPTIONS = {
    "loss": "held-out loss in nats per token on the same last tokens at every length",
    "retrieval": "retrieval in %",
}


@dataclass(frozen=True)
class Measure:
    """Quantity of a panel at one length."""

    quantity: Literal["loss", "retrieval"]
    factor: float

    @property
    def title(self) -> str:
        """Title of the panel."""
        unit = " (%)" if self.quantity == "retrieval" else ""
        return f"{self.quantity} at {factor_label(self.factor)}{unit}"

    def limits(self, sweep: Sweep) -> tuple[float, float]:
        """Return the limits of the panel's axis."""
        if self.quantity == "retrieval":
            return -4, 106
        losses = [self.values(sweep, run)[0] for run in sweep.runs]
        finite = [loss for loss in losses if math.isfinite(loss)] or [0.0]
        return padded(min(finite), max(finite), _LEAST_SPAN)

    def values(self, sweep: Sweep, run: SweptRun) -> tuple[float, float, float]:
        """Return value, lower and upper limit; all three are NaN if they were not measured.

        A loss has no interval: its limits are the loss itself.
        """
        point = sweep.point(run, self.factor)
        if self.quantity == "loss":
            return (math.nan if point is None or point.loss is None else point.loss,) * 3
        if point is None or point.retrieval is None:
            return (math.nan,) * 3
        rate = point.retrieval
        return 100 * rate.mean, 100 * rate.low, 100 * rate.high


@dataclass(frozen=True)
class Axis:
    """Swept key on the x axis, with its lines: the name of each, and its runs by their value."""

    key: str
    lines: tuple[tuple[str, tuple[tuple[float, SweptRun], ...]], ...]


def sweep_figure(sweep: Sweep) -> Iterator[Plan]:
    """Plan ``sweep`` if anything was measured.

    Panels show loss and retrieval at two lengths (:func:`measures`), a row for each of the
    :func:`axes`.
    """
    shown = measures(sweep)
    if not shown:
        return
    along, quantities = axes(sweep), list(dict.fromkeys(measure.quantity for measure in shown))
    description = ", and ".join(map(_DESCRIPTIONS.__getitem__, quantities))
    draw: Callable[[], Figure]
    if along:
        scope = f"over {', '.join(sweep.titles[axis.key] for axis in along)}"
        draw = partial(_draw_curves, sweep, along, shown)
    elif grid := _grid(sweep):
        scope = f"by {sweep.titles[sweep.keys[0]]} and {sweep.titles[sweep.keys[1]]}"
        draw = partial(_draw_grid, sweep, grid, shown)
    else:
        scope, draw = "by run", partial(_draw_names, sweep, shown)
    yield Plan(
        "sweep",
        f"The runs of the sweep {scope}",
        f"{description[0].upper()}{description[1:]} of every run {scope}, at {_lengths(shown)}."
        f"{f' {_BARS}' if 'retrieval' in quantities else ''}{caveat(sweep)}",
        f"{' and '.join(quantities).capitalize()} of every run {scope}; the same numbers are in "
        "the table.",
        draw,
        ("run", *sweep.keys, *(measure.title for measure in shown)),
        [
            (
                name,
                *(run.settings.get(key, "") for key in sweep.keys),
                *("" if math.isnan(x) else x for x, *_ in (m.values(sweep, run) for m in shown)),
            )
            for name, run in zip(sweep.names, sweep.runs, strict=True)
        ],
    )


def _lengths(shown: Sequence[Measure]) -> str:
    """Name the lengths of the panels."""
    factors = sorted({measure.factor for measure in shown})
    labels = ["the training length" if f == 1 else factor_label(f) for f in factors]
    if factors[-1] > 1:
        labels[-1] += ", the longest length that all runs share"
    return " and ".join(labels)


def measures(sweep: Sweep) -> list[Measure]:
    """Return the panels for which any run has numbers: at the training length, and at the longest
    length that all runs share.

    Without a measurement at the training length, the shortest shared length stands in; runs that
    share no length are shown at their shortest.
    """
    shared = sweep.shared_factors or sweep.factors[:1]
    first = (1.0,) if 1 in sweep.factors else shared[:1]
    ends = dict.fromkeys((*first, *shared[-1:]))
    candidates = [Measure("loss", factor) for factor in ends]
    candidates += [Measure("retrieval", factor) for factor in ends]
    return [
        measure
        for measure in candidates
        if not all(math.isnan(measure.values(sweep, run)[0]) for run in sweep.runs)
    ]


def axes(sweep: Sweep) -> list[Axis]:
    """Return the numeric keys that serve as x axes, or nothing if they do not cover all runs.

    For two keys that form a grid, this is the one with more values, with a line for each value of
    the other. Otherwise a key's line holds the runs that differ from the first in that key alone.
    """
    numbers = {
        key: places
        for key in sweep.keys
        if None not in (places := [_number(run, key) for run in sweep.runs])
    }
    if len(sweep.keys) == 2 and numbers and _grid(sweep):
        key = max(numbers, key=lambda key: len(set(numbers[key])))
        (other,) = set(sweep.keys) - {key}
        title = sweep.titles[other]
        values = list(dict.fromkeys(run.settings.get(other) for run in sweep.runs))
        return [
            Axis(
                key,
                tuple(
                    (
                        f"no {title}" if value is None else f"{title}={value}",
                        _sorted(key, [r for r in sweep.runs if r.settings.get(other) == value]),
                    )
                    for value in values
                ),
            )
        ]
    first, drawn = sweep.runs[0].settings, []
    for key in numbers:
        others = [other for other in sweep.keys if other != key]
        runs = [r for r in sweep.runs if all(r.settings.get(k) == first.get(k) for k in others)]
        drawn.append(Axis(key, (("", _sorted(key, runs)),)))
    covered = {run.place for axis in drawn for _, line in axis.lines for _, run in line}
    return drawn if len(covered) == len(sweep.runs) else []


def _number(run: SweptRun, key: str) -> float | None:
    try:
        value = float(run.settings.get(key, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _sorted(key: str, runs: Sequence[SweptRun]) -> tuple[tuple[float, SweptRun], ...]:
    placed = [(value, run) for run in runs if (value := _number(run, key)) is not None]
    return tuple(sorted(placed, key=lambda pair: pair[0]))


def _grid(sweep: Sweep) -> dict[tuple[str, str], SweptRun]:
    """Return the runs by the values of two keys, or nothing if these form no grid."""
    if len(sweep.keys) != 2:
        return {}
    runs = {
        (run.settings.get(sweep.keys[0], ""), run.settings.get(sweep.keys[1], "")): run
        for run in sweep.runs
    }
    rows, columns = ({pair[i] for pair in runs} for i in (0, 1))
    whole = len(runs) == len(sweep.runs) and len(runs) > len(rows) + len(columns) - 1
    return runs if whole else {}


def _draw_curves(sweep: Sweep, along: Sequence[Axis], shown: Sequence[Measure]) -> Figure:
    figure = blank(0.5 + 1.9 * len(along))
    panels = figure.subplots(len(along), len(shown), squeeze=False)
    for row, axis in zip(panels, along, strict=True):
        for panel, measure in zip(row, shown, strict=True):
            lines = []
            for style, (name, runs) in enumerate(axis.lines):
                y, low, high = zip(*(measure.values(sweep, run) for _, run in runs), strict=True)
                lines.append(Series(name, style, [x for x, _ in runs], y, low, high))
            for line in lines:
                draw_line(panel, line)
            ticks = sorted({x for line in lines for x in line.x})
            if ticks[0] > 0 and ticks[-1] > _WIDE * ticks[0]:
                panel.set_xscale("log")
                panel.xaxis.set_minor_locator(NullLocator())
            names = [f"{x:g}" for x in ticks]
            crowded = len("".join(names)) > _CROWDED
            panel.set_xticks(ticks, names, fontsize=6, rotation=40 if crowded else 0)
            panel.set_xlabel(sweep.titles[axis.key])
            panel.set_title(measure.title)
            panel.set_ylim(measure.limits(sweep))
    if named := [line for line in lines if line.label]:
        legend_above(figure, [line_handle(line) for line in named])
    return figure


def _draw_grid(
    sweep: Sweep, grid: dict[tuple[str, str], SweptRun], shown: Sequence[Measure]
) -> Figure:
    rows, columns = (list(dict.fromkeys(pair[i] for pair in grid)) for i in (0, 1))
    panels = {}
    for measure in shown:
        values = panels[measure.title] = np.full((len(rows), len(columns)), math.nan)
        for (row, column), run in grid.items():
            values[rows.index(row), columns.index(column)], *_ = measure.values(sweep, run)
    return numbered_maps(
        panels,
        None,
        names=(columns, rows),
        labels=(sweep.titles[sweep.keys[1]], sweep.titles[sweep.keys[0]]),
        text=lambda title, value: f"{value:.1f}" if "%" in title else f"{value:.3f}",
        columns=len(panels),
        row_height=0.4,
    )


def _draw_names(sweep: Sweep, shown: Sequence[Measure]) -> Figure:
    figure = blank(0.6 + 0.24 * len(sweep.runs))
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    places = range(len(sweep.runs))
    for panel, measure in zip(panels, shown, strict=True):
        for y, run in enumerate(sweep.runs):
            value, low, high = measure.values(sweep, run)
            if math.isnan(value):
                continue
            panel.errorbar(
                value, y, xerr=[[value - low], [high - value]], fmt="o", color=BLUE, capsize=1.5
            )
        panel.set_title(measure.title)
        panel.set_xlim(measure.limits(sweep))
        panel.grid(visible=True, axis="both")
    panels[0].set_yticks(places, [name[:40] for name in sweep.names], fontsize=6.5)
    panels[0].set_ylim(len(sweep.runs) - 0.5, -0.5)
    return figure
