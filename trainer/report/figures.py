"""The figures of an evaluation: success and perplexity by length, and success by depth."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from trainer.common.words import factor_label, percent
from trainer.config import PERPLEXITY
from trainer.evaluation.results import AS_IS, Report, Row, estimates, lengths_of
from trainer.evaluation.statistics import Estimate
from trainer.plotting.lines import (
    MOST_LINES,
    Frame,
    Panel,
    Series,
    log_axis,
    padded,
    side_by_side,
    training_length_mark,
)
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.style import style_numbers
from trainer.report.files import Plot
from trainer.report.tables import perplexity
from trainer.report.training_figures import milestones_figure, training_figure

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


def plots(report: Report) -> Iterator[Plot]:
    """Draw what the report has numbers for, the most important figure first."""
    names = (*map(report.row_name, _rows(report)), *(arm.name for arm in report.arms))
    styles = style_numbers(names)
    for task in report.scored:
        if len(lengths_of(report.rows[report.rows.task == task])) > 1:
            yield _success(report, task, styles)
    yield from _contrast(report, styles)
    yield from training_figure(report, styles)
    yield from milestones_figure(report)
    for task in report.scored:
        yield from _by_depth(report, task)


def _rows(report: Report) -> list[Row]:
    return list(dict.fromkeys(zip(report.rows.model, report.rows.method, strict=True)))


def _success(report: Report, task: str, styles: Mapping[str, int]) -> Plot:
    title, scores = report.tasks[task], estimates(report.rows, task)
    models = dict.fromkeys(model for model, _ in scores)
    groups: list[list[Row]] = [list(scores)]
    if len(scores) > MOST_LINES:
        groups = [[row for row in scores if row[0] == model] for model in models]
    lengths = lengths_of(report.rows[report.rows.task == task])
    chances = tuple(
        (100 * report.task[key], f"{text} ({percent(report.task[key])}%)")
        for key, text in (("chance", "chance"), ("chance_listed", "any listed value"))
        if report.chance(task) and key in report.task
    )
    frame = lengths_frame(report, lengths, "success (%)", success, chances)
    panels = [
        Panel(
            group[0][0] if len(groups) > 1 else "",
            apart([_success_line(report, row, scores[row], styles) for row in group]),
            frame,
        )
        for group in groups
    ]
    return Plot(
        f"success_{_slug(task)}",
        f"Success over length: {title}",
        f"Mean score of the trials over sequence length (logarithmic axis): {title}. {_INTERVALS} "
        f"After Figure 1 and Table 1 of “{_DROPE}”.",
        f"Line chart of success over sequence length, {title}; the same numbers are in the tables.",
        side_by_side(panels, columns=2, height=2.8 if len(panels) == 1 else 2.3),
    )


def _success_line(
    report: Report, row: Row, scores: Mapping[int, Estimate], styles: Mapping[str, int]
) -> Series:
    y, low, high = ([100 * getattr(e, k) for e in scores.values()] for k in ("mean", "low", "high"))
    name = report.row_name(row)
    return Series(name, styles[name], list(scores), y, low, high)


def _contrast(report: Report, styles: Mapping[str, int]) -> Iterator[Plot]:
    """Draw perplexity beside retrieval of all models as is, and the first with some methods."""
    losses = estimates(report.rows, PERPLEXITY, "loss")
    if not (losses and report.scored):
        return
    task = report.scored[0]
    scores, first = estimates(report.rows, task), next(iter(losses))[0]
    perplexities, successes = [], []
    for row in _rows(report):
        if row[1] in (CONTRASTED if row[0] == first else (AS_IS,)):
            known = {n: perplexity(loss.mean) for n, loss in losses.get(row, {}).items()}
            name = report.row_name(row)
            perplexities.append(Series(name, styles[name], list(known), list(known.values())))
            successes.append(_success_line(report, row, scores.get(row, {}), styles))
    scale = perplexity_axis([y for line in perplexities for y in line.y])
    by_loss, by_score = (
        lengths_of(report.rows[report.rows.task == key]) for key in (PERPLEXITY, task)
    )
    panels = [
        Panel("", perplexities, lengths_frame(report, by_loss, "perplexity", scale)),
        Panel("", apart(successes), lengths_frame(report, by_score, "success (%)", success)),
    ]
    title = report.tasks[task]
    yield Plot(
        "perplexity_and_retrieval",
        "Perplexity against retrieval",
        f"Left: perplexity, exp of the mean loss on the last {report.last} tokens of "
        f"held-out sequences. Right: {title}. A low perplexity does not show that distant text is "
        f"read. {_INTERVALS} After Figure 5 of “{_DROPE}”.",
        f"Two line charts over sequence length: perplexity and {title}.",
        side_by_side(panels, height=2.6, x_label=panels[0].frame.x_label),
    )


def _by_depth(report: Report, task: str) -> Iterator[Plot]:
    trials = report.trials[(report.trials.task == task) & report.trials.depth.notna()]
    if trials.empty:
        return
    names, places = depths_of(trials.depth)
    means = 100 * trials.assign(place=places).groupby(["model", "method", "place", "length"])[
        "value"
    ].mean().unstack("length").reindex(columns=[*(lengths := lengths_of(trials))])
    maps = {
        row: means.loc[row].reindex(range(len(names))).to_numpy()
        for row in _rows(report)
        if row in means.index.droplevel("place")
    }
    groups = {"": list(maps)}
    if len(maps) > _TOGETHER:
        groups = {model: [row for row in maps if row[0] == model] for model in dict(maps)}
    for model, group in groups.items():
        name = f"{report.tasks[task]}{', ' if model else ''}{model}"
        yield Plot(
            "_".join(("depth", *map(_slug, filter(None, (task, model))))),
            f"Success by depth and length: {name}",
            f"Mean score in % of the trials whose needle lies at that depth (0: beginning of the "
            f"text, 100: its end, where the question is) at that length: {name}. With several "
            "needles, the depth of the first. After G. Kamradt’s needle in a haystack (2023).",
            f"Heat maps of success by depth and sequence length, {name}.",
            heat_maps(
                {textwrap.fill(report.row_name(row), 24): maps[row] for row in group},
                Scale("success (%)", 0, 100),
                x=f"sequence length (multiple of {report.unit})",
                y="depth (% of the text)",
                columns=5,
                height=min(2.2, 0.6 + 0.17 * len(names)),
                names=(list(map(factor_label, lengths.values())), names),
            ),
        )


def depths_of(depths: pd.Series) -> tuple[list[str], np.ndarray]:
    """Return names of the rows of a heat map, and the row of each depth.

    There is a row for each depth that occurs, or for each tenth if there are many depths.
    """
    known = np.sort(depths.unique())
    if len(known) <= _MOST:
        return [f"{100 * depth:.0f}" for depth in known], np.searchsorted(known, depths)
    names = [f"{100 * i // _BINS}–{100 * (i + 1) // _BINS}" for i in range(_BINS)]
    return names, np.minimum((depths * _BINS).astype(int), _BINS - 1).to_numpy()


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
    lengths: Mapping[int, float],
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


def apart(lines: Sequence[Series]) -> list[Series]:
    """Shift lines slightly along a logarithmic axis, so that their intervals stay apart."""
    middle = (len(lines) - 1) / 2
    return [
        replace(line, x=[x * 2 ** (_DODGE * (index - middle)) for x in line.x])
        for index, line in enumerate(lines)
    ]
