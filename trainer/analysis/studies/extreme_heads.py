"""Attention and query directions of the heads of extreme matrix entropy (DoPE, Sec. 5.4
and 5.5, Fig. 2 to 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.analysis.averages import Array
from trainer.analysis.needle_prompt import NeedlePrompt
from trainer.analysis.needle_view import NeedleView, copied, needle_view
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.section import Picture
from trainer.analysis.studies.study import Target
from trainer.plotting.lines import curves, spans
from trainer.plotting.maps import Scale, heat_maps

HEADS, CELLS, POINTS = 16, 128, 2048
AVERAGE, LAST = "average", "last token"
ALL = "all heads"
Place = tuple[int, int]


def ranked(scores: Array) -> list[Place]:
    """(layer, head) of ``[layers, heads]``, from the lowest on."""
    order = np.argsort(scores, axis=None, kind="stable")
    return [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, scores.shape), strict=True)]


def prompt_of(target: Target) -> NeedlePrompt:
    """What heads are shown with: the question, or a copy of the text's end."""
    return target.question or copied(target.ids)


class ExtremeHeads:
    """The lowest and the highest query heads by each of ``scores`` (``[layers, heads]`` by name),
    at most a quarter of all, on the target's question for a needle, or on a text that ends with
    what it had near its beginning. Maps show the target's chosen heads, or the first of every
    group."""

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
        """Overlap of the groups, and where their attention is."""
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
        """For JSON: of every head."""
        return {
            "attention_on_needle": plain(self.view.on_needle()),
            "attention_on_first_token": plain(self.view.attention[..., 0]),
            "last_token_on_needle": plain(self.view.last[..., self.view.needle].sum(axis=-1)),
        }

    def pictures(self) -> list[Picture]:
        """Attention by position, attention maps, and directions."""
        return [self._attention(), self._heads(), self._maps(), self._directions()]

    def _attention(self) -> Picture:
        step = -(-self.length // CELLS)
        starts = np.arange(0, self.length, step)
        widths = np.diff([*starts, self.length])
        of_groups = {ALL: self.view.attention.mean(axis=(0, 1))} | {
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
