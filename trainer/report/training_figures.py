"""Figures of the course of training: loss, reach at several lengths, and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from trainer.common.words import factor_label
from trainer.evaluation.results import (
    PERPLEXITY,
    REACH_HEAD,
    Arm,
    Drop,
    Milestone,
    Reach,
    Reaches,
    Report,
    is_known,
    reach_rows,
)
from trainer.plotting.lines import Frame, Series, draw
from trainer.plotting.style import ON_BRIGHT, blank
from trainer.report.files import Plan

_SMOOTHING = 40  # a curve is averaged over this fraction of its points


def training_figure(report: Report, looks: Mapping[str, int]) -> Iterator[Plan]:
    """Plan ``training`` if an arm has a curve; ``looks``: style numbers by arm."""
    arms = [arm for arm in report.arms if arm.curve]
    if not arms:
        return
    drop = report.drop
    yield Plan(
        "training",
        "Training loss",
        " ".join(_training_caption(arms, report)),
        "Line chart of the training loss of each arm over training steps.",
        lambda: draw(
            [_smoothed_line(arm, drop, looks[arm.name]) for arm in arms],
            _training_frame(arms, drop),
        ),
        ("arm", "step", "training_loss"),
        [(arm.name, step, loss) for arm in arms for step, loss in arm.curve],
    )


def _training_caption(arms: Sequence[Arm], report: Report) -> Iterator[str]:
    """Yield a sentence for everything that is drawn."""
    yield "Training loss over training steps for each arm."
    if any(len(arm.curve) >= 2 * _SMOOTHING for arm in arms):
        sides = ", taken on each side of the drop by itself" if report.drop else ""
        yield f"Thick: centred mean over 1/40 of the logged points{sides}; thin: as logged."
    if report.drop:
        yield "The vertical line is the step at which the positional encoding was dropped."
    needles = report.config.get("data", {}).get("needles", {})
    if needles.get("share", 1) > 0:  # reports of other programs do not say
        yield (
            "The training loss weighs needle statements and text as the configuration says, so it "
            "is not comparable with the held-out text loss."
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
        losses = f"loss {before} before, {after} after"
        losses += "" if drop.loss_end is None else f", {end} at the end"
        note = (float(drop.step), f"encoding dropped at step {drop.step}\n{losses}")
    return Frame("training step", "training loss (nats/token)", prepare, note)


def reach_figures(report: Report, looks: Mapping[str, int]) -> Iterator[Plan]:
    """Plan ``reach`` and ``reach_by_position`` if an arm was measured in training.

    ``looks``: style numbers by arm; shorter lengths are paler.
    """
    arms = {name: history for name, history in report.reach.items() if history}
    if not arms:
        return
    yield Plan(
        "reach",
        "Reach while training",
        "How far models reach while they train, on validation text: the run at every length, its "
        "controls at the longest. Where the encoding was dropped the run was measured on both "
        "sides.",
        "Line chart over training steps of retrieval, or of loss where that was not measured, with "
        "a line for each length.",
        lambda: _reach_lines(report, arms, looks),
        REACH_HEAD,
        reach_rows(arms),
    )
    yield Plan(
        "reach_by_position",
        "Loss by position while training",
        "Held-out loss of the run by position in its longest validation sequences, less the mean "
        "over the positions within the training length, which the dotted line marks. A column is a "
        "measurement; steps are not to scale. The dashed line is the drop.",
        "Heat map of the excess loss over measurements and positions.",
        lambda: _reach_map(next(iter(arms.values()))),
        ("arm", "step", "dropped", "from_position", "to_position", "loss"),
        _by_position(arms),
    )


def _reach_lines(report: Report, arms: Reaches, looks: Mapping[str, int]) -> Figure:
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
            series.append(Series(label, looks[name], steps, y, marked=False, opacity=strength))

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
    figure = blank(2.6)
    axes = figure.add_subplot()
    columns = np.arange(len(history) + 1)
    mesh = axes.pcolormesh(columns, edges, excess, cmap="RdBu_r", norm=CenteredNorm())
    figure.colorbar(mesh, label="excess loss (nats/token)")
    every = math.ceil(len(history) / 10)
    axes.set_xticks(columns[:-1:every] + 0.5, [str(reach.step) for reach in history[::every]])
    axes.set_yticks([edge for edge in edges if edge % seen == 0])
    axes.axhline(seen, color=ON_BRIGHT, linewidth=0.8, linestyle=":")
    crossings = [i for i in columns[1:-1] if history[i].dropped and not history[i - 1].dropped]
    for column in crossings:
        axes.axvline(column, color=ON_BRIGHT, linewidth=0.8, linestyle="--")
    axes.grid(visible=False)
    axes.set_xlabel("training step of the measurement")
    axes.set_ylabel("position (tokens)")
    return figure


def _by_position(arms: Reaches) -> Iterator[tuple[Any, ...]]:
    for name, history in arms.items():
        for reach in history:
            for start, stop, loss in zip(
                reach.edges[:-1], reach.edges[1:], reach.losses, strict=True
            ):
                yield name, reach.step, reach.dropped, start, stop, loss


RECOVERED = 0.95
"""Share of the score before the drop that counts as recovered (DroPE, Sec. 5.1)."""
MEAN = "mean"
FALLING = ("perplexity", "bits_per_byte")
"""Suffixes of metrics where lower is better."""
Milestones = Mapping[str, tuple[Milestone, ...]]
SCORE_HEAD = ("arm", "step", "tokens", "dropped", "score", "value")


def recovery_figure(report: Report) -> Iterator[Plan]:
    """Plan ``benchmarks`` if an arm was measured in training."""
    arms = {name: history for name, history in report.milestones.items() if history}
    if not arms:
        return
    yield Plan(
        "benchmarks",
        "Benchmarks while training",
        "What models score while they train: the run in every task that has scores, and the mean "
        "over these; its controls in the mean; or perplexities alone. Where the encoding was "
        "dropped the run was measured on both sides.",
        "Line chart of scores over training tokens, with a line for each task.",
        lambda: _score_lines(arms),
        SCORE_HEAD,
        by_score(arms),
    )


def by_score(arms: Milestones) -> Iterator[tuple[object, ...]]:
    """Yield a row under :data:`SCORE_HEAD` for each score of each measurement."""
    for name, history in arms.items():
        for milestone in history:
            for key, value in milestone.scores.items():
                yield name, milestone.step, milestone.tokens, milestone.dropped, key, value


def recoveries(arms: Milestones) -> list[str]:
    """Return for each arm with a drop when each score had recovered to :data:`RECOVERED`."""
    return [
        f"{name}: {'; '.join(sentences)}."
        for name, history in arms.items()
        if (sentences := list(_recoveries(history)))
    ]


def _recoveries(history: Sequence[Milestone]) -> Iterator[str]:
    before = [milestone for milestone in history if not milestone.dropped]
    after = [milestone for milestone in history if milestone.dropped]
    if not before or not after:
        return
    last = before[-1]
    keys = list(last.scores)
    if len(scored(last)) > 1:
        keys = [MEAN, *keys]
    for key in keys:
        reference = value_of(last, key)
        if reference is None or reference <= 0:
            continue
        back = next((m for m in after if _is_back(value_of(m, key), reference, key)), None)
        name = "the mean" if key == MEAN else key
        share = f"{RECOVERED:.0%} of {name} before the drop ({_number(reference)})"
        if back is None:
            yield f"{share} not recovered within the run"
        elif (tokens := back.tokens - last.tokens) == 0:
            yield f"{share} never lost"
        else:
            yield f"{share} recovered after {tokens:,} tokens"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _is_back(value: float | None, reference: float, key: str) -> bool:
    if value is None:
        return False
    if _falls(key):
        return value * RECOVERED <= reference
    return value >= RECOVERED * reference


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
