"""Effects of single rotary pairs on attention (Rotary Offset Features, Sec. 4.2 and 4.3.1),
measured on the queries of a :class:`~trainer.analysis.attention.SampledAttention`.

Sinks: the key of a sink lies towards the mean query of the pair or near the origin, and all other
keys lie away from the queries. The *margin* is the score of the first key minus the mean score of
the other visible keys; it is a sum over pairs and the channels that do not rotate. The *weight* is
the attention on the first key, with all pairs and without one pair's part of the scores.

The token before: a pair of means adds |q| |k| cos(phi - theta delta) to the logit at distance
delta, most at phi / theta tokens. Of feature 0 of Phi-1 the largest heads have an angle phi of
about theta, the rotation by one token: "these are features that select for the previous token".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from trainer.analysis.arrays import Array, finite, to_json
from trainer.analysis.attention import sampled_attention
from trainer.analysis.capture import Heads
from trainer.analysis.offset_features.measure import TURN, OffsetFeatures
from trainer.analysis.studies.section import Grid, Part, Picture, column_rows
from trainer.common.words import counted
from trainer.plotting.points import HeadCloud, head_points

SINK = 0.1
"""Least attention on the first token of a head with a sink."""
SHOWN = 10
Columns = Mapping[str, Array]
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


def sinks_part(rows: Sequence[Row], layers: int) -> Part:
    """Report the effect of each head's strongest pair under the upper bound on its sink; empty if
    no head has such a pair.

    ``rows``: see :func:`sink_row`; ``layers``: number of the model's layers.
    """
    if not rows:
        return Part()
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    order = np.argsort(-columns["attention"], kind="stable")
    order = order[columns["attention"][order] >= SINK]
    sinks = {name: values[order] for name, values in columns.items()}
    return Part(
        findings=tuple(_sink_findings(sinks, len(rows))),
        pictures=(_sink_picture(columns, layers),),
        grids=(_sink_table(sinks),) if len(order) else (),
        numbers={"sinks": {name: to_json(values) for name, values in columns.items()}},
    )


def _sink_findings(sinks: Columns, heads: int) -> list[str]:
    """Describe the heads with a sink, out of ``heads`` with a pair under the upper bound."""
    count, explained, control = len(sinks["head"]), sinks["explained"], ""
    if not count:
        return [
            f"None of {counted(heads, 'head')} with a pair under the upper bound puts {SINK:.0%} "
            "of its attention on the first token: there is no sink to explain."
        ]
    without_fast = finite(sinks["attention_without_fast_pair"])
    if without_fast.size:
        control = f" (without its strongest faster pair {without_fast.mean():.0%})"
    strongest = int((sinks["strongest_pair"] == sinks["pair"]).sum())
    return [
        f"Of {counted(heads, 'head')} with a pair under the upper bound, {count} put "
        f"{SINK:.0%} or more of their attention on the first token, "
        f"{sinks['attention'].mean():.0%} on average. Without the strongest such pair of each it "
        f"is {sinks['attention_without'].mean():.0%}{control}: that one pair explains "
        f"{np.median(explained):.0%} of it in the median head, and more than half in "
        f"{(explained > 0.5).sum()}.",
        f"In {strongest} of these {count} heads no other pair does more to raise the score of the "
        "first key above the scores of other keys. In the pair taken out the first key is "
        f"{np.median(sinks['first_key']):.2f} times as long as the mean key in the median head.",
    ]


def _sink_picture(columns: Columns, layers: int) -> Picture:
    first, score = "attention on the first token", "score of the first key over others"
    panels = [
        HeadCloud(columns["layer"], columns[x], columns[y], *labels, diagonal=diagonal)
        for x, y, labels, diagonal in (
            ("attention", "attention_without", (first, f"{first}\nwithout the pair"), True),
            ("margin", "margin_of_pair", (score, "of it, the pair's"), False),
        )
    ]
    return Picture(
        name="offset_sinks",
        figure=head_points(panels, layers),
        caption=(
            "Effect of the strongest pair under the upper bound on the sink of its head, a point a "
            "head, means over queries in the last three quarters of the training length. Left: "
            "attention on the first token, as it is and with this pair's part taken out of all "
            "scores; points far below the dotted line have a sink by one feature. Right: how far "
            "the score of the first key lies above the mean of the other keys in sight (before a "
            "softcap), and the pair's part of that."
        ),
        header=tuple(columns),
        rows=column_rows(columns.values()),
    )


def _sink_table(sinks: Columns) -> Grid:
    count = len(sinks["head"])
    shown = [dict(zip(sinks, row, strict=True)) for row in zip(*sinks.values(), strict=True)]
    return Grid(
        caption=(
            f"Heads with a sink by its weight, {min(SHOWN, count)} of {count}: attention on the "
            "first token as it is and without the strongest pair under the upper bound; how far "
            "the score of the first key lies above the others', the pair's part of that, and the "
            "pair with the largest part."
        ),
        header=(
            *("head", "pair", "attention", "without", "explained"),
            *("score", "the pair's", "largest"),
        ),
        rows=[
            (
                f"L{sink['layer']}H{sink['head']}",
                str(sink["pair"]),
                *(f"{sink[k]:.1%}" for k in ("attention", "attention_without", "explained")),
                *(f"{sink[k]:.1f}" for k in ("margin", "margin_of_pair")),
                f"{sink['margin_of_strongest']:.1f}, pair {sink['strongest_pair']}",
            )
            for sink in shown[:SHOWN]
        ],
    )


LOUD = 0.9
"""Quantile of radii from which a head's fastest pair counts as large."""
OF_PAIR = ("layer", "head", "pair", "inv_freq", "query_radius", "key_radius", "angle")
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


