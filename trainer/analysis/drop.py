"""The comparison of two models on one text: RoPE before the drop and DroPE after it, or any two
others (DroPE).

Models are read layer by layer, one after the other, and only means are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trainer.analysis.attention import Array, Heads, Rows, attention_rows, capture
from trainer.analysis.positional_bias import positional_biases
from trainer.analysis.topic import (
    Results,
    Target,
    bucket_means,
    finished,
    position_edges,
    stacked,
    tidy,
)
from trainer.common.errors import UserError
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size
from trainer.plotting.panels import Line, Panel, diagonal, draw, graded, log_lengths
from trainer.plotting.style import Plot, style_numbers

MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token",
    "diagonal": "Aᶜ, its own token",
    "previous": "Aᶜ, the previous token",
}


def head_statistics(rows: Rows) -> dict[str, Tensor]:
    """Average over the queries of each head ``[B, Hq]``, in texts of at least two tokens.

    ``distance``: tokens between query and key, weighted by attention. ``entropy``: divided by its
    largest possible value, the logarithm of the number of visible keys; 1 is uniform.
    ``sink_mass``: attention on the first key of the text. The first query, which sees only itself,
    is left out.
    """
    # A query with one visible key has entropy 0; log 2 avoids 0 / 0.
    largest = rows.visible[1:].clamp(min=2).log()
    return {
        "distance": rows.distance[..., 1:].double().mean(dim=-1),
        "entropy": (rows.entropy[..., 1:].double() / largest).mean(dim=-1),
        "sink_mass": rows.sink[..., 1:].double().mean(dim=-1),
    }


@torch.no_grad()
def head_measures(model: LanguageModel, ids: Tensor) -> dict[str, Array]:
    """Compute :data:`MEASURES` of every head on ``ids`` ``[B, T]``, ``[layers, query heads]``."""
    layers: list[dict[str, Tensor]] = []

    def on_layer(heads: Heads) -> None:
        rows = attention_rows(heads)
        layers.append(head_statistics(rows) | positional_biases(rows))

    capture(model, ids, on_layer)
    return stacked(layers)


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


def compare_drop(before: Target, after: Target) -> Results:
    """Compare two models that read the same text: heads within the shorter training length,
    predictions also beyond it.

    Raises:
        UserError: vocabularies differ, or the text has fewer than 2 tokens.
    """
    sizes = [target.model.vocab_size for target in (before, after)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f"compare: expected models of one vocabulary, got {sizes[0]} and {sizes[1]} tokens"
        )
    if before.length < 2:
        raise UserError(f"analysis.length: expected 2 tokens or more, got {before.length}")
    trained = min(before.training_length, after.training_length)
    within, names = min(trained, before.length), (before.name, after.name)
    models = (before.model, after.model)
    heads = [head_measures(model, before.ids[:, :within]) for model in models]
    edges = position_edges(before.length - 1, per_octave=4)
    divergence = divergence_by_position(*models, before.ids)[:-1]
    curves = {name: loss_by_position(m, before.ids) for name, m in zip(names, models, strict=True)}
    curves[" ‖ ".join(names)] = divergence
    curves = {n: bucket_means(torch.from_numpy(c), edges).numpy() for n, c in curves.items()}
    tables = [
        tidy(measures, "layer", "head", length=within, model=name)
        for name, measures in zip(names, heads, strict=True)
    ]
    for name, curve in curves.items():
        metric = "loss" if name in names else "kl"
        tables.append(tidy({metric: curve}, "length", places={"length": edges[1:]}, model=name))
    plots = [*_heads(names, *heads), _positions(names, trained, edges, curves)]
    return finished("drop", "Before and after the drop", plots, pd.concat(tables), after.name)


def _heads(names: tuple[str, str], before: dict[str, Array], after: dict[str, Array]) -> list[Plot]:
    """Draw every head of both models; empty if they have different numbers of them."""
    shape = before["distance"].shape
    if shape != after["distance"].shape:
        return []
    plots = []
    for name, measures, source in (
        ("positional_heads", ("diagonal", "previous"), "Def. 3.1"),
        ("attention", ("distance", "entropy", "sink_mass"), "Sec. 5"),
    ):
        panels = [
            graded(
                MEASURES[measure],
                *(before[measure], after[measure], np.indices(shape)[0]),
                x=names[0],
                y="" if number else names[1],
                prepare=diagonal,
            )
            for number, measure in enumerate(measures)
        ]
        caption = f"Every head in {' (x) and '.join(names)} (y) (DroPE, {source})."
        plots.append(Plot(f"drop_{name}", draw(panels, size=14, index="layer"), caption))
    return plots


def _positions(
    names: tuple[str, str], trained: int, edges: Sequence[int], curves: Mapping[str, Array]
) -> Plot:
    """Draw the distance between predictions, and both losses, by the number of tokens read."""
    middles = ((np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2).tolist()
    styles = style_numbers(names)
    mark = float(trained), "training length"
    panels = [
        Panel(
            title,
            [
                Line(label, style, middles, curves[label].tolist(), marked=False)
                for label, style in shown.items()
            ],
            "tokens read",
            y_label,
            log_lengths,
            mark,
        )
        for title, shown, y_label in (
            ("next-token predictions", {" ‖ ".join(names): 0}, "KL divergence (nats)"),
            ("loss", styles, "loss (nats/token)"),
        )
    ]
    return Plot(
        "drop_positions",
        draw(panels),
        "Distance between both models' predictions, and their losses, by the number of tokens "
        "read (DroPE, Sec. 5).",
    )
