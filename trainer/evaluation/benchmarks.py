"""Settings and scores of benchmark evaluations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.evaluation.outcomes import AS_IS
from trainer.evaluation.statistics import Comparison, sign_test

"""Parts that change nothing for an extension factor of 1."""


@dataclass(frozen=True)
class Score:
    """One metric of one task: its mean over ``questions``, and the standard error of the mean.

    ``each``: score of every question, higher is better; empty if unknown.
    """

    task: str
    metric: str
    value: float
    standard_error: float | None
    questions: int
    each: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values without ``each``; null for numbers that are not finite."""
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in vars(self).items()
            if key != "each"
        }


@dataclass(frozen=True)
class Scored:
    """Scores of one model with one method: the method's key and title, the model's path."""

    model: str
    method: str
    title: str
    path: str
    scores: list[Score]

    @property
    def name(self) -> str:
        """``SmolLM + YaRN``; the model's name alone if it is unchanged."""
        return self.model if self.method == AS_IS else f"{self.model} + {self.title}"


def comparisons(scored: Scored, others: Sequence[Scored]) -> list[Comparison | None]:
    """Compare every score with a baseline on the same questions.

    The baseline of a method is the same model unchanged. The baseline of an unchanged model is the
    first one. None if the baseline has no scores per question.
    """
    as_is = [other for other in others if other.method == AS_IS]
    if scored.method != AS_IS:
        as_is = [other for other in as_is if other.model == scored.model]
    if not as_is or as_is[0] is scored:
        return [None] * len(scored.scores)
    pairs = zip(scored.scores, as_is[0].scores, strict=True)
    return [
        sign_test(a.each, b.each) if a.each and len(a.each) == len(b.each) else None
        for a, b in pairs
    ]


def mean_score(task: str, metric: str, values: Iterable[float]) -> Score:
    """Return the mean and its standard error from the sample standard deviation."""
    numbers = list(values)
    n, mean = len(numbers), sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (n - 1) if n > 1 else None
    error = None if variance is None else (variance / n) ** 0.5
    return Score(task, metric, mean, error, n, tuple(map(float, numbers)))
