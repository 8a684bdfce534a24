"""The section on matrix entropy: which heads have low rank, by which measure, and where they attend
(DoPE, Sec. 4.3 and 5.4, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from trainer.analysis.arrays import Array, Side, mean_over_heads, stack_layers, to_json
from trainer.analysis.capture import Heads, NeedlePrompt, capture
from trainer.analysis.matrix_entropy.measure import (
    MatrixEntropy,
    NeedleView,
    Stage,
    copy_prompt,
    matrix_entropy_of,
    needle_view,
)
from trainer.analysis.studies.section import Grid, Picture, Section
from trainer.analysis.studies.study import Study, Target
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
        scores = {at: _scores(layers) for at, layers in self._entropies.items()}
        bands = {
            at: stack_layers([one.bands for one in layers])
            for at, layers in self._entropies.items()
        }
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
                    f"{side} {stage}": {name: to_json(of) for name, of in by_name.items()}
                    for (side, stage), by_name in scores.items()
                },
                "bands": {f"{side} {stage}": to_json(of) for (side, stage), of in bands.items()},
                **extreme.numbers(),
            },
        )

    @property
    def _ranked_apart(self) -> bool:
        return self.target.needle.ranked_on == "prompt"

    def _in_the_prompt(self, side: Side) -> dict[str, Array]:
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
            of = bands[side, ATTENDING]
            turns = self._turns(of.shape)
            slow, fast = (turns > 0) & (turns < 1), turns >= 1
            if slow.any() and fast.any():
                findings.append(
                    f"Bands of {kind} that turn less than once in the training length have a mean "
                    f"entropy of {of[slow].mean():.2f} nats as they attend, faster ones "
                    f"{of[fast].mean():.2f}."
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


def _scores(layers: list[MatrixEntropy]) -> dict[str, Array]:
    """Return ``[layers, heads]`` by name: the mean over bands, and the effective ranks."""
    scores = {BANDS: torch.stack([one.band_mean for one in layers])}
    for r in (*(r for r in RANKS if r < layers[0].eigenvalues.shape[-1]), None):
        name = ALL if r is None else f"{ALL}, r = {r}"
        scores[name] = torch.stack([one.effective_rank(r) for one in layers])
    return {name: values.cpu().numpy() for name, values in scores.items()}


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
            (*at, *place, *(float(by_name[name][place]) for name in names))
            for at, by_name in scores.items()
            for place in np.ndindex(by_name[BANDS].shape)
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


HEADS, CELLS, POINTS = 16, 128, 2048
AVERAGE, LAST = "average", "last token"
ALL_HEADS = "all heads"
Place = tuple[int, int]


def ranked(scores: Array) -> list[Place]:
    """Return (layer, head) of ``[layers, heads]`` in ascending order of scores."""
    order = np.argsort(scores, axis=None, kind="stable")
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, scores.shape), strict=True)]


def prompt_of(target: Target) -> NeedlePrompt:
    """Return the prompt that heads are shown with: the question, or a copy of the text's end."""
    return target.question or copy_prompt(target.ids)


