"""The softmax temperature 1 + c ln s beyond the training length (DroPE, App. C.2), and its fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainer.positional.layout import LayerChoice, Layout


def tempered(
    layout: Layout,
    coefficient: float,
    exponent: float = 1.0,
    layers: LayerChoice = None,
) -> Layout:
    """Multiply the logits of ``layers`` by (1 + c ln s)^exponent beyond the training length.

    This is DroPE's temperature (App. C.2), or with c = 0.1 and exponent 2 RoPE-ID's (App. A.4). It
    replaces an earlier temperature, and C is the longest length of training, whatever length the
    earlier one referred to.
    """
    return layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=coefficient, exponent=exponent, per="sequence", reference=None, steps=False
        ),
        layout.chosen(layers),
    )


LARGEST_TRIED = 2.0
"""Coefficient at which the search beyond a grid ends; DroPE's own are 0.412 and 0.103."""


def is_largest_tried(coefficient: float, grid: Sequence[float]) -> bool:
    """Whether a fit ended at the largest value that it could try, so that its minimum is beyond."""
    return len(set(grid)) > 1 and coefficient >= max(LARGEST_TRIED, *grid)


def fit_coefficient(loss: Callable[[float], float], grid: Sequence[float]) -> float:
    """Return the coefficient c of 1 + c ln s (DroPE, App. C.2) of least ``loss``.

    While the largest value is the best, the grid continues up to :data:`LARGEST_TRIED`, with its
    last spacing at first and twice the spacing each time. The result is the best value, or the
    minimum of the parabola through it and its neighbours if its loss is lower. A grid of one value
    gives that value.
    """
    tried: dict[float, float] = {}

    def measure(coefficient: float) -> None:
        value = loss(coefficient)
        tried[coefficient] = value if math.isfinite(value) else math.inf

    coefficients = sorted(set(grid))
    if len(coefficients) == 1:
        return coefficients[0]
    for coefficient in coefficients:
        measure(coefficient)
    largest, step = coefficients[-1], coefficients[-1] - coefficients[-2]
    while largest < LARGEST_TRIED and min(tried, key=tried.__getitem__) == largest:
        largest, step = min(LARGEST_TRIED, largest + step), 2 * step
        measure(largest)
    lowest = _lowest_point(list(tried.items()))
    if lowest is not None and lowest not in tried:
        measure(lowest)
    return min(tried, key=tried.__getitem__)


def fit_line(
    best: Callable[[Sequence[int]], float], lengths: Sequence[int], training_length: int
) -> float:
    """Fit the line 1 + c ln s to the best scale of each length by least squares, as in YaRN.

    ``best``: returns the coefficient of least loss at the given lengths.
    """
    numerator = denominator = 0.0
    for length in lengths:
        log_s = math.log(length / training_length)
        numerator += best([length]) * log_s**2
        denominator += log_s**2
    return numerator / denominator


def _lowest_point(points: list[tuple[float, float]]) -> float | None:
    """Return the minimum of the parabola through the lowest point and its neighbours.

    Return None if the lowest point is at an end, the points lie on a line, or one is infinite.
    """
    best = min(range(len(points)), key=lambda i: points[i][1])
    if not 0 < best < len(points) - 1:
        return None
    (a, loss_a), (b, loss_b), (c, loss_c) = points[best - 1 : best + 2]
    before, after = (b - a) * (loss_c - loss_b), (c - b) * (loss_a - loss_b)
    if before + after == 0 or not math.isfinite(before + after):
        return None
    return b + ((c - b) * after - (b - a) * before) / (2 * (before + after))
