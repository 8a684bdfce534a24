"""The comparison of two models on one text: RoPE before the drop and DroPE after it, or any two
others (DroPE).

Models are read layer by layer, and only means are kept. Heads are compared within the shorter
training length; predictions also beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, bucket_means, position_edges
from trainer.analysis.attention import attention_rows, head_statistics
from trainer.analysis.capture import Heads, capture
from trainer.analysis.positional_bias import positional_biases
from trainer.analysis.topic import Plot, Results, Target, finished, tidy
from trainer.common.errors import UserError
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size
from trainer.plotting.lines import (
    Frame,
    Panel,
    Series,
    log_lengths,
    side_by_side,
)
from trainer.plotting.points import Points, diagonal, points
from trainer.plotting.style import style_numbers

MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token",
    "diagonal": "Aᶜ, its own token",
    "previous": "Aᶜ, the previous token",
}


@torch.no_grad()
def head_measures(model: LanguageModel, ids: Tensor) -> dict[str, Array]:
    """Compute :data:`MEASURES` of every head on ``ids`` ``[B, T]``, ``[layers, query heads]``."""
    averages = Averages()

    def on_layer(heads: Heads) -> None:
        rows = attention_rows(heads)
        averages.add(heads.layer, **head_statistics(rows), **positional_biases(rows))

    capture(model, ids, on_layer)
    return {name: averages.stacked(name) for name in MEASURES}


@torch.no_grad()
def loss_by_position(model: LanguageModel, ids: Tensor) -> Array:
    """Compute the loss of every next token, ``[T - 1]`` nats, averaged over ``ids`` ``[B, T]``."""
    losses = model.token_losses(ids[:, :-1].to(model.device), ids[:, 1:].to(model.device))
    return losses.double().mean(dim=0).cpu().numpy()


@torch.no_grad()
def divergence_by_position(model: LanguageModel, other: LanguageModel, ids: Tensor) -> Array:
    """Compute KL(model || other) of the next token at every position, ``[T]`` nats, averaged over
    the texts ``ids`` ``[B, T]``; both models share a vocabulary."""

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        log_p, log_q = (logits.float().log_softmax(dim=-1) for logits in (p, q.to(p.device)))
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1, dtype=torch.float64).clamp(min=0)

    states = [m.hidden_states(ids.to(m.device)).flatten(0, 1) for m in (model, other)]
    size = chunk_size(model.vocab_size, model.device)
    chunks = [
        divergence(model.logits(p), other.logits(q))
        for p, q in zip(*(x.split(size) for x in states), strict=True)
    ]
    return torch.cat(chunks).view(ids.shape).mean(dim=0).cpu().numpy()


class DropComparison:
    """Compare two models, read one after the other: heads within the shorter training length
    ``trained``, predictions also beyond it.

    ``before`` and ``after``: two targets with the same text.

    Raises:
        UserError: vocabularies differ, or the text has fewer than 2 tokens.
    """

    key = "drop"
    title = "Before and after the drop"

    def __init__(self, before: Target, after: Target) -> None:
        sizes = [target.model.config.vocab_size for target in (before, after)]
        if sizes[0] != sizes[1]:
            raise UserError(
                f"compare: expected models of one vocabulary, got {sizes[0]} and {sizes[1]} tokens"
            )
        if before.length < 2:
            raise UserError(f"analysis.length: expected 2 tokens or more, got {before.length}")
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.trained = min(before.training_length, after.training_length)

    def results(self) -> Results:
        """Read the text with both models; draw heads and predictions of both."""
        ids, within = self.before.ids, min(self.trained, self.before.length)
        models = (self.before.model, self.after.model)
        heads = [head_measures(model, ids[:, :within]) for model in models]
        edges = position_edges(ids.shape[1] - 1, per_octave=4)
        losses = [_bucketed(loss_by_position(model, ids), edges) for model in models]
        divergence = _bucketed(divergence_by_position(*models, ids)[:-1], edges)
        tables = [
            tidy(measures, "layer", "head", length=within, model=name)
            for name, measures in zip(self.names, heads, strict=True)
        ]
        for metric, name, curve in (
            ("loss", self.names[0], losses[0]),
            ("loss", self.names[1], losses[1]),
            ("kl", " ‖ ".join(self.names), divergence),
        ):
            table = tidy({metric: curve}, "length", places={"length": edges[1:]}, model=name)
            tables.append(table)
        plots = [*self._heads(*heads), self._positions(edges, losses, divergence)]
        return finished(self, plots, pd.concat(tables), self.names[1])

    def _heads(self, before: dict[str, Array], after: dict[str, Array]) -> list[Plot]:
        """Draw every head of both models; empty if they have different numbers of them."""
        shape = before["distance"].shape
        if shape != after["distance"].shape:
            return []
        layer = np.indices(shape)[0]
        plots = []
        for name, measures, source in (
            ("positional_heads", ("diagonal", "previous"), "Def. 3.1"),
            ("attention", ("distance", "entropy", "sink_mass"), "Sec. 5"),
        ):
            panels = [
                Points.graded(
                    MEASURES[m],
                    *(before[m], after[m], layer),
                    Frame(self.names[0], "" if i else self.names[1], diagonal),
                )
                for i, m in enumerate(measures)
            ]
            caption = f"Every head in {' (x) and '.join(self.names)} (y) (DroPE, {source})."
            figure = points(panels, size=14, index="layer")
            plots.append(Plot(f"drop_{name}", figure, caption))
        return plots

    def _positions(self, edges: Sequence[int], losses: Sequence[Array], divergence: Array) -> Plot:
        middles = ((np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2).tolist()
        styles = style_numbers(self.names)
        label = f"KL({self.names[0]} ‖ {self.names[1]})"
        apart = [Series(label, 0, middles, divergence.tolist(), marked=False)]
        curves = [
            Series(name, styles[name], middles, curve.tolist(), marked=False)
            for name, curve in zip(self.names, losses, strict=True)
        ]
        mark = float(self.trained), "training length"
        panels = [
            Panel(title, lines, Frame("tokens read", y_label, log_lengths, mark))
            for title, lines, y_label in (
                ("next-token predictions", apart, "KL divergence (nats)"),
                ("loss", curves, "loss (nats/token)"),
            )
        ]
        return Plot(
            "drop_positions",
            side_by_side(panels),
            "Distance between both models' predictions, and their losses, by the number of tokens "
            "read (DroPE, Sec. 5).",
        )


def _bucketed(curve: Array, edges: list[int]) -> Array:
    return bucket_means(torch.from_numpy(curve), edges).numpy()
