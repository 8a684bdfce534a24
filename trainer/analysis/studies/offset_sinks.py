"""What one rotary pair of a head does for its attention on the first token, as a part of a section
(Rotary Offset Features, Sec. 4.2)."""

from __future__ import annotations

import numpy as np

from trainer.analysis.capture import Heads
from trainer.analysis.sink_features import SinkPart, sink_part
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.section import Grid, Part, Picture
from trainer.analysis.studies.study import Target
from trainer.common.words import counted
from trainer.plotting.points import HeadCloud, head_points

SINK = 0.1
"""Attention on the first token from which on a head has a sink."""
SHOWN = 10
HEADER = (
    *("layer", "head", "pair", "attention", "attention_without", "explained"),
    *("attention_without_fast_pair", "first_key"),
    *("margin", "margin_of_pair", "strongest_pair", "margin_of_strongest"),
)


class OffsetSinks:
    """Collects, of heads with a pair under the upper bound, what the strongest such pair does."""

    def __init__(self) -> None:
        self._found: list[SinkPart] = []

    def update(self, heads: Heads, head: int, pair: int, fast: int | None) -> None:
        """Take in one head of a layer, the pair to take out, and a faster one to compare with."""
        if (found := sink_part(heads, head, pair, fast)) is not None:
            self._found.append(found)

    def part(self, target: Target) -> Part:
        """A figure, a table and sentences; empty where no head has such a pair."""
        found = self._found
        if not found:
            return Part()
        sinks = sorted((one for one in found if one.weight >= SINK), key=lambda one: -one.weight)
        rows = [_row(one) for one in found]
        columns = dict(zip(HEADER, zip(*rows, strict=True), strict=True))
        return Part(
            tuple(_findings(sinks, len(found))),
            (_picture(found, rows, len(target.model.layout.layers)),),
            (_table(sinks[:SHOWN], len(sinks)),) if sinks else (),
            {"sinks": {name: plain(np.array(values)) for name, values in columns.items()}},
        )


def _row(one: SinkPart) -> tuple[float, ...]:
    best = int(one.parts.argmax())
    return (
        *(one.layer, one.head, one.pair, one.weight, one.without, one.explained),
        *(one.control, one.first_key),
        *(one.margin, float(one.parts[one.pair]), best, float(one.parts[best])),
    )


def _findings(sinks: list[SinkPart], heads: int) -> list[str]:
    if not sinks:
        return [
            f"None of {counted(heads, 'head')} with a pair under the upper bound puts {SINK:.0%} "
            "of its attention on the first token: there is no sink to explain."
        ]
    explained = np.array([one.explained for one in sinks])
    before, after = np.mean([(one.weight, one.without) for one in sinks], axis=0)
    controls = [one.control for one in sinks if not np.isnan(one.control)]
    control = f" (without its strongest faster pair {np.mean(controls):.0%})" if controls else ""
    most = sum(int(one.parts.argmax()) == one.pair for one in sinks)
    return [
        f"Of {counted(heads, 'head')} with a pair under the upper bound, {len(sinks)} put "
        f"{SINK:.0%} or more of their attention on the first token, {before:.0%} on average. "
        f"Without the strongest such pair of each it is {after:.0%}{control}: that one pair "
        f"explains {np.median(explained):.0%} of it in the median head, and more than half in "
        f"{(explained > 0.5).sum()}.",
        f"In {most} of these {len(sinks)} heads no other pair does more to raise the score of the "
        "first key above those of others. In the pair taken out the first key is "
        f"{np.median([one.first_key for one in sinks]):.2f} times as long as the mean key in the "
        "median head.",
    ]


def _picture(found: list[SinkPart], rows: list[tuple[float, ...]], layers: int) -> Picture:
    layer, weight, without, margin, of_pair = (
        np.array([row[HEADER.index(name)] for row in rows])
        for name in ("layer", "attention", "attention_without", "margin", "margin_of_pair")
    )
    first = "attention on the first token"
    panels = (
        HeadCloud("", layer, weight, without, first, f"{first}\nwithout the pair", diagonal=True),
        HeadCloud(
            "", layer, margin, of_pair, "score of the first key over others", "of it, the pair's"
        ),
    )
    return Picture(
        "offset_sinks",
        head_points(panels, layers),
        "What the strongest pair under the upper bound does for the sink of its head, a point a "
        "head, means over queries in the last three quarters of the training length. Left: "
        "attention on the first token, and what it is with this pair's part taken out of all "
        "scores; points far below the dotted line have a sink by one feature. Right: how far the "
        "score of the first key lies above the mean of the other keys in sight (before a softcap), "
        "and how much of that is the pair's.",
        HEADER,
        rows,
    )


def _table(shown: list[SinkPart], sinks: int) -> Grid:
    return Grid(
        f"Heads with a sink by its weight, {len(shown)} of {sinks}: attention on the first token "
        "as it is and without the strongest pair under the upper bound; how far the score of the "
        "first key lies above the others', the pair's part of that, and the pair with the largest "
        "part.",
        ("head", "pair", "attention", "without", "explained", "score", "the pair's", "largest"),
        [
            (
                f"L{one.layer}H{one.head}",
                str(one.pair),
                *(f"{value:.1%}" for value in (one.weight, one.without, one.explained)),
                *(f"{one.margin:.1f}", f"{one.parts[one.pair]:.1f}"),
                f"{one.parts.max():.1f}, pair {one.parts.argmax()}",
            )
            for one in shown
        ],
    )
