"""The figures of a report, each as SVG and PNG with its numbers as CSV beside it, and what is said
below it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from trainer.report.drawn import Drawn, Plan
from trainer.report.frames import lengths_frame, perplexity_axis, positions_frame, success
from trainer.report.heatmap import Depths, draw_heatmaps
from trainer.report.outcomes import AS_IS, Outcomes, Row
from trainer.report.panels import draw_rows, is_panelled, pair
from trainer.report.plotting import Series, paper_style
from trainer.report.reach import reach_figures
from trainer.report.recovery import recovery_figure
from trainer.report.results import PERPLEXITY, STATEMENTS, Report
from trainer.report.table import perplexity
from trainer.report.training_curves import training_figure
from trainer.report.words import factor_label, percent

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


def _plans(outcomes: Outcomes) -> Iterator[Plan]:
    if len(outcomes.lengths(outcomes.averaged)) > 1:
        titles = ", ".join(map(outcomes.task, outcomes.averaged))
        yield _success(outcomes, "mean", f"the mean over {titles}", outcomes.averaged)
    yield from _contrast(outcomes)
    for task in (task for task in outcomes.scored if len(outcomes.lengths([task])) > 1):
        yield _success(outcomes, task, outcomes.task(task), [task])
    yield from training_figure(outcomes.report, outcomes.looks)
    yield from _by_position(outcomes)
    yield from reach_figures(outcomes.report, outcomes.looks)
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
    return Series(name, outcomes.looks[name], [n for n, _ in found], y, low, high)


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
        Series(name, outcomes.looks[name], list(curves[row]), list(curves[row].values()))
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
