"""FIGDOC"""

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
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from trainer.common.words import factor_label, percent
from trainer.evaluation.outcomes import AS_IS, Outcomes, Row
from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Cell, Report
from trainer.plotting.lines import (
    OVERLAY,
    Frame,
    Series,
    blank,
    draw,
    draw_line,
    finish,
    legend_above,
    line_handle,
    log_axis,
    paper_style,
    reference_handles,
    training_length_mark,
    trim,
)
from trainer.plotting.style import ON_BRIGHT, UNKNOWN, looks
from trainer.report.files import Drawn, Plan
from trainer.report.tables import perplexity
from trainer.report.training_figures import reach_figures, recovery_figure, training_figure

CONTRASTED = (AS_IS, "crop", "yarn")
"""Methods of the first model in the figure that holds perplexity against retrieval."""

_TOGETHER = 15  # heat maps in one figure; more become a figure for each model
_DROPE = "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings"
_INTERVALS = (
    "Bars: 95% intervals over trials, Wilson's for scores of 0 and 1, percentile bootstrap for "
    "fractions. Dashed: the training length."
)


def write_figures(report: Report, directory: Path) -> list[Drawn]:
    """Draw what the report has numbers for, and return it in the order of the page.

    ``success_*``: success over length, of the mean over tasks and of each task.
    ``perplexity_and_retrieval``: both side by side. ``training``: training loss over steps.
    ``perplexity_by_position``: along the longest sequences. ``reach*``, ``benchmarks``: what was
    measured while arms trained. ``depth_*``: success by depth and length. Beside each
    ``<name>.svg`` lie ``<name>.png`` and ``<name>.csv``, numbers in full precision and empty where
    nothing was measured. The files depend on the report alone.
    """
    outcomes = Outcomes(report)
    drawn: list[Drawn] = []
    with paper_style():
        for plan in _plans(outcomes):
            # Names that differ in punctuation alone must not share a file.
            again = sum(figure.path.stem.split("~")[0] == plan.name for figure in drawn)
            stem = f"{plan.name}~{again + 1}" if again else plan.name
            drawn.append(plan.write(directory / stem))
    return drawn


def styles_of(outcomes: Outcomes) -> dict[str, int]:
    """Return the style number of every row and arm by its name."""
    report = outcomes.report
    arms = (*(arm.name for arm in report.arms), *report.reach)
    return looks((*map(outcomes.name, outcomes.rows), *arms))


def _plans(outcomes: Outcomes) -> Iterator[Plan]:
    if len(outcomes.lengths(outcomes.averaged)) > 1:
        titles = ", ".join(map(outcomes.task, outcomes.averaged))
        yield _success(outcomes, "mean", f"the mean over {titles}", outcomes.averaged)
    yield from _contrast(outcomes)
    for task in (task for task in outcomes.scored if len(outcomes.lengths([task])) > 1):
        yield _success(outcomes, task, outcomes.task(task), [task])
    yield from training_figure(outcomes.report, styles_of(outcomes))
    yield from _by_position(outcomes)
    yield from reach_figures(outcomes.report, styles_of(outcomes))
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
    found = [(n, e) for n in lengths if (e := outcomes.estimate(row, tasks, n)) is not None]
    y, low, high = ([100 * getattr(e, name) for _, e in found] for name in ("mean", "low", "high"))
    name = outcomes.name(row)
    return Series(name, styles_of(outcomes)[name], [n for n, _ in found], y, low, high)


def _contrast(outcomes: Outcomes) -> Iterator[Plan]:
    """Perplexity beside retrieval: the first model as is, cropped and with YaRN, and every other
    model as is."""
    lengths = outcomes.lengths([PERPLEXITY], losses=True)
    chosen = [
        row
        for row in outcomes.rows
        if row[1] in (CONTRASTED if row[0] == outcomes.models[0] else (AS_IS,))
    ]
    if not (lengths and outcomes.scored and chosen):
        return
    task = outcomes.scored[0]
    curves = {row: _perplexities(outcomes, row, lengths) for row in chosen}
    left = [
        Series(name, styles_of(outcomes)[name], list(curves[row]), list(curves[row].values()))
        for row in chosen
        for name in (outcomes.name(row),)
    ]
    tested = outcomes.lengths([task])
    right = [_success_line(outcomes, row, [task], tested) for row in chosen]
    report = outcomes.report
    scale = perplexity_axis([y for curve in curves.values() for y in curve.values()])
    frames = (
        lengths_frame(report, lengths, "perplexity", scale),
        lengths_frame(report, tested, "success (%)", success),
    )
    title = outcomes.task(task)
    yield Plan(
        "perplexity_and_retrieval",
        "Perplexity against retrieval",
        f"Left: perplexity, exp of the mean loss on the last {report.last} tokens of "
        f"held-out sequences. Right: {title}. A method that only keeps perplexity from rising does "
        "not thereby read what lies far back: reading nothing but the last "
        f"{report.training_length} tokens (cropped) keeps it too. {_INTERVALS} After Figure 5 of "
        f"“{_DROPE}”.",
        f"Two line charts over sequence length: perplexity and {title}.",
        lambda: pair((left, right), frames),
        ("model", "method", "length", "factor", "perplexity", "success", "low", "high"),
        [
            (*row, n, factor, curves[row].get(n), *((e.mean, e.low, e.high) if e else ("",) * 3))
            for row in chosen
            for n, factor in sorted({**lengths, **tested}.items())
            for e in (outcomes.estimate(row, [task], n),)
        ],
    )


