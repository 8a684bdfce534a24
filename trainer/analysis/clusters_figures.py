"""Clusters by length, before and after the rotation (RoPE-ID Sec. 3.1, App. A.3 and A.10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.attention import SIDES, Array, Heads, Place
from trainer.analysis.clusters import MEASURES, cluster_measures, principal_axes, project
from trainer.analysis.topic import (
    Results,
    Target,
    Versions,
    prefix_lengths,
    read,
    results,
    tidy,
    versions,
)
from trainer.plotting.panels import (
    Panel,
    by_length,
    draw,
    histogram,
    log_if_wide,
    over_heads,
    plane,
)
from trainer.plotting.style import Plot

COMPARED = {"key": "keys with keys", "query": "queries with queries", "cross": "queries with keys"}
Clouds = dict[tuple[int, str], tuple[Array, float]]
"""Keys and queries of a head, and the stable rank of its keys, by the length of the prefix and the
version."""


def analyze_clusters(target: Target) -> Results:
    """Measure width and distance of the clouds of queries and keys, before and after the
    rotation."""
    target.require(4)  # a cloud needs several points
    lengths, looks = prefix_lengths(target.length), versions(target)
    shown = list(dict.fromkeys([min(target.training_length, target.length), target.length]))
    clouds: dict[Place, tuple[Array, Clouds]] = {}

    def measure(heads: Heads) -> dict[str, Tensor]:
        tokens = heads.q.shape[2]
        for kv_head in _shown_key_heads(target, heads):
            directions = principal_axes(heads, kv_head, shown[0])
            axes, projected = clouds.setdefault((heads.layer, kv_head), (directions, {}))
            for n, version in product(shown, looks):
                if n <= tokens:
                    projected[n, version] = project(
                        heads, kv_head, axes, n, rotated=version == "rotated"
                    )
        within = [n for n in lengths if n <= tokens]
        return cluster_measures(heads, within) if within else {}

    values = read(target, measure)
    plots = _curves(values, lengths, looks, target.training_length)
    if clouds:
        plots.append(_snapshots({place: drawn for place, (_, drawn) in clouds.items()}, looks))
    title = "Clusters of queries and keys"
    return results("clusters", title, target.name, plots, _rows(values, lengths, looks))


def _shown_key_heads(target: Target, heads: Heads) -> list[int]:
    """Return the key heads of a layer that are shown: the chosen ones, or the first one."""
    if target.config.chosen:
        chosen = target.chosen(heads.layer)
        return list(dict.fromkeys(head // heads.queries_per_key for head in chosen))
    return [0] if heads.layer in target.shown_layers else []


def _rows(
    values: Mapping[str, Array], lengths: Sequence[int], looks: Versions
) -> list[pd.DataFrame]:
    """Return every measure of every head at every length."""
    axes, places = ("layer", "head", "length"), {"length": lengths}
    tables = [
        tidy({m: values[f"{v}.{m}"] for m in MEASURES}, *axes, places=places, variant=v)
        for v in looks
    ]
    if "plain" in looks:
        ratios = {f"{side}_fsv_ratio": values[f"{side}_fsv_ratio"] for side in SIDES}
        tables.append(tidy(ratios, *axes, places=places, variant="rotated / plain"))
    shares = {f"{side}_first_share": values[f"{side}_first_share"][..., -1] for side in SIDES}
    return [*tables, tidy(shares, "layer", "head", variant="plain", length=lengths[-1])]


def _curves(
    values: Mapping[str, Array], lengths: Sequence[int], looks: Versions, trained: int
) -> list[Plot]:
    """Draw the measures by length, and the first principal component."""

    def panel(title: str, measure: str, *, median: bool = False, **others: Any) -> Panel:
        lines = [
            over_heads(*look, lengths, values[f"{version}.{measure}"], median=median)
            for version, look in looks.items()
        ]
        return Panel(title, lines, **others)

    def pairs(kind: str, label: str) -> list[Panel]:
        return [
            panel(title, f"{side}_{kind}", y=label if side == "key" else "")
            for side, title in COMPARED.items()
        ]

    def plot(name: str, panels: list[Panel], caption: str, **layout: Any) -> Plot:
        x = "length of the text (tokens)"
        figure = by_length(panels, x=x, trained=trained, **layout)
        return Plot(f"clusters_{name}", figure, caption)

    ranks = [
        panel("keys", "key_stable_rank", y="stable rank"),
        panel("queries", "query_stable_rank"),
    ]
    for side, title in SIDES.items() if "plain" in looks else ():
        ratio = values[f"{side}_fsv_ratio"]
        mean = over_heads(*looks["rotated"], lengths, ratio)
        faint = ratio.reshape(-1, ratio.shape[-1])
        y = "after / before" if side == "key" else ""
        ranks.append(Panel(f"{title}: first singular value", [mean], y=y, faint=faint))
    # Medians: a head whose two clouds share a centre has an unbounded index.
    separation = [
        panel("silhouette score", "silhouette"),
        panel("Davies–Bouldin index", "davies_bouldin", prepare=log_if_wide, median=True),
    ]
    shares = {title: 100 * values[f"{side}_first_share"][..., -1] for side, title in SIDES.items()}
    return [
        plot(
            "cosine",
            pairs("cosine", "mean cosine"),
            "Mean cosine of all pairs by length, mean and 80% of heads (RoPE-ID, Fig. 2, 13).",
        ),
        plot(
            "separation",
            separation,
            "Separation of queries and keys by length, mean score, median index and 80% of heads "
            "(RoPE-ID, Fig. 11).",
        ),
        plot(
            "singular_values",
            ranks,
            "Stable rank, and first singular value after over before the rotation, by length; mean "
            "and 80% of heads, thin: each head (RoPE-ID, Fig. 4).",
            columns=2,
            height=2.0,
        ),
        Plot(
            "clusters_first_component",
            histogram(shares, "variance of the first component (%)", low=0, high=100),
            "Heads by the share of the first principal component in the variance about the origin, "
            "before the encoding (RoPE-ID, Fig. 4).",
        ),
        plot(
            "dot",
            pairs("dot", "mean dot product"),
            "Mean dot product of all pairs by length, mean and 80% of heads (RoPE-ID, Fig. 10).",
        ),
    ]


def _snapshots(clouds: Mapping[Place, Clouds], looks: Versions) -> Plot:
    """Draw some heads in the plane of their first two principal components."""
    panels = []
    for (layer, kv_head), projected in clouds.items():
        everything = np.concatenate([points.reshape(-1, 2) for points, _ in projected.values()])
        limits = _square(everything.min(axis=0), everything.max(axis=0))
        for number, ((n, version), (points, rank)) in enumerate(projected.items()):
            readers = len(points) - 1
            queries = [f"queries {i}" for i in range(readers)] if readers > 1 else ["queries"]
            panels.append(
                Panel(
                    f"{looks[version][0]}\n{n:,} tokens, rank {rank:.2f}",
                    y="" if number else f"L{layer}, key head {kv_head}",
                    prepare=limits,
                    points=dict(zip(["keys", *queries], points, strict=True)),
                )
            )
    return Plot(
        "clusters_snapshots",
        draw(panels, columns=len(panels) // len(clouds), height=1.9),
        "Keys and the queries that read them in the plane of their first two principal components, "
        "lines through the origin; a row a key head, with the stable rank of its keys (RoPE-ID, "
        "Fig. 3, 14).",
    )


def _square(low: Array, high: Array) -> Callable[[Axes], None]:
    """Return a function that shows the plane from ``low`` to ``high`` ``[2]`` with one scale."""
    half, (x, y) = 0.55 * float((high - low).max()), (low + high) / 2

    def prepare(axes: Axes) -> None:
        plane(axes)
        axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half), box_aspect=1)
        axes.tick_params(labelleft=False, labelbottom=False, length=0)

    return prepare
