"""Rotary offset features of one model, and of a model and its extension (Rotary Offset Features,
Fig. 1, 2, 4, 6 to 8 and 11 to 16, Table 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Arc

from trainer.analysis.attention import SIDES, Heads, capture
from trainer.analysis.offset_features import (
    PLACE,
    RADII,
    TURN,
    HeadView,
    Row,
    contributions,
    fastest_pairs,
    head_view,
    offset_features,
    sinks,
    strongest_pairs,
    summary,
)
from trainer.analysis.topic import NotApplicableError, Results, Target, results, tidy
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, diagonal, draw, graded, plane
from trainer.plotting.style import BLACK, GREEN, GREY, ORANGE, Plot

SHOWN = 3
"""Number of heads that figures show if none are chosen."""
DISTANCES = 400
PAIR_INDEX = "pair index, from the fastest on"
LOUDEST = 0.999
"""Quantile of absolute activations that has the strongest colour."""


def analyze_offset_features(target: Target) -> Results:
    """Measure radii and angles of every pair, their bounds, and what single pairs do to
    attention."""
    target.require(2)
    if not target.rotates:
        raise NotApplicableError("analysis.kind: expected a model that rotates")
    model, C, config = target.model, target.training_length, target.config
    layers: list[pd.DataFrame] = []
    shown: list[tuple[Any, HeadView]] = []

    def effects(heads: Heads) -> tuple[list[Row], list[Row]]:
        return sinks(heads, layers[heads.layer]), fastest_pairs(heads)

    def measure(heads: Heads) -> tuple[list[Row], list[Row]]:
        features = offset_features(heads)
        layers.append(features)
        shown.extend(_views(heads, features, target))
        if not config.chosen:
            shown.sort(key=lambda view: (not view[0].possible, -view[0].strength))
            del shown[SHOWN:]
        return effects(heads) if target.prefix is None else ([], [])

    measured = capture(model, target.ids, measure)
    if target.prefix is not None:  # its queries lie within C
        measured = capture(model, target.prefix, effects)
    features = pd.concat(layers, ignore_index=True)
    on_first = pd.DataFrame([row for rows, _ in measured for row in rows])
    on_previous = pd.DataFrame([row for _, rows in measured for row in rows])
    on_previous = on_previous.merge(features, on=PLACE)
    # Angles become steps of a token (Sec. 4.3.1). Just under a full turn means just below 0.
    turned = np.mod(on_previous.angle + on_previous.inv_freq / 2, TURN)
    on_previous["steps"] = turned / on_previous.inv_freq - 0.5
    plots = [all_pairs(features, C), stability_plot(features)]
    if shown:
        # Without a choice, all pairs of the strongest head alone.
        plots.append(channels([view for _, view in shown]))
        whole = shown if config.chosen else shown[:1]
        plots += [points_of_head(view, C, config.pairs) for _, view in whole]
        plots.append(terms(features, [pair for pair, _ in shown], C))
    plots += [sinks_plot(on_first)] if len(on_first) else []
    plots.append(steps_plot(on_previous))
    tables = _rows(features, on_first, on_previous)
    tables.append(tidy(summary(features), variant="all pairs", length=C))
    return results("offset_features", "Rotary offset features", target.name, plots, tables)


def _views(heads: Heads, features: pd.DataFrame, target: Target) -> list[tuple[Any, HeadView]]:
    """Return the strongest pair and the vectors of the chosen heads of a layer, or of the head with
    the strongest pair; ``features``: of this layer."""
    if features.empty:
        return []
    strongest = strongest_pairs(features)
    if target.config.chosen:
        strongest = strongest[strongest["head"].isin(target.chosen(heads.layer))]
    else:
        strongest = strongest.sort_values(["possible", "strength"]).tail(1)
    return [(pair, head_view(heads, pair.head)) for pair in strongest.itertuples()]


def _rows(
    features: pd.DataFrame, on_first: pd.DataFrame, on_previous: pd.DataFrame
) -> list[pd.DataFrame]:
    """Return every pair, and the effects of pairs on attention."""
    tables = [_long(features.drop(columns="scale"))]
    if len(on_first):
        tables.append(_long(on_first).assign(variant="first token"))
    steps = on_previous[[*PLACE, "attention", "attention_without", "steps"]]
    return [*tables, _long(steps).assign(variant="token before")]


def _long(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each place and metric."""
    return (
        table.astype(dict.fromkeys(table.columns.difference(PLACE), float))
        .melt(PLACE, var_name="metric")
        .dropna(subset="value")
    )


