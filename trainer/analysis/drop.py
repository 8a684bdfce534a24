"""The comparison of two models on one text: RoPE before the drop and DroPE after it, or any two
others (DroPE).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention import Array, Heads, attention_statistics, capture
from trainer.analysis.positional_bias import positional_biases
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import (
    NotApplicableError,
    Target,
    bucket_means,
    position_edges,
    stacked,
)
from trainer.model.language_model import LanguageModel
from trainer.model.loss import chunk_size
from trainer.plotting import Grid, Line, Panel, Plot, diagonal, draw, graded, style_numbers

MEASURES = {
    "distance": "mean distance (tokens)",
    "entropy": "entropy (1: uniform)",
    "sink_mass": "attention on the first token",
    "diagonal": "bias towards the own token",
    "previous": "bias towards the previous token",
}
DIVERGENCE_STYLE = 3
"""Style of the divergence of two models, which have styles of their own."""


def head_measures(model: LanguageModel, ids: Tensor) -> dict[str, Array]:
    """Compute :data:`MEASURES` of every head on ``ids`` ``[B, T]``, ``[layers, query heads]``,
    means over texts of at least two tokens and queries but the first, which sees only itself.

    ``distance``: tokens between query and key, weighted by attention. ``entropy``: divided by its
    largest possible value, the logarithm of the number of visible keys; 1 is uniform.
    ``sink_mass``: attention on the first key of the text. Biases: see :func:`positional_biases`.
    """

    def measure(heads: Heads) -> dict[str, Tensor]:
        statistics = attention_statistics(heads)
        # A query with one visible key has entropy 0; log 2 avoids 0 / 0.
        largest = statistics.visible[1:].clamp(min=2).log()
        by_query = {
            "distance": statistics.distance[..., 1:].double(),
            "entropy": statistics.entropy[..., 1:].double() / largest,
            "sink_mass": statistics.sink[..., 1:].double(),
        }
        means = {name: values.mean(dim=-1) for name, values in by_query.items()}
        return means | positional_biases(statistics)

    return stacked(capture(model, ids, measure))


@torch.no_grad()
def compare_predictions(model: LanguageModel, other: LanguageModel, ids: Tensor) -> Array:
    """Compute KL(model || other) of the next token and the losses of both models at every position,
    ``[3, T - 1]`` nats, averaged over the texts ``ids`` ``[B, T]``; both share a vocabulary."""
    device = model.device
    targets = ids[:, 1:].to(device)
    states, other_states = (
        m.hidden_states(ids[:, :-1].to(m.device)).flatten(0, 1) for m in (model, other)
    )
    size = chunk_size(model.vocab_size, device)
    chunks = []
    for start in range(0, len(states), size):
        part = slice(start, start + size)
        target = targets.flatten()[part]
        log_p = model.logits(states[part]).float().log_softmax(dim=-1)
        log_q = other.logits(other_states[part]).float().log_softmax(dim=-1).to(device)
        divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1, dtype=torch.float64).clamp(min=0)
        losses = [-x.gather(-1, target[:, None])[:, 0].double() for x in (log_p, log_q)]
        chunks.append(torch.stack([divergence, *losses]))
    return torch.cat(chunks, dim=1).view(3, *targets.shape).mean(dim=1).cpu().numpy()


@analysis("drop", "Before and after the drop", models=2)
def compare_drop(before: Target, after: Target) -> Findings:
    """Compare two models that read the same text: heads within the shorter training length,
    predictions also beyond it.

    Raises:
        NotApplicableError: vocabularies differ, or the text has fewer than 2 tokens.
    """
    sizes = [target.model.vocab_size for target in (before, after)]
    if sizes[0] != sizes[1]:
        raise NotApplicableError(f"compare: expected models of one vocabulary, got {sizes} tokens")
    before.require(2)
    trained = min(before.training_length, after.training_length)
    within = min(trained, before.length)
    names = before.name, after.name
    models = (before.model, after.model)
    heads = [head_measures(model, before.ids[:, :within]) for model in models]
    edges = position_edges(before.length - 1, per_octave=4)
    predictions = torch.from_numpy(compare_predictions(*models, before.ids))
    labels = " ‖ ".join(names), *names
    curves = dict(zip(labels, bucket_means(predictions, edges).numpy(), strict=True))
    tables = [
        tidy(measures, "layer", "head", length=within, model=name)
        for name, measures in zip(names, heads, strict=True)
    ]
    for name, curve in curves.items():
        metric = "loss" if name in names else "kl"
        tables.append(tidy({metric: curve}, "length", places={"length": edges[1:]}, model=name))
    plots = [_positions(names, trained, edges, curves)]
    if heads[0]["distance"].shape != heads[1]["distance"].shape:
        return Findings(plots, tables, ["No figure of heads: the models differ in their number."])
    return Findings([_heads(names, *heads), *plots], tables)


def _heads(names: tuple[str, str], before: dict[str, Array], after: dict[str, Array]) -> Plot:
    layer = np.indices(before["distance"].shape)[0]
    panels = [
        graded(title, before[name], after[name], layer, x=names[0], y=names[1], prepare=diagonal)
        for name, title in MEASURES.items()
    ]
    return Plot(
        "drop_heads",
        draw(panels, index="layer"),
        f"Every head in {' (x) and '.join(names)} (y) (DroPE, Def. 3.1, Sec. 5).",
    )


def _positions(
    names: tuple[str, str], trained: int, edges: Sequence[int], curves: Mapping[str, Array]
) -> Plot:
    """Draw the distance between predictions, and both losses, by the number of tokens read."""
    middles = ((np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2).tolist()
    styles = style_numbers(names)
    divergence, *losses = [
        Line(label, styles.get(label, DIVERGENCE_STYLE), middles, curve.tolist())
        for label, curve in curves.items()
    ]
    panels = [
        Panel("next-token predictions", [divergence], y="KL divergence (nats)"),
        Panel("loss", losses, y="loss (nats/token)"),
    ]
    return Plot(
        "drop_positions",
        draw(panels, Grid(x="tokens read"), trained=trained),
        "Distance between both models' predictions, and their losses, by the number of tokens "
        "read (DroPE, Sec. 5).",
    )
