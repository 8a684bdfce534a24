"""Rotary offset features of two models on one text: a model and its extension to longer texts, or
any two others (Rotary Offset Features, App. C, Fig. 15 and 16)."""

from __future__ import annotations

from dataclasses import asdict
from typing import ClassVar

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.capture import capture
from trainer.analysis.offset_features import (
    RADII,
    TURN,
    OffsetFeatures,
    OffsetFeatureSearch,
    judged,
    shared,
)
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.extended_bounds import number, percent
from trainer.analysis.studies.offset_figures import Changes, OnePair, changes_by_pair, pairs_in_both
from trainer.analysis.studies.offset_pictures import first_possible
from trainer.analysis.studies.section import Grid, Part, Picture, Section
from trainer.analysis.studies.study import Target

LONG = 0.9
"""Quantile of radii from which on a pair is large, where none reaches the least of the table."""


class OffsetChanges:
    """``before`` and ``after`` read the same text, no further than both were trained for."""

    key: ClassVar[str] = "offset_changes"
    title: ClassVar[str] = "Rotary offset features of two models"

    def __init__(self, before: Target, after: Target) -> None:
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.length = min(before.length, before.training_length, after.training_length)

    def run(self) -> Section:
        """Read the text with both models, and compare."""
        before, after = self._features(self.before), self._features(self.after)
        part = self._heads(before, after)
        tables = {
            f"{name}, own bounds": of for name, of in zip(self.names, (before, after), strict=True)
        }
        if part.pictures:
            was, now = shared(before, after)
            tables[f"{self.names[1]}, bounds of {self.names[0]}"] = judged(now, by=was)
        return Section(
            self.key,
            self.title,
            f"Two models read the same {self.length:,} tokens: {self.names[0]}, with a context of "
            f"{before.context_length:,}, and {self.names[1]}, with {after.context_length:,}. A "
            "longer context moves the bounds: pairs that turned less than once may no longer, and "
            "of the others the least angle grows. If training follows the bounds, keys of the "
            "former become shorter and angles of the latter larger.",
            ("change of the radius = |k̄| after − |k̄| before",),
            "Rotary Offset Features in Large Language Models, App. C, Fig. 15 and 16, Table 2.",
            part.findings,
            part.pictures,
            (_table(tables),),
            {
                "names": list(self.names),
                "tokens": self.length,
                "models": {
                    name: {
                        "context_length": of.context_length,
                        "share": of.share,
                        "mean_lower_bound": of.mean_lower_bound,
                        "recall": [asdict(recall) for recall in of.recall],
                    }
                    for name, of in tables.items()
                },
            }
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
            said = (
                f"Heads were not compared: the models have {' and '.join(shapes)} layers and heads."
            )
            return Part((said,))
        was, now = shared(before, after)
        if not len(was.pair):
            return Part(("Heads were not compared: no layer rotates in both models.",))
        both = np.maximum(was.key_radius, now.key_radius)
        large = both >= min(RADII[0], float(np.quantile(both, LONG)))
        change = now.key_radius - was.key_radius
        turned = np.mod(now.angle - was.angle + TURN / 2, TURN) - TURN / 2
        shown = self._shown(was, change)
        return Part(
            tuple(self._findings(was, now, change, large)),
            (
                self._by_pair(was, now, change, np.where(large, turned, np.nan)),
                self._of_pairs(was, now, shown),
            ),
            numbers={
                name: plain(values)
                for name, values in {
                    **{name: getattr(was, name) for name in ("layer", "head", "pair")},
                    "radius_before": was.key_radius,
                    "radius_after": now.key_radius,
                    "angle_before": was.angle,
                    "angle_after": now.angle,
                }.items()
            },
        )

    def _shown(self, was: OffsetFeatures, change: Array) -> list[int]:
        """The pairs asked for, or those under the upper bound before, or all where there are none,
        that on average lost and gained most."""
        there = np.unique(was.pair)
        if asked := [pair for pair in self.after.pairs if pair in there]:
            return asked
        index = np.unique(was.pair[was.possible]) if was.possible.any() else there
        means = [change[was.pair == pair].mean() for pair in index]
        return sorted({int(index[np.argmin(means)]), int(index[np.argmax(means)])})

    def _findings(
        self, was: OffsetFeatures, now: OffsetFeatures, change: Array, large: Array
    ) -> list[str]:
        first, second = self.names
        counts = [int((of.key_radius >= RADII[0]).sum()) for of in (was, now)]
        text = [
            f"Pairs of radius {RADII[0]:g} or more: {counts[0]:,} in {first}, {counts[1]:,} in "
            f"{second}; the mean radius of all goes from {was.key_radius.mean():.2f} to "
            f"{now.key_radius.mean():.2f}."
        ]
        for now_possible, what in ((False, "no longer are"), (True, "still are")):
            among = was.possible & (now.possible == now_possible) & large
            if among.any():
                text.append(
                    f"Keys of the {among.sum():,} long pairs that are under the upper bound in "
                    f"{first} and {what} in {second} change their radius by "
                    f"{change[among].mean():+.2f} on average; "
                    f"{(change[among] < 0).mean():.0%} of them shrink."
                )
        if counts[1]:
            own, others = (of.recall[0].lower for of in (now, judged(now, by=was)))
            text.append(
                f"Of the pairs of {second} with radius {RADII[0]:g} or more, {percent(own)} are "
                f"within its own bounds and {percent(others)} within those of {first}."
            )
        return text

    def _by_pair(
        self, was: OffsetFeatures, now: OffsetFeatures, change: Array, turned: Array
    ) -> Picture:
        first = dict(zip(self.names, map(first_possible, (was, now)), strict=True))
        return Picture(
            "offset_changes_by_pair",
            changes_by_pair(Changes(was.layer, was.pair, change, turned), first),
            f"From {self.names[0]} to {self.names[1]}, every head by its pair and, in colour and "
            "within the width of a pair, by its layer. Above: how much longer its mean key became. "
            "Below: how far the angle from mean query to mean key turned, of the long pairs alone. "
            "Right of the dashed and dotted lines pairs turn less than once in the context. Where "
            "training follows the bounds radii shrink between the two lines.",
            *_rows(was, now),
        )

    def _of_pairs(self, was: OffsetFeatures, now: OffsetFeatures, shown: list[int]) -> Picture:
        panels = []
        for pair in shown:
            at = was.pair == pair
            lower = tuple(
                float(of.lower_bound[at & of.possible].mean()) if of.possible[at].any() else None
                for of in (was, now)
            )
            radii, angles = (
                np.stack([getattr(of, name)[at] for of in (was, now)])
                for name in ("key_radius", "angle")
            )
            panels.append(OnePair(pair, radii, angles, (lower[0], lower[1])))
        return Picture(
            "offset_changes_of_pairs",
            pairs_in_both(panels, self.names),
            "Radius of the mean key and angle from the mean query to it in every head, in both "
            "models, with a line between the two; dashed and dotted: the lower bounds of the one "
            "and of the other, where the pair is under its upper bound.",
            *_rows(was, now, shown),
        )


HEADER = ("layer", "head", "pair", "radius_before", "radius_after", "angle_before", "angle_after")


def _rows(
    was: OffsetFeatures, now: OffsetFeatures, pairs: list[int] | None = None
) -> tuple[tuple[str, ...], list[tuple[float, ...]]]:
    """Header and rows of a file about these pairs, or about all."""
    at = np.isin(was.pair, pairs) if pairs is not None else slice(None)
    columns = (was.layer, was.head, was.pair, was.key_radius, now.key_radius, was.angle, now.angle)
    return HEADER, list(zip(*(column[at].tolist() for column in columns), strict=True))


def _table(models: dict[str, OffsetFeatures]) -> Grid:
    return Grid(
        "Share of pairs under the upper bound (UB) and their mean lower bound (LB); of the pairs "
        "with so long a mean key, the shares that are under the one, and above the other, or the "
        "other less 0.1 rad.",
        (
            *("model", "pairs", "under UB", "mean LB (rad)", "min. radius", "positives"),
            *("UB recall", "LB recall", "LB − 0.1 recall"),
        ),
        [
            (
                *(name, len(of.pair), percent(of.share), number(of.mean_lower_bound)),
                *(f"{one.radius:g}", one.positives),
                *map(percent, (one.upper, one.lower, one.relaxed)),
            )
            for name, of in models.items()
            for one in of.recall
        ],
    )
