"""A model's shape before training, with an encoding and without (DroPE Sec. 3, Fig. 4, Thm. 3.4).

The decoders have the depth, width and heads of the model and weights drawn anew, all matrices with
one standard deviation of 0.02, as the paper's "fixed variance" and its Table 5 have it: divided by
depth, the matrices that write to the residual stream would let the two differ in late layers alone.
Their vocabulary is what occurs in the text: embeddings are independent, so that the others change
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.averages import Array
from trainer.analysis.positional_bias import bias_gradients, prefix_spreads
from trainer.model.decoder import Decoder
from trainer.model.language_model import LanguageModel
from trainer.positional.encodings import make_spectrum
from trainer.positional.layout import Layout
from trainer.recalibration.drop import drop

TOKENS, FEWEST, SEEDS = 512, 32, 3
BUDGET = 1e12
"""Floating-point operations in gradients, about a minute of one core."""


@dataclass(frozen=True)
class FreshResult:
    """``encoding``: what the version with positions is called. Gradients of A^c by W_Q and W_K
    together, mean over heads, ``[seeds, 2, layers]`` for diagonal and previous token; prefix
    spreads ``[seeds, layers + 1]``. Versions: ``encoded`` and ``nope``."""

    encoding: str
    tokens: int
    gradients: dict[str, Array]
    spreads: dict[str, Array]


def fresh_decoders(model: LanguageModel, ids: Tensor) -> FreshResult | None:
    """Measure both versions with some seeds, or nothing where the shape is too large.

    Args:
        model: its shape, its encoding (RoPE of base 10,000 where it has none) and its windows.
        ids: ``[B, T]``; the first text is read, at most 512 tokens or the training length of it.
    """
    wanted = min(TOKENS, ids.shape[1], model.layout.training_length)
    cost = _cost_of_a_token(model)
    tokens = min(wanted, int(BUDGET / cost))
    if tokens < min(FEWEST, wanted):
        return None
    seeds = max(1, min(SEEDS, int(BUDGET / (cost * tokens))))
    words, text = torch.unique(ids[:1, :tokens], return_inverse=True)
    name, layout = encoded_layout(model)
    versions = {"encoded": layout, "nope": drop(layout)}
    found = [_measure(model, seed, versions, text, len(words)) for seed in range(seeds)]
    gradients, spreads = (
        {version: np.stack([of[version][kind] for of in found]) for version in versions}
        for kind in (0, 1)
    )
    return FreshResult(name, tokens, gradients, spreads)


def encoded_layout(model: LanguageModel) -> tuple[str, Layout]:
    """An encoding for the model's shape, its own where it has one, and what that is called."""
    layout = model.layout
    if not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra):
        rope = make_spectrum("rope", model.config.head_size, layout.training_length, {})
        return "RoPE, base 10,000", drop(layout, to=rope)
    everywhere = len(layout.spectra) == 1
    full = layout.spectra[0].rotary_dim == model.config.head_size
    return "RoPE" if everywhere and full else "own encoding", layout


def _cost_of_a_token(model: LanguageModel) -> float:
    """Operations for the gradients of both biases of both versions."""
    config = model.config
    outputs = (config.num_attention_heads + config.num_key_value_heads) * config.head_size
    gradient = 2 * config.hidden_size * outputs
    return 4.0 * config.num_hidden_layers * config.num_attention_heads * gradient


def _measure(
    model: LanguageModel, seed: int, versions: dict[str, Layout], text: Tensor, vocab: int
) -> dict[str, tuple[Array, Array]]:
    """Gradients ``[2, layers]`` and spreads ``[layers + 1]`` of one decoder with either layout."""
    config = replace(
        model.config,
        vocab_size=vocab,
        initializer="normal",
        initializer_by_depth=False,
        tie_word_embeddings=True,
        from_pretrained=None,
        from_run=None,
    )
    normed = config.qk_norm.when == "always"
    decoder = Decoder(config, drop(model.layout), seed).to(model.device)
    found = {}
    for version, layout in versions.items():
        layers = (replace(layer, qk_norm=normed, intervention=None) for layer in layout.layers)
        decoder.layout = replace(layout, layers=tuple(layers))
        norms = [
            np.hypot(one.query, one.key).mean(axis=1)
            for one in (bias_gradients(decoder, text, shift) for shift in (0, 1))
        ]
        found[version] = np.stack(norms), prefix_spreads(decoder, text)
    return found
