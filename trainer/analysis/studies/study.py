"""The interface of analyses, which share one forward pass of a model over a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.capture import Heads, NeedlePrompt, capture, separate_prefix
from trainer.analysis.settings import USUAL, AttenuationSettings, NeedleSettings, ShortTime
from trainer.analysis.studies.section import Section
from trainer.model.language_model import LanguageModel


@dataclass(frozen=True)
class Target:
    """A model and the text that it reads.

    ``ids``: ``[B, T]`` tokens on the model's device, each row after a beginning-of-text token.
    ``chosen``: (layer, query head) pairs that snapshots and maps show; empty: the study chooses.
    ``pairs``: rotary pairs that pictures of single pairs show; empty: all, or the study chooses.
    ``seed``: seed of subsamples. ``prompt``: needle prompts in the model's vocabulary, if there are
    any. ``frames``: frames of the short-time transform. ``prefixes``: shorter lengths at which
    frequency entropies are shown too. ``attenuation``: settings of the attenuation of pairs;
    ``choice`` ``[B, T]``: texts whose entropies select these pairs (None: ``ids``). ``needle``: how
    heads of extreme matrix entropy are shown; ``question``: a prompt as long as a text (None: copy
    the end of a text).
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
        """Number of tokens of a text."""
        return self.ids.shape[1]

    @property
    def sampled_layers(self) -> list[int]:
        """Up to 8 layers, evenly spread, from which a study chooses the heads that it shows."""
        layers = len(self.model.layout.layers)
        return np.linspace(0, layers - 1, min(layers, 8)).round().astype(int).tolist()

    @property
    def rotates(self) -> bool:
        """Whether any head rotates."""
        return self.model.layout.rotates

    @property
    def pair_axis(self) -> str:
        """Label of an axis of channel pairs."""
        return "pair index, from the fastest on" if self.rotates else "pair index"

    @property
    def training_length(self) -> int:
        """The model's training length C."""
        return self.model.layout.training_length

    @property
    def prefix(self) -> Tensor | None:
        """First C tokens of the texts if the model reads them differently without the later ones,
        see :func:`separate_prefix`."""
        return separate_prefix(self.model, self.ids, self.training_length)


class Study(ABC):
    """One analysis of one target. A subclass sees every layer of the shared pass, once.

    ``shortest``: number of tokens that it needs.
    """

    key: ClassVar[str]
    title: ClassVar[str]
    shortest: ClassVar[int] = 1

    def __init__(self, target: Target) -> None:
        self.target = target

    @classmethod
    def problems(cls, target: Target) -> list[str]:
        """Return a sentence for each reason why the target cannot be analysed."""
        if target.length >= cls.shortest:
            return []
        return [
            f"expected a text of {cls.shortest} tokens or more, got {target.length}; give a larger "
            "analysis.length, or a longer text."
        ]

    def on_layer(self, heads: Heads) -> None:  # noqa: B027  # a study may need no layer
        """Process one layer in the shared pass; do not keep its tensors."""

    def on_prefix(self, heads: Heads) -> None:  # noqa: B027  # few encodings follow the length
        """Process one layer in a second pass, over the target's ``prefix``, if it has one.

        Everything that a section states about the training length must come from this pass, because
        the first pass applies the temperatures and frequencies of the whole text.
        """

    @abstractmethod
    def section(self) -> Section:
        """Write the section after the pass; may run the model again."""


@torch.no_grad()
def run(
    studies: Sequence[Study], target: Target, done: Callable[[], object] = lambda: None
) -> list[Section]:
    """Read the text once for all studies, and its prefix if that is read differently; then let each
    write its section.

    ``done``: called when a study has read a layer or written its section.
    """

    def on_layer(heads: Heads) -> None:
        for study in studies:
            study.on_layer(heads)
            done()

    def on_prefix(heads: Heads) -> None:
        for study in studies:
            study.on_prefix(heads)

    capture(target.model, target.ids, on_layer)
    if target.prefix is not None:
        capture(target.model, target.prefix, on_prefix)
    sections = []
    for study in studies:
        sections.append(study.section())
        done()
    return sections


Item = TypeVar("Item")


def extremes(items: Sequence[Item], key: Callable[[Item], float]) -> list[Item]:
    """Return the items of the smallest, the middle and the largest key; up to three items as they
    are."""
    if len(items) <= 3:
        return list(items)
    ordered = sorted(items, key=key)
    return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]


Versions = dict[str, tuple[str, int]]
"""Label and style number in figures, by field of a result."""


def before(shown_versions: Versions) -> str:
    """Describe the queries and keys that no encoding has changed."""
    return "before the encoding" if "plain" in shown_versions else "as projected"


def versions(target: Target, *, scores: bool = False) -> Versions:
    """Return ``plain`` and ``rotated``, or only ``rotated`` if the encoding changes at most a
    factor.

    ``scores``: also tell them apart for an ALiBi bias on the scores.
    """
    if target.rotates:
        return {"plain": ("before rotation", 2), "rotated": ("after rotation", 4)}
    if scores and any(spectrum.alibi for spectrum in target.model.layout.spectra):
        return {"plain": ("without the bias", 2), "rotated": ("with ALiBi's bias", 4)}
    return {"rotated": ("as projected, no rotation", 1)}
