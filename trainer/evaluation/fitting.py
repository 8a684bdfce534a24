"""The held-out text on which methods fit their parameters, and the fit of a temperature (DroPE)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.data.held_out import divided
from trainer.data.order import Integers
from trainer.evaluation.loss import AnsweredTexts, losses_by_position
from trainer.evaluation.method_config import SPREAD
from trainer.evaluation.store import Claims, Store, all_fields, fingerprint
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout

_NOT_OF_FITS = {
    "windows": "their sizes stand for them: they end at places that follow from the sizes",
    "needles": "read by the search for factors alone, whose key has them",
    "choice": "read by choices alone: see FitText.choice_key",
    "parts": "follow from the texts and weights, which the fingerprint has",
}
"""Fields of the text that the key of a fit leaves out, with the reason."""


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
    ``fingerprint``: hash of the text and its tokens. ``needles``: texts with questions and answers,
    for every length at which factors are searched by needles. ``choice``: ``[texts, tokens]`` for
    every length at which heads or pairs are chosen; None: the windows.
    """

    windows: Mapping[int, Integers]
    first_token: int
    fingerprint: str
    needles: Mapping[int, AnsweredTexts] = field(default_factory=dict)
    choice: Mapping[int, Integers] | None = None
    parts: Sequence[int] = ()

    def spread(self, count: int, length: int) -> Integers:
        """Return ``[count, length]`` windows as :func:`spread_evenly` chooses them."""
        windows = self.windows[length]
        return windows[spread_evenly(count, len(windows), self.parts)]

    @property
    def key(self) -> dict[str, Any]:
        """Inputs of a fit other than the model and settings."""
        sizes = {length: len(windows) for length, windows in self.windows.items()}
        return {**all_fields(self, _NOT_OF_FITS), "windows": sizes}

    @property
    def choice_key(self) -> dict[str, Any]:
        """Inputs of a choice of heads or pairs other than the model and settings."""
        texts = self.choice
        if texts is None:
            return {**self.key, "choice": SPREAD}
        return {**self.key, "choice": {n: fingerprint(texts[n]) for n in sorted(texts)}}


@dataclass
class Fitting:
    """One model, the text to fit on, and the notes of its fits, which are stored.

    ``read``: called with the number and length of the sequences that a fit has read. ``notes``:
    descriptions of the fitted parameters. ``temperature``: the softmax temperature, if fitted.
    ``claims``: claims of the processes that fit together, if there are several.
    """

    model: LanguageModel
    fingerprint: str
    text: FitText
    store: Store
    batch_tokens: int
    read: Callable[[int, int], None] = lambda sequences, length: None
    notes: list[str] = field(default_factory=list)
    temperature: dict[str, Any] | None = None
    claims: Claims | None = None

    def windows_beyond(self, factors: Iterable[float]) -> dict[int, Integers]:
        """Return the windows at all ``factors`` that make more than the training length."""
        C = self.model.layout.training_length
        lengths = (round(factor * C) for factor in factors)
        return {length: self.text.windows[length] for length in lengths if length > C}

    def ids(self, factor: float, texts: int) -> Tensor:
        """Return ``[texts, tokens]`` on the model's device, for capturing queries and keys."""
        length = round(factor * self.model.layout.training_length)
        text = self.text
        if text.choice is None:
            ids = text.spread(texts, length)
        else:
            ids = text.choice[length][spread_evenly(texts, len(text.choice[length]))]
        self.read(len(ids), length)
        return torch.from_numpy(ids).to(self.model.device)

    def stored(self, kind: str, settings: Any, make: Callable[[], Any]) -> Any:
        """Return a fit, made once for these weights, this text and these settings."""
        return self.store.get(kind, self._key(settings), make)

    def _key(self, settings: Any) -> dict[str, Any]:
        """Return all inputs of a fit."""
        return {"model": self.fingerprint, **self.text.key, "settings": settings}

    def losses(
        self, settings: Any, values: Sequence[float], loss: Callable[[float], float]
    ) -> list[float]:
        """Return the loss of each value, infinite if it is not a number.

        Processes that fit together share the values, and read the others' losses from the store.
        """

        def measured(value: float) -> float | None:
            result = loss(value)
            return result if math.isfinite(result) else None  # JSON has no NaN

        claims = self.claims
        if claims is None or claims.share.processes == 1:
            losses = [measured(value) for value in values]
        else:
            keys = {value: {**self._key(settings), "value": value} for value in values}
            for value, key in keys.items():
                if claims.take("tried", key):
                    self.store.get("tried", key, partial(measured, value))
            for key in keys.values():
                while not self.store.has("tried", key):
                    claims.pause()
            losses = [
                self.store.get("tried", keys[value], partial(measured, value)) for value in values
            ]
        return [math.inf if loss is None else loss for loss in losses]


LARGEST_TRIED = 2.0
"""Coefficient at which the search beyond a grid ends; DroPE's own are 0.412 and 0.103."""


def goes_beyond(grid: Sequence[float]) -> bool:
    """Whether :func:`fit_coefficient` may try values beyond the grid; one value is as given."""
    return len(set(grid)) > 1 and max(grid) < LARGEST_TRIED


def is_largest_tried(coefficient: float, grid: Sequence[float]) -> bool:
    """Whether a fit ended at the largest value that it could try, so that its minimum is beyond."""
    return len(set(grid)) > 1 and coefficient >= max(LARGEST_TRIED, *grid)


def fit_coefficient(
    fitting: Fitting,
    tempered_with: Callable[[float], Callable[[float], Layout]],
    windows: Mapping[int, Integers],
    grid: Sequence[float],
    settings: Any,
) -> float:
    """Return the coefficient c of 1 + c ln s (DroPE, App. C.2) with the least held-out loss.

    The loss is summed over the lengths. While the largest value is the best, the grid continues up
    to ``LARGEST_TRIED``, with its last spacing at first and twice the spacing each time. The result
    is the best value, or the minimum of the parabola through it and its neighbours if its loss is
    lower.

    ``tempered_with``: maps a coefficient to a function from extension factor to layout.
    ``windows``: ``[N, length]`` held-out tokens for every length. ``settings``: inputs of the loss
    of a coefficient besides model and text.
    """
    model = fitting.model
    C = model.layout.training_length

    def loss(coefficient: float) -> float:
        layout_at, total = tempered_with(coefficient), 0.0
        for length, tokens in windows.items():
            with model.using(layout_at(length / C)):
                by_position = losses_by_position(
                    model, tokens, fitting.text.first_token, fitting.batch_tokens
                )
            total += by_position.mean().item()
            fitting.read(*tokens.shape)
        return total

    coefficients = sorted(set(grid))
    tried = dict(zip(coefficients, fitting.losses(settings, coefficients, loss), strict=True))
    if goes_beyond(coefficients):
        largest, step = coefficients[-1], coefficients[-1] - coefficients[-2]
        while largest < LARGEST_TRIED and min(tried, key=lambda c: tried[c]) == largest:
            largest, step = min(LARGEST_TRIED, largest + step), 2 * step
            (tried[largest],) = fitting.losses(settings, [largest], loss)
    lowest = _lowest_point(list(tried.items()))
    if lowest is not None and lowest not in tried:
        (tried[lowest],) = fitting.losses(settings, [lowest], loss)
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
