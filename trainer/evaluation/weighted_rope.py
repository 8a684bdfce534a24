"""Weighted RoPE: a factor on the rotary pairs of extreme frequency entropy, without any training
(Probing Rotary Position Embeddings through Frequency Entropy, Sec. 5).

Pairs are chosen on a text, queries and keys each by their own entropies (Eq. 11 and 12), then a
layout is changed for them; any rescaling of the model's own will do. Pairs that do not rotate are
left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from trainer.analysis.attenuation import Gate, channel_factors, weights
from trainer.analysis.frequency_entropy import frequency_entropies
from trainer.errors import UserError
from trainer.evaluation.interventions import require_rotation, with_intervention
from trainer.evaluation.settings import WeightedRopeSettings
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Intervention, Layout


def select(
    model: LanguageModel,
    ids: Tensor,
    settings: Sequence[WeightedRopeSettings],
    layout: Layout | None = None,
) -> tuple[Intervention, ...]:
    """The factors of every layer, from the entropies on a text; empty where all are 1.

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
    gates = [Gate(one.entropy, one.side, one.tau) for one in settings]
    alphas = [one.alpha for one in settings]
    measures = sorted({gate.measure for gate in gates})
    with model.using(layout or model.layout):
        layers = frequency_entropies(model, ids, measures)
    size = model.config.head_size
    found = []
    for encoding, entropies in zip(model.layout.layers, layers, strict=True):
        query, of_query = channel_factors(
            encoding, weights(gates, entropies, "query", alphas), size
        )
        key, of_key = channel_factors(encoding, weights(gates, entropies, "key", alphas), size)
        found.append(Intervention(query if of_query else (), key if of_key else ()))
    return tuple(found)


def pairs(chosen: Sequence[Intervention]) -> int:
    """How many pairs of queries and keys have another factor than 1."""
    rows = (row for of_layer in chosen for row in (*of_layer.query, *of_layer.key))
    return sum(factor != 1 for row in rows for factor in row) // 2


def apply(layout: Layout, chosen: tuple[Intervention, ...]) -> Layout:
    """``layout``, rescaled or not, with these factors; itself where all are 1.

    Raises:
        ValueError: a layer has an intervention already.
    """
    if all(of_layer == Intervention() for of_layer in chosen):
        return layout
    changed = (
        encoding if of_layer == Intervention() else with_intervention(encoding, of_layer)
        for encoding, of_layer in zip(layout.layers, chosen, strict=True)
    )
    return replace(layout, layers=tuple(changed))
