"""The figures of a report, each as SVG and PNG with its numbers as CSV beside it."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from trainer.report.atomic import write_atomically
from trainer.report.plotting import (
    OVERLAY,
    Frame,
    Series,
    draw,
    paper_style,
    save,
    training_length_mark,
)
from trainer.report.reach import reach_figures
from trainer.report.results import Arm, Cell, Drop, LossByPosition, Report
from trainer.report.summary import factor_label, percent

_SMOOTHING = 40  # a curve is averaged over this fraction of its points
_DODGE = 0.022  # octaves between methods at one length, so that their intervals stay apart


def write_figures(report: Report, directory: Path) -> dict[str, Path]:
    """Draw what the report has numbers for and return the SVG files by name.

    ``training``: training loss over steps for each arm. ``retrieval``: retrieval over length for
    each method with 95% intervals. ``loss_by_position``: held-out loss along the longest
    sequences. ``reach``, ``reach_by_position``: what was measured while arms trained. Beside each
    ``<name>.svg`` lie ``<name>.png`` and ``<name>.csv``. Nothing is drawn for a kind of number that
    the report lacks. The files depend on the report alone.
    """
    order = dict.fromkeys((*report.methods, *(arm.name for arm in report.arms)))
    styles = {name: number for number, name in enumerate(order)}
    written: dict[str, Path] = {}
    arms = [arm for arm in report.arms if arm.curve]
    cells = [cell for cell in report.table if cell.retrieval is not None]
    longest = max((item.length for item in report.loss_by_position), default=0)
    positions = [item for item in report.loss_by_position if item.length == longest]
    with paper_style():
        if arms:
            path = directory / "training"
            lines = [_training(arm, report.drop, styles) for arm in arms]
            written["training"] = save(draw(lines, _steps(arms, report.drop)), path)
            rows = ((arm.name, step, loss) for arm in arms for step, loss in arm.curve)
            _write_csv(path, ("arm", "step", "training_loss"), rows)
        if cells:
            path = directory / "retrieval"
            frame = _lengths(report, cells)
            written["retrieval"] = save(draw(_retrieval(cells, styles), frame), path)
            head = ("method", "length", "factor", "retrieval", "low", "high")
            body = ((c.method, c.length, c.factor, c.retrieval, *_interval(c)) for c in cells)
            _write_csv(path, head, body)
        if positions:
            path = directory / "loss_by_position"
            frame = _positions(report.training_length, longest, narrow=len(positions) > OVERLAY)
            figure = draw([_by_position(item, styles) for item in positions], frame)
            written["loss_by_position"] = save(figure, path)
            head = ("method", "length", "from_position", "to_position", "loss")
            _write_csv(path, head, (row for item in positions for row in _buckets(item)))
        for name, drawing in reach_figures(report).items():
            written[name] = save(drawing.figure, directory / name)
            _write_csv(directory / name, drawing.head, drawing.rows)
    return written


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over up to ``window`` neighbours, fewer at the ends; NaN values are skipped."""
    half = window // 2
    padded = np.asarray(values, dtype=float)
    return [
        float(np.mean(near[np.isfinite(near)])) if np.isfinite(near).any() else math.nan
        for near in (padded[max(0, i - half) : i + half + 1] for i in range(len(padded)))
    ]


