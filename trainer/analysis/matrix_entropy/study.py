"""The section on matrix entropy: which heads have low rank, by which measure, and where they attend
(DoPE, Sec. 4.3 and 5.4, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from trainer.analysis.arrays import (
    Array,
    Place,
    Side,
    mean_over_heads,
    ranked,
    stack_layers,
    to_json,
)
from trainer.analysis.capture import Heads, NeedlePrompt, capture
from trainer.analysis.matrix_entropy.measure import (
    MatrixEntropy,
    NeedleView,
    Stage,
    copy_prompt,
    matrix_entropy_of,
    needle_view,
)
from trainer.analysis.sinks import MAP_HEADER, draw_attention_maps
from trainer.analysis.studies.section import Grid, Picture, Section, long_rows, wide_rows
from trainer.analysis.studies.study import Study, Target
from trainer.common.words import counted
from trainer.plotting.lines import curves, spans
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
Scores = dict[str, Array]
"""``[layers, heads]`` by name: the mean over bands, and the effective ranks."""


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
        shown = [BANDS, SHOWN if SHOWN in scores["query", ATTENDING] else ALL]
        needle = self.target.needle
        ranked_apart = needle.ranked_on == "prompt"
        ranks = self._in_the_prompt(needle.by) if ranked_apart else scores[needle.by, ATTENDING]
        copies = self.target.model.config.num_attention_heads // len(ranks[ALL][0])
        ranking = {
            name + (" of keys" if needle.by == "key" else ""): ranks[name].repeat(copies, axis=1)
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
            f"{extreme.needle}: a needle for heads that retrieve."
            + (" The heads are ranked by their entropies in that text." if ranked_apart else ""),
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
                _ranks(scores["query", ATTENDING]),
                *extreme.pictures(),
            ),
            (_ranking(scores),),
            {
                "tokens": self.target.length,
                "heads": {
                    " ".join(version): {name: to_json(values) for name, values in by_name.items()}
                    for version, by_name in scores.items()
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
            "band_entropy",
            heat_maps(
                {f"{SIDES[side]}, {STAGES[stage]}": m for (side, stage), m in means.items()},
                Scale("entropy (nats)", 0, math.log(2)),
                x=self.target.pair_axis,
                y="layer",
            ),
            "Entropy of every band (nats, at most log 2 = 0.69), mean over the heads of a layer."
            + (
                " The rotation spreads fast pairs over all directions; pairs that stay dark turn "
                "too little in this text."
                if self.target.rotates
                else ""
            ),
            ("side", "stage", "layer", "pair", "mean_over_heads"),
            long_rows(means),
        )

    def _findings(self, scores: Mapping[At, Scores], bands: Mapping[At, Array]) -> list[str]:
        size, findings = self.target.model.config.head_size, []
        for side, kind in SIDES.items():
            ranks = (
                f"{scores[side, stage][ALL].mean():.1f} {name}"
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


def _scores(layers: list[MatrixEntropy]) -> Scores:
    scores = {BANDS: torch.stack([layer.band_mean for layer in layers])}
    for r in (*(r for r in RANKS if r < layers[0].eigenvalues.shape[-1]), None):
        name = ALL if r is None else f"{ALL}, r = {r}"
        scores[name] = torch.stack([layer.effective_rank(r) for layer in layers])
    return {name: values.cpu().numpy() for name, values in scores.items()}


def _head_maps(scores: Mapping[At, Scores], shown: list[str]) -> Picture:
    panels = {
        f"{name} of {title}": scores[side, ATTENDING][name]
        for name in shown
        for side, title in SIDES.items()
    }
    scales = [Scale("nats" if title.startswith(BANDS) else "rank") for title in panels]
    names = [re.sub(r"\W+", "_", name) for name in scores["query", ATTENDING]]
    return Picture(
        "head_entropy",
        heat_maps(panels, scales, x="head", y="layer"),
        "Matrix entropy of every head as it attends: the mean over its bands (nats) and its "
        "truncated effective rank, each panel with its own colours. Dark: low entropy. The file "
        "has every rank and every stage.",
        ("side", "stage", "layer", "head", *names),
        [
            (*version, *row)
            for version, by_name in scores.items()
            for row in wide_rows(list(by_name.values()))
        ],
    )


def _ranks(scores: Scores) -> Picture:
    means = {
        name.removeprefix(f"{ALL}, ") if name != ALL else "all": ranks.mean(axis=1)
        for name, ranks in scores.items()
        if name != BANDS
    }
    layers = range(len(scores[ALL]))
    return Picture(
        "effective_rank",
        curves(
            {label: (layers, mean.tolist()) for label, mean in means.items()},
            x="layer",
            y="effective rank of queries",
        ),
        "Truncated effective rank of the queries as they attend, mean over the heads of a layer. "
        "The smaller r, the fewer directions decide; r = 1 is 1 over the share of the largest "
        "eigenvalue in all, and may lie above r = 4.",
        ("layer", *means),
        wide_rows(list(means.values())),
    )


def _ranking(scores: Mapping[At, Scores]) -> Grid:
    def listed(values: Array, places: list[Place]) -> str:
        return ", ".join(f"L{i}H{j} ({values[i, j]:.2f})" for i, j in places)

    return Grid(
        f"The {LISTED} heads of lowest and of highest entropy as they attend, by each measure "
        "(layer, head, and its value: nats for band entropy, else the effective rank).",
        ("by", "measure", "lowest", "highest"),
        [
            (
                *(title, name),
                listed(values, ranked(values)[:LISTED]),
                listed(values, ranked(values)[: -LISTED - 1 : -1]),
            )
            for side, title in SIDES.items()
            for name, values in scores[side, ATTENDING].items()
        ],
    )


HEADS, CELLS, POINTS = 16, 128, 2048
AVERAGE, LAST = "average", "last token"
ALL_HEADS = "all heads"


def prompt_of(target: Target) -> NeedlePrompt:
    """Return the prompt that heads are shown with: the question, or a copy of the text's end."""
    return target.question or copy_prompt(target.ids)


