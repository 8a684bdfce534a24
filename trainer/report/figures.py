"""The figures of a report: success and perplexity by length, by position and by depth."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from trainer.common.words import factor_label, percent
from trainer.evaluation.outcomes import AS_IS, Outcomes, Row
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell, Report
from trainer.plotting.lines import (
    OVERLAY,
    Frame,
    Panel,
    Series,
    draw,
    log_axis,
    padded,
    side_by_side,
    small_multiples,
    training_length_mark,
)
from trainer.plotting.maps import Scale, numbered_maps
from trainer.plotting.style import style_numbers
from trainer.report.files import Drawn, Plan
from trainer.report.tables import perplexity
from trainer.report.training_figures import reach_figures, recovery_figure, training_figure

CONTRASTED = (AS_IS, "crop", "yarn")
"""Methods of the first model in the figure of perplexity and retrieval."""

_TOGETHER = 15  # heat maps in one figure; more become a figure for each model
_LINEAR = 6  # a perplexity that varies by less than this factor is drawn on a linear axis
_LEAST_SPAN = 0.2  # of the largest perplexity
_DODGE = 0.03  # octaves between the lines of a panel, so that intervals do not overlap
_MOST, _BINS = 11, 10  # more different depths than _MOST are grouped into _BINS
_DROPE = "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings"
_INTERVALS = (
    "Bars: 95% intervals over texts, Wilson's for scores of 0 and 1 and for several trials on a "
    "text, percentile bootstrap for other fractions. Dashed: the training length."
)

AxisScale = Callable[[Axes], None]


def write_figures(report: Report, directory: Path) -> list[Drawn]:
    """Draw what the report has numbers for, and return the figures in the order of the page.

    ``success_*``: success over length, for the mean over tasks and for each task.
    ``perplexity_and_retrieval``: both side by side. ``training``: training loss over steps.
    ``perplexity_by_position``: along the longest sequences. ``reach*`` and ``benchmarks``:
    measurements during training. ``depth_*``: success by depth and length. Each ``NAME.svg`` has a
    ``NAME.png`` and a ``NAME.csv`` beside it, with numbers in full precision.
    """
    drawn: list[Drawn] = []
    for plan in _plans(Outcomes(report)):
        # Names that differ only in punctuation must not share a file.
        again = sum(figure.path.stem.split("~")[0] == plan.name for figure in drawn)
        stem = f"{plan.name}~{again + 1}" if again else plan.name
        drawn.append(plan.write(directory / stem))
    return drawn


def styles_of(outcomes: Outcomes) -> dict[str, int]:
    """Return the style number of every row and arm by its name."""
    report = outcomes.report
    arms = (*(arm.name for arm in report.arms), *report.reach)
    return style_numbers((*map(outcomes.name, outcomes.rows), *arms))


def _plans(outcomes: Outcomes) -> Iterator[Plan]:
    styles = styles_of(outcomes)
    if len(outcomes.lengths(outcomes.averaged)) > 1:
        titles = ", ".join(map(outcomes.task, outcomes.averaged))
        yield _success(outcomes, "mean", f"the mean over {titles}", outcomes.averaged)
    yield from _contrast(outcomes)
    for task in (task for task in outcomes.scored if len(outcomes.lengths([task])) > 1):
        yield _success(outcomes, task, outcomes.task(task), [task])
    yield from training_figure(outcomes.report, styles)
    yield from _by_position(outcomes)
    yield from reach_figures(outcomes.report, styles)
    yield from recovery_figure(outcomes.report)
    for task in outcomes.scored:
        yield from _by_depth(outcomes, task)


def _success(outcomes: Outcomes, name: str, title: str, tasks: list[str]) -> Plan:
    lengths = outcomes.lengths(tasks)
    lines = {row: _success_line(outcomes, row, tasks, lengths) for row in outcomes.rows}
    lines = {row: line for row, line in lines.items() if len(line.x)}
    frame = lengths_frame(
        outcomes.report,
        lengths,
        "success (%)",
        success,
        narrow=is_panelled(lines),
        lines=_chances(outcomes.report) if tasks == [STATEMENTS] else (),
    )
    return Plan(
        f"success_{_slug(name)}",
        f"Success over length: {title}",
        f"Mean score of the trials over sequence length (logarithmic axis): {title}. {_INTERVALS}"
        f"{_grey(lines)} After Figure 1 and Table 1 of “{_DROPE}”.",
        f"Line chart of success over sequence length, {title}; the same numbers are in the tables.",
        lambda: draw_rows(outcomes, lines, frame),
        ("model", "method", "length", "factor", "success", "low", "high"),
        [
            (*row, length, lengths[length], e.mean, e.low, e.high)
            for row in lines
            for length in lengths
            if (e := outcomes.estimate(row, tasks, length)) is not None
        ],
    )


def _chances(report: Report) -> tuple[tuple[float, str], ...]:
    chances = (("chance", "chance"), ("chance_listed", "any listed value"))
    return tuple(
        (100 * report.task[key], f"{text} ({percent(report.task[key])}%)")
        for key, text in chances
        if key in report.task
    )


def _success_line(outcomes: Outcomes, row: Row, tasks: list[str], lengths: Iterable[int]) -> Series:
    estimates = [(n, e) for n in lengths if (e := outcomes.estimate(row, tasks, n)) is not None]
    y, low, high = ([100 * getattr(e, k) for _, e in estimates] for k in ("mean", "low", "high"))
    name = outcomes.name(row)
    return Series(name, styles_of(outcomes)[name], [n for n, _ in estimates], y, low, high)


def _contrast(outcomes: Outcomes) -> Iterator[Plan]:
    """Plan perplexity beside retrieval of all models as is, and the first with some methods."""
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    chosen = [
        row
        for row in outcomes.rows
        if row[1] in (CONTRASTED if row[0] == outcomes.models[0] else (AS_IS,))
    ]
    if not (lengths and outcomes.scored and chosen):
        return
    task, styles = outcomes.scored[0], styles_of(outcomes)
    curves = {row: _perplexities(outcomes, row, lengths) for row in chosen}
    perplexities = [
        Series(name, styles[name], list(curves[row]), list(curves[row].values()))
        for row in chosen
        for name in (outcomes.name(row),)
    ]
    tested = outcomes.lengths([task])
    successes = [_success_line(outcomes, row, [task], tested) for row in chosen]
    report = outcomes.report
    cropped = ""
    if any(method == "crop" for _, method in chosen):
        cropped = (
            f": reading only the last {report.training_length} tokens (cropped) keeps it low too"
        )
    scale = perplexity_axis([y for curve in curves.values() for y in curve.values()])
    panels = [
        Panel("", apart(perplexities), lengths_frame(report, lengths, "perplexity", scale)),
        Panel("", apart(successes), lengths_frame(report, tested, "success (%)", success)),
    ]
    title = outcomes.task(task)
    yield Plan(
        "perplexity_and_retrieval",
        "Perplexity against retrieval",
        f"Left: perplexity, exp of the mean loss on the last {report.last} tokens of "
        f"held-out sequences. Right: {title}. A low perplexity does not show that distant text is "
        f"read{cropped}. "
        f"{_INTERVALS} After Figure 5 of “{_DROPE}”.",
        f"Two line charts over sequence length: perplexity and {title}.",
        partial(side_by_side, panels, height=2.6, x_label=panels[0].frame.x_label, balanced=True),
        ("model", "method", "length", "factor", "perplexity", "success", "low", "high"),
        [
            (*row, n, factor, curves[row].get(n), *((e.mean, e.low, e.high) if e else ("",) * 3))
            for row in chosen
            for n, factor in sorted({**lengths, **tested}.items())
            for e in (outcomes.estimate(row, [task], n),)
        ],
    )


def _perplexities(
    outcomes: Outcomes, row: Row, lengths: Iterable[int], task: str = PERPLEXITY
) -> dict[int, float]:
    cells = ((n, outcomes.cell(row, task, n)) for n in lengths)
    return {n: perplexity(c.last_loss) for n, c in cells if c and c.last_loss is not None}


def _by_position(outcomes: Outcomes) -> Iterator[Plan]:
    cells = [cell for cell in outcomes.report.cells if cell.losses]
    if not cells:
        return
    longest = max(cell.length for cell in cells)
    by_row = {(c.model, c.method): c for c in cells if c.length == longest}
    if all(len(cell.losses) == 1 for cell in by_row.values()):
        return  # a line of one point shows nothing
    lines = {}
    for row in (row for row in outcomes.rows if row in by_row):
        cell = by_row[row]
        middles = [(a + b) / 2 for a, b in pairwise(cell.edges)]
        values = [math.nan if loss is None else perplexity(loss) for loss in cell.losses]
        lines[row] = Series(outcomes.name(row), 0, middles, values, marked=False)
    scale = perplexity_axis([y for line in lines.values() for y in line.y])
    frame = positions_frame(outcomes.report, longest, scale)
    beyond = " Right of the dashed line no position was ever trained on."
    beyond = beyond if longest > outcomes.report.trained else ""
    yield Plan(
        "perplexity_by_position",
        f"Perplexity by position at {longest} tokens",
        "exp of the mean held-out loss over the positions of a bucket, drawn at its middle, in "
        f"sequences of {longest} tokens.{beyond}"
        f"{_grey(lines)} After Figure 5 of “{_DROPE}”, by position instead of length.",
        "Line chart of perplexity over the position in the sequence.",
        lambda: draw_rows(outcomes, lines, frame),
        ("model", "method", "length", "from_position", "to_position", "perplexity", "loss"),
        [
            (*row, longest, start, stop, "" if math.isnan(value) else value, loss)
            for row, line in lines.items()
            for (start, stop), value, loss in zip(
                pairwise(by_row[row].edges), line.y, by_row[row].losses, strict=True
            )
        ],
    )


def _by_depth(outcomes: Outcomes, task: str) -> Iterator[Plan]:
    cells = [cell for cell in outcomes.report.cells if cell.task == task and cell.depths]
    if not cells:
        return
    depths = Depths.from_cells(cells)
    lengths = {
        length: factor_label(f) for length, f in sorted({(c.length, c.factor) for c in cells})
    }
    means = {((c.model, c.method), c.length): depths.means(c) for c in cells}
    missing = [math.nan] * len(depths.names)
    rows = [row for row in outcomes.rows if any(row == there for there, _ in means)]
    groups = {"": rows}
    if len(rows) > _TOGETHER:
        groups = {m: [row for row in rows if row[0] == m] for m in dict(rows)}
    for model, group in groups.items():
        panels = {row: np.array([means.get((row, n), missing) for n in lengths]).T for row in group}
        one_method = len({method for _, method in group}) == 1
        titles = {
            row: outcomes.method(row[1]) if model and not one_method else outcomes.name(row)
            for row in group
        }
        named = {titles[row]: values for row, values in panels.items()}
        name = f"{outcomes.task(task)}{', ' if model else ''}{model}"
        yield Plan(
            "_".join(("depth", *map(_slug, filter(None, (task, model))))),
            f"Success by depth and length: {name}",
            f"Mean score in % of the trials whose needle lies at that depth (0: beginning of the "
            f"text, 100: its end, where the question is) at that length: {name}. With several "
            "needles, the depth of the first. A grey cell was not measured. After G. Kamradt’s "
            "needle in a haystack (2023).",
            f"Heat maps of success by depth and sequence length, {name}.",
            partial(draw_heatmaps, named, depths, lengths, outcomes.report.unit),
            ("model", "method", "length", "depth", "success"),
            [
                (*row, length, depth, "" if math.isnan(value) else value)
                for row, values in panels.items()
                for length, column in zip(lengths, values.T, strict=True)
                for depth, value in zip(depths.names, column.tolist(), strict=True)
            ],
            detail=bool(model),
        )


def _grey(lines: Iterable[Row]) -> str:
    return " Grey: what the other panels show." if len([*lines]) > OVERLAY else ""


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_") or "unnamed"


def success(axes: Axes) -> None:
    """Scale the y axis from 0 to 100 percent."""
    axes.set_ylim(-4, 106)
    axes.set_yticks(range(0, 101, 25))


def perplexity_axis(values: Iterable[float]) -> AxisScale:
    """Return a scale for perplexities: logarithmic if the values span a large factor."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=1.0), max(known, default=1.0)

    def prepare(axes: Axes) -> None:
        if high < _LINEAR * low:
            axes.set_ylim(padded(low, high, _LEAST_SPAN * high))
            return
        log_axis(axes, low, high)
        axes.set_ylim(low / 1.2, high * 1.2)

    return prepare


