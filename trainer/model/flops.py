"""Floating-point operations of a model, from its shape alone (PaLM, App. B, but causal).

Counts matrix products, with two operations per multiply-add, and neither norms, rotations, softmax,
biases nor embedding look-ups. Attention counts visible pairs of a query and a key only, whatever
else a backend computes. torchtitan, nanochat and OLMo count the full square of the length, about
twice as many pairs, so that their MFU of the same run is higher. Work that is repeated to save
memory is not counted again.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.model.config import ModelConfig
from trainer.positional.layout import Layout


def visible_pairs(length: int, window: int | None = None) -> int:
    """Return the number of visible query-key pairs in ``length`` tokens: query t sees min(t + 1,
    window)."""
    seen = min(window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(
    config: ModelConfig, layout: Layout, length: int, documents: Sequence[int] | None = None
) -> int:
    """Return the operations of one forward pass over one sequence, with logits at every position.

    ``layout``: its windows limit what a query sees, per layer. ``documents``: lengths in tokens of
    the documents that attention stays within (None: one document).
    """
    assert config.vocab_size is not None
    documents = [length] if documents is None else documents
    q_size = config.num_attention_heads * config.head_size
    weights = config.block_weights + config.hidden_size * config.vocab_size
    pairs = sum(visible_pairs(n, layer.window) for layer in layout.layers for n in documents)
    # Each pair costs one product of query and key, and one of probability and value.
    return 2 * weights * length + 4 * q_size * pairs


def training_flops(
    config: ModelConfig, layout: Layout, length: int, documents: Sequence[int] | None = None
) -> int:
    """Return the operations of forward and backward over one sequence; see :func:`forward_flops`.

    Backward has two products for each one of forward: for its left and its right factor.
    """
    return 3 * forward_flops(config, layout, length, documents)
