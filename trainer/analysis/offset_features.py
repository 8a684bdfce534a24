"""Rotary offset features: slow pairs whose queries and keys have large means at a fixed angle, the
bounds on frequency and angle that predict them, and their effect on attention (Rotary Offset
Features, Sec. 3 and 4, Table 2).

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.arrays import Array, Averages, Side, cell_means
from trainer.analysis.attention import sampled_attention
from trainer.analysis.capture import Heads
from trainer.positional.spectrum import Spectrum

TURN = 2 * math.pi
RADII = (6.0, 9.0, 12.0)


@dataclass(frozen=True)
class Bounds:
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
    return Bounds(
        inv_freq=inv_freq, possible=possible, angle=math.pi + inv_freq * context_length / 2
    )


@dataclass(frozen=True)
class OffsetFeatures:
    """Every rotated pair of every query head, one entry each in all columns.

    ``angle``: phi, from the mean query counterclockwise to the mean key, in [0, 2 pi).
    ``query_radius``, ``key_radius``: lengths of the means. ``possible``, ``lower_bound``: see
    :class:`Bounds`. ``scale``: factor on the dot product of a query and a key in the scores, times
    the encoding's factor (YaRN's attention factor, a temperature).
    """

    context_length: int
    layer: Array
    head: Array
    pair: Array
    inv_freq: Array
    query_radius: Array
    key_radius: Array
    angle: Array
    possible: Array
    lower_bound: Array
    scale: Array

    @property
    def columns(self) -> dict[str, Array]:
        """The table of pairs by column."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}

    def only(self, rows: Array) -> OffsetFeatures:
        """Select some entries, by their indices."""
        chosen = {name: column[rows] for name, column in self.columns.items()}
        return replace(self, **chosen)

    def recall(self, radius: float) -> dict[str, float]:
        """Count pairs with a mean key of ``radius`` or longer that the bounds predict (Table 2).

        ``positives``: number of these pairs. Shares of them, NaN without any: ``upper``: under the
        upper bound; ``lower``: also above the lower bound; ``relaxed``: above the lower bound minus
        0.1 rad.
        """
        large = self.key_radius >= radius
        possible, angle, lower = (
            column[large] for column in (self.possible, self.angle, self.lower_bound)
        )
        shares = {
            "upper": possible,
            "lower": possible & (angle >= lower),
            "relaxed": possible & (angle >= lower - 0.1),
        }
        mean = {name: float(x.mean()) if len(x) else math.nan for name, x in shares.items()}
        return {"positives": float(large.sum()), **mean}

    def summary(self) -> dict[str, float]:
        """Return the share of pairs under the upper bound, the mean of their lower bounds, and the
        recall for each of :data:`RADII`, by name."""
        bounds = self.lower_bound[self.possible]
        numbers = {
            "share_possible": float(self.possible.mean()) if len(self.possible) else 0.0,
            "mean_lower_bound": float(bounds.mean()) if len(bounds) else math.nan,
        }
        for radius in RADII:
            counts = self.recall(radius).items()
            numbers |= {f"{name}, radius {radius:g}": value for name, value in counts}
        return numbers


