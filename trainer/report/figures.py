"""The figures of a report: success and perplexity by length, success by depth, and training."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

from trainer.config import PERPLEXITY, STATEMENTS
from trainer.evaluation.results import (
    AS_IS,
    MEAN,
    Report,
    Row,
    RunSummary,
    estimates,
    factor_label,
    lengths_of,
    percent,
)
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, draw, log_if_wide
from trainer.plotting.style import Plot, style_numbers
from trainer.report.tables import perplexity

CONTRASTED = (AS_IS, "crop", "yarn")
"""Methods of the first model in the figure of perplexity and retrieval."""
_CHANCES = {"chance": "chance", "chance_listed": "any listed value"}
_MOST_LINES = 8  # in one panel; more become a panel for each model
_TOGETHER = 15  # heat maps in one figure; more become a figure for each model
_MOST, _BINS = 11, 10  # more different depths than _MOST are grouped into _BINS
_DODGE = 0.03  # octaves between the lines of a panel, so that intervals do not overlap
_SMOOTHING = 40  # a curve is averaged over this fraction of its points
_DROPE = "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings"
_INTERVALS = "Bars: 95% intervals over texts. Dashed: the training length."


def plots(report: Report) -> Iterator[Plot]:
    """Draw what the report has numbers for, the most important figure first."""
    for task in report.scored:
        if len(lengths_of(report.rows[report.rows.task == task])) > 1:
            yield _success(report, task)
    yield from _contrast(report)
    yield from training(report)
    yield from benchmarks(report)
    for task in report.scored:
        yield from _by_depth(report, task)


def _rows(report: Report) -> list[Row]:
    return list(dict.fromkeys(zip(report.rows.model, report.rows.method, strict=True)))


def _styles(report: Report) -> dict[str, int]:
    """Return the style numbers of all rows and runs by name."""
    names = (*map(report.row_name, _rows(report)), *(run.name for run in report.runs))
    return style_numbers(names)


def _groups(rows: Collection[Row], most: int) -> dict[str, list[Row]]:
    """Return all rows under an empty name, or the rows of each model if there are too many."""
    if len(rows) <= most:
        return {"": list(rows)}
    return {model: [row for row in rows if row[0] == model] for model, _ in rows}


def _success(report: Report, task: str) -> Plot:
    title, scores = report.tasks[task], estimates(report.rows, task)
    chances = tuple(
        (100 * report.task[key], f"{name} ({percent(report.task[key])}%)")
        for key, name in _CHANCES.items()
        if task == STATEMENTS and key in report.task
    )
    panels = [
        replace(_successes(report, task, group), title=model, horizontal=chances)
        for model, group in _groups(scores, _MOST_LINES).items()
    ]
    return Plot(
        f"success_{_slug(task)}",
        draw(panels, columns=2, height=2.8 if len(panels) == 1 else 2.3),
        f"Mean score of the trials over sequence length (logarithmic axis): {title}. {_INTERVALS} "
        f"After Figure 1 and Table 1 of “{_DROPE}”.",
    )


def _successes(report: Report, task: str, rows: Sequence[Row]) -> Panel:
    """Return the scores of rows in % with their intervals."""
    scores, styles, lines = estimates(report.rows, task), _styles(report), []
    for row in rows:
        name, of_row = report.row_name(row), scores.get(row, {})
        y, low, high = ([100 * e[part] for e in of_row.values()] for part in range(3))
        lines.append(Line(name, styles[name], list(of_row), y, low, high))
    return _over_lengths(report, task, apart(lines), "success (%)", _percent)


def _contrast(report: Report) -> Iterator[Plot]:
    """Draw perplexity beside retrieval of all models as is, and the first with some methods."""
    losses = estimates(report.rows, PERPLEXITY, "loss")
    if not (losses and report.scored):
        return
    task, first, styles = report.scored[0], next(iter(losses))[0], _styles(report)
    rows = [r for r in _rows(report) if r[1] in (CONTRASTED if r[0] == first else (AS_IS,))]
    lines = []
    for row in rows:
        known = {n: perplexity(loss.mean) for n, loss in losses.get(row, {}).items()}
        name = report.row_name(row)
        lines.append(Line(name, styles[name], list(known), list(known.values())))
    panels = [
        _over_lengths(report, PERPLEXITY, lines, "perplexity", _perplexities),
        _successes(report, task, rows),
    ]
    yield Plot(
        "perplexity_and_retrieval",
        draw(panels, height=2.6, x=panels[0].x),
        f"Left: perplexity, exp of the mean loss on the last {report.last} tokens of held-out "
        f"sequences. Right: {report.tasks[task]}. A low perplexity does not show that distant text "
        f"is read. {_INTERVALS} After Figure 5 of “{_DROPE}”.",
    )


def _by_depth(report: Report, task: str) -> Iterator[Plot]:
    trials = report.trials[(report.trials.task == task) & report.trials.depth.notna()]
    if trials.empty:
        return
    names, places = depths_of(trials.depth)
    lengths = lengths_of(trials)
    means = 100 * trials.assign(place=places).groupby(["model", "method", "place", "length"])[
        "value"
    ].mean().unstack("length").reindex(columns=[*lengths])
    maps = {
        row: means.loc[row].reindex(range(len(names))).to_numpy()
        for row in _rows(report)
        if row in means.index.droplevel("place")
    }
    for model, group in _groups(maps, _TOGETHER).items():
        name = f"{report.tasks[task]}{', ' if model else ''}{model}"
        yield Plot(
            "_".join(("depth", *map(_slug, filter(None, (task, model))))),
            heat_maps(
                {textwrap.fill(report.row_name(row), 24): maps[row] for row in group},
                Scale("success (%)", 0, 100),
                x=f"sequence length (multiple of {report.unit})",
                y="depth (% of the text)",
                columns=5,
                height=min(2.2, 0.6 + 0.17 * len(names)),
                names=(list(map(factor_label, lengths.values())), names),
            ),
            f"Mean score in % of the trials whose needle lies at that depth (0: beginning of the "
            f"text, 100: its end, where the question is) at that length: {name}. With several "
            "needles, the depth of the first. After G. Kamradt’s needle in a haystack (2023).",
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


def _percent(axes: Axes) -> None:
    axes.set_ylim(-4, 106)
    axes.set_yticks(range(0, 101, 25))


def _perplexities(axes: Axes) -> None:
    """Make the y axis logarithmic if it spans a large factor. A linear one spans at least a fifth
    of the largest value: a narrower axis makes a trend of noise."""
    low, high = axes.dataLim.intervaly
    log_if_wide(axes)
    if axes.get_yscale() == "linear":
        room = max(0.06 * (high - low), (0.2 * high - (high - low)) / 2)
        axes.set_ylim(low - room, high + room)


def _over_lengths(
    report: Report, task: str, lines: Sequence[Line], y: str, prepare: Callable[[Axes], None]
) -> Panel:
    """Return a panel with the lengths of a task on a logarithmic axis."""
    lengths = lengths_of(report.rows[report.rows.task == task])

    def scale(axes: Axes) -> None:
        prepare(axes)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(lengths), [f"{factor_label(f)}\n{n}" for n, f in lengths.items()])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(lengths) / 1.2, max(lengths) * 1.2)

    within = min(lengths) <= report.trained <= max(lengths)
    mark = (float(report.trained), "training length") if within else None
    x = f"sequence length (multiple of {report.unit}; tokens)"
    return Panel("", lines, x, y, scale, mark)


def apart(lines: Sequence[Line]) -> list[Line]:
    """Shift lines slightly along a logarithmic axis, so that their intervals stay apart."""
    middle = (len(lines) - 1) / 2
    return [
        replace(line, x=[x * 2 ** (_DODGE * (index - middle)) for x in line.x])
        for index, line in enumerate(lines)
    ]


def training(report: Report) -> Iterator[Plot]:
    """Draw the training loss if a run has a curve."""
    runs, drop, styles = [run for run in report.runs if run.curve], report.drop, _styles(report)
    if not runs:
        return
    caption = (
        "Training loss over training steps for each run. Thick: centred mean over 1/40 of the "
        "logged points; thin: as logged. It weighs needle statements and text as the configuration "
        "says, so it is not comparable with the held-out text loss."
    )

    def prepare(axes: Axes) -> None:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    mark = (float(drop["step"]), f"encoding dropped at step {drop['step']}") if drop else None
    lines = [_smoothed(run, drop, styles[run.name]) for run in runs]
    panel = Panel("", lines, "training step", "training loss (nats/token)", prepare, mark)
    yield Plot("training", draw([panel], height=2.8), caption)


def _smoothed(run: RunSummary, drop: dict[str, Any] | None, style: int) -> Line:
    """Return the centred mean of a run's loss over its neighbours, fewer at the ends."""
    losses = pd.Series(dict(run.curve), dtype=float)
    window = 2 * (len(losses) // _SMOOTHING // 2) + 1
    # Smooth each side of the drop separately: a mean across it would blur the jump.
    sides = losses.groupby(losses.index > (drop["step"] if drop else math.inf))
    smooth = sides.transform(lambda side: side.rolling(window, 1, center=True).mean())
    return Line(run.name, style, losses.index.tolist(), smooth.tolist(), raw=losses.tolist())


def benchmarks(report: Report) -> Iterator[Plot]:
    """Draw the scores that runs reached in training: of the first one each and their mean, of
    others the mean."""
    lines: list[Line] = []
    dropped = None
    for run in report.runs:
        scores = 100 * pd.DataFrame([m["scores"] for m in run.milestones], dtype=float)
        rising = [k for k in scores if not k.startswith(f"{PERPLEXITY}/")]
        scores = scores[rising].dropna(axis="columns", how="all")
        if scores.empty:
            continue
        if len(scores.columns) > 1:
            scores.insert(0, MEAN, scores.mean(axis=1))
        tokens = [milestone["tokens"] for milestone in run.milestones]
        if lines:
            scores = scores.iloc[:, :1]
        else:
            dropped = next((m["tokens"] for m in run.milestones if m["dropped"]), None)
        for key, y in scores.items():
            lines.append(Line(f"{run.name}, {key}", len(lines), tokens, y.tolist()))
    if not lines:
        return

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter())

    mark = (float(dropped), "encoding dropped") if dropped else None
    panel = Panel("", lines, "training tokens", "score (%)", prepare, mark)
    yield Plot(
        "benchmarks",
        draw([panel], height=2.8),
        "What models score while they train: the run in every task that has scores, and the mean "
        "over these; its controls in the mean. Where the encoding was dropped the run was measured "
        "on both sides.",
    )
