"""The figures of an evaluation: success and perplexity by length, by position and by depth."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
    training_length_mark,
)
from trainer.plotting.maps import Scale, numbered_maps
from trainer.plotting.style import style_numbers
from trainer.report.files import Drawn, Plot
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
_INTERVALS = "Bars: 95% intervals over texts. Dashed: the training length."

AxisScale = Callable[[Axes], None]


def write_figures(report: Report, directory: Path) -> list[Drawn]:
    """Draw what the report has numbers for, and return the figures in the order of the page."""
    drawn: dict[str, Drawn] = {}
    for plot in _plots(Outcomes(report)):
        name = plot.name
        while name in drawn:  # names that differ only in punctuation must not share a file
            name += "~"
        drawn[name] = plot.write(directory / name)
    return list(drawn.values())


def styles_of(outcomes: Outcomes) -> dict[str, int]:
    """Return the style number of every row and arm by its name."""
    report = outcomes.report
    arms = (*(arm.name for arm in report.arms), *report.reach)
    return style_numbers((*map(outcomes.name, outcomes.rows), *arms))


def _plots(outcomes: Outcomes) -> Iterator[Plot]:
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


def _success(outcomes: Outcomes, name: str, title: str, tasks: list[str]) -> Plot:
    lengths = outcomes.lengths(tasks)
    lines = [_success_line(outcomes, row, tasks, lengths) for row in outcomes.rows]
    chances = _chances(outcomes.report) if tasks == [STATEMENTS] else ()
    frame = lengths_frame(outcomes.report, lengths, "success (%)", success, chances)
    return Plot(
        f"success_{_slug(name)}",
        f"Success over length: {title}",
        f"Mean score of the trials over sequence length (logarithmic axis): {title}. {_INTERVALS} "
        f"After Figure 1 and Table 1 of “{_DROPE}”.",
        f"Line chart of success over sequence length, {title}; the same numbers are in the tables.",
        draw_lines([line for line in lines if len(line.x)], frame),
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


def _contrast(outcomes: Outcomes) -> Iterator[Plot]:
    """Draw perplexity beside retrieval of all models as is, and the first with some methods."""
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    chosen = [
        row
        for row in outcomes.rows
        if row[1] in (CONTRASTED if row[0] == outcomes.models[0] else (AS_IS,))
    ]
    if not (lengths and outcomes.scored and chosen):
        return
    task, styles, report = outcomes.scored[0], styles_of(outcomes), outcomes.report
    perplexities = []
    for row in chosen:
        cells = [(n, outcomes.cell(row, PERPLEXITY, n)) for n in lengths]
        known = {n: perplexity(c.last_loss) for n, c in cells if c and c.last_loss is not None}
        name = outcomes.name(row)
        perplexities.append(Series(name, styles[name], list(known), list(known.values())))
    tested = outcomes.lengths([task])
    successes = [_success_line(outcomes, row, [task], tested) for row in chosen]
    scale = perplexity_axis([y for line in perplexities for y in line.y])
    panels = [
        Panel("", apart(perplexities), lengths_frame(report, lengths, "perplexity", scale)),
        Panel("", apart(successes), lengths_frame(report, tested, "success (%)", success)),
    ]
    title = outcomes.task(task)
    label = panels[0].frame.x_label
    yield Plot(
        "perplexity_and_retrieval",
        "Perplexity against retrieval",
        f"Left: perplexity, exp of the mean loss on the last {report.last} tokens of "
        f"held-out sequences. Right: {title}. A low perplexity does not show that distant text is "
        f"read. {_INTERVALS} After Figure 5 of “{_DROPE}”.",
        f"Two line charts over sequence length: perplexity and {title}.",
        side_by_side(panels, height=2.6, x_label=label, balanced=True),
    )


def _by_position(outcomes: Outcomes) -> Iterator[Plot]:
    cells = [cell for cell in outcomes.report.cells if cell.losses]
    longest = max((cell.length for cell in cells), default=0)
    by_row = {(c.model, c.method): c for c in cells if c.length == longest}
    if all(len(cell.losses) == 1 for cell in by_row.values()):
        return  # a line of one point shows nothing
    lines = []
    for row in (row for row in outcomes.rows if row in by_row):
        cell, name = by_row[row], outcomes.name(row)
        middles = [(a + b) / 2 for a, b in pairwise(cell.edges)]
        values = [math.nan if loss is None else perplexity(loss) for loss in cell.losses]
        lines.append(Series(name, styles_of(outcomes)[name], middles, values, marked=False))
    scale = perplexity_axis([y for line in lines for y in line.y])
    beyond = " Right of the dashed line no position was ever trained on."
    yield Plot(
        "perplexity_by_position",
        f"Perplexity by position at {longest} tokens",
        "exp of the mean held-out loss over the positions of a bucket, drawn at its middle, in "
        f"sequences of {longest} tokens.{beyond if longest > outcomes.report.trained else ''} "
        f"After Figure 5 of “{_DROPE}”, by position instead of length.",
        "Line chart of perplexity over the position in the sequence.",
        draw_lines(lines, positions_frame(outcomes.report, longest, scale)),
    )


def _by_depth(outcomes: Outcomes, task: str) -> Iterator[Plot]:
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
        panels = {
            textwrap.fill(outcomes.name(row), 24): np.array(
                [means.get((row, n), missing) for n in lengths]
            ).T
            for row in group
        }
        name = f"{outcomes.task(task)}{', ' if model else ''}{model}"
        yield Plot(
            "_".join(("depth", *map(_slug, filter(None, (task, model))))),
            f"Success by depth and length: {name}",
            f"Mean score in % of the trials whose needle lies at that depth (0: beginning of the "
            f"text, 100: its end, where the question is) at that length: {name}. With several "
            "needles, the depth of the first. After G. Kamradt’s needle in a haystack (2023).",
            f"Heat maps of success by depth and sequence length, {name}.",
            numbered_maps(
                {title: 100 * values for title, values in panels.items()},
                Scale("success (%)", 0, 100),
                names=(list(lengths.values()), depths.names),
                labels=(
                    f"sequence length (multiple of {outcomes.report.unit})",
                    "depth (% of the text)",
                ),
                text=lambda _, value: f"{value:.0f}",
                columns=5,
                row_height=0.17,
            ),
            detail=bool(model),
        )


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
    lines: tuple[tuple[float, str], ...] = (),
) -> Frame:
    """Return a frame with lengths on a logarithmic axis; ``lines``: horizontal ones, as y and
    name."""

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(lengths), [f"{factor_label(f)}\n{n}" for n, f in lengths.items()])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)

    return Frame(
        f"sequence length (multiple of {report.unit}; tokens)",
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


def draw_lines(lines: Sequence[Series], frame: Frame) -> Figure:
    """Draw lines in one panel, or each over the others in grey if there are many."""
    return draw(lines if len(lines) > OVERLAY else apart(lines), frame)


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
