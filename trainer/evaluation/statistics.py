"""Confidence intervals of mean scores, and tests of paired differences.

Scores are fractions from 0 to 1 and independent of each other: one for each trial, or for each text
that several trials share. Intervals are 95% intervals over them; they do not cover the choice of a
training seed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest

SIGNIFICANT = 0.05
Z = 1.959964
"""Quantile of the normal distribution for intervals of 95%."""
ROUNDING = 1e-12
"""Difference of scores below which they are equal."""


class Estimate(NamedTuple):
    """A mean and its 95% interval."""

    mean: float
    low: float
    high: float


def estimate(scores: Sequence[float], trials: float = math.inf) -> Estimate:
    """Return the mean p of G scores and Wilson's interval, with z of :data:`Z`:

        (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n)

    It keeps its coverage near 0 and 1, where many cells lie (E. B. Wilson, JASA 22, 1927). n is the
    number of trials of 0 or 1 that are as informative as the scores:

        n = min(trials, G q (1 - q) / s²)

    ``trials``: number of trials behind the scores, if there are several for each of them. With the
    mean q and variance s² of the scores, n is the number of trials divided by the design effect
    (Kish, Survey Sampling, 1965), and G if the scores are 0 and 1. Near 0 or 1 few scores are left
    to estimate s² from, so q and s² include one more score, half of it at 0 and half at 1.
    """
    weights = np.array([1.0] * len(scores) + [0.5, 0.5])
    values = np.array([*scores, 0.0, 1.0])
    q = np.average(values, weights=weights)
    variance = np.average((values - q) ** 2, weights=weights)
    n = min(trials, len(scores) * float(q * (1 - q) / variance))
    return wilson(float(np.mean(scores)), n)


def wilson(p: float, n: float) -> Estimate:
    """Return the rate p of n independent trials with Wilson's interval."""
    square = Z * Z / n
    middle = p + square / 2
    half = math.sqrt(square * p * (1 - p) + square * square / 4)
    # One bound equals p where p is 0 or 1; rounding could put it 1e-17 beyond.
    low = 0.0 if p == 0 else (middle - half) / (1 + square)
    high = 1.0 if p == 1 else (middle + half) / (1 + square)
    return Estimate(p, low, high)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent numbers with Student's interval; NaN limits for one number."""
    array = np.asarray(values, dtype=float)
    n = len(array)
    mean = float(array.mean())
    half = float(stdtrit(n - 1, 0.975) * array.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Estimate(mean, mean - half, mean + half)


def change(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Return the relative difference of the means of paired values: 0.01 if ``values`` is 1% above.

    The pairs are, for example, two models' losses on the same texts. The interval of the ratio
    r = a / b of the means is that of the mean of (a_i - r b_i) / b (W. G. Cochran, Sampling
    Techniques, 1977, Ch. 6). One pair has no interval: its limits are the value itself.
    """
    a, b = np.asarray(values, dtype=float), np.asarray(reference, dtype=float)
    ratio = float(a.mean() / b.mean())
    half = mean_estimate((a - ratio * b) / b.mean()).high if len(a) > 1 else 0.0
    return Estimate(ratio - 1, ratio - 1 - half, ratio - 1 + half)


def average(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Return the weighted mean of independent estimates.

    The distance to each limit is the root of the sum of squares of the estimates' weighted
    distances (G. Y. Zou and A. Donner, Statistics in Medicine 27, 2008).
    """
    shares = np.asarray(weights) / sum(weights)
    means, lows, highs = np.transpose(estimates)
    mean = float(shares @ means)
    below = float(np.linalg.norm(shares * (means - lows)))
    above = float(np.linalg.norm(shares * (means - highs)))
    return Estimate(mean, mean - below, mean + above)


def sign_mark(scores: Sequence[float], reference: Sequence[float]) -> str:
    """Return ``↑`` or ``↓`` if more scores are better or worse than their pair in the reference, by
    the exact sign test with p < 0.05; otherwise nothing.

    Equal pairs are ignored. With b pairs better and c worse, p = min(1, 2 P(X <= min(b, c))), X
    binomial of b + c trials with probability 1/2. For scores of 0 and 1 it is McNemar's exact test
    (Q. McNemar, Psychometrika 12, 1947).
    """
    differences = np.subtract(scores, reference)
    # Scores may be means of fractions: equal sums of them may differ by 1e-16.
    better = int((differences > ROUNDING).sum())
    worse = int((differences < -ROUNDING).sum())
    if better == worse or binomtest(better, better + worse).pvalue >= SIGNIFICANT:
        return ""
    return "↑" if better > worse else "↓"