def lengths_frame(
    report: Report,
    lengths: dict[int, float],
    y_label: str,
    scale: AxisScale,
    narrow: bool = False,
    lines: tuple[tuple[float, str], ...] = (),
) -> Frame:
    """Return a frame with lengths on a logarithmic axis.

    Ticks name multiples of the training length, and tokens unless the panel is ``narrow``.
    ``lines``: horizontal reference lines, as y and name.
    """

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xscale("log", base=2)
        names = [factor_label(f) + ("" if narrow else f"\n{n}") for n, f in lengths.items()]
        axes.set_xticks(list(lengths), names)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)

    unit = f"multiple of {report.unit}" + ("" if narrow else "; tokens")
    return Frame(
        f"sequence length ({unit})",
        y_label,
        prepare,
        training_length_mark(report.trained, lengths),
        lines,
    )


def positions_frame(report: Report, longest: int, scale: AxisScale) -> Frame:
    """Return a frame of positions, with ticks at multiples of the training length."""

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xlim(0, longest)
        step = min(report.training_length, longest)
        while longest / step > 4:
            step *= 2
        axes.set_xticks(range(0, longest + 1, step))

    label = f"position in sequences of {longest} tokens"
    return Frame(label, "perplexity", prepare, training_length_mark(report.trained, (0, longest)))