def _training(arm: Arm, drop: Drop | None, styles: dict[str, int]) -> Series:
    steps = [step for step, _ in arm.curve]
    losses = [math.nan if loss is None else loss for _, loss in arm.curve]
    # Each side of the drop by itself: a mean across it would blur the jump into a slope.
    cut = sum(step <= drop.step for step in steps) if drop else len(steps)
    window = max(1, len(steps) // _SMOOTHING)
    smooth = smoothed(losses[:cut], window) + smoothed(losses[cut:], window)
    number = styles[arm.name]
    return Series(arm.name, number, steps, smooth, raw=losses, marked=False)


def _steps(arms: Sequence[Arm], drop: Drop | None) -> Frame:
    last = max(step for arm in arms for step, _ in arm.curve)

    def prepare(axes: Axes) -> None:
        axes.set_xlim(0, 1.02 * last)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    note = None
    if drop is not None:
        before, after, end = (
            "?" if loss is None else f"{loss:.2f}"
            for loss in (drop.loss_before, drop.loss_after, drop.loss_end)
        )
        losses = f"loss {before} before, {after} after"
        losses += "" if drop.loss_end is None else f", {end} at the end"
        note = (float(drop.step), f"encoding dropped at step {drop.step}\n{losses}")
    return Frame("training step", "training loss (nats/token)", prepare, note)


def _retrieval(cells: Sequence[Cell], styles: dict[str, int]) -> list[Series]:
    methods = list(dict.fromkeys(cell.method for cell in cells))
    spread = _DODGE if len(methods) <= OVERLAY else 0.0
    series = []
    for index, method in enumerate(methods):
        own = sorted((c for c in cells if c.method == method), key=lambda cell: cell.length)
        shift = 2 ** (spread * (index - (len(methods) - 1) / 2))
        rates, lows, highs = (
            [100 * value for value in values]
            for values in zip(*((c.retrieval, *_interval(c)) for c in own), strict=True)
        )
        x = [cell.length * shift for cell in own]
        series.append(Series(method, styles[method], x, rates, lows, highs))
    return series


def _interval(cell: Cell) -> tuple[float | None, float | None]:
    return cell.retrieval_ci or (cell.retrieval, cell.retrieval)


def _lengths(report: Report, cells: Sequence[Cell]) -> Frame:
    factors = dict(sorted((cell.length, cell.factor) for cell in cells))

    def prepare(axes: Axes) -> None:
        axes.set_xscale("log", base=2)
        labels = [f"{factor_label(factor)}\n{length}" for length, factor in factors.items()]
        axes.set_xticks(list(factors), labels)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(min(factors) / 1.15, max(factors) * 1.15)
        axes.set_ylim(-4, 106)
        axes.set_yticks(range(0, 101, 25))

    chances = (("chance", "chance"), ("chance_listed", "any listed value"))
    lines = tuple(
        (100 * report.task[key], f"{text} ({percent(report.task[key])}%)")
        for key, text in chances
        if report.task.get(key) is not None
    )
    return Frame(
        "sequence length (multiple of the training length; tokens)",
        "retrieval (%)",
        prepare,
        training_length_mark(report.training_length, factors),
        lines,
    )


def _by_position(item: LossByPosition, styles: dict[str, int]) -> Series:
    middles = [(a + b) / 2 for a, b in zip(item.edges[:-1], item.edges[1:], strict=True)]
    losses = [math.nan if loss is None else loss for loss in item.losses]
    # Methods that are not in the table, if any, share the last style.
    return Series(item.method, styles.get(item.method, len(styles)), middles, losses)


def _buckets(item: LossByPosition) -> Iterable[tuple[Any, ...]]:
    for start, stop, loss in zip(item.edges[:-1], item.edges[1:], item.losses, strict=True):
        yield item.method, item.length, start, stop, loss


def _positions(training_length: int | None, longest: int, narrow: bool) -> Frame:
    def prepare(axes: Axes) -> None:
        axes.set_xlim(0, longest)
        step = min(training_length or longest, longest)
        while longest / step > (4 if narrow else 8):
            step *= 2
        axes.set_xticks(range(0, longest + 1, step))

    return Frame(
        f"position in sequences of {longest} tokens",
        "held-out loss (nats/token)",
        prepare,
        training_length_mark(training_length, (0, longest)),
    )


def _write_csv(stem: Path, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Numbers in full precision; an empty field is one that was not measured."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    write_atomically(stem.with_suffix(".csv"), text.getvalue())
