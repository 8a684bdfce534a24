"""Floating-point operations that a model needs, from its shape alone (PaLM, App. B, but causal).

Matrix products are counted, two operations for a multiplication and its addition; norms, rotations,
softmax, biases and the look-up of embeddings are not. A query counts with the keys that it sees,
whatever a backend computes beside them. What a run computes twice to save memory counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.model.config import ModelConfig
from trainer.positional.layout import Layout


def visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a query and a key it sees in ``length`` tokens: query t sees min(t + 1, window)."""
    seen = min(window or length, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def forward_flops(
    config: ModelConfig, layout: Layout, length: int, documents: Sequence[int] | None = None
) -> int:
    """Operations of one forward pass over one sequence, logits of every position included.

    Args:
        config: the shape; ``vocab_size`` must be set.
        layout: its windows limit what a query sees, layer by layer.
        length: tokens of the sequence.
        documents: lengths in tokens of the documents that attention stays within (None: one).

    Raises:
        ValueError: the vocabulary is unknown, or the documents do not add up to ``length``.
    """
    if config.vocab_size is None:
        raise ValueError("config.vocab_size must be known when operations are counted")
    documents = [length] if documents is None else documents
    if sum(documents) != length:
        raise ValueError(f"documents of {sum(documents)} tokens in a sequence of {length}")
    q_size = config.num_attention_heads * config.head_size
    weights = config.block_weights + config.hidden_size * config.vocab_size
    pairs = sum(visible_pairs(n, layer.window) for layer in layout.layers for n in documents)
    # A pair is one product of a query and a key, and one of a probability and a value.
    return 2 * weights * length + 4 * q_size * pairs


def training_flops(
    config: ModelConfig, layout: Layout, length: int, documents: Sequence[int] | None = None
) -> int:
    """Operations of forward and backward over one sequence; arguments of :func:`forward_flops`.

    Backward has two products for each one of forward: by its left and by its right factor.
    """
    return 3 * forward_flops(config, layout, length, documents)