def draw_rows(outcomes: Outcomes, lines: Mapping[Row, Series], frame: Frame) -> Figure:
    """Draw one line for each row.

    If :func:`is_panelled`, each model has a panel with its methods, or each method one with its
    models, whichever leaves fewer lines in a panel.
    """
    styles = styles_of(outcomes)
    if not is_panelled(lines):
        named = [
            replace(line, label=name, style=styles[name])
            for row, line in lines.items()
            for name in (outcomes.name(row),)
        ]
        # Many lines have a panel each, in which nothing overlaps.
        return draw(named if len(named) > OVERLAY else apart(named), frame)
    models = [name for name in outcomes.models if any(model == name for model, _ in lines)]
    methods = [key for key in outcomes.methods if any(method == key for _, method in lines)]
    by_model = len(models) >= len(methods)
    titles = models if by_model else [outcomes.method(key) for key in methods]
    names = [outcomes.method(key) for key in methods] if by_model else models
    # A line has the style of the first row with the same method (or model).
    first = {row[1 if by_model else 0]: outcomes.name(row) for row in reversed(list(lines))}
    keys = methods if by_model else models
    line_styles = {name: styles[first[key]] for name, key in zip(names, keys, strict=True)}
    panels: dict[str, list[Series]] = {title: [] for title in titles}
    for (model, method), line in lines.items():
        panel, name = model, outcomes.method(method)
        if not by_model:
            panel, name = name, panel
        panels[panel].append(replace(line, label=name, style=line_styles[name]))
    marked = any(line.marked for line in lines.values())
    legend = [Series(name, line_styles[name], (), (), marked=marked) for name in names]
    return small_multiples([(title, apart(p)) for title, p in panels.items()], frame, legend)