class ExtremeHeads:
    """The lowest and the highest query heads by each of ``scores`` (``[layers, heads]`` by name),
    at most a quarter of all heads, on the target's needle prompt.

    Maps show the target's chosen heads, or the first of every group.
    """

    def __init__(self, target: Target, scores: Scores) -> None:
        self.groups: dict[str, list[Place]] = {}
        for name, values in scores.items():
            order = ranked(values)
            count = max(1, min(HEADS, len(order) // 4))
            self.groups[f"lowest {name}"] = order[:count]
            self.groups[f"highest {name}"] = order[: -count - 1 : -1]
        self.length = target.length
        self.shown: dict[Place, str] = {(i, j): f"L{i}H{j}" for i, j in target.chosen}
        if not self.shown:
            for name, ((i, j), *_) in self.groups.items():
                self.shown.setdefault((i, j), f"L{i}H{j}: {name}")
        self.needle, self.queries = (
            "its last tokens written near its beginning as well",
            "last queries",
        )
        if target.question is not None:
            self.needle = "a statement in it and a question for it at its end"
            self.queries = "tokens of the question"
        self.view: NeedleView = needle_view(target.model, prompt_of(target), self.shown)

    def _last_on_needle(self) -> Array:
        """Sum the attention of the last token over the needle, ``[layers, query heads]``."""
        return self.view.last[..., self.view.needle].sum(axis=-1)

    def findings(self) -> list[str]:
        """Report how the groups overlap, and how much they attend to the needle."""
        names, view = list(self.groups), self.view
        low, other = (self.groups[names[i]] for i in (0, 2))
        needle, first, last = view.on_needle(), view.attention[..., 0], self._last_on_needle()
        tokens, T = view.needle.stop - view.needle.start, self.length
        even = np.mean([tokens / keys for keys in range(T - view.queries + 1, T + 1)])
        overlap = (
            f"Of the {len(low)} query heads of {names[0]}, {len({*low} & {*other})} are also among "
            f"the {len(other)} of {names[2]}."
        )
        return [
            *([overlap] if len(low) > 1 else []),
            f"The {view.queries} {self.queries} put {needle.mean():.1%} of their attention on the "
            f"needle ({tokens} tokens) and {first.mean():.1%} on the first token, mean over all "
            f"heads; spread evenly, {even:.1%} would be on the needle.",
            *(
                f"For {name} ({len(places)} of the heads) these are {_mean(needle, places):.1%} "
                f"and {_mean(first, places):.1%}."
                for name, places in self.groups.items()
            ),
            f"Of the last token alone, {last.mean():.1%} are on the needle; "
            + "; ".join(f"{_mean(last, places):.1%} for {n}" for n, places in self.groups.items())
            + ".",
        ]

    def numbers(self) -> dict[str, Any]:
        """Return numbers of every head for JSON."""
        return {
            "attention_on_needle": to_json(self.view.on_needle()),
            "attention_on_first_token": to_json(self.view.attention[..., 0]),
            "last_token_on_needle": to_json(self._last_on_needle()),
        }

    def pictures(self) -> list[Picture]:
        """Draw attention by position, attention maps, and directions."""
        return [self._attention(), self._heads(), self._maps(), self._directions()]

    def _buckets(self, count: int) -> tuple[Array, Array]:
        """Return the starts and the widths of at most ``count`` buckets of positions."""
        starts = np.arange(0, self.length, -(-self.length // count))
        return starts, np.diff([*starts, self.length])

    def _attention(self) -> Picture:
        """Draw the attention of each group by the key's position."""
        starts, widths = self._buckets(CELLS)
        attention = self.view.attention
        groups = {ALL_HEADS: attention.mean(axis=(0, 1))}
        groups |= {name: _mean(attention, places) for name, places in self.groups.items()}
        means = {name: np.add.reduceat(mean, starts) / widths for name, mean in groups.items()}
        middles = (starts + widths / 2).tolist()
        needle = (self.view.needle.start + self.view.needle.stop) / 2
        return Picture(
            "needle_attention",
            curves(
                {name: (middles, mean.tolist()) for name, mean in means.items()},
                x="position of the key (tokens)",
                y="mean attention a key",
                log_y=True,
                marked=False,
                vertical=(needle, "needle"),
            ),
            f"Attention of the {self.view.queries} {self.queries} by the key's position, mean over "
            f"the heads of a group and over {counted(int(widths[0]), 'key')} (logarithmic). The "
            "first point holds the first token; a peak at the needle that stands out from the "
            "others is retrieval.",
            ("group", "from_token", "mean_attention"),
            long_rows({(name,): mean for name, mean in means.items()}, places=starts.tolist()),
        )

    def _heads(self) -> Picture:
        """Draw the attention of single heads by the key's position."""
        starts, widths = self._buckets(POINTS)
        panels = {
            (*place, kind): np.add.reduceat(attention[place], starts) / widths
            for place in self.shown
            for kind, attention in ((AVERAGE, self.view.average), (LAST, self.view.last))
        }
        titles = [f"{title}\n{kind}" for title in self.shown.values() for kind in (AVERAGE, LAST)]
        needle = self.view.needle
        return Picture(
            "needle_heads",
            spans(
                dict(zip(titles, (values.tolist() for values in panels.values()), strict=True)),
                starts.tolist(),
                marked=(needle.start, needle.stop),
                x="position of the key (tokens)",
                y="attention weight",
            ),
            "Attention of single heads by the key's position (each panel with its own scale): the "
            "mean over all queries, where a query counts as 0 for keys after it, and the attention "
            "of the last token alone. Dashed, and shaded: the needle, from token "
            f"{needle.start:,} to {needle.stop - 1:,}.",
            ("layer", "head", "of", "from_token", "mean_attention"),
            long_rows(panels, places=starts.tolist()),
        )

    def _maps(self) -> Picture:
        """Draw attention maps of single heads."""
        maps = {place: self.view.maps[place] for place in self.shown}
        step = -(-self.length // len(next(iter(maps.values()))))
        figure, rows = draw_attention_maps(
            maps, list(self.shown.values()), step, low=1e-5, height=2.6
        )
        return Picture(
            "attention_maps",
            figure,
            f"Attention of single heads (cells of {step} × {step} tokens, logarithmic "
            "colour). A bright column is a token that all later ones attend to; the needle is "
            f"at {self.view.needle.start:,}.",
            MAP_HEADER,
            rows,
        )

    def _directions(self) -> Picture:
        """Draw cosines of the last queries with the directions of all queries."""
        start = self.length - self.view.queries
        cosines = {place: self.view.similarity[place] for place in self.shown}
        return Picture(
            "query_directions",
            heat_maps(
                {self.shown[place]: values for place, values in cosines.items()},
                Scale("cosine similarity", -1, 1, signed=True),
                x="eigenvector of the head's queries, from the largest eigenvalue on",
                y=f"token, from {start:,} on",
            ),
            "Cosine similarity of the last queries with the eigenvectors of the Gram matrix of "
            "their head. Colour in the first columns alone: a head that uses few directions; "
            "stripes down a column are periods.",
            ("layer", "head", "token", "eigenvector", "cosine"),
            [
                (layer, head, start + token, *direction)
                for layer, head, token, *direction in long_rows(cosines)
            ],
        )


def _mean(values: Array, places: list[Place]) -> Array:
    return np.mean([values[place] for place in places], axis=0)
