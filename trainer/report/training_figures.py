"""Figures of the course of training: loss, reach at several lengths, and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from trainer.config import PERPLEXITY
from trainer.evaluation.results import MEAN, Arm, Drop, Report, is_known
from trainer.plotting.lines import Frame, Series, draw
from trainer.report.files import Plot

_SMOOTHING = 40  # a curve is averaged over this fraction of its points
FALLING = ("perplexity", "bits_per_byte")
"""Suffixes of metrics where lower is better."""


def training_figure(report: Report, styles: Mapping[str, int]) -> Iterator[Plot]:
    """Draw ``training`` if an arm has a curve; ``styles``: style numbers by arm."""
    arms, drop = [arm for arm in report.arms if arm.curve], report.drop
    if not arms:
        return
    caption = "Thick: centred mean over 1/40 of the logged points; thin: as logged."
    if drop:
        caption += " The vertical line is the step at which the positional encoding was dropped."
    if report.config.get("data", {}).get("needles", {}).get("share", 1) > 0:
        caption += (
            " The training loss weighs needle statements and text as the configuration says, so it "
            "is not comparable with the held-out text loss."
        )
    frame = Frame("training step", "training loss (nats/token)", _steps, _drop_mark(drop))
    yield Plot(
        "training",
        "Training loss",
        f"Training loss over training steps for each arm. {caption}",
        "Line chart of the training loss of each arm over training steps.",
        draw([_smoothed_line(arm, drop, styles[arm.name]) for arm in arms], frame),
    )


def _drop_mark(drop: Drop | None) -> tuple[float, str] | None:
    return None if drop is None else (float(drop.step), f"encoding dropped at step {drop.step}")


def _steps(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the centred mean over up to ``window`` neighbours, fewer at the ends, without NaN."""
    half = window // 2
    padded = np.asarray(values, dtype=float)
    return [
        float(np.mean(near[np.isfinite(near)])) if np.isfinite(near).any() else math.nan
        for near in (padded[max(0, i - half) : i + half + 1] for i in range(len(padded)))
    ]


def _smoothed_line(arm: Arm, drop: Drop | None, style: int) -> Series:
    steps = [step for step, _ in arm.curve]
    losses = [math.nan if loss is None else loss for _, loss in arm.curve]
    # Smooth each side of the drop separately: a mean across it would blur the jump.
    cut = sum(step <= drop.step for step in steps) if drop else len(steps)
    window = max(1, len(steps) // _SMOOTHING)
    smooth = smoothed(losses[:cut], window) + smoothed(losses[cut:], window)
    return Series(arm.name, style, steps, smooth, raw=losses, marked=False)


def milestones_figure(report: Report) -> Iterator[Plot]:
    """Draw ``benchmarks`` in percent, or perplexities if nothing else was measured, if an arm was
    measured in training."""
    arms = {name: history for name, history in report.milestones.items() if history}
    if not arms:
        return
    unit = 100 if any(_scored(history[-1].scores) for history in arms.values()) else 1
    series: list[Series] = []
    for number, (name, history) in enumerate(arms.items()):
        last = history[-1].scores
        shown = list(_scored(last) if unit == 100 else last)
        if unit == 100 and len(shown) > 1:
            shown = [MEAN, *shown] if number == 0 else [MEAN]
        for key in shown:
            values = [(_mean(m.scores) if key == MEAN else m.scores.get(key)) for m in history]
            label = f"{name}, {key}" if len(arms) > 1 else key
            y = [math.nan if value is None else unit * value for value in values]
            tokens = [milestone.tokens for milestone in history]
            series.append(Series(label, len(series), tokens, y, marked=False))

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter())

    run = next(iter(arms.values()))
    dropped = next((milestone.tokens for milestone in run if milestone.dropped), None)
    mark = None if dropped is None else (float(dropped), "encoding dropped")
    frame = Frame("training tokens", "score (%)" if unit == 100 else "perplexity", prepare, mark)
    yield Plot(
        "benchmarks",
        "Benchmarks while training",
        "What models score while they train: the run in every task that has scores, and the mean "
        "over these; its controls in the mean; or perplexities alone. Where the encoding was "
        "dropped the run was measured on both sides.",
        "Line chart of scores over training tokens, with a line for each task.",
        draw(series, frame),
    )


def _scored(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Return the known scores where higher is better."""
    return {
        key: value
        for key, value in scores.items()
        if is_known(value) and not (key.startswith(f"{PERPLEXITY}/") or key.endswith(FALLING))
    }


def _mean(scores: Mapping[str, float | None]) -> float | None:
    known = _scored(scores)
    return sum(known.values()) / len(known) if known else None
