"""Heads as DoPE counts them: which exist, and how many can be chosen."""

from __future__ import annotations

from trainer.common.errors import Problem
from trainer.evaluation.settings import DopeSettings
from trainer.model.config import ModelConfig
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum


def rotating_heads(
    layout: Layout, config: ModelConfig, settings: DopeSettings
) -> list[tuple[int, int]]:
    """Return layer and index of every head, in units of the settings, that can be chosen."""
    count = units(config, settings)
    return [
        (layer, head)
        for layer, encoding in enumerate(layout.layers)
        for head in range(count)
        if spectrum_of(encoding, head, count).rotates
    ]


def heads_problems(layout: Layout, config: ModelConfig, settings: DopeSettings) -> list[Problem]:
    """Whether more heads are to be chosen than there are, in a sentence; known without weights."""
    there = len(rotating_heads(layout, config, settings))
    if settings.heads <= there:
        return []
    kind = "query" if settings.unit == "head" else "key-value"
    return [
        Problem(
            "evaluation.dope.heads",
            f"expected at most {there}, the {kind} heads that rotate, got {settings.heads}.",
        )
    ]


def units(config: ModelConfig, settings: DopeSettings) -> int:
    """Return the number of units per layer."""
    by_head = settings.unit == "head"
    return config.num_attention_heads if by_head else config.num_key_value_heads


def spectrum_of(encoding: LayerEncoding, head: int, count: int) -> Spectrum:
    """Return the spectrum of unit ``head`` out of ``count``."""
    return encoding.spectra[head // (count // len(encoding.spectra))]
