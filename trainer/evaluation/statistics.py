"""Confidence intervals of mean scores, tests of paired differences, and effective lengths.

Scores are fractions from 0 to 1 and independent of each other: one for each trial, or for each text
that several trials share. Intervals are 95% intervals over them; they do not cover the choice of a
training seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, stdtrit

SIGNIFICANT = 0.05
RESAMPLES, SEED = 2000, 0
Z = 1.959964
"""Quantile of the normal distribution for intervals of 95%."""
ROUNDING = 1e-12
"""Difference of scores below which they are equal."""
FEW = 30
"""Scores or pairs below which a bootstrap interval is widened: it is too short by a factor of about
sqrt((n - 1) / n) Z / t, which is 0.94 for 30 pairs and 0.78 for 8."""


@dataclass(frozen=True)
class Estimate:
    """A mean score and its 95% interval, as fractions."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Numbers of trials that went ``better`` and ``worse`` than the reference's same trials.

    ``p_value``: probability of a split at least as uneven if neither is better.
    """

    better: int
    worse: int
    p_value: float

    @property
    def mark(self) -> str:
        """``↑`` or ``↓`` if the two differ with p < 0.05, otherwise empty."""
        if self.p_value >= SIGNIFICANT:
            return ""
        return "↑" if self.better > self.worse else "↓"


def estimate(scores: Sequence[float], trials: int | None = None) -> Estimate:
    """Return the mean score and its interval.

    The interval is Wilson's if every score is 0 or 1. Otherwise it comes from a percentile
    bootstrap with ``RESAMPLES`` resamples (B. Efron, Bootstrap Methods, Annals of Statistics 7,
    1979), with a fixed seed, independent of the order of scores, widened for few of them as in
    :func:`change`. A bootstrap of equal fractions has no width: they have Wilson's interval for
    as many trials, which is too wide for fractions rather than too narrow.

    ``trials``: number of trials behind the scores. If there are several for each score, the
    interval is Wilson's with an effective number of trials (:func:`effective_trials`).

    Raises:
        ValueError: no scores.
    """
    if not scores:
        raise ValueError("no scores, so no mean")
    n = len(scores)
    values, counts = np.unique(np.asarray(scores, dtype=float), return_counts=True)
    if trials is not None and trials > n:
        mean, effective = float(values @ counts) / n, effective_trials(scores, trials)
        return Estimate(mean, *wilson_interval(mean * effective, effective))
    if set(values) <= {0.0, 1.0}:
        successes = int(counts[values == 1].sum())
        return Estimate(successes / n, *wilson_interval(successes, n))
    if len(values) == 1:
        return Estimate(float(values[0]), *wilson_interval(n * float(values[0]), n))
    # Counts of each value in a resample are multinomial, so trials need not be drawn one by one.
    draws = np.random.default_rng(SEED).multinomial(n, counts / n, size=RESAMPLES)
    low, high = np.quantile(draws @ values / n, (0.025, 0.975))
    result = _widened(Estimate(float(values @ counts) / n, float(low), float(high)), n)
    return Estimate(result.mean, max(0.0, result.low), min(1.0, result.high))


def change(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """Return the relative difference of the means of paired values: 0.01 if ``values`` is 1% above.

    The pairs are, for example, two models' losses on the same texts. The interval comes from a
    percentile bootstrap over pairs with a fixed seed, widened for few of them (T. Hesterberg, What
    Teachers Should Know About the Bootstrap, The American Statistician 69, 2015). One pair has no
    interval: its limits are the value itself.

    Raises:
        ValueError: the lengths differ, or there are no pairs.
    """
    pairs = np.array(list(zip(values, reference, strict=True)), dtype=float)
    if not len(pairs):
        raise ValueError("no pairs, so no change")
    a, b = pairs.mean(axis=0)
    n = len(pairs)
    draws = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    resampled = draws @ pairs / n
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1] - 1, (0.025, 0.975))
    return _widened(Estimate(float(a / b) - 1, float(low), float(high)), n)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent numbers with Student's interval; NaN limits for one number."""
    array = np.asarray(values, dtype=float)
    n, mean = len(array), float(array.mean())
    half = float(stdtrit(n - 1, 0.975) * array.std(ddof=1) / math.sqrt(n)) if n > 1 else math.nan
    return Estimate(mean, mean - half, mean + half)


def _widened(bootstrap: Estimate, n: int) -> Estimate:
    """Return a bootstrap's estimate from ``n`` values, with a wider interval if they are few."""
    if not 1 < n < FEW:
        return bootstrap
    wider, mean = math.sqrt(n / (n - 1)) * float(stdtrit(n - 1, 0.975)) / Z, bootstrap.mean
    low, high = mean - wider * (mean - bootstrap.low), mean + wider * (bootstrap.high - mean)
    return Estimate(mean, low, high)


