"""Settings and scores of benchmark evaluations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


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


def mean_score(task: str, metric: str, values: Iterable[float]) -> Score:
    """Return the mean and its standard error from the sample standard deviation."""
    each = np.array(list(values), dtype=float)
    error = float(each.std(ddof=1) / len(each) ** 0.5) if len(each) > 1 else None
    return Score(task, metric, float(each.mean()), error, len(each), tuple(each.tolist()))