def _perplexities(outcomes: Outcomes, row: Row, lengths: Iterable[int]) -> dict[int, float]:
    cells = ((n, outcomes.cell(row, PERPLEXITY, n)) for n in lengths)
    return {n: perplexity(c.last_loss) for n, c in cells if c and c.last_loss is not None}


def _by_position(outcomes: Outcomes) -> Iterator[Plan]:
    cells = [cell for cell in outcomes.report.cells if cell.losses]
    if not cells:
        return
    longest = max(cell.length for cell in cells)
    found = {(c.model, c.method): c for c in cells if c.length == longest}
    lines = {}
    for row in (row for row in outcomes.rows if row in found):
        cell = found[row]
        middles = [(a + b) / 2 for a, b in pairwise(cell.edges)]
        values = [math.nan if loss is None else perplexity(loss) for loss in cell.losses]
        lines[row] = Series(outcomes.name(row), 0, middles, values, marked=False)
    scale = perplexity_axis([y for line in lines.values() for y in line.y])
    frame = positions_frame(outcomes.report, longest, scale)
    yield Plan(
        "perplexity_by_position",
        f"Perplexity by position at {longest} tokens",
        "exp of the mean held-out loss over the positions of a bucket, drawn at its middle, in "
        f"sequences of {longest} tokens. Right of the dashed line no position was ever trained "
        f"on.{_grey(lines)} After Figure 5 of “{_DROPE}”, by position instead of length.",
        "Line chart of perplexity over the position in the sequence.",
        lambda: draw_rows(outcomes, lines, frame),
        ("model", "method", "length", "from_position", "to_position", "perplexity", "loss"),
        [
            (*row, longest, start, stop, "" if math.isnan(value) else value, loss)
            for row, line in lines.items()
            for (start, stop), value, loss in zip(
                pairwise(found[row].edges), line.y, found[row].losses, strict=True
            )
        ],
    )