def angle_axis(axes: Axes) -> None:
    """Let y be an angle from 0 to 2 pi."""
    axes.set_yticks(np.linspace(0, TURN, 5), ["0", "π/2", "π", "3π/2", "2π"])
    axes.set_ylim(0, TURN)


def first_possible(features: pd.DataFrame) -> list[int]:
    """Return the first pair under the upper bound of every spectrum that has one."""
    possible = features[features.possible]
    return sorted(set(possible.groupby(["layer", "head"])["pair"].min()))


def all_pairs(features: pd.DataFrame, trained: int) -> Plot:
    """Draw radius and angle of every pair with the bounds, by the pair's index (Fig. 8)."""
    # The longest means on top.
    moving = features[features.inv_freq > 0].sort_values("key_radius")

    def upper_bound(axes: Axes) -> None:
        for index in first_possible(features):
            axes.axvline(index - 0.5, color=BLACK, linewidth=0.9, linestyle="--")

    def both_bounds(axes: Axes) -> None:
        upper_bound(axes)
        angle_axis(axes)
        lower = features[features.possible].drop_duplicates(["pair", "lower_bound"])
        axes.plot(lower.pair, lower.lower_bound, "_", color=ORANGE, markersize=4)

    radius, angle = "radius of the mean key", "angle φ, query to key (rad)"
    of: dict[str, Any] = {"table": moving, "across": "pair", "index": "key_radius", "x": PAIR_INDEX}
    levels = tuple((level, "") for level in RADII)
    panels = [
        _graded(up="key_radius", y=radius, prepare=upper_bound, horizontal=levels, **of),
        _graded(up="angle", y=angle, prepare=both_bounds, **of),
    ]
    return Plot(
        "offset_features",
        draw(panels, index=radius),
        "Radius and angle of every rotary pair; dashed: upper bound, orange: lower bound, dotted: "
        f"radii of Table 2; C = {trained:,} (Fig. 8, 11).",
    )


def _graded(table: pd.DataFrame, across: str, up: str, index: str, **others: Any) -> Panel:
    """Return a point for each row, coloured by a column; ``others``: arguments of the panel."""
    columns = (table[name].to_numpy() for name in (across, up, index))
    return graded(others.pop("title", ""), *columns, **others)


def stability_plot(features: pd.DataFrame) -> Plot:
    """Draw circular variance by radius (Fig. 2)."""
    labels = {"x": "radius of the mean", "y": "circular variance of the angle", "index": "layer"}
    panels = []
    for side, title in SIDES.items():
        names = {"across": f"{side}_radius", "up": f"{side}_circular_variance"}
        panels.append(_graded(features, **names, **labels, title=title))
    return Plot(
        "offset_angle_stability",
        draw(panels, index="layer"),
        "Circular variance of a pair's angle over all positions, before the rotation, by the "
        "radius of its mean (Fig. 2).",
    )


def channels(shown: Sequence[HeadView]) -> Plot:
    """Draw queries and keys of the heads along the text, every channel (Fig. 1)."""
    maps = {
        f"L{view.layer}H{view.head}, {name}": view.maps[side]
        for view in shown
        for side, name in SIDES.items()
    }
    size = float(np.quantile(np.abs(np.concatenate([m.ravel() for m in maps.values()])), LOUDEST))
    scale = Scale("activation", -size, size, signed=True)
    axes: dict[str, Any] = {"x": "token", "y": "channel", "cell": (shown[0].cell, 1)}
    pairs = len(shown[0].inv_freq)
    return Plot(
        "offset_channels",
        heat_maps(maps, scale, **axes),
        "Queries and keys before the rotation along the first text; channels m and m + "
        f"{pairs} are pair m (Fig. 1).",
    )


def points_of_head(view: HeadView, trained: int, pairs: Sequence[int]) -> Plot:
    """Draw the points of all pairs of a head, or of some (Fig. 7, 12 and 13)."""
    drawn = [pair for pair in pairs if pair < len(view.inv_freq)] or range(len(view.inv_freq))
    panels = [_cloud(view, pair, trained) for pair in drawn]
    columns = min(8, math.ceil(math.sqrt(len(panels))))
    return Plot(
        f"offset_points_L{view.layer}H{view.head}",
        draw(panels, columns=columns, height=6.6 / columns),
        f"Queries and keys of the pairs of layer {view.layer} head {view.head} before rotation, by "
        "index and turns within C; lines: means, star: the first key, green: turn of the mean "
        "query within C (Fig. 7, 12, 13).",
    )


