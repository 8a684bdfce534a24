"""Rotary offset features of one model, and of a model and its extension (Rotary Offset Features,
Fig. 1, 2, 4, 6 to 8 and 11 to 16, Table 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Arc
from torch import Tensor

from trainer.analysis.arrays import SIDES, Array
from trainer.analysis.capture import Heads, capture
from trainer.analysis.offset_features import (
    RADII,
    TURN,
    AngleStability,
    FastestPairs,
    HeadView,
    OffsetFeatures,
    OffsetFeatureSearch,
    Row,
    bounds,
    common_pairs,
    contributions,
    fastest_pairs,
    head_view,
    sink_row,
    with_bounds_of,
)
from trainer.analysis.topic import COLUMNS, Plot, Results, Target, Topic, finished
from trainer.plotting.lines import Frame, Panel, Series, side_by_side
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.points import Points, diagonal, plane, points
from trainer.plotting.style import BLACK, GREEN, GREY, ORANGE

SHOWN = 3
"""Number of features that figures show if no heads are chosen."""
DISTANCES = 400
PAIR_INDEX = "pair index, from the fastest on"
LOUDEST = 0.999
"""Quantile of absolute activations that has the strongest colour."""
LONG = 0.9
"""Quantile of radii from which a pair is large if none reaches the table's smallest radius."""


class StrongPair(NamedTuple):
    """The pair of a head with the longest means, under the upper bound if any pair is.

    ``strength``: product of the lengths. ``faster``: strongest of the pairs above the bound.
    """

    possible: bool
    strength: float
    head: int
    pair: int
    faster: int | None


@dataclass(frozen=True)
class Feature:
    """A pair, and the queries and keys of its head."""

    strong: StrongPair
    view: HeadView

    @property
    def head(self) -> str:
        """Name of the head."""
        return f"L{self.view.layer}H{self.view.head}"


