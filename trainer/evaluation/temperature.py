"""Fit of the softmax temperature 1 + c ln s (DroPE, App. C.2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from trainer.data.order import Integers
from trainer.evaluation.loss import losses_by_position
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

OfEach = Callable[[Sequence[float], Callable[[float], float]], list[float]]


def one_by_one(values: Sequence[float], loss: Callable[[float], float]) -> list[float]:
    """Return the losses of several coefficients, which one process computes."""
    return [loss(value) for value in values]


def fit_coefficient(
    model: LanguageModel,
    tempered_with: Callable[[float], Callable[[float], Layout]],
    windows: Mapping[int, Integers],
    end_of_text: int,
    grid: Sequence[float],
    batch_tokens: int,
    read: Callable[[int, int], None] = lambda sequences, length: None,
    of_each: OfEach = one_by_one,
) -> float:
    """Return the coefficient with the least held-out loss, summed over the lengths.

    This is the best of the grid, or the minimum of the parabola through it and its neighbours if
    its loss is lower.

    Args:
        model: a decoder.
        tempered_with: maps a coefficient to a function from extension factor to layout.
        windows: ``[N, length]`` held-out tokens for every length.
        end_of_text: token before each window.
        grid: coefficients to try.
        batch_tokens: tokens in one forward pass.
        read: called after each length with the number and length of its windows, in
            ``len(grid)`` or one more rounds.
        of_each: computes the losses of several coefficients.
    """
    C = model.layout.training_length

    def loss(coefficient: float) -> float:
        layout_at, total = tempered_with(coefficient), 0.0
        for length, tokens in windows.items():
            with model.using(layout_at(length / C)):
                by_position = losses_by_position(model, tokens, end_of_text, batch_tokens)
            total += by_position.mean().item()
            read(*tokens.shape)
        return total

    coefficients = sorted(set(grid))
    tried = dict(zip(coefficients, of_each(coefficients, loss), strict=True))
    lowest = _lowest_point(list(tried.items()))
    if lowest is not None and lowest not in tried:
        (tried[lowest],) = of_each([lowest], loss)
    return min(tried, key=lambda coefficient: tried[coefficient])


def fit_line(
    best: Callable[[Mapping[int, Integers]], float],
    windows: Mapping[int, Integers],
    training_length: int,
) -> float:
    """Fit the line 1 + c ln s to the best scale of each length by least squares, as in YaRN.

    ``best``: returns the coefficient that :func:`fit_coefficient` finds on the given windows.
    """
    numerator = denominator = 0.0
    for length, tokens in windows.items():
        log_s = math.log(length / training_length)
        numerator += best({length: tokens}) * log_s**2
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
