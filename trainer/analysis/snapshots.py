"""Pictures of the clusters of one head in two dimensions (RoPE-ID Fig. 3, 14 and App. A.11)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.clusters import sample_positions


@dataclass(frozen=True)
class Panel:
    """Points of a prefix: ``keys`` ``[points, 2]``, ``queries`` ``[query heads, points, 2]``.

    ``positions``: theirs in the text. ``stable_rank``: of all the keys of the prefix.
    """

    length: int
    rotated: bool
    positions: Array
    keys: Array
    queries: Array
    stable_rank: float


@dataclass(frozen=True)
class Snapshot:
    """One key-value head and its queries; ``origin`` ``[2]``: where the zero vector lies."""

    layer: int
    kv_head: int
    origin: Array
    panels: list[Panel]


def snapshot(
    heads: Heads, kv_head: int, lengths: list[int], *, points: int = 512, seed: int = 0
) -> Snapshot:
    """Project the prefixes of a text, before and after the encoding, on one and the same plane.

    The plane is that of the first two principal components of keys and queries together, before the
    encoding, of the first of the ``lengths``.

    Args:
        heads: a layer; only its first text is shown.
        kv_head: the key-value head.
        lengths: of the prefixes, in tokens; two panels each.
        points: shown of a cluster.
        seed: which ones.
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
    keys, queries = clouds[False]
    cloud = np.concatenate([keys[: lengths[0]], *queries[:, : lengths[0]]])
    centre = cloud.mean(axis=0)
    _, vectors = np.linalg.eigh(np.cov(cloud.T))
    plane = vectors[:, :-3:-1]
    # Eigenvectors have no sign of their own; this one is the same on every machine.
    plane = plane * np.sign(plane[np.abs(plane).argmax(axis=0), [0, 1]])

    def panel(length: int, rotated: bool) -> Panel:
        k, q = clouds[rotated]
        chosen = sample_positions(length, points, seed)
        spectrum = np.linalg.eigvalsh(k[:length].T @ k[:length])
        return Panel(
            length,
            rotated,
            chosen,
            (k[chosen] - centre) @ plane,
            (q[:, chosen] - centre) @ plane,
            float(spectrum.sum() / spectrum[-1]),
        )

    return Snapshot(
        heads.layer,
        kv_head,
        -centre @ plane,
        [panel(length, rotated) for length in lengths for rotated in (False, True)],
    )
