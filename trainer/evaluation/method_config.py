"""Configuration of methods and their settings, shared by every kind of evaluation.

This module imports no torch, so that a configuration error is reported without its start-up time.
"""

from __future__ import annotations

from trainer.common.errors import UserError
from trainer.config import DopeSettings
from trainer.model.config import ModelConfig
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum

"""Tokens of a sequence."""


"""Parts that change only the layers of ``evaluation.layers``."""
"""Parts of methods, which ``evaluation.methods`` joins by ``+``."""

"""Parts that choose something on validation text."""

LAYERS_KEY = "evaluation.layers"
"""Tokens that the entropies of ``evaluation.weighted_rope`` need."""


def rotating_heads(layout: Layout, config: ModelConfig) -> list[tuple[int, int]]:
    """Return layer and index of every query head that rotates."""
    count = config.num_attention_heads
    return [
        (layer, head)
        for layer, encoding in enumerate(layout.layers)
        for head in range(count)
        if spectrum_of(encoding, head, count).rotates
    ]


def check_heads(layout: Layout, config: ModelConfig, settings: DopeSettings) -> None:
    """Check that the model has enough rotating heads; this needs no weights."""
    available = len(rotating_heads(layout, config))
    if settings.heads > available:
        raise UserError(
            f"evaluation.dope.heads: expected at most {available}, the query heads that rotate, "
            f"got {settings.heads}"
        )


def spectrum_of(encoding: LayerEncoding, head: int, count: int) -> Spectrum:
    """Return the spectrum of query head ``head`` out of ``count``."""
    return encoding.spectra[head // (count // len(encoding.spectra))]
