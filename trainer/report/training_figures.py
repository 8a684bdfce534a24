"""Figures of the course of training: loss, reach at several lengths, and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from trainer.common.words import factor_label
from trainer.evaluation.results import (
    PERPLEXITY,
    Arm,
    Drop,
    Milestone,
    Reach,
    Reaches,
    Report,
    is_known,
)
from trainer.plotting.lines import Frame, Series, draw
from trainer.plotting.style import ON_BRIGHT, blank, paper_style
from trainer.report.files import Plot

_SMOOTHING = 40  # a curve is averaged over this fraction of its points
RECOVERED = 0.95
"""Share of the score before the drop that counts as recovered (DroPE, Sec. 5.1)."""
MEAN = "mean"
FALLING = ("perplexity", "bits_per_byte")
"""Suffixes of metrics where lower is better."""
Milestones = Mapping[str, tuple[Milestone, ...]]


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
    yield Plot(
        "training",
        "Training loss",
        f"Training loss over training steps for each arm. {caption}",
        "Line chart of the training loss of each arm over training steps.",
        draw(
            [_smoothed_line(arm, drop, styles[arm.name]) for arm in arms],
            _training_frame(arms, drop),
        ),
    )


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


def _training_frame(arms: Sequence[Arm], drop: Drop | None) -> Frame:
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
        losses = f"loss {before} before, {after} after, {end} at the end"
        note = (float(drop.step), f"encoding dropped at step {drop.step}\n{losses}")
    return Frame("training step", "training loss (nats/token)", prepare, note)


def reach_figures(report: Report, styles: Mapping[str, int]) -> Iterator[Plot]:
    """Draw ``reach`` and ``reach_by_position`` if an arm was measured in training.

    ``styles``: style numbers by arm; shorter lengths are paler.
    """
    arms = {name: history for name, history in report.reach.items() if history}
    if not arms:
        return
    yield Plot(
        "reach",
        "Reach while training",
        "How far models reach while they train, on validation text: the run at every length, its "
        "controls at the longest. Where the encoding was dropped the run was measured on both "
        "sides.",
        "Line chart over training steps of retrieval, or of loss where that was not measured, with "
        "a line for each length.",
        _reach_lines(report, arms, styles),
    )
    yield Plot(
        "reach_by_position",
        "Loss by position while training",
        "Held-out loss of the run by position in its longest validation sequences, less the mean "
        "over the positions within the training length, which the dotted line marks. A column is a "
        "measurement; steps are not to scale. The dashed line is the drop.",
        "Heat map of the excess loss over measurements and positions.",
        _reach_map(next(iter(arms.values()))),
    )


def _reach_lines(report: Report, arms: Reaches, styles: Mapping[str, int]) -> Figure:
    retrieval = any(reach.retrieval for history in arms.values() for reach in history)
    series = []
    for number, (name, history) in enumerate(arms.items()):
        lengths = history[-1].lengths
        shown = lengths if number == 0 else lengths[-1:]
        for rank, length in enumerate(shown, 1):
            label = f"{name}, {factor_label(length / history[-1].training_length)}"
            y = [_reach_value(reach, length, retrieval) for reach in history]
            steps = [reach.step for reach in history]
            strength = rank / len(shown)
            series.append(Series(label, styles[name], steps, y, marked=False, opacity=strength))

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if retrieval:
            axes.set_ylim(-4, 106)
            axes.set_yticks(range(0, 101, 25))

    drop = report.drop
    note = (float(drop.step), f"encoding dropped at step {drop.step}") if drop else None
    label = "retrieval (%)" if retrieval else "held-out loss (nats/token)"
    return draw(series, Frame("training step", label, prepare, note))


def _reach_value(reach: Reach, length: int, retrieval: bool) -> float:
    """Return the value of one measurement at a length, NaN if it is missing."""
    values = [100 * rate for rate in reach.retrieval] if retrieval else reach.loss
    value = dict(zip(reach.lengths, values, strict=False)).get(length)
    return math.nan if value is None else value


def _reach_map(history: tuple[Reach, ...]) -> Figure:
    # A resumed run may have other lengths: keep measurements with the same axis as the last.
    history = tuple(reach for reach in history if reach.edges == history[-1].edges)
    edges, seen = history[-1].edges, history[-1].training_length
    losses = np.array([reach.losses for reach in history], dtype=float).T
    excess = losses - losses[[edge <= seen for edge in edges[1:]]].mean(axis=0)
    with paper_style():
        figure = blank(2.6)
        axes = figure.add_subplot()
        columns = np.arange(len(history) + 1)
        mesh = axes.pcolormesh(columns, edges, excess, cmap="RdBu_r", norm=CenteredNorm())
        figure.colorbar(mesh, label="excess loss (nats/token)")
        every = math.ceil(len(history) / 10)
        axes.set_xticks(columns[:-1:every] + 0.5, [str(reach.step) for reach in history[::every]])
        axes.set_yticks([edge for edge in edges if edge % seen == 0])
        axes.axhline(seen, color=ON_BRIGHT, linewidth=0.8, linestyle=":")
        for column in columns[1:-1]:
            if history[column].dropped and not history[column - 1].dropped:
                axes.axvline(column, color=ON_BRIGHT, linewidth=0.8, linestyle="--")
        axes.grid(visible=False)
        axes.set_xlabel("training step of the measurement")
        axes.set_ylabel("position (tokens)")
    return figure


def recovery_figure(report: Report) -> Iterator[Plot]:
    """Draw ``benchmarks`` if an arm was measured in training."""
    arms = {name: history for name, history in report.milestones.items() if history}
    if not arms:
        return
    yield Plot(
        "benchmarks",
        "Benchmarks while training",
        "What models score while they train: the run in every task that has scores, and the mean "
        "over these; its controls in the mean; or perplexities alone. Where the encoding was "
        "dropped the run was measured on both sides.",
        "Line chart of scores over training tokens, with a line for each task.",
        _score_lines(arms),
    )


def recoveries(arms: Milestones) -> list[str]:
    """Return for each arm with a drop after how many tokens each score was recovered."""
    notes = []
    for name, history in arms.items():
        before = [milestone for milestone in history if not milestone.dropped]
        after = [milestone for milestone in history if milestone.dropped]
        if not before or not after:
            continue
        last, told = before[-1], []
        for key in ([MEAN] if len(scored(last)) > 1 else []) + list(last.scores):
            reference = value_of(last, key)
            if reference is None or reference <= 0:
                continue
            back = next((m for m in after if _is_back(value_of(m, key), reference, key)), None)
            when = "not within the run" if back is None else f"{back.tokens - last.tokens:,} tokens"
            told.append(f"{key} {when}")
        if told:
            notes.append(f"{name}: {RECOVERED:.0%} recovered after the drop: {', '.join(told)}.")
    return notes


def _is_back(value: float | None, reference: float, key: str) -> bool:
    if value is None:
        return False
    return value * RECOVERED <= reference if _falls(key) else value >= RECOVERED * reference


def _falls(key: str) -> bool:
    """Whether lower is better."""
    return key.startswith(f"{PERPLEXITY}/") or key.endswith(FALLING)


def scored(milestone: Milestone) -> dict[str, float]:
    """Return the known scores where higher is better."""
    return {k: v for k, v in milestone.scores.items() if is_known(v) and not _falls(k)}


def value_of(milestone: Milestone, key: str) -> float | None:
    """Return a score, or the mean of all; None if it was not measured."""
    if key != MEAN:
        return milestone.scores.get(key)
    values = scored(milestone)
    return sum(values.values()) / len(values) if values else None


def _score_lines(arms: Milestones) -> Figure:
    """Draw scores in percent, or perplexities if nothing else was measured."""
    unit = 100 if any(scored(history[-1]) for history in arms.values()) else 1
    series: list[Series] = []
    for number, (name, history) in enumerate(arms.items()):
        shown = list(scored(history[-1]) if unit == 100 else history[-1].scores)
        if unit == 100 and len(shown) > 1:
            shown = [MEAN, *shown] if number == 0 else [MEAN]
        for key in shown:
            label = f"{name}, {key}" if len(arms) > 1 else key
            values = [value_of(milestone, key) for milestone in history]
            y = [math.nan if value is None else unit * value for value in values]
            tokens = [milestone.tokens for milestone in history]
            series.append(Series(label, len(series), tokens, y, marked=False))

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter())

    run = next(iter(arms.values()))
    dropped = next((milestone.tokens for milestone in run if milestone.dropped), None)
    mark = None if dropped is None else (float(dropped), "encoding dropped")
    label = "score (%)" if unit == 100 else "perplexity"
    return draw(series, Frame("training tokens", label, prepare, mark))
