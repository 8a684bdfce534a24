"""Lines of many models and methods: in one panel while they are few, otherwise in small multiples
that leave few to each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from trainer.report.outcomes import Outcomes, Row
from trainer.report.plotting import (
    OVERLAY,
    Frame,
    Series,
    blank,
    draw,
    draw_line,
    finish,
    legend_above,
    line_handle,
    reference_handles,
    trim,
)

_BESIDE = 6  # entries of a legend in one row
_DODGE = 0.03  # octaves between lines of one panel, so that their intervals stay apart


def draw_rows(outcomes: Outcomes, lines: Mapping[Row, Series], frame: Frame) -> Figure:
    """One line a row. Up to ``OVERLAY``, or all of one model or one method: as any figure has them.
    Otherwise a panel for each model with its methods or for each method with its models, whichever
    leaves fewer lines to a panel, over all the others in grey."""
    if not is_panelled(lines):
        named = [
            replace(line, label=name, style=outcomes.looks[name])
            for row, line in lines.items()
            for name in (outcomes.name(row),)
        ]
        return draw(apart(named), frame)
    models = [name for name in outcomes.models if any(model == name for model, _ in lines)]
    methods = [key for key in outcomes.methods if any(method == key for _, method in lines)]
    by_model = len(models) >= len(methods)
    titles = models if by_model else [outcomes.method(key) for key in methods]
    names = [outcomes.method(key) for key in methods] if by_model else models
    # What differs within a panel looks as it does alone, with the first that has it.
    of_first = {row[1 if by_model else 0]: outcomes.name(row) for row in reversed(list(lines))}
    keys = methods if by_model else models
    styles = {name: outcomes.looks[of_first[key]] for name, key in zip(names, keys, strict=True)}
    panels: dict[str, list[Series]] = {title: [] for title in titles}
    for (model, method), line in lines.items():
        panel, name = model, outcomes.method(method)
        if not by_model:
            panel, name = name, panel
        panels[panel].append(replace(line, label=name, style=styles[name]))
    marked = any(line.marked for line in lines.values())
    looks = [Series(name, styles[name], (), (), marked=marked) for name in names]
    return _multiples(panels, frame, looks)


def is_panelled(lines: Iterable[Row]) -> bool:
    """Whether the lines are shared out among panels, several to each."""
    rows = list(lines)
    shapes = (len({model for model, _ in rows}), len({method for _, method in rows}))
    return len(rows) > OVERLAY and 1 not in shapes


def pair(series: Sequence[Sequence[Series]], frames: Sequence[Frame]) -> Figure:
    """Panels side by side with one legend and the first one's label below; a label has the same
    style in all of them."""
    figure = blank(2.9)
    grid = figure.subplots(1, len(frames))
    seen: dict[str, Series] = {}
    for axes, lines, frame in zip(grid, series, frames, strict=True):
        for line in apart(lines):
            draw_line(axes, line)
            seen.setdefault(line.label, line)
        finish(axes, frame, with_note=False)
        axes.set_ylabel(frame.y_label)
    figure.supxlabel(frames[0].x_label, fontsize=8)
    _legend(figure, list(seen.values()), frames[0])
    return figure


def apart(lines: Sequence[Series]) -> list[Series]:
    """The same lines, those with intervals slightly shifted along a logarithmic axis."""
    middle = (len(lines) - 1) / 2
    return [
        line
        if line.low is None
        else replace(line, x=[x * 2 ** (_DODGE * (index - middle)) for x in line.x])
        for index, line in enumerate(lines)
    ]


def _multiples(
    panels: Mapping[str, Sequence[Series]], frame: Frame, names: Sequence[Series]
) -> Figure:
    columns = min((4, 3), key=lambda count: -len(panels) % count)  # the fuller last row
    rows = math.ceil(len(panels) / columns)
    figure = blank(0.9 + 1.45 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    everything = [line for lines in panels.values() for line in lines]
    for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
        for other in everything:
            axes.plot(other.x, other.y, color="#dcdcdc", linewidth=0.5, zorder=1)
        for line in apart(lines):
            draw_line(axes, line)
        finish(axes, frame, with_note=False)
        axes.set_title(title, pad=3)
    trim(list(grid.flat), len(panels), columns)
    figure.supxlabel(frame.x_label, fontsize=8)
    figure.supylabel(frame.y_label, fontsize=8)
    _legend(figure, names, frame)
    return figure


def _legend(figure: Figure, lines: Sequence[Series], frame: Frame) -> None:
    handles = [line_handle(line) for line in lines]
    handles += reference_handles(frame, with_vertical=True)
    rows = math.ceil(len(handles) / _BESIDE)
    legend_above(figure, handles, math.ceil(len(handles) / rows))
