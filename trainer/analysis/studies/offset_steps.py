"""Whether the fastest pair of a head selects the token before (Rotary Offset Features, Sec. 4.3.1).

A pair of means adds |q| |k| cos(phi - theta delta) to the logit at distance delta, most at phi /
theta tokens. Of feature 0 of Phi-1 the largest heads have an angle phi of about theta, the step of
one token: "these are features that select for the previous token". Here each head has the angle of
its fastest pair in such steps, its attention on the token before, and that attention without the
pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.analysis.attention_rows import sampled_attention
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.offset_features import TURN, OffsetFeatures
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.section import Grid, Part, Picture
from trainer.common.words import counted
from trainer.plotting.points import HeadCloud, head_points

LOUD = 0.9
"""Quantile of radii from which on a head's fastest pair is large."""
SHOWN = 10
HEADER = (
    *("layer", "head", "pair", "inv_freq", "query_radius", "key_radius", "angle", "steps"),
    *("attention", "attention_without"),
)


@dataclass(frozen=True)
class Fastest:
    """The fastest pair of a query head: attention on the token before, as it is and without it."""

    layer: int
    head: int
    pair: int
    previous: float
    without: float


class OffsetSteps:
    """Collects what the fastest pair of every head does for attention on the token before."""

    def __init__(self) -> None:
        self._found: list[Fastest] = []

    def update(self, heads: Heads) -> None:
        """Take in one layer."""
        C = heads.training_length
        for head in range(heads.q.shape[1]):
            spectrum = heads.encoding.spectra[head // heads.queries_per_key].at(C, C)
            sampled = sampled_attention(heads, head)
            if not spectrum.rotates or sampled is None:
                continue
            pair = int(np.argmax(spectrum.inv_freq))
            rows = range(len(sampled.at))
            weights = [
                float(of[:, rows, sampled.at - 1].double().mean())
                for of in (sampled.weights(), sampled.weights(without=pair))
            ]
            self._found.append(Fastest(heads.layer, head, pair, *weights))

    def part(self, found: OffsetFeatures, layers: int) -> Part:
        """A figure, a table and sentences about the means ``found`` of a model of ``layers``."""
        if not self._found:
            return Part()
        places = {
            place: row
            for row, place in enumerate(zip(found.layer, found.head, found.pair, strict=True))
        }
        at = np.array([places[one.layer, one.head, one.pair] for one in self._found])
        columns = {name: getattr(found, name)[at] for name in HEADER[:7]}
        # An angle just under a full turn is -0.1 steps rather than 6.2.
        turned = np.mod(columns["angle"] + columns["inv_freq"] / 2, TURN)
        columns["steps"] = turned / columns["inv_freq"] - 0.5
        columns["attention"] = np.array([one.previous for one in self._found])
        columns["attention_without"] = np.array([one.without for one in self._found])
        return Part(
            tuple(_findings(columns)),
            (_picture(columns, layers),),
            (_table(columns),),
            {"steps": {name: plain(columns[name]) for name in HEADER}},
        )


def _at_a_step(columns: dict[str, Array]) -> Array:
    """Which pairs add most at distance 1, of all whole distances."""
    return (columns["steps"] >= 0.5) & (columns["steps"] < 1.5)


def _large(columns: dict[str, Array]) -> Array:
    radius = columns["key_radius"]
    return radius >= np.quantile(radius, LOUD)


def _findings(columns: dict[str, Array]) -> list[str]:
    at_step, large = _at_a_step(columns), _large(columns)
    by_chance = float(np.minimum(columns["inv_freq"] / TURN, 1).mean())
    heads, least = counted(int(large.sum()), "head"), columns["key_radius"][large].min()
    text = [
        "The fastest pair adds most to the logit of the token before in "
        f"{at_step[large].mean():.0%} of the {heads} in which its mean key is longest (a tenth, "
        f"from {least:.2f} on), and in "
        f"{at_step.mean():.0%} of all {len(large)}; of angles at random that would be "
        f"{by_chance:.0%}."
    ]
    for among, of in (
        (large & at_step, "these heads with a long key and that angle"),
        (~(large & at_step), "the others"),
    ):
        if among.any():
            was, now = columns["attention"][among], columns["attention_without"][among]
            text.append(
                f"In {of} attention on the token before is {was.mean():.1%} on average, and "
                f"{now.mean():.1%} without the pair."
            )
    return text


def _picture(columns: dict[str, Array], layers: int) -> Picture:
    layer, before = columns["layer"], "attention on the token before"
    radius, angle = "radius of the mean key", "angle φ in steps of a token"
    panels = (
        HeadCloud("", layer, columns["key_radius"], columns["steps"], radius, angle, level=1.0),
        HeadCloud(
            *("", layer, columns["attention"], columns["attention_without"]),
            *(before, f"{before}\nwithout the pair"),
            diagonal=True,
        ),
    )
    return Picture(
        "offset_steps",
        head_points(panels, layers),
        "The fastest pair of every head, a point a head. Left: the radius of its mean key, and its "
        "angle from mean query to mean key over what it turns in one token; the part of the logit "
        "is largest at that distance, and the dotted line is the token before. Right: attention on "
        "that token, and what it is with the pair's part taken out of all scores, means over "
        "queries in the last three quarters of the training length; points below the dotted line "
        "lose such attention without the pair.",
        HEADER,
        list(zip(*(columns[name].tolist() for name in HEADER), strict=True)),
    )


def _table(columns: dict[str, Array]) -> Grid:
    strength = columns["query_radius"] * columns["key_radius"]
    order = np.argsort(-strength, kind="stable")[:SHOWN]
    return Grid(
        f"Fastest pairs of the longest means, {len(order)} of {len(strength)} heads: radii, the "
        "angle, the step of one token, the distance at which the pair adds most to the logit, and "
        "attention on the token before, as it is and without the pair.",
        (
            *("head", "pair", "query", "key", "angle (rad)", "step (rad)", "distance"),
            *("attention", "without"),
        ),
        [
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
