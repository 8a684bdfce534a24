"""Clusters of queries and keys, and how the rotation changes them (RoPE-ID Sec. 3.1, App. A.3).

Means over pairs come from sums of vectors, and singular values from Gram matrices. Both are summed
over the text once and read at every prefix length.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.attention import Array, Heads

CHUNK = 2048
"""Positions converted to float64 at a time."""


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


def _sums(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the first n vectors of every head ``[lengths, B, H, D]`` for every n, the vectors scaled
    to length 1, and X^T X ``[lengths, B, H, D, D]``, all float64."""

    def of_chunk(chunk: Tensor) -> tuple[Tensor, ...]:
        v = chunk.double()
        return v.sum(dim=2), F.normalize(v, dim=-1).sum(dim=2), v.mT @ v

    parts = []
    for begin, end in pairwise([0, *lengths]):
        chunks = [of_chunk(chunk) for chunk in x[:, :, begin:end].split(CHUNK, dim=2)]
        parts.append([torch.stack(values).sum(dim=0) for values in zip(*chunks, strict=True)])
    vectors, units, gram = (torch.stack(part).cumsum(dim=0) for part in zip(*parts, strict=True))
    return vectors, units, gram


def _within(total: Tensor, squares: Tensor, n: Tensor) -> Tensor:
    """Compute the mean dot product of two different vectors out of n from their sum and squared
    norms."""
    return (total.square().sum(dim=-1) - squares) / (n * (n - 1))


def _measures(q: Tensor, k: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Compute cosines, dot products and stable ranks, ``[B, H, lengths]`` each."""
    sums = {"query": _sums(q, lengths), "key": _sums(k, lengths)}
    n = torch.tensor(lengths, dtype=torch.float64, device=q.device)[:, None, None]
    measures = {}
    for side, (vectors, units, gram) in sums.items():
        squares = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        measures[f"{side}_dot"] = _within(vectors, squares, n)
        # The squares of n unit vectors sum to n.
        measures[f"{side}_cosine"] = _within(units, n, n)
        measures[f"{side}_stable_rank"] = stable_rank(gram)
    for index, name in enumerate(("dot", "cosine")):
        keys = sums["key"][index].repeat_interleave(q.shape[1] // k.shape[1], dim=2)
        measures[f"cross_{name}"] = (sums["query"][index] * keys).sum(dim=-1) / n**2
    return {name: value.movedim(0, -1) for name, value in measures.items()}


def _separation(q: Tensor, k: Tensor, lengths: list[int], points: int) -> dict[str, Tensor]:
    """Compute silhouette score and Davies-Bouldin index ``[B, Hq, lengths]`` of samples."""
    group = q.shape[1] // k.shape[1]
    scores = []
    for n in lengths:
        chosen = torch.as_tensor(sample_positions(n, points), device=q.device)
        queries, keys = q[:, :, chosen], k[:, :, chosen]
        # A point's distance to itself is 0 and does not count.
        within_queries, within_keys = (
            torch.cdist(x, x).sum(dim=-1) / (len(chosen) - 1) for x in (queries, keys)
        )
        within = torch.cat([within_queries, within_keys.repeat_interleave(group, dim=1)], dim=-1)
        keys = keys.repeat_interleave(group, dim=1)
        across = torch.cdist(queries, keys)
        other = torch.cat([across.mean(dim=-1), across.mean(dim=-2)], dim=-1)
        silhouette = ((other - within) / torch.maximum(within, other)).mean(dim=-1)
        centre_q, centre_k = queries.mean(dim=2, keepdim=True), keys.mean(dim=2, keepdim=True)
        scatter = (queries - centre_q).norm(dim=-1) + (keys - centre_k).norm(dim=-1)
        apart = (centre_q - centre_k).norm(dim=-1)[..., 0]
        scores.append(torch.stack([silhouette, scatter.mean(dim=-1) / apart]))
    silhouette, davies_bouldin = torch.stack(scores, dim=-1).double()
    return {"silhouette": silhouette, "davies_bouldin": davies_bouldin}


def sample_positions(length: int, points: int) -> Array:
    """Choose at most ``points`` of the positions 0 .. length - 1, ascending."""
    if length <= points:
        return np.arange(length)
    return np.sort(np.random.default_rng(0).choice(length, points, replace=False))


def cluster_measures(heads: Heads, lengths: list[int], points: int = 512) -> dict[str, Tensor]:
    """Measure the clusters of a layer in the first tokens of each text, ``[B, heads, lengths]``.

    ``plain.NAME`` and ``rotated.NAME`` for each of :data:`MEASURES`: before the encoding, and as
    the scores use queries and keys. ``*_fsv_ratio``: first singular value after the encoding over
    that before it, without the queries' temperature. A rotation leaves |X|_F unchanged (Lemma 2),
    so this is the root of the ratio of stable ranks. ``*_first_share``: share of the first
    principal component in the variance about the origin, before the encoding. ``points``: number of
    queries and of keys in the samples for silhouette and Davies-Bouldin.
    """
    values: dict[str, Tensor] = {}
    for name, q, k in (("plain", heads.q, heads.k), ("rotated", heads.rotated_q, heads.rotated_k)):
        measures = _measures(q, k, lengths) | _separation(q, k, lengths, points)
        values |= {f"{name}.{key}": value for key, value in measures.items()}
    for side in ("query", "key"):
        before = values[f"plain.{side}_stable_rank"]
        values[f"{side}_fsv_ratio"] = (before / values[f"rotated.{side}_stable_rank"]).sqrt()
        values[f"{side}_first_share"] = 1 / before
    return values


def _cloud(heads: Heads, kv_head: int, length: int, *, rotated: bool) -> Array:
    """Return the first keys of the first text and the queries that read them, ``[1 + readers,
    length, D]``."""
    q, k = (heads.rotated_q, heads.rotated_k) if rotated else (heads.q, heads.k)
    group = heads.queries_per_key
    readers = q[0, kv_head * group : (kv_head + 1) * group, :length]
    return torch.cat([k[0, kv_head, None, :length], readers]).double().cpu().numpy()


def principal_axes(heads: Heads, kv_head: int, length: int) -> Array:
    """Return the first two principal components ``[D, 2]`` of keys and queries together, before the
    encoding, over the first ``length`` tokens of the layer's first text."""
    cloud = np.concatenate(_cloud(heads, kv_head, length, rotated=False))
    _, vectors = np.linalg.eigh(np.cov(cloud.T))
    axes = vectors[:, :-3:-1]
    # The sign of an eigenvector is arbitrary; this choice is the same on every machine.
    return axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])


def project(
    heads: Heads, kv_head: int, axes: Array, length: int, *, rotated: bool, points: int = 256
) -> tuple[Array, float]:
    """Project the first ``length`` keys of the layer's first text and their queries on ``axes``
    ``[D, 2]``; the origin stays the zero vector.

    Returns at most ``points`` of each, ``[1 + readers, points, 2]`` with the keys first, and the
    stable rank of all these keys.
    """
    cloud = _cloud(heads, kv_head, length, rotated=rotated)
    keys = torch.from_numpy(cloud[0])
    return cloud[:, sample_positions(length, points)] @ axes, float(stable_rank(keys.mT @ keys))
