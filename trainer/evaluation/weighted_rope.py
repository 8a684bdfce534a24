"""Weighted RoPE: a factor on the rotary pairs of extreme frequency entropy, without any training
(Probing Rotary Position Embeddings through Frequency Entropy, Sec. 5).

Pairs are chosen on a text, queries and keys each by their own entropies (Eq. 11 and 12), then a
layout is changed for them; any rescaling of the model's own will do. Pairs that do not rotate are
left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.analysis.attenuation import Gate, channel_factors
from trainer.analysis.frequency_entropy import FrequencyEntropy, frequency_entropies
from trainer.analysis.pairs import Side
from trainer.errors import UserError
from trainer.evaluation.interventions import reading_with, require_rotation, with_intervention
from trainer.evaluation.settings import WeightedRopeSettings
from trainer.model.decoder import Decoder
from trainer.positional.intervention import Factors, Intervention
from trainer.positional.layout import Layout

PAPER = (
    WeightedRopeSettings("sequence", "below", 0.6),
    WeightedRopeSettings("spectrum", "above", 0.4),
)
"""What the paper does at once in its downstream tasks (Sec. 5.3)."""


@dataclass(frozen=True)
class Weights:
    """Factors of one layer, ``[Hq][D]`` and ``[Hkv][D]``, empty where all are 1, and how many pairs
    of queries and keys have another than 1."""

    query: Factors = ()
    key: Factors = ()
    query_pairs: int = 0
    key_pairs: int = 0


def select(
    model: Decoder,
    ids: Tensor,
    settings: Sequence[WeightedRopeSettings] = PAPER,
    layout: Layout | None = None,
) -> tuple[Weights, ...]:
    """Weights of every layer, from the entropies on a text.

    Args:
        model: a decoder, with its layout as trained.
        ids: ``[B, T]`` texts; their entropies are averaged.
        settings: one or more; a pair that several choose has the smallest of their factors.
        layout: the rescaled layout; None: as trained.

    Raises:
        UserError: impossible settings, a model without rotation, or too short a text.
    """
    if problems := [problem for one in settings for problem in one.problems()]:
        raise UserError(*problems)
    require_rotation(model.layout, "evaluation.weighted_rope")
    measures = sorted({one.entropy for one in settings})
    with reading_with(model, layout or model.layout):
        layers = frequency_entropies(model, ids, measures)
    size = model.config.head_size
    found = []
    for encoding, entropies in zip(model.layout.layers, layers, strict=True):
        query, of_query = channel_factors(encoding, _weights(entropies, "query", settings), size)
        key, of_key = channel_factors(encoding, _weights(entropies, "key", settings), size)
        found.append(Weights(query if of_query else (), key if of_key else (), of_query, of_key))
    return tuple(found)


def _weights(
    entropies: FrequencyEntropy, side: Side, settings: Sequence[WeightedRopeSettings]
) -> Tensor:
    """Factors of the pairs of one side of a layer, ``[H, pairs]``."""
    gates = [Gate(one.entropy, one.side, one.tau) for one in settings]
    found = [
        gate.weights(entropies, side, one.alpha) for gate, one in zip(gates, settings, strict=True)
    ]
    return torch.stack(found).amin(dim=0)


def apply(layout: Layout, weights: tuple[Weights, ...]) -> Layout:
    """``layout``, rescaled or not, with these weights; itself where all are 1.

    Raises:
        ValueError: a layer has an intervention already.
    """
    if not any(of_layer.query or of_layer.key for of_layer in weights):
        return layout
    changed = (
        with_intervention(encoding, Intervention(query=of_layer.query, key=of_layer.key))
        if of_layer.query or of_layer.key
        else encoding
        for encoding, of_layer in zip(layout.layers, weights, strict=True)
    )
    return replace(layout, layers=tuple(changed))
