"""Clusters of queries and keys by length, and how the rotation changes them (RoPE-ID Sec. 3.1,
App. A.3 and A.10).

Sums of vectors and Gram matrices are summed over the text once and read at every prefix length.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.attention import SIDES, Array, HeadIndex, Heads, by_name, view_heads
from trainer.analysis.results import Findings, Variants, analysis, tidy, variants
from trainer.analysis.target import Target, read
from trainer.plotting import Grid, Panel, Plot, draw, log_if_wide, over_heads, plane

CHUNK = 2048
"""Positions converted to float64 at a time."""
COMPARED = {"key": "keys with keys", "query": "queries with queries", "cross": "queries with keys"}
RATIO_STYLE = 3
"""Style of a ratio of two variants, which have styles of their own."""

MEASURES = (
    *("query_cosine", "key_cosine", "cross_cosine"),
    *("query_dot", "key_dot", "cross_dot"),
    *("query_stable_rank", "key_stable_rank"),
    *("silhouette", "davies_bouldin"),
)
"""Measures of a head's clusters by prefix length, ``[layers, heads, lengths]``.

``query_*``: among queries, per query head; ``key_*``: among keys, per key-value head; ``cross_*``:
between queries and the keys that they read, per query head. ``*_cosine``, ``*_dot``: means over all
pairs of two different vectors. ``*_stable_rank``: |X|_F^2 / |X|_2^2, about the origin.
``silhouette``, ``davies_bouldin``: separation of the two clusters, per query head.
"""


def stable_rank(gram: Tensor) -> Tensor:
    """Compute stable ranks of matrices K ``[..., T, D]`` from K^T K ``[..., D, D]``: the squared
    Frobenius norm over the squared spectral norm; NaN if K is zero or not finite."""
    # eigvalsh raises an error for values that are not finite.
    finite = gram.isfinite().all(dim=-1).all(dim=-1)[..., None, None]
    gram = torch.where(finite, gram, 0.0)
    return gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1) / torch.linalg.eigvalsh(gram)[..., -1]


def _sums(x: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Sum the first n vectors of every head for every n, all float64: the ``vectors`` ``[lengths,
    B, H, D]``, the same scaled to length 1 (``units``), and X^T X (``gram``) ``[..., D, D]``."""
    vectors = units = gram = x.new_zeros((), dtype=torch.float64)
    sums = []
    for begin, end in pairwise([0, *lengths]):
        for chunk in x[:, :, begin:end].split(CHUNK, dim=2):
            v = chunk.double()
            vectors = vectors + v.sum(dim=2)
            units = units + F.normalize(v, dim=-1).sum(dim=2)
            gram = gram + v.mT @ v
        sums.append({"vectors": vectors, "units": units, "gram": gram})
    return {name: torch.stack(of_lengths) for name, of_lengths in by_name(sums).items()}


def _within(total: Tensor, squares: Tensor, n: Tensor) -> Tensor:
    """Compute the mean dot product of two of n vectors from their sum and squared norms."""
    return (total.square().sum(dim=-1) - squares) / (n * (n - 1))


