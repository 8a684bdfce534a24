"""Five attention statistics of each layer, cheap enough to be computed during training.

The mass on the first token (attention sinks, Xiao et al. 2024), the entropy of attention, whose
collapse comes with instability (Zhai et al. 2023), the largest logit, whose growth does (Dehghani
et al. 2023), the distance attended over, and the stable rank of the keys (Rudelson and Vershynin
2007).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainer.analysis.attention_rows import head_slopes
from trainer.analysis.capture import Heads, observing
from trainer.model.language_model import LanguageModel
from trainer.model.softmax import capped

MEASURES = ("sink_mass", "entropy", "distance", "largest_logit", "stable_rank")
SCORES = 2**22
"""Scores held at once."""


@torch.no_grad()
def probe(model: LanguageModel, ids: Tensor) -> dict[str, list[float]]:
    """Read ``ids`` ``[B, T]``, T at least 2; each of :data:`MEASURES` for every layer.

    ``sink_mass``: attention on the first token. ``entropy``: of attention, 1 where it is uniform
    over what a query sees. ``distance``: mean distance attended over, in tokens. All three are
    means over heads and queries but the first, which sees itself alone. Entropy and distance are of
    the attention that the keys share, without what a learned sink takes. ``largest_logit``: max of
    the scores, q k / sqrt(D) in most models, over what these queries see. ``stable_rank``: squared
    Frobenius over squared spectral norm of a head's keys ``[T, D]``, mean over heads and sequences.
    Queries and keys are those after the encoding.
    """
    measured, grams = [], []

    def look(heads: Heads) -> None:
        measured.append(attention_measures(heads))
        grams.append(heads.rotated_k.mT @ heads.rotated_k)

    with observing(model, look):
        model(ids.to(model.device), last=1)
    # All layers in one transfer from the device.
    ranks = stable_rank(torch.stack(grams)).mean(dim=(1, 2))
    rows = torch.column_stack([torch.stack(measured), ranks]).T.tolist()
    return dict(zip(MEASURES, rows, strict=True))


def attention_measures(heads: Heads) -> Tensor:
    """Sink mass, entropy, distance and largest logit of one layer, ``[4]``; see :func:`probe`.

    Goes through blocks of queries, and with a window through those keys that they can see.
    """
    k = heads.rotated_k[:, :, None]
    q = heads.rotated_q.unflatten(1, (k.shape[1], -1)) * heads.scale
    B, H, G, T, _ = q.shape
    window = heads.encoding.window or T
    slopes = head_slopes(heads)
    if slopes is not None:
        slopes = slopes.view(H, G, 1, 1)
    sums, largest = q.new_zeros(3), q.new_full((), -math.inf)
    size = max(1, SCORES // (B * H * G * min(T, window)))
    for start in range(1, T, size):
        stop = min(start + size, T)
        first = max(0, start - window + 1)
        i = torch.arange(start, stop, device=q.device)[:, None]
        away = i - torch.arange(first, stop, device=q.device)
        hidden = (away < 0) | (away >= window)
        scores = capped(q[..., start:stop, :] @ k[..., first:stop, :].mT, heads.softcap)
        scores = scores.masked_fill(hidden, -math.inf)
        largest = torch.maximum(largest, scores.amax())
        scores = scores if slopes is None else scores - slopes * away
        attention = scores.softmax(dim=-1)
        first_key = attention[..., 0] if first == 0 else attention.new_zeros(())
        if heads.sinks is not None:
            first_key = first_key * (scores.logsumexp(dim=-1) - heads.sinks.view(H, G, 1)).sigmoid()
        # A query that sees itself alone has the entropy 0, whatever that is divided by.
        most = (i + 1).clamp(max=window).log().clamp(min=1e-6)
        sums += torch.stack(
            [
                first_key.sum(),
                (torch.special.entr(attention) / most).sum(),
                (attention * away).sum(),
            ]
        )
    return torch.cat([sums / (B * H * G * (T - 1)), largest[None]])


def stable_rank(gram: Tensor) -> Tensor:
    """Of matrices K ``[..., T, D]`` from K^T K ``[..., D, D]``; not a number where K is not finite
    or zero."""
    # The decomposition refuses what is not finite.
    finite = gram.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    gram = torch.where(finite, gram, 0.0)
    return gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / torch.linalg.eigvalsh(gram)[..., -1]
