"""The training loss of every arm of an experiment over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from trainer.report.drawn import Plan
from trainer.report.plotting import Frame, Series, draw
from trainer.report.results import Arm, Drop, Report

_SMOOTHING = 40  # a curve is averaged over this fraction of its points


def training_figure(report: Report, looks: Mapping[str, int]) -> Iterator[Plan]:
    """``training``, where an arm has a curve; ``looks``: by the arms' names."""
    arms = [arm for arm in report.arms if arm.curve]
    if not arms:
        return
    drop = report.drop
    yield Plan(
        "training",
        "Training loss",
        "Training loss over training steps for each arm. Thick: centred mean over 1/40 of the "
        "logged points, taken on each side of the drop by itself; thin: as logged. The vertical "
        "line is the step at which the positional encoding was dropped. The training loss weighs "
        "needle statements and text as the configuration says, so it is not comparable with the "
        "held-out text loss.",
        "Line chart of the training loss of each arm over training steps.",
        lambda: draw([_line(arm, drop, looks[arm.name]) for arm in arms], _frame(arms, drop)),
        ("arm", "step", "training_loss"),
        [(arm.name, step, loss) for arm in arms for step, loss in arm.curve],
    )


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Centred mean over up to ``window`` neighbours, fewer at the ends; NaN values are skipped."""
    half = window // 2
    padded = np.asarray(values, dtype=float)
    return [
        float(np.mean(near[np.isfinite(near)])) if np.isfinite(near).any() else math.nan
        for near in (padded[max(0, i - half) : i + half + 1] for i in range(len(padded)))
    ]


def _line(arm: Arm, drop: Drop | None, style: int) -> Series:
    steps = [step for step, _ in arm.curve]
    losses = [math.nan if loss is None else loss for _, loss in arm.curve]
    # Each side of the drop by itself: a mean across it would blur the jump into a slope.
    cut = sum(step <= drop.step for step in steps) if drop else len(steps)
    window = max(1, len(steps) // _SMOOTHING)
    smooth = smoothed(losses[:cut], window) + smoothed(losses[cut:], window)
    return Series(arm.name, style, steps, smooth, raw=losses, marked=False)


def _frame(arms: Sequence[Arm], drop: Drop | None) -> Frame:
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
