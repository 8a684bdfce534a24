"""The held-out text on which methods fit their parameters, and the parameters fitted so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainer.data.order import Integers
from trainer.evaluation.needle_loss import AnsweredTexts
from trainer.evaluation.store import Store
from trainer.model.language_model import LanguageModel

TEXTS = 4
"""Windows, at most, in which queries and keys are looked at."""


@dataclass(frozen=True)
class FitText:
    """Validation text, apart from what is reported.

    ``windows``: ``[N, length]`` tokens for every length at which something is chosen; they end at
    the same places.
    ``fingerprint``: of the text and its tokens. ``needles``: for every length at which factors are
    searched by needles, texts from it with questions and answers.
    """

    windows: dict[int, Integers]
    end_of_text: int
    fingerprint: str
    needles: Mapping[int, AnsweredTexts] = field(default_factory=dict)

    @property
    def key(self) -> dict[str, Any]:
        """What a choice depends on."""
        sizes = {length: len(windows) for length, windows in self.windows.items()}
        return {"text": self.fingerprint, "windows": sizes}


@dataclass
class Fitting:
    """One model, the text, and what was chosen so far; choices are kept in the store.

    ``read``: told the number and length of the sequences that were read for a choice. ``notes``:
    what was chosen, in words. ``temperature``: the softmax temperature, if that was.
    """

    model: LanguageModel
    fingerprint: str
    text: FitText
    store: Store
    batch_tokens: int
    read: Callable[[int, int], None] = lambda sequences, length: None
    notes: list[str] = field(default_factory=list)
    temperature: dict[str, Any] | None = None

    def beyond(self) -> dict[int, Integers]:
        """The windows longer than the training length."""
        C = self.model.layout.training_length
        return {length: windows for length, windows in self.text.windows.items() if length > C}

    def ids(self, factor: float) -> Tensor:
        """``[TEXTS, length]`` tokens on the model's device, to look at queries and keys."""
        windows = self.text.windows[round(factor * self.model.layout.training_length)][:TEXTS]
        self.read(*windows.shape)
        return torch.from_numpy(windows).to(self.model.device)

    def kept(self, kind: str, settings: Any, make: Callable[[], Any]) -> Any:
        """A choice, made once for these weights, this text and these settings."""
        key = {"model": self.fingerprint, **self.text.key, "settings": settings}
        return self.store.get(kind, key, make)
