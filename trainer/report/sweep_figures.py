"""The figure of a sweep: curves over what was swept, a grid of two keys, or the runs by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from trainer.common.words import factor_label
from trainer.plotting.lines import Series, draw_line, legend_above, line_handle
from trainer.plotting.maps import numbered_maps
from trainer.plotting.style import BLUE, blank
from trainer.report.files import Plan
from trainer.report.sweep import Reached, Sweep, SweptRun, numeric

_WIDE = 8  # a key whose values span more than this factor has a logarithmic axis
_CROWDED = 12  # characters of the names of ticks that stand beside each other
_BARS = "Bars: 95% intervals over trials."
_WHAT = {
    "loss": "held-out loss in nats per token on the same last tokens at every length",
    "retrieval": "retrieval in %",
}


@dataclass(frozen=True)
class Measure:
    """Quantity of a panel at one length: its value, which may be None, and its interval."""

    title: str
    factor: float
    value: Callable[[Reached], float | None]
    limits: Callable[[Reached], tuple[float, float] | None] = lambda _: None


@dataclass(frozen=True)
class Axis:
    """Swept key on the x axis, and its lines: the name of each, with runs by their value."""

    key: str
    lines: tuple[tuple[str, tuple[tuple[float, SweptRun], ...]], ...]


def sweep_figure(sweep: Sweep) -> Iterator[Plan]:
    """Plan ``sweep`` if anything was measured.

    Panels show loss and retrieval at the training length and at the longest, a row for each of the
    :func:`axes`.
    """
    shown = measures(sweep)
    if not shown:
        return
    along, kinds = axes(sweep), list(dict.fromkeys(one.title.split()[0] for one in shown))
    said = ", and ".join(_WHAT[one] for one in kinds)
    draw: Callable[[], Figure]
    if along:
        what = f"over {', '.join(sweep.titles[axis.key] for axis in along)}"
        draw = partial(_draw_curves, sweep, along, shown)
    elif grid := _grid(sweep):
        what = f"by {sweep.titles[sweep.keys[0]]} and {sweep.titles[sweep.keys[1]]}"
        draw = partial(_draw_grid, sweep, grid, shown)
    else:
        what, draw = "by run", partial(_draw_names, sweep, shown)
    yield Plan(
        "sweep",
        f"The runs of the sweep {what}",
        f"{said[0].upper()}{said[1:]} of every run {what}, at the training length and at the "
        f"longest.{f' {_BARS}' if 'retrieval' in kinds else ''}",
        f"{' and '.join(kinds).capitalize()} of every run {what}; the same numbers are in the "
        "table.",
        draw,
        ("run", *sweep.keys, *(one.title.replace("\n", " ") for one in shown)),
        [
            (name, *(run.settings.get(k, "") for k in sweep.keys), *(_of(sweep, run, shown)))
            for name, run in zip(sweep.names, sweep.runs, strict=True)
        ],
    )


def measures(sweep: Sweep) -> list[Measure]:
    """Return the panels for which any run has numbers."""
    ends = dict.fromkeys((*sweep.factors[:1], *sweep.factors[-1:]))
    wanted = [
        *(Measure(f"loss at {factor_label(f)}", f, lambda at: at.loss) for f in ends),
        *(
            Measure(
                f"retrieval at {factor_label(f)} (%)",
                f,
                lambda at: 100 * at.retrieval.mean if at.retrieval else None,
                lambda at: (
                    (100 * at.retrieval.low, 100 * at.retrieval.high) if at.retrieval else None
                ),
            )
            for f in ends
        ),
    ]
    return [one for one in wanted if any(x is not None for x in _column(sweep, one))]


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
        other = next(one for one in sweep.keys if one != key)
        values = list(dict.fromkeys(run.settings[other] for run in sweep.runs))
        return [
            Axis(
                key,
                tuple(
                    (
                        f"{sweep.titles[other]}={value}",
                        _sorted(key, [r for r in sweep.runs if r.settings[other] == value]),
                    )
                    for value in values
                ),
            )
        ]
    first, found = sweep.runs[0], []
    for key in numbers:
        rest = [one for one in sweep.keys if one != key]
        own = [r for r in sweep.runs if all(_same(r, first, one) for one in rest)]
        found.append(Axis(key, (("", _sorted(key, own)),)))
    held = {run.place for axis in found for _, line in axis.lines for _, run in line}
    return found if len(held) == len(sweep.runs) else []


def _number(run: SweptRun, key: str) -> float | None:
    value = numeric(run.settings.get(key, ""))
    return value if value is not None and math.isfinite(value) else None


def _same(run: SweptRun, other: SweptRun, key: str) -> bool:
    return run.settings.get(key) == other.settings.get(key)


def _sorted(key: str, runs: Sequence[SweptRun]) -> tuple[tuple[float, SweptRun], ...]:
    found = [(value, run) for run in runs if (value := _number(run, key)) is not None]
    return tuple(sorted(found, key=lambda pair: pair[0]))


def _grid(sweep: Sweep) -> dict[tuple[str, str], SweptRun]:
    """Return the runs by the values of two keys, or nothing if these form no grid."""
    if len(sweep.keys) != 2:
        return {}
    found = {
        (run.settings.get(sweep.keys[0], ""), run.settings.get(sweep.keys[1], "")): run
        for run in sweep.runs
    }
    rows, columns = ({pair[i] for pair in found} for i in (0, 1))
    whole = len(found) == len(sweep.runs) and len(found) > len(rows) + len(columns) - 1
    return found if whole else {}


def _value(sweep: Sweep, run: SweptRun, measure: Measure) -> float | None:
    at = sweep.at(run, measure.factor)
    return None if at is None else measure.value(at)


def _column(sweep: Sweep, measure: Measure) -> list[float | None]:
    return [_value(sweep, run, measure) for run in sweep.runs]


def _of(sweep: Sweep, run: SweptRun, shown: Sequence[Measure]) -> list[float | None]:
    return [_value(sweep, run, measure) for measure in shown]


def _draw_curves(sweep: Sweep, along: Sequence[Axis], shown: Sequence[Measure]) -> Figure:
    figure = blank(0.5 + 1.9 * len(along))
    panels = figure.subplots(len(along), len(shown), squeeze=False)
    for row, axis in zip(panels, along, strict=True):
        for panel, measure in zip(row, shown, strict=True):
            lines = [
                _line(sweep, name, number, runs, measure)
                for number, (name, runs) in enumerate(axis.lines)
            ]
            for line in lines:
                draw_line(panel, line)
            values = sorted({x for line in lines for x in line.x})
            if values[0] > 0 and values[-1] > _WIDE * values[0]:
                panel.set_xscale("log")
                panel.xaxis.set_minor_locator(NullLocator())
            names = [f"{value:g}" for value in values]
            crowded = len("".join(names)) > _CROWDED
            panel.set_xticks(values, names, fontsize=6, rotation=40 if crowded else 0)
            panel.set_xlabel(sweep.titles[axis.key])
            panel.set_title(measure.title)
    if named := [line for line in lines if line.label]:
        legend_above(figure, [line_handle(line) for line in named])
    return figure


def _line(
    sweep: Sweep,
    name: str,
    style: int,
    runs: Sequence[tuple[float, SweptRun]],
    measure: Measure,
) -> Series:
    x, y, low, high = [], [], [], []
    for value, run in runs:
        at = sweep.at(run, measure.factor)
        own = None if at is None else measure.value(at)
        limits = None if at is None else measure.limits(at)
        known = math.nan if own is None else own
        x.append(value)
        y.append(known)
        low.append(limits[0] if limits else known)
        high.append(limits[1] if limits else known)
    return Series(name, style, x, y, low, high)


def _draw_grid(
    sweep: Sweep, grid: dict[tuple[str, str], SweptRun], shown: Sequence[Measure]
) -> Figure:
    rows, columns = (list(dict.fromkeys(pair[i] for pair in grid)) for i in (0, 1))
    panels = {}
    for measure in shown:
        values = panels[measure.title] = np.full((len(rows), len(columns)), math.nan)
        for (row, column), run in grid.items():
            value = _value(sweep, run, measure)
            values[rows.index(row), columns.index(column)] = math.nan if value is None else value
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
            at = sweep.at(run, measure.factor)
            own = None if at is None else measure.value(at)
            if at is None or own is None:
                continue
            low, high = measure.limits(at) or (own, own)
            panel.errorbar(
                own, y, xerr=[[own - low], [high - own]], fmt="o", color=BLUE, capsize=1.5
            )
        panel.set_title(measure.title)
        panel.grid(visible=True, axis="both")
    panels[0].set_yticks(places, [name[:40] for name in sweep.names], fontsize=6.5)
    panels[0].set_ylim(len(sweep.runs) - 0.5, -0.5)
    return figure
