"""Benchmarks while training: their course, and how soon what a drop took was recovered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from trainer.report.drawn import Plan
from trainer.report.plotting import Frame, Series, draw
from trainer.report.results import PERPLEXITY, Milestone, Report, is_known

RECOVERED = 0.95
"""Share of the score before the drop that counts as recovered: DroPE, Sec. 5.1."""
MEAN = "mean"
FALLING = ("perplexity", "bits_per_byte")
"""How names of metrics end of which less is better."""
Milestones = Mapping[str, tuple[Milestone, ...]]
HEAD = ("arm", "step", "tokens", "dropped", "score", "value")


def recovery_figure(report: Report) -> Iterator[Plan]:
    """``benchmarks``, or nothing where no arm was measured in training."""
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
        lambda: _lines(arms),
        HEAD,
        by_score(arms),
    )


def by_score(arms: Milestones) -> Iterator[tuple[object, ...]]:
    """Rows under :data:`HEAD`, one a measurement and score."""
    for name, history in arms.items():
        for one in history:
            for key, value in one.scores.items():
                yield name, one.step, one.tokens, one.dropped, key, value


def recoveries(arms: Milestones) -> list[str]:
    """For every arm that dropped its encoding between two measurements a sentence: when each score
    was back at :data:`RECOVERED` of what it was before."""
    return [
        f"{name}: {'; '.join(said)}."
        for name, history in arms.items()
        if (said := list(_recoveries(history)))
    ]


def _recoveries(history: Sequence[Milestone]) -> Iterator[str]:
    before = [one for one in history if not one.dropped]
    after = [one for one in history if one.dropped]
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
        back = next((one for one in after if _is_back(value_of(one, key), reference, key)), None)
        name = "the mean" if key == MEAN else key
        what = f"{RECOVERED:.0%} of {name} before the drop ({_number(reference)})"
        if back is None:
            yield f"{what} not recovered within the run"
        elif (tokens := back.tokens - last.tokens) == 0:
            yield f"{what} never lost"
        else:
            yield f"{what} recovered after {tokens:,} tokens"


def _number(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:,.1f}"


def _is_back(value: float | None, reference: float, key: str) -> bool:
    if value is None:
        return False
    if _falls(key):
        return value * RECOVERED <= reference
    return value >= RECOVERED * reference


def _falls(key: str) -> bool:
    """Whether less is better."""
    return key.startswith(f"{PERPLEXITY}/") or key.endswith(FALLING)


def scored(one: Milestone) -> dict[str, float]:
    """The scores of which more is better, as far as they are known."""
    return {k: v for k, v in one.scores.items() if is_known(v) and not _falls(k)}


def value_of(one: Milestone, key: str) -> float | None:
    """A score, or the mean of all; None where it was not measured."""
    if key != MEAN:
        return one.scores.get(key)
    values = scored(one)
    return sum(values.values()) / len(values) if values else None


def _lines(arms: Milestones) -> Figure:
    """Scores in percent; perplexities where nothing else was measured."""
    unit = 100 if any(scored(history[-1]) for history in arms.values()) else 1
    series: list[Series] = []
    for number, (name, history) in enumerate(arms.items()):
        shown = list(scored(history[-1]) if unit == 100 else history[-1].scores)
        if unit == 100 and len(shown) > 1:
            shown = [MEAN, *shown] if number == 0 else [MEAN]
        for key in shown:
            label = f"{name}, {key}" if len(arms) > 1 else key
            values = [value_of(one, key) for one in history]
            y = [math.nan if value is None else unit * value for value in values]
            tokens = [one.tokens for one in history]
            series.append(Series(label, len(series), tokens, y, marked=False))

    def prepare(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(EngFormatter())

    run = next(iter(arms.values()))
    dropped = next((one.tokens for one in run if one.dropped), None)
    mark = None if dropped is None else (float(dropped), "encoding dropped")
    label = "score (%)" if unit == 100 else "perplexity"
    return draw(series, Frame("training tokens", label, prepare, mark))
