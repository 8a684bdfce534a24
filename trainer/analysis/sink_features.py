"""How much of the attention on the first token one rotary pair explains (Rotary Offset Features,
Sec. 4.2): the key of a sink lies towards the mean query of the pair or near the origin, all other
keys away from the queries.

Two measures, of the queries of a :class:`~trainer.analysis.attention_rows.SampledAttention`. The
*margin* is what the score of the first key is above the mean score of the other keys a query sees;
it is a sum over pairs and the channels that stand still. The *weight* is the attention on the first
key, as it is and with one pair's part taken out of all scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trainer.analysis.attention_rows import sampled_attention
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads


@dataclass(frozen=True)
class SinkPart:
    """What ``pair`` does to the attention of a query head on the first token, means over queries.

    ``weight``, ``without``: that attention, and what it is without the pair's part of the scores;
    ``control``: without another pair's, NaN where there is none to compare with. ``first_key``:
    length of the first key in the pair, before the encoding, over that of the mean key.
    ``margin``: of the scores, scaled; ``parts`` ``[pairs]``: of it, by pair.
    """

    layer: int
    head: int
    pair: int
    weight: float
    without: float
    control: float
    first_key: float
    margin: float
    parts: Array

    @property
    def explained(self) -> float:
        """The share of the attention that goes without the pair; negative where it grows."""
        return 1 - self.without / max(self.weight, np.finfo(float).tiny)


def sink_part(heads: Heads, head: int, pair: int, control: int | None = None) -> SinkPart | None:
    """Of one query head over all texts; None where no query sees another key than the first."""
    sampled = sampled_attention(heads, head)
    if sampled is None:
        return None
    kv, at, q, k = sampled.kv_head, sampled.at, sampled.q, sampled.k
    pairs = sampled.pairs

    def weight(without: int | None = None) -> float:
        return float(sampled.weights(without)[..., 0].double().mean())

    # The mean of the keys 1 to i, for every query i; less the first key, and times the query.
    others = k[:, 1:].double().cumsum(dim=1)[:, at - 1] / at[:, None]
    by_channel = (q * (k[:, :1] - others) * heads.scale).mean(dim=(0, 1))
    turning = by_channel[: 2 * pairs].unflatten(0, (2, pairs)).sum(dim=0)
    keys_of_pair = heads.k[:, kv][..., [pair, pair + pairs]]
    first, mean = keys_of_pair[:, 0], keys_of_pair.mean(dim=(0, 1))
    return SinkPart(
        *(heads.layer, head, pair, weight(), weight(pair)),
        math.nan if control is None else weight(control),
        float(first.norm(dim=-1).mean() / mean.norm().clamp_min(1e-9)),
        *(float(by_channel.sum()), turning.cpu().numpy()),
    )
