"""STATDOC"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SIGNIFICANT = 0.05
RESAMPLES, SEED = 2000, 0


@dataclass(frozen=True)
class Estimate:
    """A mean score and its 95% interval, as fractions."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """``better``, ``worse``: how many of the same trials went better and worse than the
    reference's; ``p_value``: how likely a split at least as uneven is when neither is better."""

    better: int
    worse: int
    p_value: float

    @property
    def mark(self) -> str:
        """``↑`` or ``↓`` where the two differ with p < 0.05, otherwise nothing."""
        if self.p_value >= SIGNIFICANT:
            return ""
        return "↑" if self.better > self.worse else "↓"


def estimate(scores: Sequence[float]) -> Estimate:
    """The mean score. Its interval is Wilson's where every score is 0 or 1, otherwise the
    percentile bootstrap's with ``RESAMPLES`` resamples (B. Efron, Bootstrap Methods, Annals of
    Statistics 7, 1979), always the same for the same scores in any order.

    Raises:
        ValueError: no scores.
    """
    if not scores:
        raise ValueError("no scores, so no mean")
    n = len(scores)
    values, counts = np.unique(np.asarray(scores, dtype=float), return_counts=True)
    if set(values) <= {0.0, 1.0}:
        successes = int(counts[values == 1].sum())
        return Estimate(successes / n, *wilson_interval(successes, n))
    # How often each value is drawn in a resample is multinomial: no need to draw trial by trial.
    draws = np.random.default_rng(SEED).multinomial(n, counts / n, size=RESAMPLES)
    low, high = np.quantile(draws @ values / n, (0.025, 0.975))
    return Estimate(float(values @ counts) / n, float(low), float(high))


def change(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """How much larger the mean of ``values`` is than that of ``reference``, relative to it: 0.01
    for 1%. The two are pairs, such as two models' losses on the same texts; the interval is the
    percentile bootstrap's over pairs, always the same for the same pairs.

    Raises:
        ValueError: the two are not as long as each other, or there are none.
    """
    pairs = np.array(list(zip(values, reference, strict=True)), dtype=float)
    if not len(pairs):
        raise ValueError("no pairs, so no change")
    a, b = pairs.mean(axis=0)
    n = len(pairs)
    draws = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    resampled = draws @ pairs / n
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1] - 1, (0.025, 0.975))
    return Estimate(float(a / b) - 1, float(low), float(high))


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Score interval of a success rate, 95% for the default ``z``:

        (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n, n = trials

    Unlike p ± z sqrt(p (1 - p) / n) it keeps its coverage near 0 and 1, where many cells lie.
    Raises ``ValueError`` unless 0 <= successes <= trials and trials > 0. Source: E. B. Wilson,
    Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927).
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials is not a success rate")
    p, square = successes / trials, z * z / trials
    middle = p + square / 2
    half = math.sqrt(square * p * (1 - p) + square * square / 4)
    # At 0 and at n the bound equals p exactly; rounding would leave it 1e-17 on the wrong side.
    low = 0.0 if successes == 0 else (middle - half) / (1 + square)
    high = 1.0 if successes == trials else (middle + half) / (1 + square)
    return low, high


def average(estimates: Sequence[Estimate]) -> Estimate:
    """The unweighted mean of independent estimates. The distances to its limits are the root of
    the sum of squares of theirs over their number (G. Y. Zou and A. Donner, Statistics in Medicine
    27, 2008)."""
    n = len(estimates)
    mean = sum(e.mean for e in estimates) / n
    below = math.hypot(*(e.mean - e.low for e in estimates)) / n
    above = math.hypot(*(e.high - e.mean for e in estimates)) / n
    return Estimate(mean, mean - below, mean + above)


def sign_test(scores: Sequence[float], reference: Sequence[float]) -> Comparison:
    """The exact two-sided sign test of paired scores; equal pairs say nothing and drop out.

        p = min(1, 2 P(X <= min(b, c))),   X ~ Binomial(b + c, 1/2)

    with b pairs better and c worse. For scores of 0 and 1 it is McNemar's exact test
    (Q. McNemar, Psychometrika 12, 1947). For fractions it asks which of the two does better more
    often, not by how much.

    Raises:
        ValueError: the two are not as long as each other.
    """
    pairs = list(zip(scores, reference, strict=True))
    better = sum(a > b for a, b in pairs)
    worse = sum(a < b for a, b in pairs)
    n = better + worse
    term = tail = 1  # C(n, k), and its sum over k up to the smaller count
    for k in range(min(better, worse)):
        term = term * (n - k) // (k + 1)
        tail += term
    return Comparison(better, worse, min(1.0, 2 * tail / 2**n))
