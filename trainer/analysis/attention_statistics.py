"""Statistics of attention heads and of next-token distributions, to compare two models with, or
one model with two encodings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.analysis.attention_rows import Rows
from trainer.analysis.averages import Array, Averages
from trainer.common.errors import UserError
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over queries, ``[layers, query heads]``, without the first, which has no choice.

    ``distance``: tokens between query and key, weighted by attention. ``entropy``: over its largest
    possible value, the logarithm of the keys in sight: 1 is uniform. ``sink_mass``: attention on
    the first key of the text.
    """

    layers: list[int]
    distance: Array
    entropy: Array
    sink_mass: Array


class StatisticsOfHeads:
    """Collects the statistics of every layer."""

    def __init__(self) -> None:
        self._averages = Averages()

    def update(self, layer: int, rows: Rows) -> None:
        """Take in one layer's rows of attention, of texts of at least two tokens."""
        # A window of one key leaves no choice either: entropy 0 over the logarithm of 2.
        largest = rows.visible[1:].clamp(min=2).log()
        self._averages.add(
            layer,
            distance=rows.distance[..., 1:].double().mean(dim=-1),
            entropy=(rows.entropy[..., 1:].double() / largest).mean(dim=-1),
            sink_mass=rows.sink[..., 1:].double().mean(dim=-1),
        )

    def result(self) -> AttentionStatistics:
        """Means over the texts taken in."""
        stacked = self._averages.stacked
        return AttentionStatistics(
            self._averages.layers, stacked("distance"), stacked("entropy"), stacked("sink_mass")
        )


@torch.no_grad()
def divergence_by_position(model: LanguageModel, other: LanguageModel, ids: Tensor) -> Array:
    """KL(model || other) of the next token at every position, ``[T]`` nats, averaged over texts.

    Args:
        model: p.
        other: q, of the same vocabulary.
        ids: ``[B, T]``.

    Raises:
        UserError: the vocabularies differ in size.
    """
    if model.config.vocab_size != other.config.vocab_size:
        raise UserError.at(
            "model",
            f"the two models must share a vocabulary, got {model.config.vocab_size} and "
            f"{other.config.vocab_size} tokens.",
        )
    states = [one.hidden_states(ids.to(one.device)).flatten(0, 1) for one in (model, other)]
    size = chunk_size(model.vocab_size, model.device)
    chunks = [
        _divergence(model.logits(p), other.logits(q).to(p.device))
        for p, q in zip(*(x.split(size) for x in states), strict=True)
    ]
    return torch.cat(chunks).view(ids.shape).mean(dim=0).cpu().numpy()


def _divergence(logits: Tensor, others: Tensor) -> Tensor:
    """``[n]`` float64 of logits ``[n, vocab]``."""
    log_p, log_q = logits.float().log_softmax(dim=-1), others.float().log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1, dtype=torch.float64).clamp(min=0)
