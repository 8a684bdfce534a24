"""The held-out text on which methods fit their parameters, and the fit of a temperature (DroPE)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trainer.data.corpus import divided
from trainer.data.order import Integers
from trainer.evaluation.likelihood import Request
from trainer.evaluation.store import fingerprint
from trainer.model.language_model import LanguageModel


def spread_evenly(count: int, total: int, parts: Sequence[int] = ()) -> Integers:
    """Return the indices of ``count`` rows spread evenly over ``total``, or of all if there are
    fewer.

    Windows of one text overlap with their neighbours, so that the first ones are nearly one text.
    ``parts``: number of each row's text, if there are several; then the rows are spread over each
    text by itself, in the texts' shares of all rows.
    """
    if not parts:
        return np.linspace(0, total - 1, min(count, total)).round().astype(np.int64)
    rows_of = [np.flatnonzero(np.equal(parts, part)) for part in sorted(set(parts))]
    sizes = [len(rows) for rows in rows_of]
    shares = divided(min(count, total), sizes, sizes)
    chosen = [
        rows[spread_evenly(share, len(rows))] for rows, share in zip(rows_of, shares, strict=True)
    ]
    return np.sort(np.concatenate(chosen))


@dataclass(frozen=True)
class FitText:
    """Validation text, which is not part of the reported text.

    ``windows``: ``[N, length]`` tokens for every length of a fit; they end at the same places.
    ``parts``: the text of a mixture that each of them is from, ``[N]``; empty for a single text.
    ``needles``: answers to predict, for every length at which factors are searched by needles.
    ``choice``: ``[texts, tokens]`` for every length at which heads or pairs are chosen; None: the
    windows.
    """

    windows: Mapping[int, Integers]
    first_token: int
    needles: Mapping[int, Sequence[Request]] = field(default_factory=dict)
    choice: Mapping[int, Integers] | None = None
    parts: Sequence[int] = ()

    def spread(self, count: int, length: int) -> Integers:
        """Return ``[count, length]`` windows as :func:`spread_evenly` chooses them."""
        windows = self.windows[length]
        return windows[spread_evenly(count, len(windows), self.parts)]

    @cached_property
    def key(self) -> str:
        """Hash of all that fits read."""
        return fingerprint(self)


@dataclass
class Fitting:
    """A model, which is loaded when it is needed, and the text to fit on.

    ``notes``: descriptions of the fitted parameters.
    """

    load: Callable[[], LanguageModel]
    text: FitText
    batch_tokens: int
    notes: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> LanguageModel:
        """The model, with its layout as trained."""
        return self.load()

    def ids(self, factor: float, texts: int) -> Tensor:
        """Return ``[texts, tokens]`` on the model's device, for capturing queries and keys."""
        length = round(factor * self.model.layout.training_length)
        choice = self.text.choice
        if choice is None:
            ids = self.text.spread(texts, length)
        else:
            ids = choice[length][spread_evenly(texts, len(choice[length]))]
        return torch.from_numpy(ids).to(self.model.device)


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
    best: Callable[[Mapping[int, Integers]], float],
    windows: Mapping[int, Integers],
    training_length: int,
) -> float:
    """Fit the line 1 + c ln s to the best scale of each length by least squares, as in YaRN.

    ``best``: returns the coefficient of least loss on the given windows.
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
