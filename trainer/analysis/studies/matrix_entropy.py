"""Matrix entropy of a model's heads: which are of low rank, by which measure, and what those look
at (DoPE, Sec. 4.3 and 5.4, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch

from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads, capture
from trainer.analysis.matrix_entropy import MatrixEntropy, Stage, matrix_entropy_of
from trainer.analysis.pairs import Side
from trainer.analysis.studies.arrays import mean_over_heads, plain, stacked
from trainer.analysis.studies.extreme_heads import ExtremeHeads, prompt_of, ranked
from trainer.analysis.studies.section import Grid, Picture, Section
from trainer.analysis.studies.study import Study, Target
from trainer.plotting.lines import curves
from trainer.plotting.maps import Scale, heat_maps

RANKS = (1, 4, 8, 16, 32)
SIDES: dict[Side, str] = {"query": "queries", "key": "keys"}
STAGES: dict[Stage, str] = {
    "pre_ntk": "before the rotation",
    "post_ntk": "as they attend",
}
ATTENDING: Stage = "post_ntk"
LISTED = 3
BANDS, ALL, SHOWN = "band entropy", "effective rank", "effective rank, r = 16"
At = tuple[Side, Stage]


class MatrixEntropyStudy(Study):
    """Band entropies and truncated effective ranks of every head, and its attention on a needle.

    The model is read with one layout, so that the two stages after the rotation are one.
    """

    key: ClassVar[str] = "matrix_entropy"
    title: ClassVar[str] = "Matrix entropy"
    shortest: ClassVar[int] = 16  # room for a needle

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # Without a rotation both stages are one.
        self.stages = STAGES if target.rotates else {ATTENDING: STAGES[ATTENDING]}
        self._found: dict[At, list[MatrixEntropy]] = {
            (side, stage): [] for side in SIDES for stage in self.stages
        }

    def on_layer(self, heads: Heads) -> None:
        """Gram matrices of both sides at every stage."""
        for (side, stage), found in self._found.items():
            found.append(matrix_entropy_of(heads, side, stage, self.target.model.layout))

    def section(self) -> Section:
        """Maps, a ranking, and what the extreme heads do with a needle."""
        scores = {at: _scores(layers) for at, layers in self._found.items()}
        bands = {at: stacked([one.bands for one in layers]) for at, layers in self._found.items()}
        shown = [BANDS, SHOWN if SHOWN in scores["query", ATTENDING] else ALL]
        by = self.target.needle.by
        ranks = self._in_the_prompt(by) if self._ranked_apart else scores[by, ATTENDING]
        copies = self.target.model.config.num_attention_heads // len(ranks[ALL][0])
        ranking = {
            name + (" of keys" if by == "key" else ""): ranks[name].repeat(copies, axis=1)
            for name in shown
        }
        extreme = ExtremeHeads(self.target, ranking)
        return Section(
            self.key,
            self.title,
            "The Gram matrix of a head's queries or keys over a text says how evenly they spread "
            "over directions. The entropy of its 2 × 2 blocks, one a pair of channels, is near "
            "log 2 where a pair turns through all directions, and near 0 where it stays in a cone. "
            "The effective rank is exp of the entropy of all eigenvalues, or of the r largest; for "
            "r = 1 it is 1 over the largest share. A head of low entropy has a few directions in "
            "which all its tokens add up. For attention the text is read again with "
            f"{extreme.what}: a needle for heads that retrieve."
            + (" These heads are ranked by what they are in that text." * self._ranked_apart),
            (
                "Σ = Σⱼ kⱼ kⱼᵀ / tr",
                "H(f) = −tr(Σ(f) log Σ(f)),  0 ≤ H(f) ≤ log 2,  Σ(f): the 2 × 2 block of pair f",
                "ρʳ = exp(−Σᵢ pᵢ log pᵢ),  pᵢ = λᵢ / Σⱼ λⱼ,  i, j ≤ r",
            ),
            "DoPE: Denoising Rotary Position Embedding, Eq. 23–30, Fig. 2–6, Table 1.",
            (*self._findings(scores, bands), *extreme.findings()),
            (
                _head_maps(scores, shown),
                self._band_maps(bands),
                _ranks(scores),
                *extreme.pictures(),
            ),
            (_ranking(scores),),
            {
                "tokens": self.target.length,
                "heads": {
                    f"{side} {stage}": {name: plain(of) for name, of in found.items()}
                    for (side, stage), found in scores.items()
                },
                "bands": {f"{side} {stage}": plain(of) for (side, stage), of in bands.items()},
                **extreme.numbers(),
            },
        )

    @property
    def _ranked_apart(self) -> bool:
        return self.target.needle.ranked_on == "prompt"

    def _in_the_prompt(self, side: Side) -> dict[str, Array]:
        """Scores of all heads in the text that has the needle."""
        found: list[MatrixEntropy] = []
        layout = self.target.model.layout
        capture(
            self.target.model,
            prompt_of(self.target).ids[:1],
            lambda heads: found.append(matrix_entropy_of(heads, side, ATTENDING, layout)),
        )
        return _scores(found)

    def _band_maps(self, bands: Mapping[At, Array]) -> Picture:
        means = {at: mean_over_heads(values) for at, values in bands.items()}
        return Picture(
            "band_entropy",
            heat_maps(
                {f"{SIDES[side]}, {STAGES[stage]}": of for (side, stage), of in means.items()},
                Scale("entropy (nats)", 0, math.log(2)),
                x=self.target.pair_axis,
                y="layer",
            ),
            "Entropy of every band (nats, at most log 2 = 0.69), mean over the heads of a layer."
            + (
                " The rotation spreads fast pairs over all directions; those that stay dark turn "
                "too little in this text."
                if self.target.rotates
                else ""
            ),
            ("side", "stage", "layer", "pair", "mean_over_heads"),
            [(*at, *i, float(v)) for at, of in means.items() for i, v in np.ndenumerate(of)],
        )

    def _findings(
        self, scores: Mapping[At, Mapping[str, Array]], bands: Mapping[At, Array]
    ) -> list[str]:
        size, found = self.target.model.config.head_size, []
        for side, kind in SIDES.items():
            ranks = (
                f"{scores[side, stage][ALL].mean():.1f} {name}"
                for stage, name in self.stages.items()
            )
            found.append(f"Mean effective rank of {kind}: {', '.join(ranks)}, of {size} channels.")
        for side, kind in SIDES.items():
            of = bands[side, ATTENDING]
            turns = self._turns(of.shape)
            slow, fast = (turns > 0) & (turns < 1), turns >= 1
            if slow.any() and fast.any():
                found.append(
                    f"Bands of {kind} that turn less than once in the training length have a mean "
                    f"entropy of {of[slow].mean():.2f} nats as they attend, faster ones "
                    f"{of[fast].mean():.2f}."
                )
        return found

    def _turns(self, shape: tuple[int, ...]) -> Array:
        """How often every pair turns in the training length, ``[layers, heads, pairs]``; NaN where
        there is no rotation."""
        turns = np.full(shape, np.nan)
        layout = self.target.model.layout.at(self.target.length)
        for layer, encoding in enumerate(layout.layers):
            for head in range(shape[1]):
                spectrum = encoding.spectra[head * len(encoding.spectra) // shape[1]]
                inv_freq = np.array(spectrum.inv_freq)
                turns[layer, head, : len(inv_freq)] = inv_freq
        return turns * self.target.training_length / (2 * math.pi)


def _scores(layers: list[MatrixEntropy]) -> dict[str, Array]:
    """``[layers, heads]`` by name: the mean over bands, and the effective ranks."""
    found = {BANDS: torch.stack([one.band_mean for one in layers])}
    for r in (*(r for r in RANKS if r < layers[0].eigenvalues.shape[-1]), None):
        name = ALL if r is None else f"{ALL}, r = {r}"
        found[name] = torch.stack([one.effective_rank(r) for one in layers])
    return {name: values.cpu().numpy() for name, values in found.items()}


def _head_maps(scores: Mapping[At, Mapping[str, Array]], shown: list[str]) -> Picture:
    units = {BANDS: Scale("nats")}
    panels = {(side, name): scores[side, ATTENDING][name] for name in shown for side in SIDES}
    names = list(scores["query", ATTENDING])
    return Picture(
        "head_entropy",
        heat_maps(
            {f"{name} of {SIDES[side]}": of for (side, name), of in panels.items()},
            [units.get(name, Scale("rank")) for _, name in panels],
            x="head",
            y="layer",
        ),
        "Matrix entropy of every head as it attends: the mean over its bands (nats) and its "
        "truncated effective rank, each panel with its own colours. Dark: low entropy. The file "
        "has every rank and every stage.",
        ("side", "stage", "layer", "head", *(re.sub(r"\W+", "_", name) for name in names)),
        [
            (*at, *place, *(float(found[name][place]) for name in names))
            for at, found in scores.items()
            for place in np.ndindex(found[BANDS].shape)
        ],
    )


def _ranks(scores: Mapping[At, Mapping[str, Array]]) -> Picture:
    means = {
        name: of.mean(axis=1) for name, of in scores["query", ATTENDING].items() if name != BANDS
    }
    labels = {name: name.removeprefix(f"{ALL}, ") if name != ALL else "all" for name in means}
    return Picture(
        "effective_rank",
        curves(
            {labels[k]: (list(range(len(v))), v.tolist()) for k, v in means.items()},
            x="layer",
            y="effective rank of queries",
        ),
        "Truncated effective rank of the queries as they attend, mean over the heads of a layer. "
        "The smaller r, the fewer directions decide; r = 1 is 1 over the share of the largest in "
        "all, and may lie above r = 4.",
        ("layer", *(labels[name] for name in means)),
        [(i, *map(float, row)) for i, row in enumerate(zip(*means.values(), strict=True))],
    )


def _ranking(scores: Mapping[At, Mapping[str, Array]]) -> Grid:
    def listed(of: Array, places: list[tuple[int, int]]) -> str:
        return ", ".join(f"L{i}H{j} ({of[i, j]:.2f})" for i, j in places)

    return Grid(
        f"The {LISTED} heads of lowest and of highest entropy as they attend, by each measure "
        "(layer, head, and its value: nats for band entropy, else the effective rank).",
        ("by", "measure", "lowest", "highest"),
        [
            (SIDES[side], name, listed(of, order[:LISTED]), listed(of, order[: -LISTED - 1 : -1]))
            for side in SIDES
            for name, of in scores[side, ATTENDING].items()
            for order in [ranked(of)]
        ],
    )
