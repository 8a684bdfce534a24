"""Rotary offset features (Rotary Offset Features, Sec. 3 and 4, Table 2).

These are slow pairs whose queries and keys have large means at a fixed angle. Bounds on frequency
and angle predict them.

For a fixed key and a rotating query, a pair of means at the initial angle phi contributes |q| |k|
cos(phi - theta delta) to the dot product. This stays below its value at distance 0 up to the
context length C if theta < 2 pi / C and phi >= pi + theta C / 2.

Sinks: the key of a sink lies towards the mean query of the pair or near the origin, and all other
keys lie away from the queries. The *margin* is the score of the first key minus the mean score of
the other visible keys; it is a sum over pairs and the channels that do not rotate. The *weight* is
the attention on the first key, with all pairs and without one pair's part of the scores.

The token before: the part of a pair is largest at phi / theta tokens. Of feature 0 of Phi-1 the
largest heads have an angle phi of about theta, the rotation by one token: "these are features that
select for the previous token" (Sec. 4.3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from trainer.analysis.attention import Array, Heads, Side, cell_means, head_attention
from trainer.positional.spectrum import Spectrum

TURN = 2 * math.pi
RADII = (6.0, 9.0, 12.0)
"""Radii of Table 2."""
PLACE = ["layer", "head", "pair"]
QUERIES, POINTS, CELLS = 128, 1000, 256
"""Largest number of queries whose attention is measured, of tokens with points, and of cells of a
map."""


class Bounds(NamedTuple):
    """Bounds of every pair, ``[pairs]`` each.

    ``inv_freq``: theta, radians a token. ``possible``: whether theta is under its upper bound.
    ``angle``: the lower bound on phi in radians; above 2 pi where theta is not under its bound.
    """

    inv_freq: Array
    possible: Array
    angle: Array


def bounds(spectrum: Spectrum, context_length: int) -> Bounds:
    """Predict offset features from the frequencies and the context length C alone.

    A pair that does not rotate keeps its value at every distance, so it is no offset feature.
    """
    inv_freq = np.array(spectrum.inv_freq)
    possible = (inv_freq > 0) & (inv_freq < TURN / context_length)
    return Bounds(inv_freq, possible, math.pi + inv_freq * context_length / 2)


def pair_means(x: Tensor, pairs: int) -> tuple[Array, Array]:
    """Return the mean of every pair over the vectors ``[B, T, D]`` of a head, complex ``[pairs]``,
    and the circular variance of its angles (Fig. 2).

    The variance of angles a_1 .. a_n is 1 - |mean of exp(i a)|: 0 if all are equal, 1 if they
    cancel.
    """
    points = torch.stack([x[..., :pairs], x[..., pairs : 2 * pairs]])
    lengths = points.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    mean, direction = (
        v.mean(dim=(1, 2), dtype=torch.float64).cpu().numpy() for v in (points, points / lengths)
    )
    return mean[0] + 1j * mean[1], 1 - np.hypot(*direction)


def offset_features(heads: Heads) -> pd.DataFrame:
    """Return a row for every pair of every query head of a layer, from queries and keys before the
    encoding.

    ``angle``: phi, from the mean query counterclockwise to the mean key, in [0, 2 pi).
    ``query_radius``, ``key_radius``: lengths of the means. ``query_circular_variance``,
    ``key_circular_variance``: see :func:`pair_means`; NaN if the pair does not rotate.
    ``inv_freq``, ``possible``, ``lower_bound``: see :class:`Bounds`. ``scale``: factor on the dot
    product of a query and a key in the scores, times the encoding's factor (YaRN's attention
    factor, a temperature).
    """
    C = heads.training_length
    spectra = [spectrum.at(C, C) for spectrum in heads.encoding.spectra]
    keys = [pair_means(heads.k[:, i], len(s.inv_freq)) for i, s in enumerate(spectra)]
    tables = []
    for head in range(heads.q.shape[1]):
        kv = head // heads.queries_per_key
        spectrum, (key, key_variance) = spectra[kv], keys[kv]
        limits = bounds(spectrum, C)
        pairs = len(limits.inv_freq)
        query, query_variance = pair_means(heads.q[:, head], pairs)
        turns = limits.inv_freq > 0
        columns = {
            "layer": heads.layer,
            "head": head,
            "pair": np.arange(pairs),
            "inv_freq": limits.inv_freq,
            "query_radius": np.abs(query),
            "key_radius": np.abs(key),
            "angle": np.mod(np.angle(key) - np.angle(query), TURN),
            "query_circular_variance": np.where(turns, query_variance, np.nan),
            "key_circular_variance": np.where(turns, key_variance, np.nan),
            "possible": limits.possible,
            "lower_bound": limits.angle,
            "scale": heads.scale * spectrum.rotary_scale**2 * spectrum.temperature.scale,
        }
        tables += [pd.DataFrame(columns)] if pairs else []
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def summary(features: pd.DataFrame) -> dict[str, float]:
    """Return the share of pairs under the upper bound, the mean of their lower bounds, and for each
    of :data:`RADII` the recall of the bounds (Table 2), by name.

    ``positives``: number of pairs with a mean key of that radius or longer. Shares of them, NaN
    without any: ``upper``: under the upper bound; ``lower``: also above the lower bound;
    ``relaxed``: above the lower bound minus 0.1 rad.
    """
    numbers = {
        "share_possible": features.possible.mean(),
        "mean_lower_bound": features.lower_bound[features.possible].mean(),
    }
    for radius in RADII:
        large = features[features.key_radius >= radius]
        for name, value in (
            ("positives", float(len(large))),
            ("upper", large.possible.mean()),
            ("lower", (large.possible & (large.angle >= large.lower_bound)).mean()),
            ("relaxed", (large.possible & (large.angle >= large.lower_bound - 0.1)).mean()),
        ):
            numbers[f"{name}, radius {radius:g}"] = value
    return numbers


def strongest_pairs(features: pd.DataFrame) -> pd.DataFrame:
    """Return a row for every rotating head: its pair with the longest means, under the upper bound
    if any pair is.

    ``strength``: product of the lengths. ``faster``: the strongest pair above the bound, NaN if
    there is none.
    """
    ordered = (
        features[features.inv_freq > 0]
        .assign(strength=features.query_radius * features.key_radius)
        .sort_values(["possible", "strength"])
    )
    head = ["layer", "head"]
    fast = (
        ordered[~ordered.possible].groupby(head).tail(1)[PLACE].rename(columns={"pair": "faster"})
    )
    return ordered.groupby(head).tail(1).sort_values(head).merge(fast, "left", on=head)


def contributions(head: pd.DataFrame, distances: Sequence[int]) -> Array:
    """Compute the terms that the means of every pair add to the logit of a key so many tokens back
    (Eq. 14, Fig. 4), ``[pairs, distances]``, from the features of one head.

    They are scaled like scores. Their sum over pairs is the logit; without a pair's row it is the
    logit without that pair (Fig. 6).
    """
    size = (head.query_radius * head.key_radius * head.scale).to_numpy()
    turned = head.angle.to_numpy()[:, None] - np.outer(head.inv_freq, distances)
    terms: Array = size[:, None] * np.cos(turned)
    return terms


class HeadView(NamedTuple):
    """One query head and the keys that it reads in the first text, before their encoding (Fig. 1,
    7, 12 and 13).

    Pair m of M is channels m and m + M. ``inv_freq`` ``[M]``: radians a token. ``tokens``: ``[n,
    D]``, evenly spread. ``maps``: ``[D, cells]``, means over ``cell`` neighbouring tokens.
    """

    layer: int
    head: int
    inv_freq: Array
    cell: int
    tokens: dict[Side, Array]
    maps: dict[Side, Array]


def head_view(heads: Heads, head: int) -> HeadView:
    """Sample query head ``head``; the size of the result does not grow with the text."""
    kv, length, C = head // heads.queries_per_key, heads.q.shape[2], heads.training_length
    vectors: dict[Side, Tensor] = {"query": heads.q[0, head], "key": heads.k[0, kv]}
    step, cell = -(-length // POINTS), -(-length // CELLS)
    return HeadView(
        layer=heads.layer,
        head=head,
        inv_freq=np.array(heads.encoding.spectra[kv].at(C, C).inv_freq),
        cell=cell,
        tokens={side: x[::step].cpu().numpy().copy() for side, x in vectors.items()},
        maps={side: cell_means(x.T, cell).cpu().numpy() for side, x in vectors.items()},
    )


def sampled_queries(heads: Heads) -> Tensor:
    """Return positions evenly spread over the last three quarters of the training length, the text
    or the window, whichever is shortest, so that each query sees all keys before it."""
    T = heads.q.shape[2]
    length = min(T, heads.training_length, heads.encoding.window or T)
    start = max(1, length // 4)
    return torch.linspace(start, length - 1, min(QUERIES, length - start)).round().long()


Row = dict[str, float]


def sink_row(heads: Heads, head: int, pair: int, control: int | None = None) -> Row:
    """Measure the effect of ``pair`` on a query head's attention on the first token, means over all
    texts and sampled queries.

    ``attention``: that attention; ``attention_without``: without the pair's part of the scores;
    ``explained``: share of it that disappears then, negative if attention grows;
    ``attention_without_fast_pair``: without the part of the pair ``control``, NaN if that is None.
    ``margin``: the scaled margin of the scores; ``margin_of_pair``: its part from the pair.
    """
    positions = sampled_queries(heads)
    kv = head // heads.queries_per_key

    def weight(without: int | None = None) -> float:
        weights = head_attention(heads, head, positions, without=without)
        return float(weights[..., 0].double().mean())

    q, k = heads.rotated_q[:, head, positions], heads.rotated_k[:, kv, : int(positions[-1]) + 1]
    seen = positions.to(q.device)
    # Mean of the keys 1 to i for every query i; then minus the first key, times the query.
    others = k[:, 1:].double().cumsum(dim=1)[:, seen - 1] / seen[:, None]
    by_channel = (q * (k[:, :1] - others) * heads.scale).mean(dim=(0, 1))
    channels = [pair, pair + len(heads.encoding.spectra[kv].inv_freq)]
    attention, without = weight(), weight(pair)
    return {
        "layer": heads.layer,
        "head": head,
        "pair": pair,
        "attention": attention,
        "attention_without": without,
        "explained": 1 - without / max(attention, np.finfo(float).tiny),
        "attention_without_fast_pair": math.nan if control is None else weight(control),
        "margin": float(by_channel.sum()),
        "margin_of_pair": float(by_channel[channels].sum()),
    }


def sinks(heads: Heads, features: pd.DataFrame) -> list[Row]:
    """Measure :func:`sink_row` of the strongest pair under the upper bound of every head that has
    one; ``features``: of this layer, empty if it does not rotate."""
    return [
        sink_row(heads, row.head, row.pair, None if math.isnan(row.faster) else int(row.faster))
        for row in (strongest_pairs(features).itertuples() if len(features) else ())
        if row.possible
    ]


def fastest_pairs(heads: Heads) -> list[Row]:
    """Measure the attention on the token before in every head that rotates, as it is and without
    the head's fastest pair."""
    C, positions = heads.training_length, sampled_queries(heads)
    rows: list[Row] = []
    for head in range(heads.q.shape[1]):
        spectrum = heads.encoding.spectra[head // heads.queries_per_key].at(C, C)
        if not spectrum.rotates:
            continue
        pair = int(np.argmax(spectrum.inv_freq))
        row: Row = {"layer": heads.layer, "head": head, "pair": pair}
        for name, without in (("attention", None), ("attention_without", pair)):
            weights = head_attention(heads, head, positions, without=without)
            before = weights[:, range(len(positions)), positions - 1]
            row[name] = float(before.double().mean())
        rows.append(row)
    return rows
