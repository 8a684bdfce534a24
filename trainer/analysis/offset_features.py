"""Rotary offset features (Rotary Offset Features, Fig. 1, 2, 4, 6 to 8 and 11 to 14, Table 2).

These are slow pairs whose queries and keys have large means at a fixed angle. Bounds on frequency
and angle predict them.

For a fixed key and a rotating query, a pair of means at the initial angle phi contributes |q| |k|
cos(phi - theta delta) to the dot product. This stays below its value at distance 0 up to the
context length C if theta < 2 pi / C and phi >= pi + theta C / 2.

Sinks: the *margin* is the score of the first key minus the mean score of the other visible keys; it
is a sum over pairs and the channels that do not rotate. The token before: the part of a pair is
largest at phi / theta tokens (Sec. 4.3.1).
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Arc
from torch import Tensor

from trainer.analysis.attention import (
    SIDES,
    Array,
    HeadIndex,
    Heads,
    Side,
    capture,
    cell_means,
    head_attention,
    head_vectors,
    view_heads,
)
from trainer.analysis.frequency_entropy import CELLS, PAIR_INDEX
from trainer.analysis.results import Findings, analysis, tidy
from trainer.analysis.target import NotApplicableError, Target
from trainer.plotting import (
    BLACK,
    GREEN,
    GREY,
    ORANGE,
    ColourScale,
    Grid,
    Line,
    Panel,
    Plot,
    diagonal,
    draw,
    graded,
    heat_maps,
    plane,
)

TURN = 2 * math.pi
RADII = (6.0, 9.0, 12.0)
"""Radii of Table 2."""
PLACE = ["layer", "head", "pair"]
QUERIES = 128
"""Largest number of queries whose attention is measured."""
DISTANCES = 400
"""Largest number of distances in a curve."""
POINTS = 1000
"""Largest number of tokens with a point of their own."""
SHOWN = 3
"""Number of heads that figures show if none are chosen."""


def bounds(inv_freq: Array, context_length: int) -> tuple[Array, Array]:
    """Predict offset features from the frequencies ``[pairs]`` (theta, radians a token) and the
    context length C alone.

    Returns whether theta is under its upper bound (no for a pair that does not rotate), and the
    lower bound on phi in radians.
    """
    possible = (inv_freq > 0) & (inv_freq < TURN / context_length)
    return possible, math.pi + inv_freq * context_length / 2


def pair_means(x: Tensor, pairs: int) -> tuple[Array, Array]:
    """Return the mean of every pair over the vectors ``[B, T, D]`` of a head, complex ``[pairs]``,
    and the circular variance of its angles a, 1 - |mean of exp(i a)| (Fig. 2)."""
    points = torch.stack([x[..., :pairs], x[..., pairs : 2 * pairs]])
    lengths = points.norm(dim=0).clamp_min(torch.finfo(x.dtype).tiny)
    mean, direction = (
        v.mean(dim=(1, 2), dtype=torch.float64).cpu().numpy() for v in (points, points / lengths)
    )
    return mean[0] + 1j * mean[1], 1 - np.hypot(*direction)


def offset_features(heads: Heads, context_length: int) -> pd.DataFrame:
    """Return a row for every pair of every query head of a layer, from queries and keys before the
    encoding, and frequencies as in a text of ``context_length`` tokens.

    ``angle``: phi, from the mean query counterclockwise to the mean key, in [0, 2 pi).
    ``query_radius``, ``key_radius``: lengths of the means. ``query_circular_variance``,
    ``key_circular_variance``: see :func:`pair_means`; NaN if the pair does not rotate.
    ``inv_freq``, ``possible``, ``lower_bound``: see :func:`bounds`; no lower bound (NaN) for a pair
    above its upper bound. ``scale``: factor on the dot product of a query and a key in the scores,
    times the encoding's factor (YaRN's attention factor, a temperature).
    """
    trained = heads.training_length
    spectra = [spectrum.at(context_length, trained) for spectrum in heads.encoding.spectra]
    keys = [pair_means(heads.k[:, i], len(s.inv_freq)) for i, s in enumerate(spectra)]
    tables = []
    for head in range(heads.q.shape[1]):
        kv = head // heads.queries_per_key
        spectrum = spectra[kv]
        inv_freq = np.array(spectrum.inv_freq)
        possible, lower_bound = bounds(inv_freq, context_length)
        pairs = len(inv_freq)
        query, query_variance = pair_means(heads.q[:, head], pairs)
        key, key_variance = keys[kv]
        rotates = inv_freq > 0
        columns = {
            "layer": heads.layer,
            "head": head,
            "pair": np.arange(pairs),
            "inv_freq": inv_freq,
            "query_radius": np.abs(query),
            "key_radius": np.abs(key),
            "angle": np.mod(np.angle(key) - np.angle(query), TURN),
            "query_circular_variance": np.where(rotates, query_variance, np.nan),
            "key_circular_variance": np.where(rotates, key_variance, np.nan),
            "possible": possible,
            "lower_bound": np.where(possible, lower_bound, np.nan),
            "scale": heads.scale * spectrum.rotary_scale**2 * spectrum.temperature.scale,
        }
        if pairs:
            tables.append(pd.DataFrame(columns))
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
        lower = large.possible & (large.angle >= large.lower_bound)
        relaxed = large.possible & (large.angle >= large.lower_bound - 0.1)
        numbers |= {
            f"positives, radius {radius:g}": float(len(large)),
            f"upper, radius {radius:g}": large.possible.mean(),
            f"lower, radius {radius:g}": lower.mean(),
            f"relaxed, radius {radius:g}": relaxed.mean(),
        }
    return numbers


def strongest_pairs(features: pd.DataFrame) -> pd.DataFrame:
    """Return a row for every rotating head: its pair with the longest means, under the upper bound
    if any pair is.

    ``strength``: product of the lengths. ``faster``: the strongest pair above the bound, NaN if
    there is none.
    """
    rotating = features[features.inv_freq > 0]
    strength = rotating.query_radius * rotating.key_radius
    ordered = rotating.assign(strength=strength).sort_values(["possible", "strength"])
    head = ["layer", "head"]
    strongest = ordered.groupby(head).tail(1).sort_values(head)
    fast = ordered[~ordered.possible].groupby(head).tail(1)
    return strongest.merge(fast[PLACE].rename(columns={"pair": "faster"}), "left", on=head)


def contributions(head: pd.DataFrame, distances: Sequence[int]) -> Array:
    """Compute the terms that the means of every pair add to the logit of a key so many tokens back
    (Eq. 14, Fig. 4), ``[pairs, distances]``, from the features of one head, scaled like scores."""
    size = (head.query_radius * head.key_radius * head.scale).to_numpy()
    turned = head.angle.to_numpy()[:, None] - np.outer(head.inv_freq, distances)
    terms: Array = size[:, None] * np.cos(turned)
    return terms


def sampled_queries(heads: Heads) -> Tensor:
    """Return positions evenly spread over the last three quarters of the training length, the text
    or the window, whichever is shortest, so that each query sees all keys before it."""
    T = heads.q.shape[2]
    length = min(T, heads.training_length, heads.encoding.window or T)
    start = max(1, length // 4)
    return torch.linspace(start, length - 1, min(QUERIES, length - start)).round().long()


PairEffect = dict[str, float]
"""What a pair does to a head's attention, by metric, with its layer and head."""