def steps_part(fastest: FastestPairs, features: OffsetFeatures, layers: int) -> Part:
    """Report the effect of every head's fastest pair on attention on the token before; ``layers``:
    number of the model's layers."""
    if not fastest:
        return Part()
    places = zip(features.layer, features.head, features.pair, strict=True)
    row_of_place = {place: row for row, place in enumerate(places)}
    rows = np.array([row_of_place[place] for place in fastest])
    columns = {name: getattr(features, name)[rows] for name in OF_PAIR}
    # Treat an angle just under a full turn as -0.1 steps, not as 6.2.
    turned = np.mod(columns["angle"] + columns["inv_freq"] / 2, TURN)
    columns["steps"] = turned / columns["inv_freq"] - 0.5
    columns["attention"], columns["attention_without"] = np.array([*fastest.values()]).T
    return Part(
        findings=tuple(_step_findings(columns)),
        pictures=(_step_picture(columns, layers),),
        grids=(_step_table(columns),),
        numbers={"steps": {name: to_json(values) for name, values in columns.items()}},
    )


def _step_findings(columns: Columns) -> list[str]:
    # Distance 1 has the largest term of all whole distances.
    at_step = (columns["steps"] >= 0.5) & (columns["steps"] < 1.5)
    large = columns["key_radius"] >= np.quantile(columns["key_radius"], LOUD)
    by_chance = float(np.minimum(columns["inv_freq"] / TURN, 1).mean())
    heads, least = counted(int(large.sum()), "head"), columns["key_radius"][large].min()
    text = [
        "The fastest pair adds most to the logit of the token before in "
        f"{at_step[large].mean():.0%} of the {heads} in which its mean key is longest (a tenth, "
        f"from {least:.2f} on), and in "
        f"{at_step.mean():.0%} of all {len(large)}; of angles at random that would be "
        f"{by_chance:.0%}."
    ]
    for among, name in (
        (large & at_step, "these heads with a long key and that angle"),
        (~(large & at_step), "the others"),
    ):
        if among.any():
            was, now = columns["attention"][among], columns["attention_without"][among]
            text.append(
                f"In {name} attention on the token before is {was.mean():.1%} on average, and "
                f"{now.mean():.1%} without the pair."
            )
    return text


def _step_picture(columns: Columns, layers: int) -> Picture:
    layer, before = columns["layer"], "attention on the token before"
    labels = ("radius of the mean key", "angle φ in steps of a token")
    was, now = columns["attention"], columns["attention_without"]
    panels = (
        HeadCloud(layer, columns["key_radius"], columns["steps"], *labels, level=1.0),
        HeadCloud(layer, was, now, before, f"{before}\nwithout the pair", diagonal=True),
    )
    return Picture(
        name="offset_steps",
        figure=head_points(panels, layers),
        caption=(
            "The fastest pair of every head, a point a head. Left: the radius of its mean key, and "
            "its angle from mean query to mean key over its turn in one token; the part of the "
            "logit is largest at that distance, and the dotted line is the token before. Right: "
            "attention on that token, as it is and with the pair's part taken out of all scores, "
            "means over queries in the last three quarters of the training length; points below "
            "the dotted line lose such attention without the pair."
        ),
        header=tuple(columns),
        rows=column_rows(columns.values()),
    )


def _step_table(columns: Columns) -> Grid:
    strength = columns["query_radius"] * columns["key_radius"]
    order = np.argsort(-strength, kind="stable")[:SHOWN]
    return Grid(
        caption=(
            f"Fastest pairs of the longest means, {len(order)} of {len(strength)} heads: radii, "
            "the angle, the step of one token, the distance at which the pair adds most to the "
            "logit, and attention on the token before, as it is and without the pair."
        ),
        header=(
            *("head", "pair", "query", "key", "angle (rad)", "step (rad)", "distance"),
            *("attention", "without"),
        ),
        rows=[
            (
                f"L{columns['layer'][i]}H{columns['head'][i]}",
                str(columns["pair"][i]),
                *(
                    f"{columns[name][i]:.2f}"
                    for name in ("query_radius", "key_radius", "angle", "inv_freq", "steps")
                ),
                *(f"{columns[name][i]:.1%}" for name in ("attention", "attention_without")),
            )
            for i in order
        ],
    )