class OffsetFeatureFigures(Topic):
    """Radii and angles of every pair, their bounds, and what single pairs do to attention."""

    key = "offset_features"
    title = "Rotary offset features"

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.C = target.training_length
        self.search = OffsetFeatureSearch()
        self.features: list[Feature] = []
        self.stability: dict[str, Array] = {}
        self.result: OffsetFeatures
        self._stability = AngleStability()
        self._strong: dict[int, list[StrongPair]] = {}  # of every layer
        self._sinks: list[Row] = []
        self._fastest: FastestPairs = {}

    @classmethod
    def problem(cls, target: Target) -> str | None:
        """Also refuse models without rotation, which have no pairs."""
        if target.rotates:
            return super().problem(target)
        return "expected a model with a rotary encoding, got one without rotation in any head"

    def on_layer(self, heads: Heads) -> None:
        """Add the means of all pairs, the strongest pair of every head, and the points of some
        heads."""
        # Convert once for all: temporary float64 copies of a layer fragment memory.
        means = replace(
            heads,
            q=heads.q.mean(dim=2, keepdim=True, dtype=torch.float64),
            k=heads.k.mean(dim=2, keepdim=True, dtype=torch.float64),
        )
        self.search.update(means)
        self._stability.update(heads)
        found = (self._strongest(means, head) for head in range(heads.q.shape[1]))
        strongest = [pair for pair in found if pair is not None]
        self._strong[heads.layer] = strongest
        if self.target.prefix is None:
            self._measure_effects(heads)
        if self.target.chosen:
            chosen = {head for layer, head in self.target.chosen if layer == heads.layer}
            strongest = [pair for pair in strongest if pair.head in chosen]
        else:
            strongest = sorted(strongest, reverse=True)[:1]
        self.features += [Feature(pair, head_view(heads, pair.head)) for pair in strongest]
        self.features.sort(key=lambda f: (not f.strong.possible, -f.strong.strength))
        if not self.target.chosen:
            del self.features[SHOWN:]

    def on_prefix(self, heads: Heads) -> None:
        """Measure the effects of pairs on attention, whose queries lie within C."""
        self._measure_effects(heads)

    def _measure_effects(self, heads: Heads) -> None:
        self._fastest |= fastest_pairs(heads)
        for strong in self._strong[heads.layer]:
            row = sink_row(heads, strong.head, strong.pair, strong.faster)
            if strong.possible and row is not None:
                self._sinks.append(row)

    def _strongest(self, means: Heads, head: int) -> StrongPair | None:
        """Find the strongest pair of a head; None if the head does not rotate."""
        kv = head // means.queries_per_key
        limits = bounds(means.encoding.spectra[kv].at(self.C, self.C), self.C)
        moving = limits.inv_freq > 0
        if not moving.any():
            return None
        among = limits.possible if limits.possible.any() else moving
        pairs = len(among)
        size = _radii(means.q[:, head], pairs) * _radii(means.k[:, kv], pairs)
        pair = int(np.where(among, size, -1).argmax())
        faster = moving & ~limits.possible
        fast = int(np.where(faster, size, -1).argmax()) if faster.any() else None
        return StrongPair(bool(limits.possible[pair]), float(size[pair]), head, pair, fast)

    def finish(self) -> None:
        """Average over the texts."""
        self.stability, self.result = self._stability.result(), self.search.result()

    def plots(self) -> list[Plot]:
        """Draw all pairs, single heads with their pairs, terms by distance, and effects."""
        plots = [all_pairs(self.result), stability_plot(self.stability)]
        if self.features:
            # Without a choice, all pairs of the strongest head alone.
            whole = self.features if self.target.chosen else self.features[:1]
            plots.append(channels(self.features))
            plots += [points_of_head(f, self.C, self.target.pairs) for f in whole]
            plots.append(terms(self.result, self.features))
        if self._sinks:
            plots.append(_sinks_plot(_columns(self._sinks)))
        if self._fastest:
            plots.append(_steps_plot(step_columns(self._fastest, self.result)))
        return plots

    def rows(self) -> pd.DataFrame:
        """Return every pair, the effects on attention, and the recall of the bounds (Table 2)."""
        trained = self.result
        places = {name: getattr(trained, name) for name in ("layer", "head", "pair")}
        columns = ("inv_freq", "query_radius", "key_radius", "angle", "lower_bound", "possible")
        tables = [_rows(places, {name: getattr(trained, name) for name in columns})]
        stability = self.stability
        for side, of_keys in (("query", False), ("key", True)):
            among = stability["of_keys"] == of_keys
            at = {name: stability[name][among] for name in places}
            tables.append(_rows(at, {f"{side}_circular_variance": stability["variance"][among]}))
        effects = [_columns(self._sinks)] if self._sinks else []
        names = ["first token"] if self._sinks else []
        if self._fastest:
            effects.append(step_columns(self._fastest, trained))
            names.append("token before")
        for name, effect in zip(names, effects, strict=True):
            at = {place: effect[place].astype(int) for place in places}
            rest = {k: v for k, v in effect.items() if k not in (*places, *columns)}
            tables.append(_rows(at, rest).assign(variant=name))
        return pd.concat([*tables, _summary(trained, "all pairs").assign(length=self.C)])


def _radii(x: Tensor, pairs: int) -> Array:
    """Return the lengths of the means of all pairs, ``[pairs]``, from the texts' means ``[B, 1,
    D]``."""
    mean = x.mean(dim=(0, 1)).cpu().numpy()
    return np.hypot(mean[:pairs], mean[pairs : 2 * pairs])


def _columns(rows: Sequence[Row]) -> dict[str, Array]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _rows(places: Mapping[str, Array], values: Mapping[str, Array]) -> pd.DataFrame:
    """Return a row for each place and metric."""
    table = pd.DataFrame({**places, **{name: v.astype(float) for name, v in values.items()}})
    return table.melt(list(places), var_name="metric").dropna(subset="value")


