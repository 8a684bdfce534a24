"""Weighted RoPE: a factor on rotary pairs of extreme frequency entropy, without training.

Source: Probing Rotary Position Embeddings through Frequency Entropy, Sec. 5. Pairs of queries and
of keys are chosen on a text by their own entropies (Eq. 11 and 12), and the layout is changed for
them, on top of any rescaling. Pairs that do not rotate stay unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.analysis.attention import SIDES, Side
from trainer.config import WeightedRopeSettings
from trainer.positional.layout import Factors, Intervention, LayerEncoding, Layout


def factors_of(
    layout: Layout,
    entropies: Sequence[Mapping[tuple[str, Side], Tensor]],
    rules: Sequence[WeightedRopeSettings],
    head_dim: int,
) -> tuple[Intervention, ...]:
    """Return the factors on every layer's queries and keys, by their own entropies (Eq. 11 and
    12), ``[H, pairs]`` by measure and side.

    A pair that several rules choose gets the smallest factor. A side whose factors are all 1 is
    empty.
    """
    layers = []
    for encoding, entropy in zip(layout.layers, entropies, strict=True):
        factors: dict[Side, Factors] = {}
        for side in SIDES:
            by_rule = []
            for rule in rules:
                values = entropy[rule.entropy, side]
                chosen = values < rule.tau if rule.side == "below" else values > rule.tau
                by_rule.append(torch.ones_like(values).masked_fill(chosen, rule.alpha))
            weights = torch.stack(by_rule).amin(dim=0)
            factors[side] = _channel_factors(encoding, weights, head_dim)
        layers.append(Intervention(factors["query"], factors["key"]))
    return tuple(layers)


def _channel_factors(encoding: LayerEncoding, weights: Tensor, head_dim: int) -> Factors:
    """Turn the weights ``[H, pairs]`` of pairs into factors ``[H][D]`` of channels, 1 where a pair
    does not rotate; empty if all are 1."""
    rows = torch.ones(len(weights), head_dim, dtype=torch.float64)
    per_key = len(weights) // len(encoding.spectra)
    for head, row in enumerate(rows):
        turns = torch.tensor(encoding.spectra[head // per_key].inv_freq) > 0
        pairs = torch.where(turns, weights[head, : len(turns)], 1.0)
        row[: 2 * len(turns)] = pairs.repeat(2)
    if (rows == 1).all():
        return ()
    return tuple(map(tuple, rows.tolist()))


def count_pairs(chosen: Sequence[Intervention]) -> int:
    """Return the number of query and key pairs whose factor is not 1."""
    changed = 0
    for intervention in chosen:
        for of_head in (*intervention.query, *intervention.key):
            changed += sum(factor != 1 for factor in of_head)
    return changed // 2


def apply(layout: Layout, chosen: Sequence[Intervention]) -> Layout:
    """Return ``layout``, rescaled or not, with these factors; raise a ValueError if a layer already
    has an intervention."""
    layers = [*layout.layers]
    for number, factors in enumerate(chosen):
        if factors != Intervention():
            layers[number] = layers[number].with_intervention(factors)
    return replace(layout, layers=tuple(layers))
