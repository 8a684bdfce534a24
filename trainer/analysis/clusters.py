"""Clusters of queries and keys, and how the rotation changes them (RoPE-ID Sec. 3.1, App. A.3).

Means over pairs come from sums of vectors, and singular values from Gram matrices. Both are summed
over the text once and read at every prefix length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, prefix_lengths
from trainer.analysis.attention import stable_rank
from trainer.analysis.capture import Heads

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


@dataclass(frozen=True)
class _Sums:
    """Sums over the first n vectors of every head, for every prefix length n: ``[lengths, B, H,
    ...]`` float64."""

    vectors: Tensor  # [.., D]
    units: Tensor  # [.., D], of the vectors scaled to length 1
    gram: Tensor  # [.., D, D], X^T X


def _sums(x: Tensor, lengths: list[int]) -> _Sums:
    def of_chunk(chunk: Tensor) -> tuple[Tensor, ...]:
        v = chunk.double()
        return v.sum(dim=2), F.normalize(v, dim=-1).sum(dim=2), v.mT @ v

    parts = []
    for begin, end in pairwise([0, *lengths]):
        chunks = [of_chunk(chunk) for chunk in x[:, :, begin:end].split(CHUNK, dim=2)]
        parts.append([torch.stack(values).sum(dim=0) for values in zip(*chunks, strict=True)])
    return _Sums(*(torch.stack(part).cumsum(dim=0) for part in zip(*parts, strict=True)))


def _within(total: Tensor, squares: Tensor, n: Tensor) -> Tensor:
    """Compute the mean dot product of two different vectors out of n from their sum and squared
    norms."""
    return (total.square().sum(dim=-1) - squares) / (n * (n - 1))


def _measures(q: Tensor, k: Tensor, lengths: list[int]) -> dict[str, Tensor]:
    """Compute cosines, dot products and stable ranks, ``[B, H, lengths]`` each."""
    queries, keys = _sums(q, lengths), _sums(k, lengths)
    group = q.shape[1] // k.shape[1]
    n = torch.tensor(lengths, dtype=torch.float64, device=q.device)[:, None, None]
    measures = {}
    for side, sums in (("query", queries), ("key", keys)):
        # The squares of n unit vectors sum to n.
        squares = sums.gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        measures[f"{side}_cosine"] = _within(sums.units, n, n)
        measures[f"{side}_dot"] = _within(sums.vectors, squares, n)
        measures[f"{side}_stable_rank"] = stable_rank(sums.gram)
    for name in ("units", "vectors"):
        shared = getattr(keys, name).repeat_interleave(group, dim=2)
        product = (getattr(queries, name) * shared).sum(dim=-1) / n**2
        measures["cross_cosine" if name == "units" else "cross_dot"] = product
    return {name: value.movedim(0, -1) for name, value in measures.items()}


def _separation(
    q: Tensor, k: Tensor, lengths: list[int], points: int, seed: int
) -> dict[str, Tensor]:
    """Compute silhouette score and Davies-Bouldin index ``[B, Hq, lengths]`` of samples."""
    group = q.shape[1] // k.shape[1]
    scores = []
    for n in lengths:
        chosen = torch.as_tensor(sample_positions(n, points, seed), device=q.device)
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


def sample_positions(length: int, points: int, seed: int) -> Array:
    """Choose at most ``points`` of the positions 0 .. length - 1, ascending."""
    if length <= points:
        return np.arange(length)
    return np.sort(np.random.default_rng(seed).choice(length, points, replace=False))


class Clusters:
    """Collect the geometry of every layer; pass :meth:`update` to ``capture``.

    ``points``: number of queries and of keys in the samples for silhouette and Davies-Bouldin;
    ``seed``: seed of these samples. ``lengths``: of the prefixes, in tokens.
    """

    def __init__(self, points: int = 512, seed: int = 0) -> None:
        self.points, self.seed = points, seed
        self.lengths: list[int] = []
        self.averages = Averages()
        self._prefix = Averages()

    def update(self, heads: Heads) -> None:
        """Add one layer of one or more texts, all of the same length of at least two tokens."""
        self.lengths = prefix_lengths(heads.q.shape[2])
        self.averages.add(heads.layer, **self._values(heads, self.lengths))

    def update_prefix(self, heads: Heads) -> None:
        """Add one layer of the same texts' first tokens, read without the later ones: they replace
        the measures at all lengths up to theirs."""
        if lengths := [n for n in self.lengths if n <= heads.q.shape[2]]:
            self._prefix.add(heads.layer, **self._values(heads, lengths))

    def _values(self, heads: Heads, lengths: list[int]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = {}
        for name, q, k in (
            ("plain", heads.q, heads.k),
            ("rotated", heads.rotated_q, heads.rotated_k),
        ):
            measures = _measures(q, k, lengths)
            measures |= _separation(q, k, lengths, self.points, self.seed)
            values |= {f"{name}.{key}": value for key, value in measures.items()}
        for side in ("query", "key"):
            before = values[f"plain.{side}_stable_rank"]
            values[f"{side}_fsv_ratio"] = (before / values[f"rotated.{side}_stable_rank"]).sqrt()
            values[f"{side}_first_share"] = 1 / before[..., -1]
        return values

    def result(self) -> dict[str, Array]:
        """Return means over the texts added so far.

        ``plain.NAME`` and ``rotated.NAME`` for each of :data:`MEASURES`: before the encoding, and
        as the scores use queries and keys. ``*_fsv_ratio``: first singular value after the encoding
        over that before it, ``[layers, heads, lengths]``, without the queries' temperature. A
        rotation leaves |X|_F unchanged (Lemma 2), so this is the root of the ratio of stable ranks.
        ``*_first_share``: share of the first principal component in the variance about the origin,
        before the encoding, over the whole text, ``[layers, heads]``.
        """
        result = self.averages.all_stacked()
        for name, values in self._prefix.all_stacked().items():
            if not name.endswith("_first_share"):
                result[name][..., : values.shape[-1]] = values
        return result


@dataclass(frozen=True)
class Projection:
    """Points of a prefix: ``keys`` ``[points, 2]``, ``queries`` ``[query heads, points, 2]``.

    ``positions``: positions of the points in the text. ``stable_rank``: stable rank of all keys of
    the prefix.
    """

    length: int
    rotated: bool
    positions: Array
    keys: Array
    queries: Array
    stable_rank: float


@dataclass(frozen=True)
class Snapshot:
    """One key-value head and its queries in two dimensions.

    ``centre`` ``[D]`` and ``plane`` ``[D, 2]``: the origin of the plane and its directions.
    """

    layer: int
    kv_head: int
    centre: Array
    plane: Array
    panels: list[Projection]


def snapshot(
    heads: Heads,
    kv_head: int,
    lengths: list[int],
    *,
    points: int = 512,
    seed: int = 0,
    plane_of: Snapshot | None = None,
) -> Snapshot:
    """Project prefixes of a text, before and after the encoding, on one plane.

    The plane is spanned by the first two principal components of keys and queries together, before
    the encoding, over the first of the ``lengths``. Only the layer's first text is shown, with at
    most ``points`` points of a cluster. ``plane_of``: the snapshot whose plane is used instead.
    """
    group = heads.queries_per_key
    shared = slice(kv_head * group, (kv_head + 1) * group)
    clouds = {
        rotated: tuple(x.double().cpu().numpy() for x in (k[0, kv_head], q[0, shared]))
        for rotated, k, q in (
            (False, heads.k, heads.q),
            (True, heads.rotated_k, heads.rotated_q),
        )
    }
    if plane_of is None:
        keys, queries = clouds[False]
        cloud = np.concatenate([keys[: lengths[0]], *queries[:, : lengths[0]]])
        centre = cloud.mean(axis=0)
        _, vectors = np.linalg.eigh(np.cov(cloud.T))
        plane = vectors[:, :-3:-1]
        # The sign of an eigenvector is arbitrary; this choice is the same on every machine.
        plane = plane * np.sign(plane[np.abs(plane).argmax(axis=0), [0, 1]])
    else:
        centre, plane = plane_of.centre, plane_of.plane

    def panel(length: int, rotated: bool) -> Projection:
        k, q = clouds[rotated]
        chosen = sample_positions(length, points, seed)
        spectrum = np.linalg.eigvalsh(k[:length].T @ k[:length])
        return Projection(
            length=length,
            rotated=rotated,
            positions=chosen,
            keys=(k[chosen] - centre) @ plane,
            queries=(q[:, chosen] - centre) @ plane,
            stable_rank=float(spectrum.sum() / spectrum[-1]),
        )

    return Snapshot(
        layer=heads.layer,
        kv_head=kv_head,
        centre=centre,
        plane=plane,
        panels=[panel(length, rotated) for length in lengths for rotated in (False, True)],
    )