def _summary(features: OffsetFeatures, variant: str) -> pd.DataFrame:
    numbers = features.summary()
    table = pd.DataFrame({"metric": list(numbers), "value": list(numbers.values())})
    return table.assign(variant=variant).reindex(columns=COLUMNS).dropna(subset="value")


def step_columns(fastest: FastestPairs, features: OffsetFeatures) -> dict[str, Array]:
    """Return the fastest pair of every head, with its angle in steps of a token (Sec. 4.3.1)."""
    places = zip(features.layer, features.head, features.pair, strict=True)
    row_of_place = {place: row for row, place in enumerate(places)}
    rows = np.array([row_of_place[place] for place in fastest])
    names = ("layer", "head", "pair", "inv_freq", "query_radius", "key_radius", "angle")
    columns = {name: getattr(features, name)[rows] for name in names}
    # Treat an angle just under a full turn as -0.1 steps, not as 6.2.
    turned = np.mod(columns["angle"] + columns["inv_freq"] / 2, TURN)
    columns["steps"] = turned / columns["inv_freq"] - 0.5
    columns["attention"], columns["attention_without"] = np.array([*fastest.values()]).T
    return columns


def angle_axis(axes: Axes) -> None:
    """Let y be an angle from 0 to 2 pi."""
    axes.set_yticks(np.linspace(0, TURN, 5), ["0", "π/2", "π", "3π/2", "2π"])
    axes.set_ylim(0, TURN)


def first_possible(features: OffsetFeatures) -> list[int]:
    """Return the first pair under the upper bound of every spectrum that has one."""
    heads = np.column_stack([features.layer, features.head])[features.possible]
    _, first = np.unique(heads, axis=0, return_index=True)
    return np.unique(features.pair[features.possible][first]).tolist()


