"""The softmax temperature 1 + c ln s beyond the training length (DroPE, App. C.2), and its fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainer.config import EvaluationConfig
from trainer.evaluation.fitting import FitText, LayoutAt, Notes
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout

LARGEST_TRIED = 2.0
"""Coefficient at which the search beyond a grid ends; DroPE's own are 0.412 and 0.103."""


def tempered(
    layout: Layout, coefficient: float, exponent: float = 1.0, layers: LayerChoice = None
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
        layers,
    )


def fit_temperature(
    before: LayoutAt, model: LanguageModel, text: FitText, config: EvaluationConfig, notes: Notes
) -> LayoutAt:
    """Multiply logits by 1 + c ln s, with c fitted on the lengths beyond the training length."""
    settings, C = config.temperature, model.layout.training_length
    lengths = [round(s * C) for s in settings.lengths or config.lengths]
    windows = {length: text.windows(length) for length in lengths if length > C}
    if max(config.lengths) <= 1 or not windows:
        return before

    def tempered_by(coefficient: float) -> LayoutAt:
        return lambda s: tempered(before(s), coefficient, layers=config.layers)

    def best(lengths: Sequence[int]) -> float:
        def loss(coefficient: float) -> float:
            layout_at, total = tempered_by(coefficient), 0.0
            for length in lengths:
                with model.using(layout_at(length / C)):
                    total += text.loss(model, windows[length], config.batch_tokens)
            return total

        coefficient = fit_coefficient(loss, settings.grid)
        if len({*settings.grid}) > 1 and coefficient >= max(LARGEST_TRIED, *settings.grid):
            notes.append("the largest coefficient tried fits best")
        return coefficient

    if settings.fit == "line":  # least squares through the best scale of each length, as in YaRN
        weights = {length: math.log(length / C) ** 2 for length in windows}
        total = sum(best([length]) * weight for length, weight in weights.items())
        fitted = total / sum(weights.values())
    else:
        fitted = best([*windows])
    notes.append(f"logits times 1 + {fitted:.3g} ln s")
    return tempered_by(fitted)


def fit_coefficient(loss: Callable[[float], float], grid: Sequence[float]) -> float:
    """Return the coefficient c of 1 + c ln s of least ``loss``.

    While the largest value is the best, the grid continues up to :data:`LARGEST_TRIED`, with its
    last spacing at first and twice the spacing each time. The result is the best value, or the
    minimum of the parabola through it and its neighbours if its loss is lower. A grid of one value
    gives that value.
    """
    coefficients = sorted(set(grid))
    if len(coefficients) == 1:
        return coefficients[0]

    def measured(coefficient: float) -> float:
        value = loss(coefficient)
        return value if math.isfinite(value) else math.inf

    tried = {coefficient: measured(coefficient) for coefficient in coefficients}
    largest, step = coefficients[-1], coefficients[-1] - coefficients[-2]
    while largest < LARGEST_TRIED and min(tried, key=tried.__getitem__) == largest:
        largest, step = min(LARGEST_TRIED, largest + step), 2 * step
        tried[largest] = measured(largest)
    lowest = _lowest_point([*tried.items()])
    if lowest not in tried:
        tried[lowest] = measured(lowest)
    return min(tried, key=tried.__getitem__)


def _lowest_point(points: list[tuple[float, float]]) -> float:
    """Return the minimum of the parabola through the lowest point and its neighbours.

    If the lowest point is at an end, the points lie on a line, or one is infinite, return the
    lowest point.
    """
    best = min(range(len(points)), key=lambda i: points[i][1])
    if not 0 < best < len(points) - 1:
        return points[best][0]
    (a, loss_a), (b, loss_b), (c, loss_c) = points[best - 1 : best + 2]
    before, after = (b - a) * (loss_c - loss_b), (c - b) * (loss_a - loss_b)
    if before + after == 0 or not math.isfinite(before + after):
        return b
    return b + ((c - b) * after - (b - a) * before) / (2 * (before + after))
