"""Perplexity with the rotary pairs of extreme frequency entropy attenuated (Probing Rotary Position
Embeddings through Frequency Entropy, Sec. 5.2 and Fig. 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from trainer.analysis.frequency_entropy import FrequencyEntropy
from trainer.analysis.pairs import Side
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Factors, Intervention, LayerEncoding, Layout

SIDES: tuple[Side, Side] = ("query", "key")


@dataclass(frozen=True)
class Gate:
    """Pairs whose ``measure`` is ``side`` the threshold ``tau``."""

    measure: str
    side: Literal["below", "above"]
    tau: float

    def chosen(self, entropy: FrequencyEntropy, side: Side) -> Tensor:
        """Which pairs of queries or keys, ``[H, pairs]``."""
        values = (entropy.query if side == "query" else entropy.key)[self.measure]
        return values < self.tau if self.side == "below" else values > self.tau

    def weights(self, entropy: FrequencyEntropy, side: Side, alpha: float) -> Tensor:
        """``alpha`` for the chosen pairs and 1 for the others, ``[H, pairs]`` float64."""
        chosen = self.chosen(entropy, side)
        return torch.ones_like(chosen, dtype=torch.float64).masked_fill(chosen, alpha)


Gates = tuple[Gate, ...]
"""All pairs that any of them chooses."""


@dataclass(frozen=True)
class Sweep:
    """Perplexity by alpha on texts of ``tokens`` tokens, with so many ``pairs`` of queries and keys
    attenuated."""

    gates: Gates
    tokens: int
    pairs: int
    perplexity: dict[float, float]


@torch.no_grad()
def sweep(
    model: LanguageModel,
    ids: Tensor,
    entropies: Sequence[FrequencyEntropy],
    gates: Sequence[Gates],
    alphas: Sequence[float],
) -> list[Sweep]:
    """Read ``ids`` ``[B, T + 1]`` once as they are, and for all gates and alphas below 1 once more.

    ``entropies``: of the layers, on these texts or others. Gates that choose no pair cost nothing.
    """
    layout = model.layout
    ids = ids.to(model.device)

    def perplexity(changed: Layout) -> float:
        with model.using(changed):
            return float(model.token_losses(ids[:, :-1], ids[:, 1:]).double().mean().exp())

    found = []
    plain = perplexity(layout)
    for together in gates:
        curve, pairs = {1.0: plain}, 0
        for alpha in sorted({*alphas} - {1.0}, reverse=True):
            changed, pairs = attenuated(layout, entropies, together, alpha, model.config.head_size)
            curve[alpha] = perplexity(changed) if pairs else plain
        found.append(Sweep(together, ids.shape[1] - 1, pairs, curve))
    return found


def attenuated(
    layout: Layout,
    entropies: Sequence[FrequencyEntropy],
    gates: Gates,
    alpha: float,
    head_dim: int,
) -> tuple[Layout, int]:
    """``layout`` with a factor ``alpha`` on the pairs of queries and keys that a gate chooses and
    that rotate, each by its own entropy (Eq. 11 and 12), and how many pairs these are."""
    layers, total = [], 0
    for encoding, entropy in zip(layout.layers, entropies, strict=True):
        (query, of_query), (key, of_key) = (
            channel_factors(encoding, weights(gates, entropy, side, [alpha] * len(gates)), head_dim)
            for side in SIDES
        )
        layers.append(replace(encoding, intervention=Intervention(query=query, key=key)))
        total += of_query + of_key
    return replace(layout, layers=tuple(layers)), total


def weights(
    gates: Sequence[Gate], entropy: FrequencyEntropy, side: Side, alphas: Sequence[float]
) -> Tensor:
    """Factors of the pairs of queries or keys, ``[H, pairs]``: of a pair that several gates choose
    the smallest. ``alphas``: one for each gate."""
    found = [gate.weights(entropy, side, alpha) for gate, alpha in zip(gates, alphas, strict=True)]
    return torch.stack(found).amin(dim=0)


def channel_factors(encoding: LayerEncoding, weights: Tensor, head_dim: int) -> tuple[Factors, int]:
    """Turn the weights of rotated pairs, ``[H, pairs]``, into one factor per channel.

    Returns:
        the factors ``[H][D]``, 1 where a pair does not rotate, and the number of pairs whose
        factor differs from 1.
    """
    rows, changed = torch.ones(len(weights), head_dim, dtype=torch.float64), 0
    per_key = len(weights) // len(encoding.spectra)
    for head, row in enumerate(rows):
        turns = torch.tensor(encoding.spectra[head // per_key].inv_freq) > 0
        pairs = torch.where(turns, weights[head, : len(turns)], 1.0)
        row[: 2 * len(turns)] = pairs.repeat(2)
        changed += int((pairs != 1).sum())
    return tuple(map(tuple, rows.tolist())), changed
