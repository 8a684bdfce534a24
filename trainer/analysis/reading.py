"""Statistics of one model on a text, to compare with those of another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.analysis.attention_rows import Rows, attention_rows
from trainer.analysis.attention_statistics import StatisticsOfHeads
from trainer.analysis.averages import Array, Averages
from trainer.analysis.capture import Heads, capture
from trainer.analysis.clusters import Clusters
from trainer.analysis.grids import bucket_means, prefix_lengths
from trainer.analysis.positional_bias import PositionalBias
from trainer.model.language_model import LanguageModel

POINTS = 256
"""Queries and keys each that the silhouette score is computed from."""


@dataclass(frozen=True)
class Reading:
    """Statistics of one model on the text.

    ``heads``: of every query head ``[layers, query heads]`` its ``distance``, ``entropy``,
    ``sink_mass`` and its bias, ``diagonal`` and ``previous``, on the first tokens. ``indicators``:
    by prefix length, means over heads, ``sink_mass`` of the queries since the length before,
    ``key_stable_rank`` and ``silhouette``, both after the encoding. ``loss``: ``[T - 1]`` nats.
    """

    heads: dict[str, Array]
    lengths: list[int]
    indicators: dict[str, Array]
    loss: Array


@torch.no_grad()
def read(model: LanguageModel, ids: Tensor, *, within: int, seed: int = 0) -> Reading:
    """One pass over ``ids`` ``[B, T]``, layer by layer.

    Args:
        model: a decoder.
        ids: texts of at least two tokens, each behind a beginning-of-text token.
        within: heads are measured on so many tokens, the first ones.
        seed: of the subsample that the silhouette score is computed from.
    """
    lengths = prefix_lengths(ids.shape[1])
    statistics, bias = StatisticsOfHeads(), PositionalBias()
    clusters, sinks = Clusters(POINTS, seed), Averages()

    def on_layer(heads: Heads) -> None:
        rows = attention_rows(heads)
        inside = _first_queries(rows, within)
        statistics.update(heads.layer, inside)
        bias.update(heads.layer, inside)
        clusters.update(heads)
        sinks.add(heads.layer, mass=bucket_means(rows.sink, [1, *lengths]))

    ids = ids.to(model.device)
    states = capture(model, ids, on_layer)
    losses = model.losses(states[:, :-1], ids[:, 1:])
    of_heads, of_bias, geometry = statistics.result(), bias.result(), clusters.result().rotated
    return Reading(
        {name: getattr(of_heads, name) for name in ("distance", "entropy", "sink_mass")}
        | {name: getattr(of_bias, name) for name in ("diagonal", "previous")},
        lengths,
        {
            "sink_mass": sinks.stacked("mass").mean(axis=(0, 1)),
            "key_stable_rank": geometry.key_stable_rank.mean(axis=(0, 1)),
            "silhouette": geometry.silhouette.mean(axis=(0, 1)),
        },
        losses.double().mean(dim=0).cpu().numpy(),
    )


def _first_queries(rows: Rows, count: int) -> Rows:
    """The statistics of the first queries, which later tokens do not affect."""
    names = ("peak", "sink", "own", "previous", "distance", "entropy", "learned")
    return Rows(rows.visible[:count], *(getattr(rows, name)[..., :count] for name in names))
