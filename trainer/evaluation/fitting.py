"""The held-out text on which methods fit their parameters, and the parameters fitted so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.data.order import Integers
from trainer.evaluation.loss import AnsweredTexts
from trainer.evaluation.store import Claims, Store, all_fields, fingerprint
from trainer.model.language_model import LanguageModel

_NOT_OF_FITS = {
    "windows": "their sizes stand for them: they end at places that follow from the sizes",
    "needles": "made of the text by the settings of the search, which its key has",
    "choice": "read by choices alone: see FitText.choice_key",
}
"""Fields of the text that the key of a fit leaves out, with the reason."""


@dataclass(frozen=True)
class FitText:
    """Validation text, apart from what is reported.

    ``windows``: ``[N, length]`` tokens for every length at which something is chosen; they end at
    the same places.
    ``fingerprint``: of the text and its tokens. ``needles``: for every length at which factors are
    searched by needles, texts from it with questions and answers.
    ``choice``: ``[texts, tokens]`` for every length at which heads or pairs are chosen, in place of
    windows.
    """

    windows: Mapping[int, Integers]
    end_of_text: int
    fingerprint: str
    needles: Mapping[int, AnsweredTexts] = field(default_factory=dict)
    choice: Mapping[int, Integers] | None = None

    @property
    def key(self) -> dict[str, Any]:
        """Inputs of a fit other than the model and settings."""
        sizes = {length: len(windows) for length, windows in self.windows.items()}
        return {**all_fields(self, _NOT_OF_FITS), "windows": sizes}

    @property
    def choice_key(self) -> dict[str, Any]:
        """Inputs of a choice of heads or pairs other than the model and settings."""
        texts = self.choice or {}
        return {**self.key, "choice": {n: fingerprint(texts[n]) for n in sorted(texts)}}


@dataclass
class Fitting:
    """One model, the text to fit on, and the notes of its fits; fits are stored.

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

    def at(self, factors: Iterable[float]) -> dict[int, Integers]:
        """Return the windows at those of these multiples of the training length that exceed it."""
        C = self.model.layout.training_length
        lengths = (round(factor * C) for factor in factors)
        return {length: self.text.windows[length] for length in lengths if length > C}

    def ids(self, factor: float, texts: int) -> Tensor:
        """Return ``[texts, tokens]`` on the model's device, for capturing queries and keys."""
        length = round(factor * self.model.layout.training_length)
        chosen = self.text.windows if self.text.choice is None else self.text.choice
        ids = chosen[length][:texts]
        self.read(len(ids), length)
        return torch.from_numpy(ids).to(self.model.device)

    def kept(self, kind: str, settings: Any, make: Callable[[], Any]) -> Any:
        """Return a fit, made once for these weights, this text and these settings."""
        key = {"model": self.fingerprint, **self.text.key, "settings": settings}
        return self.store.get(kind, key, make)

    def of_each(
        self, settings: Any, values: Sequence[float], loss: Callable[[float], float]
    ) -> list[float]:
        """Return the loss of each value, infinite if it is not a number.

        Processes that fit together share the values, and read the others' losses from the store.
        """

        def measured(value: float) -> float | None:
            found = loss(value)
            return found if math.isfinite(found) else None  # JSON has no NaN

        claims = self.claims
        if claims is None or claims.share.processes == 1:
            losses = [measured(value) for value in values]
        else:
            model = {"model": self.fingerprint, **self.text.key, "settings": settings}
            keys = {value: {**model, "value": value} for value in values}
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