def effective_trials(means: Sequence[float], trials: int) -> float:
    """Return the number of independent trials that are as informative as ``trials`` in groups.

        n = min(trials, G p (1 - p) / s²)

    with G groups and the mean p and variance s² of the groups' ``means``. That is the number of
    trials divided by the design effect (Kish, Survey Sampling, 1965), or G if the trials of each
    group are equal. A rate near 0 or 1 leaves few groups to estimate s² from. In simulations of 64
    and 256 groups Wilson's interval with it covered as little as 75% of the rates there, and a
    bootstrap of groups 57%. Therefore p and s² include one more group, half of it at 0 and half at
    1. That covered at least 93%, and n is G if all groups are 0 or all are 1.
    """
    weights = np.array([1.0] * len(means) + [0.5, 0.5])
    values = np.array([*means, 0.0, 1.0])
    p = np.average(values, weights=weights)
    variance = np.average((values - p) ** 2, weights=weights)
    return min(float(trials), len(means) * float(p * (1 - p) / variance))


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a success rate, with z of :data:`Z`:

        (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n, n = trials

    Unlike p ± z sqrt(p (1 - p) / n) it keeps its coverage near 0 and 1, where many cells lie.
    Raises ``ValueError`` unless 0 <= successes <= trials and trials > 0. Source: E. B. Wilson,
    Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927).
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials is not a success rate")
    p, square = successes / trials, Z * Z / trials
    middle = p + square / 2
    half = math.sqrt(square * p * (1 - p) + square * square / 4)
    # At 0 and at n successes one bound is p itself; rounding can leave it 1e-17 beyond p.
    low = 0.0 if successes == 0 else (middle - half) / (1 + square)
    high = 1.0 if successes == trials else (middle + half) / (1 + square)
    return low, high


def average(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Return the weighted mean of independent estimates.

    The distance to each limit is the root of the sum of squares of the estimates' weighted
    distances (G. Y. Zou and A. Donner, Statistics in Medicine 27, 2008).
    """
    total = sum(weights)
    parts = [(e, weight / total) for e, weight in zip(estimates, weights, strict=True)]
    mean = sum(share * e.mean for e, share in parts)
    below = math.hypot(*(share * (e.mean - e.low) for e, share in parts))
    above = math.hypot(*(share * (e.high - e.mean) for e, share in parts))
    return Estimate(mean, mean - below, mean + above)


def sign_test(scores: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Return the exact two-sided sign test of paired scores; equal pairs are ignored.

        p = min(1, 2 P(X <= min(b, c))),   X ~ Binomial(b + c, 1/2)

    with b pairs better and c worse. For scores of 0 and 1 it is McNemar's exact test
    (Q. McNemar, Psychometrika 12, 1947). For fractions it asks which of the two does better more
    often, not by how much.

    Raises:
        ValueError: the lengths differ.
    """
    # Scores may be means of fractions: equal sums of them may differ by 1e-16.
    differences = [a - b for a, b in zip(scores, reference, strict=True) if abs(a - b) > ROUNDING]
    better = sum(bool(difference > 0) for difference in differences)  # numpy sums to int64
    n, fewer = len(differences), min(better, len(differences) - better)
    p_value = min(1.0, 2 * float(bdtr(fewer, n, 0.5))) if n else 1.0
    return Comparison(better, n - better, p_value)


KEPT = 0.85
"""Share of the score at the training length that a longer length must keep (NoLiMa, Modarressi et
al. 2025, arXiv 2502.05167, with short texts in place of the training length)."""


@dataclass(frozen=True)
class EffectiveLength:
    """Longest evaluated length, in tokens, before the first one at which the score is not kept.

    ``length``: 0 if the score at the training length is at chance. ``is_limit``: whether the score
    falls at a longer length; otherwise the effective length may be longer.
    """

    length: int
    is_limit: bool = True

    @property
    def text(self) -> str:
        """``1024``; ``≥4096`` if it may be longer; ``none`` for chance."""
        return f"{'' if self.is_limit else '≥'}{self.length}" if self.length else "none"


def effective_length(
    scores: Mapping[int, Estimate | None], training_length: int, chance: float = 0.0
) -> EffectiveLength | None:
    """Return the longest n with S(m) >= 0.85 S(C) at all evaluated lengths m from C to n.

    As in RULER (Hsieh et al. 2024, arXiv 2404.06654, Sec. 4), the first length below the threshold
    ends the search, even if the score recovers later. Lengths below C do not count.

    Returns None without a measurement at C or at the next longer length.

    Args:
        scores: estimate of S at every evaluated length; None, for a length without a measurement,
            ends the search too.
        training_length: C.
        chance: score of a guess. S(C) is at chance if its 95% interval reaches it.
    """
    first = scores.get(training_length)
    longer = sorted(n for n in scores if n > training_length)
    if first is None or not longer or scores[longer[0]] is None:
        return None
    if first.low <= chance:
        return EffectiveLength(0)
    reached = training_length
    for length in longer:
        score = scores[length]
        if score is None:
            break
        # Scores are sums of rounded fractions: 0.85 * 1.0 and 0.85 itself may differ by 1e-16.
        if score.mean < KEPT * first.mean - ROUNDING:
            return EffectiveLength(reached)
        reached = length
    return EffectiveLength(reached, is_limit=False)
