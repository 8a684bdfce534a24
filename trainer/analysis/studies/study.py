"""The interface of analyses, which share one forward pass of a model over a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.capture import Heads, capture
from trainer.analysis.needle_prompt import NeedlePrompt
from trainer.analysis.settings import AttenuationSettings, NeedleSettings
from trainer.analysis.short_time import USUAL, ShortTime
from trainer.analysis.studies.section import Section
from trainer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Target:
    """A model and the text that it is read with.

    ``ids``: ``[B, T]`` tokens on the model's device, each row behind a beginning-of-text token.
    ``chosen``: (layer, query head) pairs that snapshots and maps show; empty: the study chooses.
    ``pairs``: rotary pairs that pictures of single ones show; empty: all, or found. ``seed``: of
    subsamples. ``prompt``: needle prompts in the model's words; None: there are none. ``frames``:
    of the short-time transform of frequency entropies. ``prefixes``: shorter texts, their first
    tokens, at which frequency entropies are shown too. ``attenuation``: of pairs of extreme
    entropy, and ``choice`` ``[B, T]`` the texts whose entropies decide; None: ``ids``. ``needle``:
    for heads of extreme matrix entropy, and ``question`` a prompt as long as a text; None: a copy.
    """

    name: str
    model: LanguageModel
    ids: Tensor
    chosen: tuple[tuple[int, int], ...] = ()
    seed: int = 0
    prompt: NeedlePrompt | None = None
    pairs: tuple[int, ...] = ()
    frames: ShortTime = USUAL
    prefixes: tuple[int, ...] = ()
    attenuation: AttenuationSettings = field(default_factory=AttenuationSettings)
    choice: Tensor | None = None
    needle: NeedleSettings = field(default_factory=NeedleSettings)
    question: NeedlePrompt | None = None

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.ids.shape[1]

    @property
    def sampled_layers(self) -> list[int]:
        """At most 8 layers, evenly spread, that a study looks at to choose what it shows."""
        layers = len(self.model.layout.layers)
        return np.linspace(0, layers - 1, min(layers, 8)).round().astype(int).tolist()

    @property
    def rotates(self) -> bool:
        """Whether any head has a rotation."""
        return any(spectrum.rotates for spectrum in self.model.layout.spectra)

    @property
    def pair_axis(self) -> str:
        """What an axis of channel pairs is called."""
        return "pair index, from the fastest on" if self.rotates else "pair index"

    @property
    def training_length(self) -> int:
        """C of the model."""
        return self.model.layout.training_length


class Study(ABC):
    """One analysis of one target. A subclass sees every layer of the shared pass, once.

    ``shortest``: tokens that it needs of a text.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    shortest: ClassVar[int] = 1

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def problems(cls, target: Target) -> list[str]:
        """Why it cannot be made of this target, one sentence each."""
        if target.length >= cls.shortest:
            return []
        return [
            f"expected a text of {cls.shortest} tokens or more, got {target.length}; give a larger "
            "analysis.length, or a longer text."
        ]

    def on_layer(self, heads: Heads) -> None:  # noqa: B027  # a study may need no layer
        """Process one layer in the shared pass; do not keep its tensors."""

    @abstractmethod
    def section(self) -> Section:
        """The section of the page, after the pass; may run the model again."""


@torch.no_grad()
def run(studies: Sequence[Study], target: Target) -> list[Section]:
    """Read the text once for all studies together, then let each write its section."""

    def on_layer(heads: Heads) -> None:
        for study in studies:
            study.on_layer(heads)

    capture(target.model, target.ids, on_layer)
    return [study.section() for study in studies]
