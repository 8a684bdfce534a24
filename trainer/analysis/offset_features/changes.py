"""The section on rotary offset features of two models that read one text, such as a model and its
extension (Rotary Offset Features, App. C, Fig. 15 and 16)."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from matplotlib.collections import LineCollection

from trainer.analysis.arrays import Array, to_json
from trainer.analysis.capture import capture
from trainer.analysis.offset_features.figures import (
    PAIR_INDEX,
    angle_axis,
    first_possible,
    legend_of_lines,
    number,
    percent,
)
from trainer.analysis.offset_features.measure import (
    RADII,
    TURN,
    OffsetFeatures,
    OffsetFeatureSearch,
    common_pairs,
    with_bounds_of,
)
from trainer.analysis.studies.section import Grid, Part, Picture, Section, column_rows
from trainer.analysis.studies.study import Target
from trainer.plotting.points import graded_points, index_bar
from trainer.plotting.style import BLACK, BLUE, GREY, ORANGE, blank, paper_style

LONG = 0.9
"""Quantile of radii from which a pair is large if none reaches the table's smallest radius."""
HEADER = ("layer", "head", "pair", "radius_before", "radius_after", "angle_before", "angle_after")
_DASHES = ("--", ":")


class OffsetChanges:
    """Compare two models that read the same text, up to the shorter training length."""

    key: ClassVar[str] = "offset_changes"
    title: ClassVar[str] = "Rotary offset features of two models"

    def __init__(self, before: Target, after: Target) -> None:
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.length = min(before.length, before.training_length, after.training_length)

    def run(self) -> Section:
        """Read the text with both models and write the section."""
        before, after = self._features(self.before), self._features(self.after)
        part = self._heads(before, after)
        tables = {
            f"{name}, own bounds": features
            for name, features in zip(self.names, (before, after), strict=True)
        }
        if part.pictures:
            was, now = common_pairs(before, after)
            tables[f"{self.names[1]}, bounds of {self.names[0]}"] = with_bounds_of(now, by=was)
        models = {
            name: {"context_length": features.context_length} | features.summary()
            for name, features in tables.items()
        }
        return Section(
            key=self.key,
            title=self.title,
            text=(
                f"Two models read the same {self.length:,} tokens: {self.names[0]}, with a context "
                f"of {before.context_length:,}, and {self.names[1]}, with "
                f"{after.context_length:,}. A longer context moves the bounds: pairs that turned "
                "less than once may turn more often now, and the least angle of the other pairs "
                "grows. If training follows the bounds, keys of the former become shorter and "
                "angles of the latter larger."
            ),
            formula=("change of the radius = |k̄| after − |k̄| before",),
            source=(
                "Rotary Offset Features in Large Language Models, App. C, Fig. 15 and 16, Table 2."
            ),
            findings=part.findings,
            pictures=part.pictures,
            grids=(_table(tables),),
            numbers={"names": list(self.names), "tokens": self.length, "models": models}
            | part.numbers,
        )

    def _features(self, target: Target) -> OffsetFeatures:
        search = OffsetFeatureSearch()
        capture(target.model, target.ids[:, : self.length], search.update)
        return search.result()

    def _heads(self, before: OffsetFeatures, after: OffsetFeatures) -> Part:
        shapes = [
            f"{len(t.model.layout.layers)} x {t.model.config.num_attention_heads}"
            for t in (self.before, self.after)
        ]
        if shapes[0] != shapes[1]:
            refusal = (
                f"Heads were not compared: the models have {' and '.join(shapes)} layers and heads."
            )
            return Part((refusal,))
        was, now = common_pairs(before, after)
        if not len(was.pair):
            return Part(("Heads were not compared: no layer rotates in both models.",))
        both = np.maximum(was.key_radius, now.key_radius)
        large = both >= min(RADII[0], float(np.quantile(both, LONG)))
        change = now.key_radius - was.key_radius
        turned = np.mod(now.angle - was.angle + TURN / 2, TURN) - TURN / 2
        return Part(
            tuple(self._findings(was, now, change, large)),
            (
                self._by_pair(was, now, change, np.where(large, turned, np.nan)),
                self._single_pairs(was, now, self._shown(was, change)),
            ),
            numbers={name: to_json(c) for name, c in _columns(was, now).items()},
        )

    def _shown(self, was: OffsetFeatures, change: Array) -> list[int]:
        """Return the chosen pairs, or the two whose mean radius shrank and grew most.

        If no pair is chosen and some pairs were under the upper bound, only those are considered.
        """
        rotating = np.unique(was.pair)
        if chosen := [pair for pair in self.after.pairs if pair in rotating]:
            return chosen
        index = np.unique(was.pair[was.possible]) if was.possible.any() else rotating
        means = [change[was.pair == pair].mean() for pair in index]
        return sorted({int(index[np.argmin(means)]), int(index[np.argmax(means)])})

    def _findings(
        self, was: OffsetFeatures, now: OffsetFeatures, change: Array, large: Array
    ) -> list[str]:
        first, second = self.names
        counts = [int((features.key_radius >= RADII[0]).sum()) for features in (was, now)]
        text = [
            f"Pairs of radius {RADII[0]:g} or more: {counts[0]:,} in {first}, {counts[1]:,} in "
            f"{second}; the mean radius of all goes from {was.key_radius.mean():.2f} to "
            f"{now.key_radius.mean():.2f}."
        ]
        for now_possible, verb in ((False, "no longer are"), (True, "still are")):
            among = was.possible & (now.possible == now_possible) & large
            if among.any():
                text.append(
                    f"Keys of the {among.sum():,} long pairs that are under the upper bound in "
                    f"{first} and {verb} in {second} change their radius by "
                    f"{change[among].mean():+.2f} on average; "
                    f"{(change[among] < 0).mean():.0%} of them shrink."
                )
        if counts[1]:
            by_second, by_first = (
                features.recall[0].lower for features in (now, with_bounds_of(now, by=was))
            )
            text.append(
                f"Of the pairs of {second} with radius {RADII[0]:g} or more, {percent(by_second)} "
                f"are within the bounds of {second} and {percent(by_first)} within the bounds of "
                f"{first}."
            )
        return text

    def _by_pair(
        self, was: OffsetFeatures, now: OffsetFeatures, change: Array, turned: Array
    ) -> Picture:
        """Draw the change of radii above the change of angles, a point for each head, coloured by
        layer; ``turned``: NaN for a pair that is too small for a meaningful angle."""
        layers = max(int(was.layer.max()), 1)
        with paper_style():
            figure = blank(4.2)
            grid = figure.subplots(2, 1, sharex=True)
            # Layers side by side within the width of a pair.
            x = was.pair + 0.6 * (was.layer / layers - 0.5)
            for axes, values in zip(grid, (change, turned), strict=True):
                points = graded_points(
                    axes, x, values, was.layer, layers + 1, size=4, alpha=0.7, rasterized=True
                )
                axes.axhline(0, color=GREY, linewidth=0.6)
                for name, dash, features in zip(self.names, _DASHES, (was, now), strict=True):
                    for i, index in enumerate(first_possible(features)):
                        label = None if i else f"upper bound, {name}"
                        style = {"color": BLACK, "linewidth": 0.9, "linestyle": dash}
                        axes.axvline(index - 0.5, label=label, **style)
            pairs = np.unique(was.pair)
            middle = [np.median(change[was.pair == pair]) for pair in pairs]
            grid[0].plot(pairs, middle, color=ORANGE, linewidth=1.4, label="median over heads")
            grid[0].set_ylabel("change of the radius")
            grid[1].set_ylabel("change of the angle φ (rad)")
            grid[1].set_xlabel(PAIR_INDEX)
            grid[1].locator_params(axis="x", integer=True)
            legend_of_lines(figure, grid[:1])
            index_bar(figure, points, list(grid), "layer", aspect=30)
        return Picture(
            name="offset_changes_by_pair",
            figure=figure,
            caption=(
                f"From {self.names[0]} to {self.names[1]}, every head by its pair and, in colour "
                "and within the width of a pair, by its layer. Above: how much longer its mean key "
                "became. Below: how far the angle from mean query to mean key turned, of the long "
                "pairs alone. Right of the dashed and dotted lines pairs turn less than once in "
                "the context. Where training follows the bounds radii shrink between the two lines."
            ),
            header=HEADER,
            rows=column_rows(_columns(was, now).values()),
        )

    def _single_pairs(self, was: OffsetFeatures, now: OffsetFeatures, shown: list[int]) -> Picture:
        """Draw radius and angle of every head in both models, joined by a line."""
        with paper_style():
            figure = blank(2.9)
            grid = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
            for axes, pair in zip(grid, shown, strict=True):
                rows = was.pair == pair
                radius, angle = (
                    np.stack([first, second])[:, rows]
                    for first, second in ((was.key_radius, now.key_radius), (was.angle, now.angle))
                )
                # Draw no line for pairs that pass 2 pi: it would cross the whole panel.
                near = np.abs(np.diff(angle, axis=0)[0]) < math.pi
                ends = np.stack([radius, angle], axis=-1)[:, near]
                moves = LineCollection(list(ends.transpose(1, 0, 2)), colors=GREY, rasterized=True)
                moves.set(linewidths=0.4, alpha=0.5)
                axes.add_collection(moves)
                for model, (features, colour) in enumerate(
                    zip((was, now), (BLUE, ORANGE), strict=True)
                ):
                    look = {"s": 7, "alpha": 0.7, "linewidths": 0, "rasterized": True}
                    name = self.names[model]
                    axes.scatter(radius[model], angle[model], color=colour, label=name, **look)
                    if (possible := rows & features.possible).any():
                        bound = float(features.lower_bound[possible].mean())
                        axes.axhline(bound, color=colour, linewidth=1, linestyle=_DASHES[model])
                axes.set_title(f"pair {pair}", pad=3)
                axes.set_xlabel("radius of the mean key")
                axes.set_xlim(left=0)
            angle_axis(grid[0])
            grid[0].set_ylabel("angle φ, query to key (rad)")
            handles = grid[0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False)
        return Picture(
            name="offset_changes_of_pairs",
            figure=figure,
            caption=(
                "Radius of the mean key and angle from the mean query to it in every head, in both "
                "models, with a line between the two; dashed and dotted: the lower bounds of the "
                "first and the second model, where the pair is under its upper bound."
            ),
            header=HEADER,
            rows=column_rows(
                column[np.isin(was.pair, shown)] for column in _columns(was, now).values()
            ),
        )


def _columns(was: OffsetFeatures, now: OffsetFeatures) -> dict[str, Array]:
    """Return the columns of :data:`HEADER`."""
    means = (was.key_radius, now.key_radius, was.angle, now.angle)
    return dict(zip(HEADER, (was.layer, was.head, was.pair, *means), strict=True))


def _table(models: dict[str, OffsetFeatures]) -> Grid:
    return Grid(
        caption=(
            "Share of pairs under the upper bound (UB) and their mean lower bound (LB). For the "
            "pairs with a mean key of the minimal radius or longer: the shares under the upper "
            "bound, also above the lower bound, and also above the lower bound less 0.1 rad."
        ),
        header=(
            *("model", "pairs", "under UB", "mean LB (rad)", "min. radius", "positives"),
            *("UB recall", "LB recall", "LB − 0.1 recall"),
        ),
        rows=[
            (
                *(name, len(features.pair), percent(features.share)),
                *(number(features.mean_lower_bound), f"{recall.radius:g}", recall.positives),
                *map(percent, (recall.upper, recall.lower, recall.relaxed)),
            )
            for name, features in models.items()
            for recall in features.recall
        ],
    )
