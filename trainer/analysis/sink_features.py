"""How much of the attention on the first token one rotary pair explains (Rotary Offset Features,
Sec. 4.2): the key of a sink lies towards the mean query of the pair or near the origin, all other
keys away from the queries.

Two measures, of the queries in the last three quarters of the training length, or of the text or
the window where these are shorter. The *margin* is what the score of the first key is above the
mean score of the other keys a query sees; it is a sum over pairs and the channels that stand still.
The *weight* is the attention on the first key, as it is and with one pair's part taken out of all
scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.attention_rows import head_slopes
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.model.softmax import capped

QUERIES = 128
"""The most queries of a text, evenly spread."""


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
    length = min(heads.q.shape[2], heads.training_length, heads.encoding.window or heads.q.shape[2])
    if length < 2:
        return None
    kv = head // heads.queries_per_key
    pairs = len(heads.encoding.spectra[kv].inv_freq)
    start = max(1, length // 4)
    at = torch.linspace(start, length - 1, min(QUERIES, length - start), device=heads.q.device)
    at = at.round().long()
    q, k = heads.rotated_q[:, head, at], heads.rotated_k[:, kv, :length]
    products = q @ k.mT
    slopes = head_slopes(heads)
    slope = 0.0 if slopes is None else float(slopes[head])
    keys = torch.arange(length, device=at.device)

    def weight(products: Tensor) -> float:
        scores = capped(products * heads.scale, heads.softcap) + slope * (keys - at[:, None])
        scores = scores.masked_fill(keys > at[:, None], -torch.inf)
        if heads.sinks is not None:
            scores = F.pad(scores, (0, 1), value=float(heads.sinks[head]))
        return float(scores.softmax(dim=-1)[..., 0].double().mean())

    def without(pair: int) -> float:
        channels = [pair, pair + pairs]
        return weight(products - q[..., channels] @ k[..., channels].mT)

    # The mean of the keys 1 to i, for every query i; less the first key, and times the query.
    others = k[:, 1:].double().cumsum(dim=1)[:, at - 1] / at[:, None]
    by_channel = (q * (k[:, :1] - others) * heads.scale).mean(dim=(0, 1))
    turning = by_channel[: 2 * pairs].unflatten(0, (2, pairs)).sum(dim=0)
    keys_of_pair = heads.k[:, kv][..., [pair, pair + pairs]]
    first, mean = keys_of_pair[:, 0], keys_of_pair.mean(dim=(0, 1))
    return SinkPart(
        *(heads.layer, head, pair, weight(products), without(pair)),
        math.nan if control is None else without(control),
        float(first.norm(dim=-1).mean() / mean.norm().clamp_min(1e-9)),
        *(float(by_channel.sum()), turning.cpu().numpy()),
    )