def _measures(q: Tensor, k: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Compute cosines, dot products and stable ranks, ``[B, H, lengths]`` each."""
    sums = {"query": _sums(q, lengths), "key": _sums(k, lengths)}
    n = torch.tensor(lengths, dtype=torch.float64, device=q.device)[:, None, None]
    measures = {}
    for side, of_side in sums.items():
        squares = of_side["gram"].diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        measures[f"{side}_dot"] = _within(of_side["vectors"], squares, n)
        # The squares of n unit vectors sum to n.
        measures[f"{side}_cosine"] = _within(of_side["units"], n, n)
        measures[f"{side}_stable_rank"] = stable_rank(of_side["gram"])
    for name, kind in (("dot", "vectors"), ("cosine", "units")):
        keys = sums["key"][kind].repeat_interleave(q.shape[1] // k.shape[1], dim=2)
        measures[f"cross_{name}"] = (sums["query"][kind] * keys).sum(dim=-1) / n**2
    return {name: value.movedim(0, -1) for name, value in measures.items()}


def _separation(q: Tensor, k: Tensor, lengths: list[int], points: int) -> dict[str, Tensor]:
    """Compute silhouette score and Davies-Bouldin index ``[B, Hq, lengths]`` of samples."""
    group = q.shape[1] // k.shape[1]
    scores = []
    for n in lengths:
        chosen = torch.as_tensor(sample_positions(n, points), device=q.device)
        # float32 would lose the distances within clouds that are far from the origin.
        queries = q[:, :, chosen].double()
        keys = k[:, :, chosen].double().repeat_interleave(group, dim=1)
        # A point's distance to itself is 0 and does not count.
        sums = [torch.cdist(x, x).sum(dim=-1) for x in (queries, keys)]
        within = torch.cat(sums, dim=-1) / (len(chosen) - 1)
        across = torch.cdist(queries, keys)
        other = torch.cat([across.mean(dim=-1), across.mean(dim=-2)], dim=-1)
        silhouette = ((other - within) / torch.maximum(within, other)).mean(dim=-1)
        centre_q, centre_k = queries.mean(dim=2, keepdim=True), keys.mean(dim=2, keepdim=True)
        scatter = (queries - centre_q).norm(dim=-1) + (keys - centre_k).norm(dim=-1)
        apart = (centre_q - centre_k).norm(dim=-1)[..., 0]
        scores.append(torch.stack([silhouette, scatter.mean(dim=-1) / apart]))
    silhouette, davies_bouldin = torch.stack(scores, dim=-1)
    return {"silhouette": silhouette, "davies_bouldin": davies_bouldin}


def prefix_lengths(length: int) -> list[int]:
    """Return 32, 64, 128 and so on below ``length``, and ``length`` itself."""
    doubled = [32 * 2**n for n in range(length.bit_length())]
    return [*(n for n in doubled if n < length), length]


def sample_positions(length: int, points: int) -> Array:
    """Choose at most ``points`` of the positions 0 .. length - 1, ascending."""
    if length <= points:
        return np.arange(length)
    return np.sort(np.random.default_rng(0).choice(length, points, replace=False))


def cluster_measures(heads: Heads, lengths: list[int], points: int = 512) -> dict[str, Tensor]:
    """Measure the clusters of a layer in the first tokens of each text, ``[B, heads, lengths]``.

    ``plain.NAME`` and ``rotated.NAME`` for each of :data:`MEASURES`: before the encoding, and as
    the scores use queries and keys. ``*_fsv_ratio``: first singular value after the encoding over
    that before it, the root of the ratio of stable ranks (Lemma 2). ``*_first_share``: share of the
    first principal component in the variance about the origin, before the encoding. ``points``:
    number of queries and of keys in the samples for silhouette and Davies-Bouldin.
    """
    values: dict[str, Tensor] = {}
    for name in ("plain", "rotated"):
        q, k = heads.states(rotated=name == "rotated")
        measures = _measures(q, k, lengths) | _separation(q, k, lengths, points)
        values |= {f"{name}.{key}": value for key, value in measures.items()}
    for side in ("query", "key"):
        before = values[f"plain.{side}_stable_rank"]
        values[f"{side}_fsv_ratio"] = (before / values[f"rotated.{side}_stable_rank"]).sqrt()
        values[f"{side}_first_share"] = 1 / before
    return values


def cloud(heads: Heads, kv_head: int) -> dict[str, Array]:
    """Return a key head of the first text and the queries that read it, ``[1 + readers, T, D]``
    float64, ``plain`` and ``rotated``."""
    readers = slice(kv_head * heads.queries_per_key, (kv_head + 1) * heads.queries_per_key)
    clouds = {}
    for name in ("plain", "rotated"):
        q, k = heads.states(rotated=name == "rotated")
        clouds[name] = torch.cat([k[0, kv_head, None], q[0, readers]]).double().cpu().numpy()
    return clouds


def principal_axes(vectors: Array) -> Array:
    """Return the two common principal components ``[D, 2]`` of ``vectors`` ``[heads, T, D]``."""
    _, components = np.linalg.eigh(np.cov(np.concatenate(vectors).T))
    axes = components[:, :-3:-1]
    # The sign of an eigenvector is arbitrary; this choice is the same on every machine.
    return axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])


def project(vectors: Array, axes: Array, points: int = 256) -> tuple[Array, float]:
    """Project at most ``points`` tokens of ``vectors`` ``[1 + readers, T, D]``, keys first, on
    ``axes`` ``[D, 2]``: ``[1 + readers, points, 2]`` and the stable rank of all keys."""
    keys = torch.from_numpy(vectors[0])
    sample = sample_positions(vectors.shape[1], points)
    return vectors[:, sample] @ axes, float(stable_rank(keys.mT @ keys))


@analysis("clusters", "Clusters of queries and keys")
def analyze_clusters(target: Target) -> Findings:
    """Measure width and distance of the clouds of queries and keys, before and after the
    rotation."""
    target.require(4)  # a cloud needs several points
    lengths = prefix_lengths(target.length)
    looks = variants(target)

    def measure(heads: Heads) -> dict[str, Tensor]:
        within = [n for n in lengths if n <= heads.q.shape[2]]
        return cluster_measures(heads, within) if within else {}

    values = read(target, measure)
    axes = ("layer", "head", "length")
    places = {"length": lengths}
    tables = []
    for variant in looks:
        measured = {name: values[f"{variant}.{name}"] for name in MEASURES}
        tables.append(tidy(measured, *axes, places=places, variant=variant))
    if "plain" in looks:
        ratios = {f"{side}_fsv_ratio": values[f"{side}_fsv_ratio"] for side in SIDES}
        tables.append(tidy(ratios, *axes, places=places, variant="rotated / plain"))
    shares = {f"{side}_first_share": values[f"{side}_first_share"][..., -1] for side in SIDES}
    tables.append(tidy(shares, "layer", "head", variant="plain", length=lengths[-1]))
    plots = curve_plots(Curves(values, lengths, looks, target.training_length))
    queries, keys = (values[f"{side}_first_share"].shape[1] for side in SIDES)
    key_heads = dict.fromkeys((i, head * keys // queries) for i, head in target.config.chosen)
    shown = [*key_heads] or [(i, 0) for i in target.shown_layers]
    plots.append(snapshots_plot(target, shown, looks))
    return Findings(plots, tables)


@dataclass(frozen=True)
class Curves:
    """Measures of clusters by prefix length, as :func:`cluster_measures` names them, each
    ``[layers, heads, lengths]``; ``trained``: the training length."""

    values: Mapping[str, Array]
    lengths: Sequence[int]
    looks: Variants
    trained: int

    def panel(self, title: str, measure: str, *, median: bool = False, **others: Any) -> Panel:
        """Return a line for each variant of a measure; ``others``: arguments of the panel."""
        lines = []
        for variant, (label, style) in self.looks.items():
            of_heads = self.values[f"{variant}.{measure}"]
            lines.append(over_heads(label, style, self.lengths, of_heads, median=median))
        return Panel(title, lines, **others)

    def compared(self, kind: str, label: str) -> list[Panel]:
        """Return a panel for each of :data:`COMPARED`; ``label``: of the y axis."""
        return [self.panel(title, f"{side}_{kind}", y=label) for side, title in COMPARED.items()]

    def plot(self, name: str, panels: list[Panel], caption: str, **layout: Any) -> Plot:
        """Return a figure of panels over the length of the text; ``layout``: of its grid."""
        grid = Grid(x="length of the text (tokens)", **layout)
        return Plot(f"clusters_{name}", draw(panels, grid, trained=self.trained), caption)


def curve_plots(curves: Curves) -> list[Plot]:
    """Draw the measures by length, and the first principal component."""
    # Medians: a head whose two clouds share a centre has an unbounded index.
    separation = [
        curves.panel("silhouette score", "silhouette"),
        curves.panel("Davies–Bouldin index", "davies_bouldin", prepare=log_if_wide, median=True),
    ]
    return [
        curves.plot(
            "cosine",
            curves.compared("cosine", "mean cosine"),
            "Mean cosine of all pairs by length, mean and 80% of heads (RoPE-ID, Fig. 2, 13).",
        ),
        curves.plot(
            "separation",
            separation,
            "Separation of queries and keys by length, mean score, median index and 80% of heads "
            "(RoPE-ID, Fig. 11).",
        ),
        singular_values_plot(curves),
        first_component_plot(curves.values),
        curves.plot(
            "dot",
            curves.compared("dot", "mean dot product"),
            "Mean dot product of all pairs by length, mean and 80% of heads (RoPE-ID, Fig. 10).",
        ),
    ]


def singular_values_plot(curves: Curves) -> Plot:
    """Draw stable ranks and, if a head rotates, the change of the first singular value."""
    panels = [
        curves.panel("keys", "key_stable_rank", y="stable rank"),
        curves.panel("queries", "query_stable_rank", y="stable rank"),
    ]
    caption = "Stable rank by length; mean and 80% of heads (RoPE-ID, Fig. 4)."
    if "plain" in curves.looks:
        caption = (
            "Stable rank, and first singular value after over before the rotation, by length; mean "
            "and 80% of heads; thin: each head, from the first layer (dark) on (RoPE-ID, Fig. 4)."
        )
        y = "after / before"
        for side in reversed(SIDES):
            ratio = curves.values[f"{side}_fsv_ratio"]
            mean = over_heads(y, RATIO_STYLE, curves.lengths, ratio)
            title = f"{SIDES[side]}: first singular value"
            panels.append(Panel(title, [mean], y=y, faint=ratio.reshape(-1, ratio.shape[-1])))
    return curves.plot(
        "singular_values",
        panels,
        caption,
        columns=2,
        height=2.0,
    )


def first_component_plot(values: Mapping[str, Array]) -> Plot:
    """Draw the distribution over heads of the share of the first principal component."""
    shares = {}
    for side in reversed(SIDES):  # keys first, as everywhere in colours
        of_heads = 100 * values[f"{side}_first_share"][..., -1].ravel()
        counts, edges = np.histogram(of_heads, 20, (0, 100))
        middles = (edges[:-1] + edges[1:]) / 2
        points = np.column_stack([middles, 100 * counts / counts.sum()])
        shares[SIDES[side]] = points[counts > 0]
    x, y = "variance of the first component (%)", "share of heads (%)"
    limits = partial(Axes.set, xlim=(0, 100), ylim=(0, None))
    return Plot(
        "clusters_first_component",
        draw([Panel("", x=x, y=y, prepare=limits, points=shares)], Grid(height=2.0)),
        "Heads by the share of the first principal component in the variance about the origin, "
        "before the encoding (RoPE-ID, Fig. 4).",
    )


def snapshots_plot(target: Target, shown: Sequence[HeadIndex], looks: Variants) -> Plot:
    """Draw key heads and their queries in the plane of their first two principal components, in a
    text of the training length and in the whole one."""
    planes: dict[HeadIndex, Array] = {}  # of the shorter text, before the encoding

    def view(heads: Heads, kv_head: int) -> dict[str, tuple[Array, float]]:
        vectors = cloud(heads, kv_head)
        place = heads.layer, kv_head
        if place not in planes:
            planes[place] = principal_axes(vectors["plain"])
        return {variant: project(vectors[variant], planes[place]) for variant in looks}

    # Read the text once per length: temperatures and frequencies may depend on the length.
    lengths = dict.fromkeys([min(target.training_length, target.length), target.length])
    views = {n: view_heads(target.model, target.ids[:1, :n], shown, view) for n in lengths}
    panels = []
    for layer, kv_head in shown:
        by_length = {n: views[n][layer, kv_head] for n in lengths}
        prepare = square_plane(by_length.values())
        label = f"L{layer}, key head {kv_head}"
        for n, variant in product(lengths, looks):
            points, rank = by_length[n][variant]
            title = f"{looks[variant][0]}\n{n:,} tokens, rank {rank:.2f}"
            names = ["keys", *(f"queries {i}" for i in range(len(points) - 1))]
            if len(points) == 2:
                names = ["keys", "queries"]
            groups = dict(zip(names, points, strict=True))
            panels.append(Panel(title, y=label, prepare=prepare, points=groups))
    return Plot(
        "clusters_snapshots",
        draw(panels, Grid(columns=len(panels) // len(shown), height=1.9)),
        "Keys and the queries that read them in the plane of their first two principal components, "
        "lines through the origin; a row a key head, with the stable rank of its keys (RoPE-ID, "
        "Fig. 3, 14).",
    )


def square_plane(views: Iterable[Mapping[str, tuple[Array, float]]]) -> Callable[[Axes], None]:
    """Return a function that prepares axes for all projected points: a square without ticks, with
    both axes through the origin."""
    clouds = []
    for view in views:
        clouds += [points.reshape(-1, 2) for points, _ in view.values()]
    everything = np.concatenate(clouds)
    low, high = everything.min(axis=0), everything.max(axis=0)
    half = 0.55 * float((high - low).max())
    x, y = (low + high) / 2

    def prepare(axes: Axes) -> None:
        plane(axes)
        axes.set(xlim=(x - half, x + half), ylim=(y - half, y + half), box_aspect=1)
        axes.tick_params(labelleft=False, labelbottom=False, length=0)

    return prepare