def mean_attention(
    heads: Heads, head: int, queries: Tensor, keys: Tensor | int, without: int | None = None
) -> float:
    """Return the mean attention of queries at some positions on one key each, or on the same one,
    over all texts; ``without``: a pair whose part of the scores is left out."""
    weights = head_attention(heads, head, queries, without=without)
    return float(weights[:, torch.arange(len(queries)), keys].double().mean())


def sink_row(heads: Heads, head: int, pair: int, control: int | None = None) -> PairEffect:
    """Measure the effect of ``pair`` on a query head's attention on the first token, means over all
    texts and sampled queries.

    ``attention``: that attention; ``attention_without``: without the pair's part of the scores;
    ``explained``: share of it that disappears then, negative if attention grows;
    ``attention_without_fast_pair``: without the part of the pair ``control``, NaN if that is None.
    ``margin``: the scaled margin of the scores; ``margin_of_pair``: its part from the pair.
    """
    positions = sampled_queries(heads)
    kv = head // heads.queries_per_key
    attention = mean_attention(heads, head, positions, 0)
    without = mean_attention(heads, head, positions, 0, pair)
    fast = math.nan
    if control is not None:
        fast = mean_attention(heads, head, positions, 0, control)
    q = heads.rotated_q[:, head, positions]
    k = heads.rotated_k[:, kv, : int(positions[-1]) + 1]
    seen = positions.to(q.device)
    # Mean of the keys 1 to i for every query i; then minus the first key, times the query.
    others = k[:, 1:].double().cumsum(dim=1)[:, seen - 1] / seen[:, None]
    by_channel = (q * (k[:, :1] - others) * heads.scale).mean(dim=(0, 1))
    channels = [pair, pair + len(heads.encoding.spectra[kv].inv_freq)]
    return {
        "layer": heads.layer,
        "head": head,
        "pair": pair,
        "attention": attention,
        "attention_without": without,
        "explained": 1 - without / max(attention, np.finfo(float).tiny),
        "attention_without_fast_pair": fast,
        "margin": float(by_channel.sum()),
        "margin_of_pair": float(by_channel[channels].sum()),
    }


