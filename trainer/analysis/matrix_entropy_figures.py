"""Matrix entropy of every head, and attention of the extreme heads on a needle (DoPE, Sec. 4.3, 5.4
and 5.5, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from matplotlib.axes import Axes

from trainer.analysis.attention import (
    SIDES,
    Array,
    Heads,
    NeedlePrompt,
    Place,
    Side,
    capture,
    stack_layers,
)
from trainer.analysis.matrix_entropy import (
    MatrixEntropy,
    NeedleView,
    Stage,
    copy_prompt,
    matrix_entropy_of,
    needle_view,
)
from trainer.analysis.topic import Results, Target, results, tidy
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, draw
from trainer.plotting.style import Plot

RANKS = (1, 4, 8, 16, 32)
SHOWN = 16
"""Rank by which heads are chosen, if a head has more channels."""
STAGES: dict[Stage, str] = {"pre_ntk": "before the rotation", "post_ntk": "as they attend"}
POINTS = 2048
Scores = dict[str, Array]
"""Band entropy and effective ranks by name, ``[layers, heads]``."""
Key = tuple[Side, Stage]


def scores_of(layers: Sequence[MatrixEntropy]) -> Scores:
    """Return the mean entropy of every head's bands, and the effective rank of its r largest
    eigenvalues and of all."""
    channels = layers[0].eigenvalues.shape[-1]
    scores = {"band entropy": [layer.band_mean for layer in layers]}
    for r in (*(r for r in RANKS if r < channels), None):
        name = "effective rank" if r is None else f"effective rank, r = {r}"
        scores[name] = [layer.effective_rank(r) for layer in layers]
    return {name: torch.stack(values).cpu().numpy() for name, values in scores.items()}


def analyze_matrix_entropy(target: Target) -> Results:
    """Compute band entropies and truncated effective ranks of every head, and its attention on a
    needle.

    The model is read with one layout, so the two stages after the rotation are equal.
    """
    target.require(16)  # room for a needle
    # Without a rotation all stages are equal.
    stages: list[Stage] = ["pre_ntk", "post_ntk"] if target.rotates else ["post_ntk"]
    model, needle = target.model, target.config.needle

    def measure(heads: Heads) -> dict[Key, MatrixEntropy]:
        return {
            (side, stage): matrix_entropy_of(heads, side, stage, model.layout)
            for side in SIDES
            for stage in stages
        }

    layers = capture(model, target.ids, measure)
    scores: dict[Key, Scores] = {}
    tables = []
    for side, stage in layers[0]:
        entropies = [layer[side, stage] for layer in layers]
        scores[side, stage] = scores_of(entropies)
        bands = stack_layers([entropy.bands for entropy in entropies])
        at = f"{SIDES[side]}, {STAGES[stage]}"
        tables.append(tidy(scores[side, stage], "layer", "head", variant=at))
        tables.append(tidy({"band entropy of a pair": bands}, "layer", "head", "pair", variant=at))
    prompt = target.question or copy_prompt(target.ids)
    ranked = scores[needle.by, "post_ntk"]
    if needle.ranked_on == "prompt":
        layout, by = model.layout, needle.by
        ranked = scores_of(
            capture(
                model,
                prompt.ids[:1],
                lambda heads: matrix_entropy_of(heads, by, "post_ntk", layout),
            )
        )
    shown = {(i, j): f"L{i}H{j}" for i, j in target.config.chosen}
    shown = shown or extreme_heads(ranked, model.config.num_attention_heads, needle.by)
    view = needle_view(model, prompt, shown)
    where = prompt.needle
    numbers = {
        "attention_on_needle": view.attention[..., where].sum(axis=-1),
        "attention_on_first_token": view.attention[..., 0],
        "last_token_on_needle": view.last[..., where].sum(axis=-1),
    }
    tables.append(tidy(numbers, "layer", "head", variant="needle prompt"))
    plots = _needle_plots(view, shown, prompt)
    return results("matrix_entropy", "Matrix entropy", target.name, plots, tables)


def extreme_heads(scores: Scores, heads: int, side: Side) -> dict[Place, str]:
    """Return titles of the query heads of lowest and highest band entropy and effective rank, by
    place.

    ``scores``: of the ``side``, ``heads``: number of query heads of a layer.
    """
    shown: dict[Place, str] = {}
    rank = f"effective rank, r = {SHOWN}"
    for name in ("band entropy", rank if rank in scores else "effective rank"):
        values = scores[name].repeat(heads // scores[name].shape[1], axis=1)
        of_keys = " of keys" if side == "key" else ""
        for end, index in (("lowest", values.argmin()), ("highest", values.argmax())):
            i, j = divmod(int(index), heads)
            shown.setdefault((i, j), f"L{i}H{j}: {end} {name}{of_keys}")
    return shown


def _needle_plots(view: NeedleView, shown: Mapping[Place, str], prompt: NeedlePrompt) -> list[Plot]:
    """Draw the attention of single heads by position, and directions."""
    T, needle = prompt.ids.shape[1], prompt.needle
    mark = ((needle.start + needle.stop) / 2, "needle")
    # Means within at most so many buckets of positions.
    starts = np.arange(0, T, -(-T // POINTS))
    widths, panels = np.diff([*starts, T]), []
    for place, title in shown.items():
        kinds = {"average": view.average[place], "last token": view.last[place]}
        for kind, attention in kinds.items():
            values = (np.add.reduceat(attention, starts) / widths).tolist()
            line = Line("", 1, starts.tolist(), values)
            panels.append(Panel(f"{title}\n{kind}", [line], prepare=_from_zero, vertical=mark))
    return [
        Plot(
            "needle_heads",
            draw(panels, columns=2, height=1.7, x="position of the key (tokens)"),
            "Attention weight of single heads by the key's position, mean over all queries and of "
            "the last token (DoPE, Fig. 2).",
        ),
        Plot(
            "query_directions",
            heat_maps(
                {title: view.similarity[place] for place, title in shown.items()},
                Scale("cosine similarity", -1, 1, signed=True),
                x="eigenvector of the head's queries, from the largest eigenvalue on",
                y=f"token, from {T - prompt.question:,} on",
            ),
            "Cosines of the last queries with the eigenvectors of their head's Gram matrix (DoPE, "
            "Fig. 3-6).",
        ),
    ]


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
