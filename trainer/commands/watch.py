"""``python -m trainer watch runs/NAME``: how is a run getting on?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command
from trainer.common.words import counted, duration

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from trainer.commands.hydra.composing import Composed
    from trainer.workflows.requests import WatchRequest
    from trainer.workflows.watch import Line, WatchedArm, WatchedRun

BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a braille character, by row and column."""
NAME, VALUE, AXIS = 20, 8, 6
"""Columns of the name, the last value and the axis beside a curve."""


def read(composed: Composed) -> WatchRequest:
    """Return the checked request; words without a key come after the directories of ``runs=``."""
    from trainer.runs.parsing import parse
    from trainer.workflows.requests import WatchRequest

    return parse(WatchRequest, composed.with_verbatim("runs"), composed.problems)


def execute(request: WatchRequest) -> None:
    """Show the runs; on a terminal until all are finished or stopped, or Ctrl-C."""
    from rich.live import Live

    from trainer.commands.console import report_console
    from trainer.workflows.watch import watch

    out = report_console()
    runs = watch(request.runs)
    if request.once or not out.is_terminal:
        out.print(view(runs, out.width))
        return
    with suppress(KeyboardInterrupt), Live(console=out, auto_refresh=False) as live:
        while True:
            began = time.perf_counter()
            live.update(view(runs, out.width), refresh=True)
            if not any(_may_continue(run) for run in runs):
                break
            # Long files take long to read: do not compete with the run for the processor.
            time.sleep(max(request.every, 10 * (time.perf_counter() - began)))
            runs = watch(request.runs)


def _may_continue(run: WatchedRun) -> bool:
    """Whether a run is at work or has yet to start; no other run changes."""
    has_begun = run.sign is not None or any(arm.beat is not None for arm in run.arms)
    return run.is_running or not (run.is_finished or run.failed or has_begun)


def view(runs: Sequence[WatchedRun], width: int) -> RenderableType:
    """Return a run with its curves, or the table of several runs."""
    from rich.console import Group
    from rich.text import Text

    if len(runs) != 1:
        return Group(_table_of_runs(runs), *(Text(line) for run in runs for line in _problems(run)))
    (run,) = runs
    parts: list[RenderableType] = [Text(_safe(f"{run.place}: {_state(run)}"), style="bold")]
    parts += [Text(line, style="bold red") for line in _problems(run)]
    if run.current is not None and run.current.phases:
        parts += [Text(_safe(line)) for line in _course(run, run.current)]
        parts.append(_curves(run.current, width))
    if len(run.arms) > 1:
        parts.append(_table_of_arms(run.arms))
    if run.report is not None:
        parts.append(Text(_safe(f"Report: {run.report}")))
    return Group(*parts)


def _state(run: WatchedRun) -> str:
    from trainer.workflows.watch import seconds_since_beat

    if run.is_finished:
        return "finished"
    since = seconds_since_beat(run)
    logged = "" if since is None else f"; a step was logged {duration(since)} ago"
    if run.sign is not None:
        if run.is_running:
            doing = "training" if any(not arm.is_trained for arm in run.arms) else "evaluating"
            cells = f", {counted(run.cells, 'cell')} so far" if doing == "evaluating" else ""
            return f"{doing}{cells} ({run.sign.holder}{logged})"
        return (
            f"seems dead: {run.sign.holder} gave its last sign of life "
            f"{duration(run.sign.age)} ago; the same command resumes the run"
        )
    if run.failed:
        return "failed"
    if since is None:
        return "not started"
    return f"stopped{logged}; the same command resumes the run"


def _problems(run: WatchedRun) -> list[str]:
    failed = [f"{run.place.name}: {run.failed}"] if run.failed else []
    return [_safe(line) for line in (*failed, *(arm.problem for arm in run.arms)) if line]


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
    lines = [", ".join(parts)]
    if (drop := _drop(arm)) is not None:
        lines.append(drop)
    return lines


def _drop(arm: WatchedArm) -> str | None:
    from trainer.workflows.watch import recovery

    if (drop := recovery(arm)) is None:
        return None
    losses = [drop.before, drop.after, *([] if drop.end is None else [drop.end])]
    text = f"Drop: held-out loss {' → '.join(f'{loss:.3f}' for loss in losses)} nats per token, "
    if drop.costs_nothing:
        return f"{text}no rise to win back"
    if drop.share is None:
        return f"{text}the share won back shows at the end of recalibration"
    return f"{text}{_share(drop.share, drop.is_final)} of the rise won back"


def _share(share: float, is_final: bool) -> str:
    return f"{'' if is_final else 'about '}{share:.0%}"


def _curves(arm: WatchedArm, width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    from trainer.workflows.watch import lines

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
        made.add_row(*map(Text, (_safe(line.metric), last, "\n".join(axis), "\n".join(drawn))))
    return made


def curve(line: Line, steps: int, marks: Sequence[int], width: int) -> list[str]:
    """Draw a line as rows of braille characters over steps 0 to ``steps``.

    Values of one column are averaged, and hold until the next one. ``marks``: steps with a dotted
    vertical line.
    """
    import numpy as np

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
    from rich.markup import escape

    made = _table("run", "steps")
    for arm in arms:
        steps = f"{arm.step:,} of {arm.steps:,}" if arm.phases else "waiting"
        made.add_row(escape(_safe(arm.name)), steps, *_cells(arm))
    return made


def _table_of_runs(runs: Sequence[WatchedRun]) -> Table:
    from rich.markup import escape

    made = _table("run", "state")
    for run in runs:
        main, current = (run.arms[0], run.current) if run.arms else (None, None)
        state = _short_state(run)
        if current is not None and not run.is_finished and current.rows:
            state += f", {current.name} {current.step:,}/{current.steps:,}"
        made.add_row(
            escape(_safe(run.place.name)), escape(_safe(state)), *(_cells(main) if main else ())
        )
    return made


def _short_state(run: WatchedRun) -> str:
    return _state(run).partition(":")[0].partition(" (")[0].partition(";")[0]


def _table(*heads: str) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in heads:
        made.add_column(head, overflow="fold")
    for head in ("loss", "retrieval, %", "won back"):
        made.add_column(head, justify="right")
    return made


def _cells(arm: WatchedArm) -> tuple[str, str, str]:
    from trainer.workflows.watch import recovery, retrievals

    loss, drop = arm.last("loss"), recovery(arm)
    retrieved = "  ".join(f"{length} {100 * share:3.0f}" for length, share in retrievals(arm))
    won = None if drop is None or drop.share is None else _share(drop.share, drop.is_final)
    return "" if loss is None else f"{loss:.3f}", retrieved, won or ""


def _safe(text: str) -> str:
    from trainer.commands.console import CONTROLS

    return text.translate(CONTROLS)


HELP = """
python -m trainer watch RUN [RUN ...] [once=true]

Shows how a run is getting on: loss, learning rate and retrieval by length as curves over its steps,
the share of the drop's rise in loss that is won back, step, phase, tokens per second, time left,
and whether the process that trains it seems dead. RUN is a run directory, that of a control, that
of a sweep (multirun/NAME), or a directory of runs (runs). It reads files and writes none, so it may
run beside the training, on any machine that sees the directory. On a terminal it refreshes until
all runs are finished or stopped, or Ctrl-C.
"""
COMMAND = Command("watch", HELP, read, execute, single="name all runs in one command.", bare=True)
