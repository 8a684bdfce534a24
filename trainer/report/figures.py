"""The figures of a report: success and perplexity by length, success by depth, and training."""

import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from trainer.evaluation.results import MEAN, PERPLEXITY, STATEMENTS
from trainer.plotting import (
    ColourScale,
    Grid,
    Line,
    Panel,
    Plot,
    draw,
    heat_maps,
    log_if_wide,
    style_numbers,
)
from trainer.report.answer import answer_of
from trainer.report.report import Report, RowKey, RunSummary
from trainer.report.tables import factor_label, perplexity

_MOST_LINES = 8  # in one panel; more become a panel for each model
_MOST_DEPTHS = 11  # more are rounded to tenths
_SMOOTHING = 40  # a curve is averaged over this fraction of its points
_LENGTHS = "sequence length (tokens)"
_BANDS = "Bands: 95% intervals, over texts, or over seeds where a line is the mean of several."
_DROPE = "Extending the Context of Pretrained LLMs by Dropping Their Positional Embeddings"


def plots(report: Report) -> Iterator[Plot]:
    """Draw what the report has numbers for, the most important figure first."""
    yield from _answer(report)
    for task in [*report.scored, PERPLEXITY]:
        if report.rows.length[report.rows.task == task].nunique() > 1:
            yield _by_length(report, task)
    yield from training(report)
    yield from benchmarks(report)
    for task in report.scored:
        yield from _by_depth(report, task)


def _rows(report: Report) -> list[RowKey]:
    return list(dict.fromkeys(zip(report.rows.model, report.rows.method, strict=True)))


def _styles(report: Report) -> dict[str, int]:
    names = (*map(report.row_name, _rows(report)), *(run.name for run in report.runs))
    return style_numbers(names)


def _answer(report: Report) -> Iterator[Plot]:
    """Draw the rows of the page's answer among all others, which are grey."""
    answer = answer_of(report)
    if answer is None or len(report.curve(answer.subject, answer.task)) < 2:
        return
    rows = [row for row in _rows(report) if len(report.curve(row, answer.task))]
    panel = _panel(report, answer.task, rows)
    shown = {report.row_name(row) for row in answer.rows}
    lines = [replace(line, is_context=line.label not in shown) for line in panel.lines]
    lines.sort(key=lambda line: line.is_context)
    grey = f" Grey: the other {len(lines) - len(shown)}." if len(lines) > len(shown) else ""
    bands = "" if answer.task == PERPLEXITY else f" {_BANDS}"
    guesses = panel.horizontal[-1:]  # among the values in the text
    dotted = "".join(f" Dotted: guesses, {name}." for _, name in guesses)
    yield Plot(
        "answer",
        draw(
            [replace(panel, lines=lines, horizontal=guesses)],
            Grid(height=2.1, x=_LENGTHS, narrow=True),
            trained=report.trained,
            label_ends=True,
        ),
        f"{report.tasks[answer.task]} over the length of the sequence.{grey} Dashed: the training "
        f"length, {report.trained:,} tokens.{dotted}{bands}",
    )


def _by_length(report: Report, task: str) -> Plot:
    """Draw the scores of a task, or perplexities, by length, in a panel for each model if there are
    many rows."""
    rows = [row for row in _rows(report) if len(report.curve(row, task))]
    panels = [_panel(report, task, rows)]
    if len(rows) > _MOST_LINES:  # a method looks alike in all panels
        names = {method: report.row_name(("RoPE", method)) for method in report.methods}
        styles = style_numbers(names.values())
        panels = []
        for model in dict.fromkeys(model for model, _ in rows):
            panel = _panel(report, task, [row for row in rows if row[0] == model])
            methods = [method for name, method in rows if name == model]
            lines = [
                replace(line, label=report.methods[method], style=styles[names[method]])
                for line, method in zip(panel.lines, methods, strict=True)
            ]
            panels.append(replace(panel, title=model, lines=lines))
    name = f"success_{_file_name(task)}"
    figure = "Figure 1 and Table 1"
    caption = f"{report.tasks[task]}, mean score in %. {_BANDS}"
    if task == PERPLEXITY:
        name = PERPLEXITY
        figure = "Figure 5"
        caption = (
            "Perplexity of held-out text, the lower the better. A low one does not show that "
            "distant text is read: see the scores."
        )
    return Plot(
        name,
        draw(panels, Grid(2, 2.6, x=_LENGTHS), trained=report.trained),
        f"{caption} After {figure} of “{_DROPE}”.",
    )


def _panel(report: Report, task: str, rows: Sequence[RowKey]) -> Panel:
    """Return the scores of rows in % with their intervals and chance, or their perplexities."""
    styles = _styles(report)
    lines = []
    for row in rows:
        name = report.row_name(row)
        curve = report.curve(row, task)
        lengths = curve.length.tolist()
        if task == PERPLEXITY:  # no intervals: windows differ more than models do on each of them
            perplexities = curve.value.map(perplexity).tolist()
            lines.append(Line(name, styles[name], lengths, perplexities))
        else:
            y, low, high = ((100 * curve[key]).tolist() for key in ("value", "low", "high"))
            lines.append(Line(name, styles[name], lengths, y, low, high))
    if task == PERPLEXITY:
        return Panel("", lines, y="perplexity", prepare=_perplexity_axis)
    chances = report.chances if task == STATEMENTS else {}
    levels = tuple((100 * rate, f"{name} ({100 * rate:.1f}%)") for name, rate in chances.items())

    def prepare(axes: Axes) -> None:
        top = max([axes.dataLim.intervaly[1], *(level for level, _ in levels)])
        if top < 50:  # low scores would be flat beside 100%
            axes.set_ylim(-0.04 * top, 1.06 * top)
            return
        axes.set_ylim(-4, 106)
        axes.set_yticks(range(0, 101, 25))

    return Panel("", lines, y="success (%)", prepare=prepare, horizontal=levels)