def all_pairs(features: OffsetFeatures) -> Plot:
    """Draw radius and angle of every pair with the bounds (Fig. 8), by the pair's index and by its
    turns in the context length, slow pairs to the right."""
    moving = np.flatnonzero(features.inv_freq > 0)
    order = moving[np.argsort(features.key_radius[moving])]  # the longest means on top
    radius, angle, pair = features.key_radius[order], features.angle[order], features.pair[order]
    turns = features.inv_freq[order] * features.context_length / TURN
    limits = np.column_stack([features.pair, features.lower_bound])[features.possible]
    edge: dict[str, Any] = {"color": BLACK, "linewidth": 0.9, "linestyle": "--"}

    def by_index(axes: Axes) -> None:
        for index in first_possible(features):
            axes.axvline(index - 0.5, **edge)

    def by_turns(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.invert_xaxis()
        axes.axvline(1, **edge)

    def angles_by_index(axes: Axes) -> None:
        by_index(axes)
        angle_axis(axes)
        lower = np.unique(limits, axis=0).reshape(-1, 2).T
        axes.plot(*lower, "_", color=ORANGE, markersize=4)

    def angles_by_turns(axes: Axes) -> None:
        by_turns(axes)
        angle_axis(axes)
        slow = np.geomspace(min(turns.min(), 0.5), 1, 200)
        axes.plot(slow, math.pi * (1 + slow), color=ORANGE)

    radii, phi = "radius of the mean key", "angle φ, query to key (rad)"
    levels = tuple((level, "") for level in RADII)
    within = "turns within the context, θC/2π"
    frames = (
        Frame("", radii, by_index, horizontal=levels),
        Frame("", "", by_turns, horizontal=levels),
        Frame(PAIR_INDEX, phi, angles_by_index),
        Frame(within, "", angles_by_turns),
    )
    panels = [
        Points.graded("", x, y, radius, frame)
        for (x, y), frame in zip(
            ((pair, radius), (turns, radius), (pair, angle), (turns, angle)), frames, strict=True
        )
    ]
    return Plot(
        "offset_features",
        points(panels, columns=2, height=2.0, index=radii),
        "Radius and angle of every rotary pair; dashed: upper bound, orange: lower bound, dotted: "
        f"radii of Table 2; C = {features.context_length:,} (Fig. 8, 11).",
    )


def stability_plot(stability: Mapping[str, Array]) -> Plot:
    """Draw circular variance by radius (Fig. 2); ``stability``: see
    :meth:`AngleStability.result`."""
    labels = ("radius of the mean", "circular variance of the angle")
    panels = []
    for name, of_keys in (("queries", False), ("keys", True)):
        among = stability["of_keys"] == of_keys
        radius, variance, layer = (stability[c][among] for c in ("radius", "variance", "layer"))
        panels.append(Points.graded(name, radius, variance, layer, Frame(*labels)))
    return Plot(
        "offset_angle_stability",
        points(panels, index="layer"),
        "Circular variance of a pair's angle over all positions, before the rotation, by the "
        "radius of its mean (Fig. 2).",
    )


def channels(shown: Sequence[Feature]) -> Plot:
    """Draw queries and keys of the heads along the text, every channel (Fig. 1)."""
    columns = min(SHOWN, len(shown))
    maps = {
        f"{feature.head}, {name}": feature.view.maps[side]
        for start in range(0, len(shown), columns)
        for side, name in SIDES.items()
        for feature in shown[start : start + columns]
    }
    size = float(np.quantile(np.abs(np.concatenate([m.ravel() for m in maps.values()])), LOUDEST))
    view = shown[0].view
    scale = Scale("activation", -size, size, signed=True)
    axes: dict[str, Any] = {"x": "token", "y": "channel", "cell": (view.cell, 1)}
    return Plot(
        "offset_channels",
        heat_maps(maps, scale, columns=columns, **axes),
        f"Queries and keys before the rotation along the first text; channels m and m + "
        f"{view.pairs} are pair m (Fig. 1).",
    )


def points_of_head(feature: Feature, trained: int, pairs: Sequence[int]) -> Plot:
    """Draw the points of all pairs of a head, or of some (Fig. 7, 12 and 13)."""
    view, turns = feature.view, feature.view.inv_freq * trained / TURN
    drawn = [pair for pair in pairs if pair < view.pairs] or range(view.pairs)
    panels = [_cloud(f"{pair}: {turns[pair]:.2g} turns", view, pair, trained) for pair in drawn]
    columns = min(8, math.ceil(math.sqrt(len(panels))))
    return Plot(
        f"offset_points_{feature.head}",
        points(panels, columns=columns, height=6.6 / columns, size=2),
        f"Queries and keys of the pairs of layer {view.layer} head {view.head} before rotation, by "
        "index and turns within C; lines: means, star: the first key, green: turn of the mean "
        "query within C (Fig. 7, 12, 13).",
    )


def _cloud(title: str, view: HeadView, pair: int, trained: int) -> Points:
    """Return keys and queries of a pair in their plane, with the means and the query's turn as an
    arc."""
    query, key = view.points(pair)
    in_plane, turned = plane(), float(view.inv_freq[pair]) * trained

    def prepare(axes: Axes) -> None:
        in_plane(axes)
        for cloud in (query, key):
            axes.plot(*zip((0, 0), cloud.mean(axis=0), strict=True), color=BLACK, linewidth=0.9)
        axes.plot(*key[0], "*", color=ORANGE, markeredgecolor=BLACK, markersize=6)
        mean = query.mean(axis=0)
        start = math.degrees(math.atan2(*mean[::-1]))
        end, size = start + min(math.degrees(turned), 360), 1.2 * float(np.hypot(*mean))
        axes.add_patch(Arc((0, 0), size, size, theta1=start, theta2=end, color=GREEN))

    return Points(title, {"keys": key, "queries": query}, Frame("", "", prepare))


def terms(features: OffsetFeatures, shown: Sequence[Feature]) -> Plot:
    """Draw the terms of pairs in the logit, and the sum without the feature (Fig. 4 and 6)."""
    C = features.context_length
    distances = np.unique(np.geomspace(1, C + 1, DISTANCES).astype(int)) - 1

    def log_x(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.axhline(0, color=GREY, linewidth=0.5)

    x, panels = (distances + 1).tolist(), []
    for feature in shown:
        view, pair = feature.view, feature.strong.pair
        parts = contributions(features, view.layer, view.head, distances.tolist())
        total = parts.sum(axis=0)
        of_pair = Series("the feature", 0, x, parts[pair].tolist(), marked=False)
        sums = [
            Series("all pairs", 1, x, total.tolist(), marked=False),
            Series("all but the feature", 4, x, (total - parts[pair]).tolist(), marked=False),
        ]
        frame = Frame("", "part of the logit", log_x, (float(C), "C"))
        panels.append(Panel(f"{feature.head}, pair {pair}", [of_pair], frame, parts))
        panels.append(Panel("", sums, replace(frame, y_label="")))
    label = "distance between query and key + 1 (tokens)"
    return Plot(
        "offset_contributions",
        side_by_side(panels, columns=2, height=1.9, x_label=label),
        "Terms of the logit from the means of pairs, by distance; thin: every pair, from the "
        "fastest (dark) on (Fig. 4, 6).",
    )


def _layers(panels: Iterable[tuple[Mapping[str, Array], str, str, Frame]]) -> list[Points]:
    return [Points.graded("", c[x], c[y], c["layer"], frame) for c, x, y, frame in panels]


def _sinks_plot(columns: Mapping[str, Array]) -> Plot:
    """Draw the effect of each head's strongest pair under the upper bound on its sink."""
    first, score = "attention on the first token", "score of the first key over others"
    panels = _layers(
        [
            (columns, "attention", "attention_without",
             Frame(first, f"{first}\nwithout the pair", diagonal)),
            (columns, "margin", "margin_of_pair", Frame(score, "of it, the pair's")),
        ]
    )  # fmt: skip
    return Plot(
        "offset_sinks",
        points(panels, size=14, index="layer"),
        "Attention on the first token with and without the strongest pair under the upper bound, "
        "and the pair's part of the first key's score, a point a head (Sec. 4.2).",
    )


def _steps_plot(columns: Mapping[str, Array]) -> Plot:
    """Draw the effect of every head's fastest pair on attention on the token before."""
    before = "attention on the token before"
    radius = Frame("radius of the mean key", "angle φ in steps of a token", horizontal=((1.0, ""),))
    panels = _layers(
        [
            (columns, "key_radius", "steps", radius),
            (columns, "attention", "attention_without",
             Frame(before, f"{before}\nwithout the pair", diagonal)),
        ]
    )  # fmt: skip
    return Plot(
        "offset_steps",
        points(panels, size=14, index="layer"),
        "The fastest pair of every head: its angle by its radius, and attention on the token "
        "before with and without it (Sec. 4.3.1).",
    )


class OffsetChanges:
    """Compare two models that read the same text, up to the shorter training length (App. C, Fig.
    15 and 16)."""

    key = "offset_changes"
    title = "Rotary offset features of two models"

    def __init__(self, before: Target, after: Target) -> None:
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.length = min(before.length, before.training_length, after.training_length)

    def results(self) -> Results:
        """Read the text with both models and draw the change of every pair."""
        before, after = self._features(self.before), self._features(self.after)
        tables = [
            _summary(features, f"bounds of {name}").assign(model=name)
            for name, features in zip(self.names, (before, after), strict=True)
        ]
        shapes = [
            (len(t.model.layout.layers), t.model.config.num_attention_heads)
            for t in (self.before, self.after)
        ]
        plots: list[Plot] = []
        was, now = common_pairs(before, after)
        if shapes[0] == shapes[1] and len(was.pair):
            plots = [self._by_pair(was, now), self._single_pairs(was, now)]
            crossed = _summary(with_bounds_of(now, by=was), f"bounds of {self.names[0]}")
            tables.append(crossed.assign(model=self.names[1]))
            places = {name: getattr(was, name) for name in ("layer", "head", "pair")}
            for name, features in zip(self.names, (was, now), strict=True):
                values = {k: getattr(features, k) for k in ("key_radius", "angle")}
                tables.append(_rows(places, values).assign(model=name))
        rows = pd.concat(tables)
        rows["length"] = self.length
        return finished(self, plots, rows, self.after.name)

    def _features(self, target: Target) -> OffsetFeatures:
        search = OffsetFeatureSearch()
        capture(target.model, target.ids[:, : self.length], search.update)
        return search.result()

    def _by_pair(self, was: OffsetFeatures, now: OffsetFeatures) -> Plot:
        """Draw the change of radii above the change of angles, a point for each head, coloured by
        layer; angles of long pairs alone."""
        both = np.maximum(was.key_radius, now.key_radius)
        large = both >= min(RADII[0], float(np.quantile(both, LONG)))
        change = now.key_radius - was.key_radius
        turned = np.mod(now.angle - was.angle + TURN / 2, TURN) - TURN / 2
        # Layers side by side within the width of a pair.
        x = was.pair + 0.6 * (was.layer / max(int(was.layer.max()), 1) - 0.5)

        def prepare(axes: Axes) -> None:
            axes.set_xlim(-0.6, was.pair.max() + 0.6)
            axes.axhline(0, color=GREY, linewidth=0.6)
            for dash, features in zip(("--", ":"), (was, now), strict=True):
                for index in first_possible(features):
                    axes.axvline(index - 0.5, color=BLACK, linewidth=0.9, linestyle=dash)

        labels = ("change of the radius", "change of the angle φ (rad)")
        panels = [
            Points.graded("", x, y, was.layer, Frame(label_x, label, prepare))
            for y, label, label_x in (
                (change, labels[0], ""),
                (np.where(large, turned, np.nan), labels[1], PAIR_INDEX),
            )
        ]
        return Plot(
            "offset_changes_by_pair",
            points(panels, columns=1, height=2.0, size=4, index="layer"),
            f"From {self.names[0]} to {self.names[1]}: change of every head's radius and angle; "
            "dashed and dotted: their upper bounds (App. C, Fig. 16).",
        )

    def _single_pairs(self, was: OffsetFeatures, now: OffsetFeatures) -> Plot:
        """Draw radius and angle of every head in both models."""
        panels = []
        for number, pair in enumerate(self._shown(was, now)):
            rows = was.pair == pair
            groups = {
                name: np.column_stack([features.key_radius[rows], features.angle[rows]])
                for name, features in zip(self.names, (was, now), strict=True)
            }
            lower = partial(self._lower_bounds, rows, was, now)
            frame = Frame("radius of the mean key", "" if number else "angle φ (rad)", lower)
            panels.append(Points(f"pair {pair}", groups, frame))
        return Plot(
            "offset_changes_of_pairs",
            points(panels, size=7),
            "Radius and angle of single pairs in every head of both models; dashed and dotted: "
            "their lower bounds (App. C, Fig. 15).",
        )

    def _lower_bounds(
        self, rows: Array, was: OffsetFeatures, now: OffsetFeatures, axes: Axes
    ) -> None:
        for dash, features in zip(("--", ":"), (was, now), strict=True):
            if (possible := rows & features.possible).any():
                bound = float(features.lower_bound[possible].mean())
                axes.axhline(bound, color=BLACK, linewidth=1, linestyle=dash)
        angle_axis(axes)
        axes.set_xlim(left=0)

    def _shown(self, was: OffsetFeatures, now: OffsetFeatures) -> list[int]:
        """Return the chosen pairs, or the two whose mean radius shrank and grew most.

        If no pair is chosen and some pairs were under the upper bound, only those are considered.
        """
        rotating = np.unique(was.pair)
        if chosen := [pair for pair in self.after.pairs if pair in rotating]:
            return chosen
        index = np.unique(was.pair[was.possible]) if was.possible.any() else rotating
        change = now.key_radius - was.key_radius
        means = [change[was.pair == pair].mean() for pair in index]
        return sorted({int(index[np.argmin(means)]), int(index[np.argmax(means)])})