class ExtremeHeads:
    """The lowest and the highest query heads by each of ``scores`` (``[layers, heads]`` by name),
    at most a quarter of all heads, on the target's needle prompt.

    Maps show the target's chosen heads, or the first of every group.
    """

    def __init__(self, target: Target, scores: Mapping[str, Array]) -> None:
        self.groups: dict[str, list[Place]] = {}
        for name, of in scores.items():
            order = ranked(of)
            count = max(1, min(HEADS, len(order) // 4))
            self.groups[f"lowest {name}"] = order[:count]
            self.groups[f"highest {name}"] = order[: -count - 1 : -1]
        self.length = target.length
        self.shown: dict[Place, str] = {(i, j): f"L{i}H{j}" for i, j in target.chosen}
        if not self.shown:
            for name, ((i, j), *_) in self.groups.items():
                self.shown.setdefault((i, j), f"L{i}H{j}: {name}")
        asked = target.question is not None
        self.what, self.looking = (
            ("a statement in it and a question for it at its end", "tokens of the question")
            if asked
            else ("its last tokens written near its beginning as well", "last queries")
        )
        prompt = prompt_of(target)
        self.view: NeedleView = needle_view(target.model, prompt, self.shown)

    def findings(self) -> list[str]:
        """Report how the groups overlap and where their attention is."""
        names, view = list(self.groups), self.view
        low, other = (self.groups[names[i]] for i in (0, 2))
        needle, first = view.on_needle(), view.attention[..., 0]
        last = view.last[..., view.needle].sum(axis=-1)
        tokens, T = view.needle.stop - view.needle.start, self.length
        even = np.mean([tokens / keys for keys in range(T - view.queries + 1, T + 1)])
        overlap = (
            f"Of the {len(low)} query heads of {names[0]}, {len({*low} & {*other})} are also among "
            f"the {len(other)} of {names[2]}."
        )
        return [
            *([overlap] if len(low) > 1 else []),
            f"The {view.queries} {self.looking} put {needle.mean():.1%} of their attention on the "
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
            "last_token_on_needle": to_json(self.view.last[..., self.view.needle].sum(axis=-1)),
        }

    def pictures(self) -> list[Picture]:
        """Draw attention by position, attention maps, and directions."""
        return [self._attention(), self._heads(), self._maps(), self._directions()]

    def _attention(self) -> Picture:
        step = -(-self.length // CELLS)
        starts = np.arange(0, self.length, step)
        widths = np.diff([*starts, self.length])
        of_groups = {ALL_HEADS: self.view.attention.mean(axis=(0, 1))} | {
            name: _mean(self.view.attention, places) for name, places in self.groups.items()
        }
        means = {k: np.add.reduceat(v, starts) / widths for k, v in of_groups.items()}
        middle = (self.view.needle.start + self.view.needle.stop) / 2
        return Picture(
            "needle_attention",
            curves(
                {k: ((starts + widths / 2).tolist(), v.tolist()) for k, v in means.items()},
                x="position of the key (tokens)",
                y="mean attention a key",
                log_y=True,
                marked=False,
                vertical=(middle, "needle"),
            ),
            f"Attention of the {self.view.queries} {self.looking} by the key's position, mean over "
            f"the heads of a group and over {step} keys (logarithmic). The first point holds the "
            "first token; a peak at the needle that stands out from the rest is retrieval.",
            ("group", "from_token", "mean_attention"),
            [
                (name, int(start), float(value))
                for name, of in means.items()
                for start, value in zip(starts, of, strict=True)
            ],
        )

    def _heads(self) -> Picture:
        step = -(-self.length // POINTS)
        starts = np.arange(0, self.length, step)
        widths = np.diff([*starts, self.length])
        panels = {}
        for at, title in self.shown.items():
            for kind, of in ((AVERAGE, self.view.average[at]), (LAST, self.view.last[at])):
                panels[at, kind, title] = np.add.reduceat(of, starts) / widths
        needle = self.view.needle
        return Picture(
            "needle_heads",
            spans(
                {f"{title}\n{kind}": of.tolist() for (_, kind, title), of in panels.items()},
                starts.tolist(),
                marked=(needle.start, needle.stop),
                x="position of the key (tokens)",
                y="attention weight",
            ),
            "Attention of single heads by the key's position (each panel with its own scale): the "
            "mean over all queries, of which one gives nothing to what is behind it, and that of "
            "the last token alone. Dashed, and shaded: the needle, from token "
            f"{needle.start:,} to {needle.stop - 1:,}.",
            ("layer", "head", "of", "from_token", "mean_attention"),
            [
                (*at, kind, int(start), float(value))
                for (at, kind, _), of in panels.items()
                for start, value in zip(starts, of, strict=True)
            ],
        )

    def _maps(self) -> Picture:
        maps = {at: self.view.maps[at] for at in self.shown}
        step = -(-self.length // len(next(iter(maps.values()))))
        causal = {at: np.where(of > 0, of, np.nan) for at, of in maps.items()}
        return Picture(
            "attention_maps",
            heat_maps(
                {title: causal[at] for at, title in self.shown.items()},
                Scale("attention of a query on a cell", low=1e-5, high=1, log=True),
                x="key (tokens)",
                y="query (tokens)",
                cell=(step, step),
                height=2.6,
            ),
            f"Attention of single heads (cells of {step} × {step} tokens, logarithmic "
            "colour). A bright column is a token that all later ones attend to; the needle is "
            f"at {self.view.needle.start:,}.",
            ("layer", "head", "from_query", "from_key", "attention"),
            [
                (*at, i * step, j * step, float(of[i, j]))
                for at, of in maps.items()
                for i, j in zip(*np.tril_indices(len(of)), strict=True)
            ],
        )

    def _directions(self) -> Picture:
        start = self.length - self.view.queries
        return Picture(
            "query_directions",
            heat_maps(
                {title: self.view.similarity[at] for at, title in self.shown.items()},
                Scale("cosine similarity", -1, 1, signed=True),
                x="eigenvector of the head's queries, from the largest eigenvalue on",
                y=f"token, from {start:,} on",
            ),
            "Cosine similarity of the last queries with the eigenvectors of the Gram matrix of "
            "their head. Colour in the first columns alone: a head that uses few directions; "
            "stripes down a column are periods.",
            ("layer", "head", "token", "eigenvector", "cosine"),
            [
                (*at, start + i, j, float(value))
                for at in self.shown
                for (i, j), value in np.ndenumerate(self.view.similarity[at])
            ],
        )


def _mean(values: Array, places: list[Place]) -> Array:
    return np.mean([values[place] for place in places], axis=0)