def _perplexity_axis(axes: Axes) -> None:
    log_if_wide(axes)
    low, high = axes.dataLim.intervaly
    if axes.get_yscale() == "linear" and math.isfinite(high):  # a narrower one makes noise a trend
        axes.set_ylim(min(low, 0.8 * high) - 0.02 * high, 1.02 * high)


def _by_depth(report: Report, task: str) -> Iterator[Plot]:
    """Draw the scores of a task by depth and length, a map for each row, if trials have depths."""
    trials = report.trials[(report.trials.task == task) & report.trials.depth.notna()]
    if trials.empty:
        return
    if trials.depth.nunique() > _MOST_DEPTHS:
        trials = trials.assign(depth=trials.depth.round(1))
    means = 100 * trials.pivot_table("value", ["model", "method", "depth"], "length")
    depths = sorted(trials.depth.unique())
    lengths = trials.drop_duplicates("length").sort_values("length")
    maps = {}
    for row in _rows(report):
        if row in means.index.droplevel("depth"):
            of_row = means.loc[row].reindex(depths, columns=lengths.length)
            maps[textwrap.fill(report.row_name(row), 24)] = of_row.to_numpy()
    x = f"sequence length (multiple of {report.training_length:,} tokens)"
    grid = Grid(4, 2.0, x=x, y="depth (% of the text)", share=True)
    of_columns = [factor_label(factor) for factor in lengths.factor]
    of_rows = [f"{100 * depth:.0f}" for depth in depths]
    yield Plot(
        f"depth_{_file_name(task)}",
        heat_maps(maps, ColourScale("success (%)", 0, 100), grid, names=(of_columns, of_rows)),
        f"Mean score in %, over trials whose needle lies at that depth (0: beginning of the text, "
        f"100: its end, where the question is) at that length: {report.tasks[task]}. With several "
        "needles, the depth of the first. After G. Kamradt’s needle in a haystack (2023).",
    )


def _file_name(task: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", task)


def training(report: Report) -> Iterator[Plot]:
    """Draw the training loss if a run has a curve."""
    runs = [run for run in report.runs if run.curve]
    if not runs:
        return
    styles = _styles(report)

    def prepare(axes: Axes) -> None:
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    mark = None
    drop_step = math.inf
    if report.drop:
        drop_step = float(report.drop["step"])
        mark = drop_step, f"encoding dropped after step {drop_step:,.0f} of {runs[0].steps:,}"
    lines = [_smoothed(run, drop_step, styles[run.name]) for run in runs]
    panel = Panel("", lines, "training step", "training loss (nats/token)", prepare, mark)
    yield Plot(
        "training",
        draw([panel], Grid(height=2.8)),
        "Training loss over training steps for each run. Thick: centred mean over 1/40 of the "
        "logged points; thin: as logged. It weighs needle statements and text as the configuration "
        "says, so it is not comparable with the held-out text loss.",
    )


def _smoothed(run: RunSummary, drop_step: float, style: int) -> Line:
    """Return the centred mean of a run's loss over its neighbours, fewer at the ends."""
    losses = pd.Series(dict(run.curve), dtype=float)
    window = 2 * (len(losses) // _SMOOTHING // 2) + 1
    # Smooth each side of the drop separately: a mean across it would blur the jump.
    sides = losses.groupby(losses.index > drop_step)
    smooth = sides.transform(lambda side: side.rolling(window, 1, center=True).mean())
    return Line(run.name, style, losses.index.tolist(), smooth.tolist(), raw=losses.tolist())


def benchmarks(report: Report) -> Iterator[Plot]:
    """Draw the scores that runs reached in training, in every task and in the mean."""
    by_run = {}
    styles = _styles(report)
    for run in report.runs:
        tokens = [milestone["tokens"] for milestone in run.milestones]
        scores = 100 * pd.DataFrame([m["scores"] for m in run.milestones], tokens, dtype=float)
        scores = scores.loc[:, ~(scores > 100).any()]  # without perplexities, which are above 1
        if len(scores.columns) > 1:
            scores.insert(0, MEAN, scores.mean(axis=1))
        by_run[run.name] = scores.dropna(axis="columns", how="all")
    keys = list(dict.fromkeys(chain.from_iterable(by_run.values())))
    if not keys:
        return

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter())

    after = [m["tokens"] for m in report.runs[0].milestones if m["dropped"]]
    mark = None
    if after:
        mark = float(after[0]), "encoding dropped"
    panels = []
    for key in keys:
        lines = [
            Line(name, styles[name], scores.index.tolist(), scores[key].tolist())
            for name, scores in by_run.items()
            if key in scores
        ]
        panels.append(Panel(key, lines, prepare=prepare, vertical=mark))
    yield Plot(
        "benchmarks",
        draw(panels, Grid(3, 2.3, x="training tokens", y="score (%)")),
        "What models score while they train, in every task that has scores and in the mean over "
        "these. Where the encoding was dropped the run was measured on both sides.",
    )
