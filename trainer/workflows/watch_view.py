"""The view of watched runs on a terminal: state, curves and tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trainer.common.words import counted, duration, without_controls
from trainer.workflows.watch import (
    Line,
    WatchedArm,
    WatchedRun,
    lines,
    recovery,
    retrievals,
    seconds_since_beat,
)

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a braille character, by row and column."""
NAME, VALUE, AXIS = 20, 8, 6
"""Columns of the name, the last value and the axis beside a curve."""
RESUMES = "; the same command resumes the run"


def view(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return a run with its curves, or the table of several runs."""
    if len(runs) != 1:
        return Group(_table_of_runs(runs), *(Text(line) for run in runs for line in _problems(run)))
    (run,) = runs
    parts: list[RenderableType] = [
        Text(without_controls(f"{run.place}: {_state(run)}"), style="bold")
    ]
    parts += [Text(line, style="bold red") for line in _problems(run)]
    if run.current is not None and run.current.phases:
        parts += [Text(without_controls(line)) for line in _course(run, run.current)]
        parts.append(_curves(run.current, width))
    if len(run.arms) > 1:
        parts.append(_table_of_arms(run.arms))
    if run.report is not None:
        parts.append(Text(without_controls(f"Report: {run.report}")))
    return Group(*parts)


def _state(run: WatchedRun) -> str:
    """Return the state of a run, and what shows it."""
    since = seconds_since_beat(run)
    logged = "" if since is None else f"; a step was logged {duration(since)} ago"
    state = _short_state(run)
    if run.state == "stopped":
        return f"{state}{logged}{RESUMES}"
    if run.is_finished or run.sign is None:
        return state
    if run.is_running:
        return f"{state} ({run.sign.holder}{logged})"
    age = duration(run.sign.age)
    return f"{state}: {run.sign.holder} gave its last sign of life {age} ago{RESUMES}"


def _short_state(run: WatchedRun) -> str:
    cells = f", {counted(run.cells, 'cell')} so far" if run.state == "evaluating" else ""
    return f"{run.state}{cells}"


def _problems(run: WatchedRun) -> list[str]:
    failed = [f"{run.place.name}: {run.failed}"] if run.failed else []
    return [
        without_controls(line) for line in (*failed, *(arm.problem for arm in run.arms)) if line
    ]


def _course(run: WatchedRun, arm: WatchedArm) -> list[str]:
    """Return where an arm is, how fast, and what its drop did, as lines of text."""
    parts = [arm.name, f"step {arm.step:,} of {arm.steps:,} ({arm.step / arm.steps:.0%})"]
    if len(arm.phases) > 1:
        number = arm.phases.index(arm.phase) + 1
        parts.append(f"phase {arm.phase.name} ({number} of {len(arm.phases)})")
    if (rate := arm.last("tokens_per_second")) is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if not run.is_finished and run.seconds_left:
        parts.append(f"{duration(run.seconds_left)} left to train")
    sentences = [", ".join(parts)]
    if (drop := _drop(arm)) is not None:
        sentences.append(drop)
    return sentences


def _drop(arm: WatchedArm) -> str | None:
    if (drop := recovery(arm)) is None:
        return None
    losses = [drop.before, drop.after, *([] if drop.end is None else [drop.end])]
    text = f"Drop: held-out loss {' → '.join(f'{loss:.3f}' for loss in losses)} nats per token, "
    if drop.costs_nothing:
        return f"{text}a rise of at most 1%, nothing to win back"
    if drop.share is None:
        return f"{text}the share won back shows at the end of recalibration"
    return f"{text}{_share(drop.share, drop.is_final)} of the rise won back"


def _share(share: float, is_final: bool) -> str:
    return f"{'' if is_final else 'about '}{share:.0%}"


def _curves(arm: WatchedArm, width: int) -> Table:
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(width=NAME, no_wrap=True)
    made.add_column(width=VALUE, justify="right", no_wrap=True)
    made.add_column(width=AXIS, justify="right", no_wrap=True)
    made.add_column(no_wrap=True, style="cyan")
    changes = [phase.start for phase in arm.phases if phase.change]
    for line in lines(arm):
        low, high = (f"{limit:.3g}" for limit in line.limits)
        axis = [high, *[""] * (line.rows - 2), low] if line.rows > 1 else [""]
        drawn = curve(line, arm.steps, changes, max(width - NAME - VALUE - AXIS - 3, 10))
        last = f"{line.points[-1][1]:.4g}"
        made.add_row(
            *map(Text, (without_controls(line.metric), last, "\n".join(axis), "\n".join(drawn)))
        )
    return made


def curve(line: Line, steps: int, marks: Sequence[int], width: int) -> list[str]:
    """Draw a line as rows of braille characters over steps 0 to ``steps``.

    Values of one column are averaged, and hold until the next one. ``marks``: steps with a dotted
    vertical line.
    """
    columns, height = 2 * width, 4 * line.rows
    low, high = line.limits
    steps_of_points, values = (
        np.array(part, dtype=float) for part in zip(*line.points, strict=True)
    )

    def column_of(step: np.ndarray) -> np.ndarray:
        return np.minimum(step / max(steps, 1) * columns, columns - 1).astype(int)

    used, place = np.unique(column_of(steps_of_points), return_inverse=True)
    means = np.bincount(place, values) / np.bincount(place)
    xs = np.arange(used[0], used[-1] + 1)
    held = means[np.searchsorted(used, xs, side="right") - 1]
    shares = (held - low) / (high - low) if high > low else 0 * held + 0.5
    ys = np.round((1 - shares) * (height - 1)).astype(int)
    cells = [[BRAILLE] * width for _ in range(line.rows)]
    for x in column_of(np.array(marks, dtype=float)):
        xs, ys = np.append(xs, [x] * (height // 2)), np.append(ys, range(0, height, 2))
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    return ["".join(map(chr, row)) for row in cells]


def _table_of_arms(arms: Sequence[WatchedArm]) -> Table:
    made = _table("run", "steps")
    for arm in arms:
        steps = f"{arm.step:,} of {arm.steps:,}" if arm.phases else "waiting"
        made.add_row(escape(without_controls(arm.name)), steps, *_cells(arm))
    return made


def _table_of_runs(runs: Sequence[WatchedRun]) -> Table:
    made = _table("run", "state")
    for run in runs:
        main, current = (run.arms[0], run.current) if run.arms else (None, None)
        state = _short_state(run)
        if current is not None and not run.is_finished and current.rows:
            state += f", {current.name} {current.step:,}/{current.steps:,}"
        made.add_row(
            escape(without_controls(run.place.name)),
            escape(without_controls(state)),
            *(_cells(main) if main else ()),
        )
    return made


def _table(*heads: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        made.add_column(head, overflow="fold")
    for head in ("loss", "retrieval, %", "won back"):
        made.add_column(head, justify="right")
    return made


def _cells(arm: WatchedArm) -> tuple[str, str, str]:
    loss, drop = arm.last("loss"), recovery(arm)
    retrieved = "  ".join(f"{length} {100 * share:3.0f}" for length, share in retrievals(arm))
    won = None if drop is None or drop.share is None else _share(drop.share, drop.is_final)
    return "" if loss is None else f"{loss:.3f}", retrieved, won or ""