def is_panelled(lines: Iterable[Row]) -> bool:
    """Whether rows are spread over panels with several lines each."""
    rows = list(lines)
    shapes = (len({model for model, _ in rows}), len({method for _, method in rows}))
    return len(rows) > OVERLAY and 1 not in shapes


def apart(lines: Sequence[Series]) -> list[Series]:
    """Shift lines with intervals slightly along a logarithmic axis, so that these stay apart."""
    middle = (len(lines) - 1) / 2
    return [
        line
        if line.low is None
        else replace(line, x=[x * 2 ** (_DODGE * (index - middle)) for x in line.x])
        for index, line in enumerate(lines)
    ]


@dataclass(frozen=True)
class Depths:
    """Rows of a heat map: row i, called ``names[i]``, holds depths from ``edges[i]`` (included) to
    ``edges[i + 1]`` (excluded)."""

    edges: tuple[float, ...]
    names: tuple[str, ...]

    @classmethod
    def from_cells(cls, cells: Sequence[Cell]) -> Depths:
        """Return a row for each depth that occurs, or for each tenth if there are many depths."""
        depths = sorted({depth for cell in cells for depth in cell.depths})
        if len(depths) <= _MOST:
            return cls((*depths, math.inf), tuple(f"{100 * depth:.0f}" for depth in depths))
        names = (f"{100 * i // _BINS}–{100 * (i + 1) // _BINS}" for i in range(_BINS))
        return cls((*(i / _BINS for i in range(_BINS)), math.inf), tuple(names))

    def means(self, cell: Cell) -> list[float]:
        """Return the mean score of every row, NaN for rows without trials."""
        index = np.searchsorted(self.edges, cell.depths, side="right") - 1
        counts = np.bincount(index, minlength=len(self.names))
        sums = np.bincount(index, weights=cell.scores, minlength=len(self.names))
        return [s / n if n else math.nan for s, n in zip(sums, counts, strict=True)]


def draw_heatmaps(
    panels: Mapping[str, np.ndarray],
    depths: Depths,
    lengths: Mapping[int, str],
    unit: str = "the training length",
) -> Figure:
    """Draw mean scores ``[depth, length]`` by title; ``lengths``: their names, multiples of
    ``unit``."""
    return numbered_maps(
        {textwrap.fill(title, 24): 100 * values for title, values in panels.items()},
        Scale("success (%)", 0, 100),
        names=(list(lengths.values()), depths.names),
        labels=(f"sequence length (multiple of {unit})", "depth (% of the text)"),
        text=lambda _, value: f"{value:.0f}",
        columns=5,
        row_height=0.17,
    )