class OffsetFeatureSearch:
    """Collect mean queries and keys of every layer before their encoding."""

    def __init__(self) -> None:
        self._averages = Averages()
        self._spectra: dict[int, tuple[Spectrum, ...]] = {}
        self._scales: dict[int, float] = {}
        self._training_length = 0

    def update(self, heads: Heads) -> None:
        """Add one layer of one or more texts."""
        self._spectra[heads.layer] = heads.encoding.spectra
        self._training_length, self._scales[heads.layer] = heads.training_length, heads.scale
        self._averages.add(
            heads.layer,
            q=heads.q.mean(dim=2, dtype=torch.float64),
            k=heads.k.mean(dim=2, dtype=torch.float64),
        )

    def result(self) -> OffsetFeatures:
        """Compute the features from the means over all positions and texts seen so far."""
        q, k = self._averages.stacked("q"), self._averages.stacked("k")
        group = q.shape[1] // k.shape[1]
        layers = self._averages.layers
        C = self._training_length
        tables: list[dict[str, Any]] = []
        for index, layer in enumerate(layers):
            for head in range(q.shape[1]):
                spectrum = self._spectra[layer][head // group].at(C, C)
                encoding_scale = spectrum.rotary_scale**2 * spectrum.temperature.scale
                limits = bounds(spectrum, C)
                pairs = len(limits.inv_freq)
                query = _complex(q[index, head], pairs)
                key = _complex(k[index, head // group], pairs)
                tables.append(
                    {
                        "layer": layer,
                        "head": head,
                        "pair": np.arange(pairs),
                        "inv_freq": limits.inv_freq,
                        "query_radius": np.abs(query),
                        "key_radius": np.abs(key),
                        "angle": np.mod(np.angle(key) - np.angle(query), TURN),
                        "possible": limits.possible,
                        "lower_bound": limits.angle,
                        "scale": self._scales[layer] * encoding_scale,
                    }
                )
        return OffsetFeatures(C, **joined_columns(tables))


def joined_columns(tables: Sequence[Mapping[str, Any]]) -> dict[str, Array]:
    """Concatenate tables of equal columns; a single value fills its column."""
    filled = [dict(zip(t, np.broadcast_arrays(*t.values()), strict=True)) for t in tables]
    return {name: np.concatenate([table[name] for table in filled]) for name in tables[0]}


def _complex(vector: Array, pairs: int) -> Array:
    """Combine rotated channels m and m + pairs into complex numbers."""
    return vector[:pairs] + 1j * vector[pairs : 2 * pairs]


def common_pairs(
    first: OffsetFeatures, second: OffsetFeatures
) -> tuple[OffsetFeatures, OffsetFeatures]:
    """Restrict both to the entries (layer, head, pair) they share, in the same order."""
    keys = [np.rec.fromarrays([x.layer, x.head, x.pair]) for x in (first, second)]
    _, *rows = np.intersect1d(keys[0], keys[1], assume_unique=True, return_indices=True)
    return first.only(rows[0]), second.only(rows[1])


def with_bounds_of(features: OffsetFeatures, by: OffsetFeatures) -> OffsetFeatures:
    """Combine the means of ``features`` with the bounds of ``by``; both have the same entries."""
    return replace(
        features,
        context_length=by.context_length,
        inv_freq=by.inv_freq,
        possible=by.possible,
        lower_bound=by.lower_bound,
    )


def contributions(
    features: OffsetFeatures, layer: int, head: int, distances: Sequence[int]
) -> Array:
    """Compute the terms that the means of every pair add to the logit of a key so many tokens back
    (Eq. 14, Fig. 4), ``[pairs, distances]``.

    They are scaled like scores. Their sum over pairs is the logit; without a pair's row it is the
    logit without that pair (Fig. 6).
    """
    chosen = (features.layer == layer) & (features.head == head)
    size = features.query_radius[chosen] * features.key_radius[chosen] * features.scale[chosen]
    turned = features.angle[chosen][:, None] - np.outer(features.inv_freq[chosen], distances)
    return size[:, None] * np.cos(turned)


class AngleStability:
    """Collect means, and means of directions, of every layer before its encoding (Fig. 2)."""

    def __init__(self) -> None:
        self._averages = Averages()
        self._spectra: dict[int, tuple[Spectrum, ...]] = {}
        self._group = 1

    def update(self, heads: Heads) -> None:
        """Add one layer of one or more texts."""
        spectra = heads.encoding.spectra
        self._spectra[heads.layer], self._group = spectra, heads.queries_per_key
        q = [_means(x, spectra[i // self._group]) for i, x in enumerate(heads.q.unbind(1))]
        k = [_means(x, spectra[i]) for i, x in enumerate(heads.k.unbind(1))]
        self._averages.add(heads.layer, q=torch.stack(q, dim=1), k=torch.stack(k, dim=1))

    def result(self) -> dict[str, Array]:
        """Return columns with an entry for each rotated pair of each query head and each key-value
        head.

        ``of_keys``: whether the entry is of keys, whose ``head`` is a key-value head. ``radius``:
        length of the mean over all positions and texts, before the encoding. ``variance``: circular
        variance of the angles a_1 .. a_n, 1 - |mean of exp(i a)|: 0 if all are equal, 1 if they
        cancel.
        """
        tables: list[dict[str, Any]] = []
        for name, group in (("q", self._group), ("k", 1)):
            means = self._averages.stacked(name)
            for layer, layer_means in zip(self._averages.layers, means, strict=True):
                for head, (mean, direction) in enumerate(layer_means):
                    moving = np.flatnonzero(self._spectra[layer][head // group].inv_freq)
                    tables.append(
                        {
                            "of_keys": name == "k",
                            "layer": layer,
                            "head": head,
                            "pair": moving,
                            "radius": np.hypot(*mean[:, moving]),
                            "variance": 1 - np.hypot(*direction[:, moving]),
                        }
                    )
        return joined_columns(tables)


def _means(x: Tensor, spectrum: Spectrum) -> Tensor:
    """Compute the mean and the mean direction of every pair of one head ``[B, T, D]``: ``[B, 2, 2,
    D/2]``.

    Entries beyond the spectrum's pairs are 0.
    """
    pairs = len(spectrum.inv_freq)
    channels = torch.stack([x[..., :pairs], x[..., pairs : 2 * pairs]], dim=1)
    length = channels.norm(dim=1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    means = [x.mean(dim=2, dtype=torch.float64) for x in (channels, channels / length)]
    return torch.nn.functional.pad(torch.stack(means, dim=1), (0, x.shape[-1] // 2 - pairs))


POINTS, CELLS = 1000, 256
"""Largest number of tokens with points, and of cells of a map."""


@dataclass(frozen=True)
class HeadView:
    """One query head and the keys that it reads in the first text, before their encoding (Fig. 1,
    7, 12 and 13).

    Pair m of ``pairs`` is channels m and m + pairs. ``inv_freq`` ``[pairs]``: radians a token.
    ``tokens``: ``[n, D]``, one token in ``step``.
    ``maps``: ``[D, cells]``, means over ``cell`` neighbouring tokens.
    """

    layer: int
    head: int
    inv_freq: Array
    step: int
    cell: int
    tokens: dict[Side, Array]
    maps: dict[Side, Array]

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.inv_freq)

    def points(self, pair: int) -> tuple[Array, Array]:
        """Return queries and keys of one pair, ``[n, 2]`` each."""
        channels = [pair, pair + self.pairs]
        return self.tokens["query"][:, channels], self.tokens["key"][:, channels]


def head_view(heads: Heads, head: int) -> HeadView:
    """Sample query head ``head``; the size of the result does not grow with the text."""
    kv, length, C = head // heads.queries_per_key, heads.q.shape[2], heads.training_length
    vectors: dict[Side, Tensor] = {"query": heads.q[0, head], "key": heads.k[0, kv]}
    step, cell = -(-length // POINTS), -(-length // CELLS)
    return HeadView(
        layer=heads.layer,
        head=head,
        inv_freq=np.array(heads.encoding.spectra[kv].at(C, C).inv_freq),
        step=step,
        cell=cell,
        tokens={side: x[::step].cpu().numpy().copy() for side, x in vectors.items()},
        maps={side: cell_means(x.T, cell).cpu().numpy() for side, x in vectors.items()},
    )


Row = dict[str, float]


def sink_row(heads: Heads, head: int, pair: int, control: int | None = None) -> Row | None:
    """Measure the effect of ``pair`` on a query head's attention on the first token, means over all
    texts and sampled queries; return None if no query sees another key than the first.

    ``attention``: that attention; ``attention_without``: without the pair's part of the scores;
    ``explained``: share of it that disappears then, negative if attention grows;
    ``attention_without_fast_pair``: without the part of the pair ``control``, NaN if that is None.
    ``first_key``: length of the first key in the pair, before the encoding, over the length of the
    mean key. ``margin``: the scaled margin of the scores, with its part from the pair and the pair
    with the largest part.
    """
    sampled = sampled_attention(heads, head)
    if sampled is None:
        return None
    kv, positions, q, k = sampled.kv_head, sampled.positions, sampled.q, sampled.k
    pairs = sampled.pairs

    def weight(without: int | None = None) -> float:
        return float(sampled.weights(without)[..., 0].double().mean())

    # Mean of the keys 1 to i for every query i; then minus the first key, times the query.
    others = k[:, 1:].double().cumsum(dim=1)[:, positions - 1] / positions[:, None]
    by_channel = (q * (k[:, :1] - others) * heads.scale).mean(dim=(0, 1))
    parts = by_channel[: 2 * pairs].unflatten(0, (2, pairs)).sum(dim=0).tolist()
    keys_of_pair = heads.k[:, kv][..., [pair, pair + pairs]]
    first, mean = keys_of_pair[:, 0], keys_of_pair.mean(dim=(0, 1))
    attention, without = weight(), weight(pair)
    return {
        "layer": heads.layer,
        "head": head,
        "pair": pair,
        "attention": attention,
        "attention_without": without,
        "explained": 1 - without / max(attention, np.finfo(float).tiny),
        "attention_without_fast_pair": math.nan if control is None else weight(control),
        "first_key": float(first.norm(dim=-1).mean() / mean.norm().clamp_min(1e-9)),
        "margin": float(by_channel.sum()),
        "margin_of_pair": parts[pair],
        "strongest_pair": parts.index(max(parts)),
        "margin_of_strongest": max(parts),
    }


FastestPairs = dict[tuple[int, int, int], list[float]]
"""Attention on the token before, as it is and without the pair, by layer, head and its fastest
pair."""


def fastest_pairs(heads: Heads) -> FastestPairs:
    """Measure the effect of the fastest pair of each head that rotates."""
    C = heads.training_length
    measured: FastestPairs = {}
    for head in range(heads.q.shape[1]):
        spectrum = heads.encoding.spectra[head // heads.queries_per_key].at(C, C)
        if not spectrum.rotates or (sampled := sampled_attention(heads, head)) is None:
            continue
        pair = int(np.argmax(spectrum.inv_freq))
        rows = range(len(sampled.positions))
        measured[heads.layer, head, pair] = [
            float(weights[:, rows, sampled.positions - 1].double().mean())
            for weights in (sampled.weights(), sampled.weights(without=pair))
        ]
    return measured
