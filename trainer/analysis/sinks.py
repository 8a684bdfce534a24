"""The first token as an attention sink: its short key, the attention on it, and how both change in
long texts (RoPE-ID Sec. 3.2, App. A.2; Fig. 5, 6 and 9)."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.attention import Array, Heads, attention_map, attention_statistics, view_heads
from trainer.analysis.results import Findings, analysis, tidy, variants
from trainer.analysis.target import Target, bucket_means, position_edges, read
from trainer.plotting import ColourScale, Grid, Panel, Plot, draw, heat_maps, over_heads

CELLS = 128
"""Cells of a map's side."""
MEASURES = ("key_dot", "sink_weight", "peak")
"""Measures with and without the encoding: the mean dot product of a key with its own query and all
later ones, by the key's position; attention on the first key, and the largest dot product with a
key, both by the query's position, which is the length of the text so far. They are per query head;
``key_norm``, the length of a key before the encoding, is per key-value head."""


def key_dot(q: Tensor, k: Tensor) -> Tensor:
    """Compute the mean of q_i k_j over i >= j, ``[B, Hq, T]``."""
    T = q.shape[2]
    later = q.double().flip(2).cumsum(dim=2).flip(2)
    later /= torch.arange(T, 0, -1, device=q.device)[:, None]
    shared = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (later * shared).sum(dim=-1)


def over_largest(products: Array) -> Array:
    """Divide ``[..., buckets]`` by the largest bucket, as in Fig. 5; if all are negative, by the
    absolute value of the most negative one."""
    top = products.max(axis=-1, keepdims=True)
    scale: Array = np.where(top > 0, top, np.abs(products).max(axis=-1, keepdims=True))
    scaled: Array = products / np.maximum(scale, np.finfo(float).tiny)
    return scaled


@analysis("sinks", "Attention sinks")
def analyze_sinks(target: Target) -> Findings:
    """Measure norms of keys, attention on the first key, and largest dot products, by position."""
    target.require(8)  # other positions than the first
    looks = variants(target)
    edges = position_edges(target.length)
    if target.prefix is not None:  # no bucket holds positions of both passes
        edges = sorted({*edges, target.training_length})

    def measure(heads: Heads) -> dict[str, Tensor]:
        values = {"key_norm": heads.k.norm(dim=-1)}
        for variant in looks:
            rotated = variant == "rotated"
            statistics = attention_statistics(heads, rotated=rotated)
            values[f"{variant}.key_dot"] = key_dot(*heads.states(rotated=rotated))
            values[f"{variant}.sink_weight"] = statistics.sink
            values[f"{variant}.peak"] = statistics.peak
        within = [edge for edge in edges if edge <= heads.q.shape[2]]
        return {name: bucket_means(value, within) for name, value in values.items()}

    of_keys = ("key_norm", "plain.key_dot", "rotated.key_dot")
    curves = read(target, measure, of_whole=of_keys)
    axes = ("layer", "head", "length")
    places = {"length": edges[1:]}
    tables = []
    for variant in looks:
        measured = {name: curves[f"{variant}.{name}"] for name in MEASURES}
        tables.append(tidy(measured, *axes, places=places, variant=variant))
    tables.append(tidy({"key_norm": curves["key_norm"]}, *axes, places=places, variant="plain"))
    middles = ((np.array(edges[:-1]) + 1 + edges[1:]) / 2).tolist()

    def panel(title: str, y: str, name: str) -> Panel:
        lines = []
        for variant, (label, style) in looks.items():
            curve = curves[f"{variant}.{name}"]
            if name == "key_dot":
                curve = over_largest(curve)
            lines.append(over_heads(label, style, middles, curve))
        return Panel(title, lines, y=y)

    norm_line = over_heads("all keys", 0, middles, curves["key_norm"])
    by_query = [
        panel("attention on the first token", "share", "sink_weight"),
        panel("largest dot product of a query", "dot product", "peak"),
    ]
    by_key = [
        Panel("length of keys", [norm_line], y="‖k‖"),
        panel("dot product with later queries", "over the largest of a head", "key_dot"),
    ]
    C = target.training_length
    plots = [
        Plot(
            "sinks_by_length",
            draw(by_query, Grid(x="length of the text (tokens)"), trained=C),
            "Queries at the end of a text of this length, mean and 80% of heads (RoPE-ID, Fig. 6).",
        ),
        Plot(
            "sinks_keys",
            draw(by_key, Grid(x="position of the key"), trained=C),
            "Length of keys before the encoding, and their mean dot product with later queries, by "
            "position (RoPE-ID, Fig. 5).",
        ),
        attention_plot(target, curves["rotated.sink_weight"][..., -1]),
    ]
    return Findings(plots, tables)


def attention_plot(target: Target, shares: Array) -> Plot:
    """Draw the attention of the chosen heads, or of those with the most, a medium and the least of
    ``shares`` ``[layers, heads]``, attention on the first key at the end of the text."""
    ranked = [divmod(int(index), shares.shape[1]) for index in shares.argsort(axis=None)]
    shown = target.config.chosen or [ranked[-1], ranked[len(ranked) // 2], ranked[0]]
    maps = view_heads(target.model, target.ids[:1], shown, partial(attention_map, size=CELLS))
    titled = {
        f"L{i}H{j}: {100 * shares[i, j]:.0f}% on the first": np.where(cells > 0, cells, np.nan)
        for (i, j), cells in maps.items()
    }
    step = -(-target.length // CELLS)
    colours = ColourScale("attention of a query on a cell", 1e-4, 1, log=True)
    grid = Grid(3, 2.35, x="key (tokens)", y="query (tokens)")
    return Plot(
        "sinks_attention",
        heat_maps(titled, colours, grid, cell=(step, step)),
        f"Attention of single heads on the first text, cells of {step} × {step} tokens, "
        "logarithmic colour (RoPE-ID, Fig. 9; Rotary Offset Features, Fig. 3).",
    )