def sinks(heads: Heads, features: pd.DataFrame) -> list[PairEffect]:
    """Measure :func:`sink_row` of the strongest pair under the upper bound of every head that has
    one; ``features``: of this layer, empty if it does not rotate."""
    if features.empty:
        return []
    effects = []
    for row in strongest_pairs(features).itertuples():
        if row.possible:
            control = None if math.isnan(row.faster) else int(row.faster)
            effects.append(sink_row(heads, row.head, row.pair, control))
    return effects


def fastest_pairs(heads: Heads) -> list[PairEffect]:
    """Measure the attention on the token before in every head that rotates, as it is and without
    the head's fastest pair."""
    C = heads.training_length
    positions = sampled_queries(heads)
    effects: list[PairEffect] = []
    for head in range(heads.q.shape[1]):
        spectrum = heads.encoding.spectra[head // heads.queries_per_key].at(C, C)
        if spectrum.rotates:
            pair = int(np.argmax(spectrum.inv_freq))
            before = positions - 1
            attention = mean_attention(heads, head, positions, before)
            without = mean_attention(heads, head, positions, before, pair)
            place = {"layer": heads.layer, "head": head, "pair": pair}
            effects.append({**place, "attention": attention, "attention_without": without})
    return effects


@analysis("offset_features", "Rotary offset features")
def analyze_offset_features(target: Target) -> Findings:
    """Measure radii and angles of pairs, their bounds, and what single pairs do to attention."""
    target.require(2)
    model = target.model
    if not model.layout.rotates:
        raise NotApplicableError("analysis.kind: expected a model that rotates")
    C = target.context_length
    chosen = target.config.chosen
    layers = capture(model, target.ids, partial(offset_features, context_length=C))
    features = pd.concat(layers, ignore_index=True)

    def effects(heads: Heads) -> tuple[list[PairEffect], list[PairEffect]]:
        if heads.encoding.window == 1:  # every query sees its own key alone
            return [], []
        return sinks(heads, layers[heads.layer]), fastest_pairs(heads)

    # Queries within the training length, in texts that do not change them.
    ids = target.ids if target.prefix is None else target.prefix
    first_rows, previous_rows = zip(*capture(model, ids, effects), strict=True)
    on_first = pd.DataFrame([*chain.from_iterable(first_rows)])
    on_previous = pd.DataFrame([*chain.from_iterable(previous_rows)])
    tables = [
        pair_rows(features.drop(columns="scale")),
        tidy(summary(features), variant="all pairs", length=C),
    ]
    plots = [all_pairs(features, C), stability_plot(features)]
    shown = shown_heads(features, chosen)
    if shown:
        views = view_heads(model, target.ids[:1], [*shown], head_vectors)
        by_head = dict(iter(features.groupby(["layer", "head"])))
        plots.append(channels_plot(views))
        with_points = len(chosen) or 1  # the strongest
        for place in [*shown][:with_points]:
            turns = by_head[place].inv_freq.to_numpy() * C / TURN
            plots.append(points_of_head(place, views[place], turns, target.config.pairs))
        plots.append(terms_plot(by_head, shown, C))
    if len(on_first):
        tables.append(pair_rows(on_first).assign(variant="first token"))
        plots.append(sinks_plot(on_first))
    if len(on_previous):
        on_previous = with_steps(on_previous, features)
        steps = on_previous[[*PLACE, "attention", "attention_without", "steps"]]
        tables.append(pair_rows(steps).assign(variant="token before"))
        plots.append(steps_plot(on_previous))
    return Findings(plots, tables)


def with_steps(effects: pd.DataFrame, features: pd.DataFrame) -> pd.DataFrame:
    """Return effects of pairs with their features, and their angles in ``steps`` of a token (Sec.
    4.3.1). An angle just under a full turn is just below 0."""
    rows = effects.merge(features, on=PLACE)
    turned = np.mod(rows.angle + rows.inv_freq / 2, TURN)
    return rows.assign(steps=turned / rows.inv_freq - 0.5)


def shown_heads(features: pd.DataFrame, chosen: Sequence[HeadIndex]) -> dict[HeadIndex, int]:
    """Return the strongest pair of each head that is shown: of the chosen ones that rotate, or of
    the heads with the strongest pair of their layer, in the layers where it is longest."""
    pairs = strongest_pairs(features)
    if chosen:
        by_place = {(row.layer, row.head): row.pair for row in pairs.itertuples()}
        return {place: by_place[place] for place in chosen if place in by_place}
    best = pairs.sort_values(["possible", "strength"]).groupby("layer").tail(1).tail(SHOWN)
    return {(row.layer, row.head): row.pair for row in best[::-1].itertuples()}


def pair_rows(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each pair and metric."""
    return (
        table.astype(dict.fromkeys(table.columns.difference(PLACE), float))
        .melt(PLACE, var_name="metric")
        .dropna(subset="value")
    )


def angle_axis(axes: Axes) -> None:
    """Let y be an angle from 0 to 2 pi."""
    axes.set_yticks(np.linspace(0, TURN, 5), ["0", "π/2", "π", "3π/2", "2π"])
    axes.set_ylim(0, TURN)


def mark_upper_bound(axes: Axes, features: pd.DataFrame, label: str, linestyle: str = "--") -> None:
    """Draw a line before the first pair under the upper bound of every spectrum that has one."""
    possible = features[features.possible]
    for pair in sorted(set(possible.groupby(["layer", "head"])["pair"].min())):
        axes.axvline(pair - 0.5, label=label, color=BLACK, linewidth=0.9, linestyle=linestyle)


def all_pairs(features: pd.DataFrame, context_length: int) -> Plot:
    """Draw radius and angle of every pair with the bounds, by the pair's index (Fig. 8)."""
    # The longest means on top.
    moving = features[features.inv_freq > 0].sort_values("key_radius")

    upper_bound = partial(mark_upper_bound, features=features, label="upper bound")

    def both_bounds(axes: Axes) -> None:
        upper_bound(axes)
        angle_axis(axes)
        lower = features[features.possible].drop_duplicates(["pair", "lower_bound"])
        mark: dict[str, Any] = {"color": ORANGE, "markersize": 4, "label": "lower bound"}
        axes.plot(lower.pair, lower.lower_bound, "_", **mark)

    radius = "radius of the mean key"
    angle = "angle φ, query to key (rad)"
    by_pair = partial(points_by, moving, "pair", index="key_radius", x=PAIR_INDEX)
    longest = moving.key_radius.max()
    levels = tuple((level, "radii of Table 2") for level in RADII if level < longest)
    panels = [
        by_pair("key_radius", y=radius, prepare=upper_bound, horizontal=levels),
        by_pair("angle", y=angle, prepare=both_bounds),
    ]
    return Plot(
        "offset_features",
        draw(panels, index=radius),
        f"Radius and angle of every rotary pair, with their bounds; C = {context_length:,} (Rotary "
        "Offset Features, Fig. 8, 11).",
    )


def points_by(
    table: pd.DataFrame, across: str, up: str, index: str, title: str = "", **others: Any
) -> Panel:
    """Return a point for each row, coloured by a column; ``others``: arguments of the panel."""
    return graded(title, *(table[name].to_numpy() for name in (across, up, index)), **others)


def stability_plot(features: pd.DataFrame) -> Plot:
    """Draw circular variance by radius (Fig. 2)."""
    x, y = "radius of the mean", "circular variance of the angle"
    panels = []
    for side, title in SIDES.items():
        names = f"{side}_radius", f"{side}_circular_variance", "layer"
        panels.append(points_by(features, *names, title, x=x, y=y))
    return Plot(
        "offset_angle_stability",
        draw(panels, index="layer"),
        "Circular variance of a pair's angle over all positions, before the rotation, by the "
        "radius of its mean (Rotary Offset Features, Fig. 2).",
    )


def channels_plot(views: Mapping[HeadIndex, Mapping[Side, Tensor]]) -> Plot:
    """Draw queries and keys of the heads along the text, every channel (Fig. 1)."""
    any_view = next(iter(views.values()))
    cell = -(-len(any_view["query"]) // CELLS)
    maps = {}
    for (layer, head), view in views.items():
        for side, name in SIDES.items():
            maps[f"L{layer}H{head}, {name}"] = cell_means(view[side].T, cell).numpy()
    colours = ColourScale("activation", signed=True)
    return Plot(
        "offset_channels",
        heat_maps(maps, colours, Grid(2, 2.0, x="token", y="channel"), cell=(cell, 1)),
        "Queries and keys before the rotation along the first text; channels m and m + M are pair "
        "m of M (Rotary Offset Features, Fig. 1).",
    )


def points_of_head(
    place: HeadIndex, view: Mapping[Side, Tensor], turns: Array, pairs: Sequence[int]
) -> Plot:
    """Draw the points of pairs of a head (Fig. 7, 12 and 13); ``turns`` ``[pairs]`` within C."""
    layer, head = place
    tokens = {side: x[:: -(-len(x) // POINTS)].numpy() for side, x in view.items()}
    panels = []
    shown = [pair for pair in pairs if pair < len(turns)] or range(len(turns))
    for pair in shown:
        channels = [pair, pair + len(turns)]
        digits = np.format_float_positional(turns[pair], 2, fractional=False, trim="-")
        title = f"{pair}: {digits} turns"
        query = tokens["query"][:, channels]
        key = tokens["key"][:, channels]
        panels.append(_cloud(title, query, key, turns[pair]))
    columns = min(8, math.ceil(math.sqrt(len(panels))))
    return Plot(
        f"offset_points_L{layer}H{head}",
        draw(panels, Grid(columns, 6.6 / columns)),
        f"Queries and keys of the pairs of layer {layer} head {head} before rotation, by "
        "index and turns within C; lines: means, star: the first key, green: turn of the mean "
        "query within C (Rotary Offset Features, Fig. 7, 12, 13).",
    )


def _cloud(title: str, query: Array, key: Array, turns: float) -> Panel:
    """Return queries and keys ``[n, 2]`` of a pair in their plane, with the means and the query's
    turns as an arc."""

    def prepare(axes: Axes) -> None:
        plane(axes)
        axes.set_aspect("equal", adjustable="datalim")
        axes.locator_params(nbins=3)
        for cloud in (query, key):
            x, y = cloud.mean(axis=0)
            axes.plot([0, x], [0, y], color=BLACK, linewidth=0.9)
        axes.plot(*key[0], "*", color=ORANGE, markeredgecolor=BLACK, markersize=6)
        x, y = query.mean(axis=0)
        start = math.degrees(math.atan2(y, x))
        end = start + 360 * min(turns, 1)
        size = 1.2 * float(np.hypot(x, y))
        axes.add_patch(Arc((0, 0), size, size, theta1=start, theta2=end, color=GREEN))

    return Panel(title, prepare=prepare, points={"keys": key, "queries": query})


def terms_plot(
    by_head: Mapping[HeadIndex, pd.DataFrame], shown: Mapping[HeadIndex, int], context_length: int
) -> Plot:
    """Draw the terms of pairs in the logit, and the sum without the strongest (Fig. 4 and 6)."""
    distances = np.unique(np.geomspace(1, context_length + 1, DISTANCES).astype(int)) - 1

    def log_x(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axhline(0, color=GREY, linewidth=0.5)

    x = (distances + 1).tolist()
    panels = []
    for (layer, head), pair in shown.items():
        parts = contributions(by_head[layer, head], distances.tolist())
        term = parts[pair]
        total = parts.sum(axis=0)
        feature = Line("the feature", 0, x, term.tolist())
        sums = [
            Line("all pairs", 1, x, total.tolist()),
            Line("all but the feature", 4, x, (total - term).tolist()),
        ]
        title = f"L{layer}H{head}, pair {pair}"
        look: dict[str, Any] = {"prepare": log_x, "vertical": (context_length + 1, "C")}
        panels.append(Panel(title, [feature], y="part of the logit", faint=parts, **look))
        panels.append(Panel("", sums, y="part of the logit", **look))
    label = "distance between query and key + 1 (tokens)"
    return Plot(
        "offset_contributions",
        draw(panels, Grid(2, 1.9, x=label)),
        "Terms of the logit from the means of pairs, by distance; thin: every pair, from the "
        "fastest (dark) on (Rotary Offset Features, Fig. 4, 6).",
    )


def sinks_plot(pairs: pd.DataFrame) -> Plot:
    """Draw attention on the first token with and without each head's strongest pair under the
    upper bound, and the pair's part of the margin."""
    x, y = "score of the first key minus others' mean", "part of the strongest pair"
    margin = points_by(pairs, "margin", "margin_of_pair", "layer", x=x, y=y)
    return Plot(
        "offset_sinks",
        draw([_without_pair("the first token", pairs), margin], index="layer"),
        "Attention on the first token with and without the strongest pair under the upper bound, "
        "and the pair's part of the first key's score, a point a head (Rotary Offset Features, "
        "Sec. 4.2).",
    )


def steps_plot(pairs: pd.DataFrame) -> Plot:
    """Draw the angle of each head's fastest pair, and attention on the token before without it."""
    x, y = "radius of the mean key", "angle φ in steps of a token"
    step = ((1.0, "the token before"),)
    steps = points_by(pairs, "key_radius", "steps", "layer", x=x, y=y, horizontal=step)
    return Plot(
        "offset_steps",
        draw([steps, _without_pair("the token before", pairs)], index="layer"),
        "The fastest pair of every head: its angle by its radius, and attention on the token "
        "before with and without it (Rotary Offset Features, Sec. 4.3.1).",
    )


def _without_pair(key: str, pairs: pd.DataFrame) -> Panel:
    """Return the attention on a key with and without a pair, a point for each head."""
    x = f"attention on {key}"
    y = f"{x}\nwithout the pair"
    return points_by(pairs, "attention", "attention_without", "layer", x=x, y=y, prepare=diagonal)