def _cloud(view: HeadView, pair: int, trained: int) -> Panel:
    """Return keys and queries of a pair in their plane, with the means and the query's turn as an
    arc."""
    at = [pair, pair + len(view.inv_freq)]
    query, key = (view.tokens[side][:, at] for side in SIDES)
    turned = float(view.inv_freq[pair]) * trained

    def prepare(axes: Axes) -> None:
        plane(axes)
        axes.set_aspect("equal", adjustable="datalim")
        axes.locator_params(nbins=3)
        for cloud in (query, key):
            axes.plot(*zip((0, 0), cloud.mean(axis=0), strict=True), color=BLACK, linewidth=0.9)
        axes.plot(*key[0], "*", color=ORANGE, markeredgecolor=BLACK, markersize=6)
        mean = query.mean(axis=0)
        start = math.degrees(math.atan2(*mean[::-1]))
        end, size = start + min(math.degrees(turned), 360), 1.2 * float(np.hypot(*mean))
        axes.add_patch(Arc((0, 0), size, size, theta1=start, theta2=end, color=GREEN))

    title = f"{pair}: {turned / TURN:.2g} turns"
    return Panel(title, prepare=prepare, points={"keys": key, "queries": query})


def terms(features: pd.DataFrame, shown: Sequence[Any], trained: int) -> Plot:
    """Draw the terms of pairs in the logit, and the sum without the strongest (Fig. 4 and 6)."""
    distances = np.unique(np.geomspace(1, trained + 1, DISTANCES).astype(int)) - 1

    def log_x(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.axhline(0, color=GREY, linewidth=0.5)

    x, panels = (distances + 1).tolist(), []
    for strong in shown:
        of_head = (features["layer"] == strong.layer) & (features["head"] == strong.head)
        parts = contributions(features[of_head], distances.tolist())
        term, total = parts[strong.pair], parts.sum(axis=0)
        of_pair = Line("the feature", 0, x, term.tolist())
        sums = [
            Line("all pairs", 1, x, total.tolist()),
            Line("all but the feature", 4, x, (total - term).tolist()),
        ]
        title, mark = f"L{strong.layer}H{strong.head}, pair {strong.pair}", (float(trained), "C")
        look: dict[str, Any] = {"prepare": log_x, "vertical": mark}
        panels += [
            Panel(title, [of_pair], y="part of the logit", faint=parts, **look),
            Panel("", sums, **look),
        ]
    label = "distance between query and key + 1 (tokens)"
    return Plot(
        "offset_contributions",
        draw(panels, columns=2, height=1.9, x=label),
        "Terms of the logit from the means of pairs, by distance; thin: every pair, from the "
        "fastest (dark) on (Fig. 4, 6).",
    )


def sinks_plot(pairs: pd.DataFrame) -> Plot:
    """Draw attention on the first token with and without each head's strongest pair under the
    upper bound, and the pair's part of the margin."""
    x, y = "score of the first key over others", "of it, the pair's"
    margin = _graded(pairs, "margin", "margin_of_pair", "layer", x=x, y=y)
    return Plot(
        "offset_sinks",
        draw([_without_pair("the first token", pairs), margin], index="layer"),
        "Attention on the first token with and without the strongest pair under the upper bound, "
        "and the pair's part of the first key's score, a point a head (Sec. 4.2).",
    )


def steps_plot(pairs: pd.DataFrame) -> Plot:
    """Draw the angle of each head's fastest pair, and attention on the token before without it."""
    x, y, step = "radius of the mean key", "angle φ in steps of a token", ((1.0, ""),)
    steps = _graded(pairs, "key_radius", "steps", "layer", x=x, y=y, horizontal=step)
    return Plot(
        "offset_steps",
        draw([steps, _without_pair("the token before", pairs)], index="layer"),
        "The fastest pair of every head: its angle by its radius, and attention on the token "
        "before with and without it (Sec. 4.3.1).",
    )


def _without_pair(key: str, pairs: pd.DataFrame) -> Panel:
    x, y = f"attention on {key}", f"attention on {key}\nwithout the pair"
    names = "attention", "attention_without", "layer"
    return _graded(pairs, *names, x=x, y=y, prepare=diagonal)


def offset_changes(before: Target, after: Target) -> Results:
    """Compare two models that read the same text, up to the shorter training length (App. C, Fig.
    15 and 16)."""
    length = min(before.length, before.training_length, after.training_length)

    def read(target: Target) -> pd.DataFrame:
        layers = capture(target.model, target.ids[:, :length], offset_features)
        return pd.concat(layers, ignore_index=True)

    by_name = {target.name: read(target) for target in (before, after)}
    tables = [
        tidy(summary(features), variant=f"bounds of {name}", model=name)
        for name, features in by_name.items()
    ]
    was, now = by_name.values()
    was, now = was.merge(now[PLACE], on=PLACE), now.merge(was[PLACE], on=PLACE)
    plots: list[Plot] = []
    shapes = {
        (len(target.model.layout.layers), target.model.config.num_attention_heads)
        for target in (before, after)
    }
    if len(was) and len(shapes) == 1:
        pair = {before.name: was, after.name: now}
        plots = [changes_by_pair(pair), changes_of_pairs(pair, after.config.pairs)]
        crossed = now.assign(possible=was.possible, lower_bound=was.lower_bound)
        tables.append(tidy(summary(crossed), variant=f"bounds of {before.name}", model=after.name))
        for name, features in pair.items():
            tables.append(_long(features[[*PLACE, "key_radius", "angle"]]).assign(model=name))
    tables = [table.assign(length=length) for table in tables]
    title = "Rotary offset features of two models"
    return results("offset_changes", title, after.name, plots, tables)


def changes_by_pair(by_name: Mapping[str, pd.DataFrame]) -> Plot:
    """Draw the change of radii, a point for each head, coloured by layer (Fig. 16)."""
    (first, was), (second, now) = by_name.items()
    # Layers side by side within the width of a pair.
    beside = 0.6 * (was.layer / max(int(was.layer.max()), 1) - 0.5)
    table = was.assign(change=now.key_radius - was.key_radius, x=was.pair + beside)

    def prepare(axes: Axes) -> None:
        axes.set_xlim(-0.6, was.pair.max() + 0.6)
        axes.axhline(0, color=GREY, linewidth=0.6)
        for features, dash in ((was, "--"), (now, ":")):
            for index in first_possible(features):
                axes.axvline(index - 0.5, color=BLACK, linewidth=0.9, linestyle=dash)

    labels = {"x": PAIR_INDEX, "y": "change of the radius"}
    panel = _graded(table, "x", "change", "layer", prepare=prepare, **labels)
    return Plot(
        "offset_changes_by_pair",
        draw([panel], height=2.0, index="layer"),
        f"From {first} to {second}: change of the radius of every head's mean keys; dashed and "
        "dotted: their upper bounds (App. C, Fig. 16).",
    )


def changes_of_pairs(by_name: Mapping[str, pd.DataFrame], chosen: Sequence[int]) -> Plot:
    """Draw radius and angle of single pairs in every head of both models (Fig. 15).

    Without a chosen pair: the two whose mean radius shrank and grew most, among those under the
    upper bound in the earlier model if there are any.
    """
    was, now = by_name.values()
    shown = [pair for pair in chosen if pair in set(was.pair)]
    if not shown:
        among = was.possible if was.possible.any() else was.pair >= 0
        change = (now.key_radius - was.key_radius)[among].groupby(was.pair).mean()
        shown = sorted({change.idxmin(), change.idxmax()})

    def prepare(axes: Axes) -> None:
        angle_axis(axes)
        axes.set_xlim(left=0)

    panels = []
    for number, pair in enumerate(shown):
        tables = {name: table[table.pair == pair] for name, table in by_name.items()}
        panels.append(
            Panel(
                f"pair {pair}",
                x="radius of the mean key",
                y="" if number else "angle φ (rad)",
                prepare=prepare,
                horizontal=tuple(
                    (table.lower_bound[table.possible].iloc[0], f"lower bound of {name}")
                    for name, table in tables.items()
                    if table.possible.any()
                ),
                points={
                    n: table[["key_radius", "angle"]].to_numpy() for n, table in tables.items()
                },
            )
        )
    return Plot(
        "offset_changes_of_pairs",
        draw(panels),
        "Radius and angle of single pairs in every head of both models (App. C, Fig. 15).",
    )