def _by_depth(outcomes: Outcomes, task: str) -> Iterator[Plan]:
    cells = [cell for cell in outcomes.report.cells if cell.task == task and cell.depths]
    if not cells:
        return
    depths = Depths.of(cells)
    lengths = {
        length: factor_label(f) for length, f in sorted({(c.length, c.factor) for c in cells})
    }
    means = {((c.model, c.method), c.length): depths.means(c) for c in cells}
    missing = [math.nan] * len(depths.names)
    rows = [row for row in outcomes.rows if any(row == there for there, _ in means)]
    groups = {"": rows}
    if len(rows) > _TOGETHER:
        groups = {m: [row for row in rows if row[0] == m] for m in dict(rows)}
    for model, own in groups.items():
        panels = {row: np.array([means.get((row, n), missing) for n in lengths]).T for row in own}
        one_method = len({method for _, method in own}) == 1
        titles = {
            row: outcomes.method(row[1]) if model and not one_method else outcomes.name(row)
            for row in own
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
            partial(draw_heatmaps, named, depths, lengths),
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
    return " Grey: what the other panels show." if is_panelled(lines) else ""


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_") or "unnamed"


_LINEAR = 6  # a perplexity that varies by less than this factor is drawn on a linear axis

Scale = Callable[[Axes], None]


def success(axes: Axes) -> None:
    """Percent, all of them."""
    axes.set_ylim(-4, 106)
    axes.set_yticks(range(0, 101, 25))


def perplexity_axis(values: Iterable[float]) -> Scale:
    """Logarithmic where the values span much."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=1.0), max(known, default=1.0)

    def prepare(axes: Axes) -> None:
        if high < _LINEAR * low:
            room = 0.06 * (high - low) or 0.1 * high
            axes.set_ylim(low - room, high + room)
            return
        log_axis(axes, low, high)
        axes.set_ylim(low / 1.2, high * 1.2)

    return prepare


def lengths_frame(
    report: Report,
    lengths: dict[int, float],
    y_label: str,
    scale: Scale,
    narrow: bool = False,
    lines: tuple[tuple[float, str], ...] = (),
) -> Frame:
    """Lengths on a binary logarithmic axis, named in multiples of the training length and, unless
    the panel is narrow, in tokens; ``lines``: horizontal ones, with their names."""

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xscale("log", base=2)
        names = [factor_label(f) + ("" if narrow else f"\n{n}") for n, f in lengths.items()]
        axes.set_xticks(list(lengths), names)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)

    unit = "multiple of the training length" + ("" if narrow else "; tokens")
    return Frame(
        f"sequence length ({unit})",
        y_label,
        prepare,
        training_length_mark(report.training_length, lengths),
        lines,
    )


def positions_frame(report: Report, longest: int, scale: Scale) -> Frame:
    """Positions up to the longest length, with ticks at multiples of the training length."""

    def prepare(axes: Axes) -> None:
        scale(axes)
        axes.set_xlim(0, longest)
        step = min(report.training_length, longest)
        while longest / step > 4:
            step *= 2
        axes.set_xticks(range(0, longest + 1, step))

    label = f"position in sequences of {longest} tokens"
    return Frame(
        label, "perplexity", prepare, training_length_mark(report.training_length, (0, longest))
    )


_BESIDE = 6  # entries of a legend in one row
_DODGE = 0.03  # octaves between lines of one panel, so that their intervals stay apart


def draw_rows(outcomes: Outcomes, lines: Mapping[Row, Series], frame: Frame) -> Figure:
    """One line a row. Up to ``OVERLAY``, or all of one model or one method: as any figure has them.
    Otherwise a panel for each model with its methods or for each method with its models, whichever
    leaves fewer lines to a panel, over all the others in grey."""
    if not is_panelled(lines):
        named = [
            replace(line, label=name, style=styles_of(outcomes)[name])
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
    styles = {
        name: styles_of(outcomes)[of_first[key]] for name, key in zip(names, keys, strict=True)
    }
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


_MAPS_BESIDE = 5
_MOST, _BINS = 11, 10  # more different depths than _MOST are put into _BINS
# Perceptually uniform, for all kinds of colour vision.
_MAP = colormaps["cividis"].with_extremes(bad=UNKNOWN)


@dataclass(frozen=True)
class Depths:
    """Rows of a heat map: trials of depth ``edges[i]`` (included) to ``edges[i + 1]`` (excluded)
    are in row i, which is called ``names[i]``."""

    edges: tuple[float, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Depths:
        """A row for each depth that occurs, or for each tenth where they are many."""
        found = sorted({depth for cell in cells for depth in cell.depths})
        if len(found) <= _MOST:
            return cls((*found, math.inf), tuple(f"{100 * depth:.0f}" for depth in found))
        names = (f"{100 * i // _BINS}–{100 * (i + 1) // _BINS}" for i in range(_BINS))
        return cls((*(i / _BINS for i in range(_BINS)), math.inf), tuple(names))

    def means(self, cell: Cell) -> list[float]:
        """The mean score of every row, NaN where there is no trial."""
        index = np.searchsorted(self.edges, cell.depths, side="right") - 1
        counts = np.bincount(index, minlength=len(self.names))
        sums = np.bincount(index, weights=cell.scores, minlength=len(self.names))
        return [s / n if n else math.nan for s, n in zip(sums, counts, strict=True)]


def draw_heatmaps(
    panels: Mapping[str, np.ndarray], depths: Depths, lengths: Mapping[int, str]
) -> Figure:
    """``panels``: by title, the mean scores with axes [depth, length]. ``lengths``: their names."""
    columns = min(_MAPS_BESIDE, len(panels))
    rows = math.ceil(len(panels) / columns)
    tall = min(2.2, 0.45 + 0.17 * len(depths.names))
    figure = blank(0.5 + tall * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    image = None
    for axes, (title, values) in zip(grid.flat, panels.items(), strict=False):
        image = axes.imshow(100 * values, cmap=_MAP, vmin=0, vmax=100, aspect="auto")
        _numbers(axes, 100 * values)
        axes.set_title(textwrap.fill(title, 24), pad=3, fontsize=7)
        axes.set_xticks(range(len(lengths)), list(lengths.values()), fontsize=6)
        axes.set_yticks(range(len(depths.names)), depths.names, fontsize=6)
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
    trim(list(grid.flat), len(panels), columns)
    figure.supxlabel("sequence length (multiple of the training length)", fontsize=8)
    figure.supylabel("depth (% of the text)", fontsize=8)
    if image is not None:
        bar = figure.colorbar(
            image, ax=list(grid.flat[: len(panels)]), aspect=30, pad=0.02, fraction=0.03
        )
        bar.set_label("success (%)")
        bar.outline.set_visible(False)
    return figure


def _numbers(axes: Axes, values: np.ndarray) -> None:
    for (y, x), value in np.ndenumerate(values):
        known = math.isfinite(value)
        axes.text(
            *(x, y, f"{value:.0f}" if known else "·"),
            color=ON_BRIGHT if not known or value > 55 else "white",
            ha="center",
            va="center",
            fontsize=5.5,
        )
