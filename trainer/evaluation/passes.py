"""Batch sizes of forward passes."""

from __future__ import annotations

from trainer.model.language_model import LanguageModel

IN_CACHE = 2**19
"""Numbers of a layer's input that stay in a processor's cache until the layer has used them."""


def sequences_at_once(model: LanguageModel, length: int, batch_tokens: int) -> int:
    """Sequences of ``length`` tokens, at least one, at most ``batch_tokens`` tokens together.

    On a CPU there are no more than its caches hold: with more, every layer waits for memory.
    """
    if model.computes_on == "cpu":
        batch_tokens = min(batch_tokens, IN_CACHE // model.config.hidden_size)
    return max(1, batch_tokens // length)
