"""The section on matrix entropy: which heads have low rank, by which measure, and where they attend
(DoPE, Sec. 4.3 and 5.4, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from trainer.analysis.arrays import (
    SIDES,
    Array,
    Place,
    Side,
    mean_over_heads,
    ranked,
    stack_layers,
    to_json,
)
from trainer.analysis.capture import Heads, capture
from trainer.analysis.matrix_entropy.extreme_heads import ExtremeHeads, prompt_of
from trainer.analysis.matrix_entropy.measure import MatrixEntropy, Stage, matrix_entropy_of
from trainer.analysis.studies.section import Grid, Picture, Section, long_rows, wide_rows
from trainer.analysis.studies.study import Study, Target
from trainer.plotting.lines import curves
from trainer.plotting.maps import Scale, heat_maps

RANKS = (1, 4, 8, 16, 32)
SHOWN = 16
"""Rank of the maps and of the ranking, if a head has more channels."""
LISTED = 3
STAGES: dict[Stage, str] = {
    "pre_ntk": "before the rotation",
    "post_ntk": "as they attend",
}
ATTENDING: Stage = "post_ntk"
At = tuple[Side, Stage]
Measure = Literal["bands", "all"] | int
"""The mean entropy of a head's bands, or the effective rank of all or of the r largest
eigenvalues."""
Scores = dict[Measure, Array]
"""``[layers, heads]`` by measure."""


class MatrixEntropyStudy(Study):
    """Band entropies and truncated effective ranks of every head, and its attention on a needle.

    The model is read with one layout, so the two stages after the rotation are equal.
    """

    key: ClassVar[str] = "matrix_entropy"
    title: ClassVar[str] = "Matrix entropy"
    shortest: ClassVar[int] = 16  # room for a needle

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # Without a rotation both stages are equal.
        self.stages = STAGES if target.rotates else {ATTENDING: STAGES[ATTENDING]}
        self._entropies: dict[At, list[MatrixEntropy]] = {
            (side, stage): [] for side in SIDES for stage in self.stages
        }

    def on_layer(self, heads: Heads) -> None:
        """Compute matrix entropies of both sides at every stage."""
        for (side, stage), entropies in self._entropies.items():
            entropies.append(matrix_entropy_of(heads, side, stage, self.target.model.layout))

    def section(self) -> Section:
        """Write the section: maps, a ranking, and attention of the extreme heads on a needle."""
        scores = {version: _scores(layers) for version, layers in self._entropies.items()}
        bands = {
            version: stack_layers([layer.bands for layer in layers])
            for version, layers in self._entropies.items()
        }
        shown: list[Measure] = ["bands", SHOWN if SHOWN in scores["query", ATTENDING] else "all"]
        needle = self.target.needle
        ranked_apart = needle.ranked_on == "prompt"
        ranks = self._in_the_prompt(needle.by) if ranked_apart else scores[needle.by, ATTENDING]
        copies = self.target.model.config.num_attention_heads // len(ranks["all"][0])
        of_keys = " of keys" if needle.by == "key" else ""
        ranking = {label(m) + of_keys: ranks[m].repeat(copies, axis=1) for m in shown}
        extreme = ExtremeHeads(self.target, ranking)
        return Section(
            key=self.key,
            title=self.title,
            text=(
                "The Gram matrix of a head's queries or keys over a text says how evenly they "
                "spread over directions. The entropy of its 2 × 2 blocks, one a pair of channels, "
                "is near log 2 where a pair turns through all directions, and near 0 where it "
                "stays in a cone. The effective rank is exp of the entropy of all eigenvalues, or "
                "of the r largest; for r = 1 it is 1 over the largest share. A head of low entropy "
                "has a few directions in which all its tokens add up. For attention the text is "
                f"read again with {extreme.needle}: a needle for heads that retrieve."
                + (" The heads are ranked by their entropies in that text." if ranked_apart else "")
            ),
            formula=(
                "Σ = Σⱼ kⱼ kⱼᵀ / tr",
                "H(f) = −tr(Σ(f) log Σ(f)),  0 ≤ H(f) ≤ log 2,  Σ(f): the 2 × 2 block of pair f",
                "ρʳ = exp(−Σᵢ pᵢ log pᵢ),  pᵢ = λᵢ / Σⱼ λⱼ,  i, j ≤ r",
            ),
            source="DoPE: Denoising Rotary Position Embedding, Eq. 23–30, Fig. 2–6, Table 1.",
            findings=(*self._findings(scores, bands), *extreme.findings()),
            pictures=(
                _head_maps(scores, shown),
                self._band_maps(bands),
                _ranks(scores["query", ATTENDING]),
                *extreme.pictures(),
            ),
            grids=(_ranking(scores),),
            numbers={
                "tokens": self.target.length,
                "heads": {
                    " ".join(version): {
                        label(m): to_json(values) for m, values in by_measure.items()
                    }
                    for version, by_measure in scores.items()
                },
                "bands": {" ".join(version): to_json(values) for version, values in bands.items()},
                **extreme.numbers(),
            },
        )

    def _in_the_prompt(self, side: Side) -> Scores:
        """Compute scores of all heads in the text with the needle."""
        entropies: list[MatrixEntropy] = []
        layout = self.target.model.layout
        capture(
            self.target.model,
            prompt_of(self.target).ids[:1],
            lambda heads: entropies.append(matrix_entropy_of(heads, side, ATTENDING, layout)),
        )
        return _scores(entropies)

    def _band_maps(self, bands: Mapping[At, Array]) -> Picture:
        means = {version: mean_over_heads(values) for version, values in bands.items()}
        return Picture(
            name="band_entropy",
            figure=heat_maps(
                {f"{SIDES[side]}, {STAGES[stage]}": m for (side, stage), m in means.items()},
                Scale("entropy (nats)", 0, math.log(2)),
                x=self.target.pair_axis,
                y="layer",
            ),
            caption=(
                "Entropy of every band (nats, at most log 2 = 0.69), mean over the heads of a "
                "layer."
                + (
                    " The rotation spreads fast pairs over all directions; pairs that stay dark "
                    "turn too little in this text."
                    if self.target.rotates
                    else ""
                )
            ),
            header=("side", "stage", "layer", "pair", "mean_over_heads"),
            rows=long_rows(means),
        )

    def _findings(self, scores: Mapping[At, Scores], bands: Mapping[At, Array]) -> list[str]:
        size, findings = self.target.model.config.head_size, []
        for side, kind in SIDES.items():
            ranks = (
                f"{scores[side, stage]['all'].mean():.1f} {name}"
                for stage, name in self.stages.items()
            )
            findings.append(
                f"Mean effective rank of {kind}: {', '.join(ranks)}, of {size} channels."
            )
        for side, kind in SIDES.items():
            entropy = bands[side, ATTENDING]
            turns = self._turns(entropy.shape)
            slow, fast = (turns > 0) & (turns < 1), turns >= 1
            if slow.any() and fast.any():
                findings.append(
                    f"Bands of {kind} that turn less than once in the training length have a mean "
                    f"entropy of {entropy[slow].mean():.2f} nats as they attend, faster ones "
                    f"{entropy[fast].mean():.2f}."
                )
        return findings

    def _turns(self, shape: tuple[int, ...]) -> Array:
        """Compute how often every pair rotates in the training length, ``[layers, heads, pairs]``;
        NaN without rotation."""
        turns = np.full(shape, np.nan)
        layout = self.target.model.layout.at(self.target.length)
        for layer, encoding in enumerate(layout.layers):
            for head in range(shape[1]):
                spectrum = encoding.spectra[head * len(encoding.spectra) // shape[1]]
                inv_freq = np.array(spectrum.inv_freq)
                turns[layer, head, : len(inv_freq)] = inv_freq
        return turns * self.target.training_length / (2 * math.pi)


def label(measure: Measure) -> str:
    """Return the name of a measure on the page."""
    if measure == "bands":
        return "band entropy"
    return "effective rank" if measure == "all" else f"effective rank, r = {measure}"


def _scores(layers: Sequence[MatrixEntropy]) -> Scores:
    channels = layers[0].eigenvalues.shape[-1]
    scores: dict[Measure, list[Tensor]] = {"bands": [layer.band_mean for layer in layers]}
    scores |= {r: [layer.effective_rank(r) for layer in layers] for r in RANKS if r < channels}
    scores["all"] = [layer.effective_rank(None) for layer in layers]
    return {measure: torch.stack(values).cpu().numpy() for measure, values in scores.items()}


def _head_maps(scores: Mapping[At, Scores], shown: Sequence[Measure]) -> Picture:
    panels = {(m, side): scores[side, ATTENDING][m] for m in shown for side in SIDES}
    columns = [re.sub("[^a-z0-9]+", "_", label(m)) for m in scores["query", ATTENDING]]
    return Picture(
        name="head_entropy",
        figure=heat_maps(
            {f"{label(m)} of {SIDES[side]}": values for (m, side), values in panels.items()},
            [Scale("nats" if m == "bands" else "rank") for m, _ in panels],
            x="head",
            y="layer",
        ),
        caption=(
            "Matrix entropy of every head as it attends: the mean over its bands (nats) and its "
            "truncated effective rank, each panel with its own colours. Dark: low entropy. The "
            "file has every rank and every stage."
        ),
        header=("side", "stage", "layer", "head", *columns),
        rows=[
            (*version, *row)
            for version, by_measure in scores.items()
            for row in wide_rows(list(by_measure.values()))
        ],
    )


def _ranks(scores: Scores) -> Picture:
    means = {
        "all" if measure == "all" else f"r = {measure}": ranks.mean(axis=1)
        for measure, ranks in scores.items()
        if measure != "bands"
    }
    layers = range(len(scores["all"]))
    return Picture(
        name="effective_rank",
        figure=curves(
            {title: (layers, mean.tolist()) for title, mean in means.items()},
            x="layer",
            y="effective rank of queries",
        ),
        caption=(
            "Truncated effective rank of the queries as they attend, mean over the heads of a "
            "layer. The smaller r, the fewer directions decide; r = 1 is 1 over the share of the "
            "largest eigenvalue in all, and may lie above r = 4."
        ),
        header=("layer", *means),
        rows=wide_rows(list(means.values())),
    )


def _ranking(scores: Mapping[At, Scores]) -> Grid:
    def listed(values: Array, places: list[Place]) -> str:
        return ", ".join(f"L{i}H{j} ({values[i, j]:.2f})" for i, j in places)

    return Grid(
        caption=(
            f"The {LISTED} heads of lowest and of highest entropy as they attend, by each measure "
            "(layer, head, and its value: nats for band entropy, else the effective rank)."
        ),
        header=("by", "measure", "lowest", "highest"),
        rows=[
            (
                title,
                label(measure),
                listed(values, ranked(values)[:LISTED]),
                listed(values, ranked(values)[: -LISTED - 1 : -1]),
            )
            for side, title in SIDES.items()
            for measure, values in scores[side, ATTENDING].items()
        ],
    )
