"""Attention of the heads of lowest and of highest matrix entropy on a needle (DoPE, Sec. 5.4 and
5.5, Fig. 2 to 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainer.analysis.arrays import Array, Place, ranked, to_json
from trainer.analysis.capture import NeedlePrompt
from trainer.analysis.matrix_entropy.measure import copy_prompt, needle_view
from trainer.analysis.sinks import MAP_HEADER, draw_attention_maps
from trainer.analysis.studies.section import Picture, long_rows
from trainer.analysis.studies.study import Target
from trainer.common.words import counted
from trainer.plotting.lines import curves, spans
from trainer.plotting.maps import Scale, heat_maps

HEADS, CELLS, POINTS = 16, 128, 2048


def prompt_of(target: Target) -> NeedlePrompt:
    """Return the prompt that heads are shown with: the question, or a copy of the text's end."""
    return target.question or copy_prompt(target.ids)


@dataclass(frozen=True)
class Group:
    """The heads at one end of a measure, in order from that end.

    ``measure``: its name on the page.
    """

    end: Literal["lowest", "highest"]
    measure: str
    places: list[Place]

    @property
    def title(self) -> str:
        """Name of the group, as in ``lowest band entropy``."""
        return f"{self.end} {self.measure}"

    def mean(self, values: Array) -> Array:
        """Average ``[layers, heads, ...]`` over the heads."""
        return np.mean([values[place] for place in self.places], axis=0)


class ExtremeHeads:
    """The lowest and the highest query heads by each of ``scores`` (``[layers, heads]`` by name of
    the measure), at most a quarter of all heads, on the target's needle prompt.

    Maps show the target's chosen heads, or the first of every group.
    """

    def __init__(self, target: Target, scores: Mapping[str, Array]) -> None:
        self.groups: list[Group] = []
        for measure, values in scores.items():
            order = ranked(values)
            count = max(1, min(HEADS, len(order) // 4))
            self.groups += [
                Group("lowest", measure, order[:count]),
                Group("highest", measure, order[: -count - 1 : -1]),
            ]
        self.length = target.length
        self.shown: dict[Place, str] = {(i, j): f"L{i}H{j}" for i, j in target.chosen}
        if not self.shown:
            for group in self.groups:
                i, j = group.places[0]
                self.shown.setdefault((i, j), f"L{i}H{j}: {group.title}")
        if target.question is not None:
            self.needle = "a statement in it and a question for it at its end"
            self.queries = "tokens of the question"
        else:
            self.needle = "its last tokens written near its beginning as well"
            self.queries = "last queries"
        self.prompt = prompt_of(target)
        self.view = needle_view(target.model, self.prompt, self.shown)
        # Sums over the needle, [layers, query heads].
        self.on_needle, self.last_on_needle = (
            attention[..., self.prompt.needle].sum(axis=-1)
            for attention in (self.view.attention, self.view.last)
        )

    def findings(self) -> list[str]:
        """Report how the groups overlap, and how much they attend to the needle."""
        prompt, first = self.prompt, self.view.attention[..., 0]
        first_low, second_low = (group for group in self.groups if group.end == "lowest")
        count, shared = len(first_low.places), {*first_low.places} & {*second_low.places}
        needle, last = self.on_needle, self.last_on_needle
        tokens, T = prompt.needle.stop - prompt.needle.start, self.length
        even = np.mean([tokens / keys for keys in range(T - prompt.question + 1, T + 1)])
        overlap = (
            f"Of the {count} query heads of {first_low.title}, {len(shared)} are also among "
            f"the {len(second_low.places)} of {second_low.title}."
        )
        return [
            *([overlap] if count > 1 else []),
            f"The {prompt.question} {self.queries} put {needle.mean():.1%} of their attention on "
            f"the needle ({tokens} tokens) and {first.mean():.1%} on the first token, mean over "
            f"all heads; spread evenly, {even:.1%} would be on the needle.",
            *(
                f"For {group.title} ({len(group.places)} of the heads) these are "
                f"{group.mean(needle):.1%} and {group.mean(first):.1%}."
                for group in self.groups
            ),
            f"Of the last token alone, {last.mean():.1%} are on the needle; "
            + "; ".join(f"{group.mean(last):.1%} for {group.title}" for group in self.groups)
            + ".",
        ]

    def numbers(self) -> dict[str, Any]:
        """Return numbers of every head for JSON."""
        return {
            "attention_on_needle": to_json(self.on_needle),
            "attention_on_first_token": to_json(self.view.attention[..., 0]),
            "last_token_on_needle": to_json(self.last_on_needle),
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
        by_group = {"all heads": attention.mean(axis=(0, 1))}
        by_group |= {group.title: group.mean(attention) for group in self.groups}
        means = {name: np.add.reduceat(mean, starts) / widths for name, mean in by_group.items()}
        middles = (starts + widths / 2).tolist()
        needle = (self.prompt.needle.start + self.prompt.needle.stop) / 2
        return Picture(
            name="needle_attention",
            figure=curves(
                {name: (middles, mean.tolist()) for name, mean in means.items()},
                x="position of the key (tokens)",
                y="mean attention a key",
                log_y=True,
                marked=False,
                vertical=(needle, "needle"),
            ),
            caption=(
                f"Attention of the {self.prompt.question} {self.queries} by the key's position, "
                f"mean over the heads of a group and over {counted(int(widths[0]), 'key')} "
                "(logarithmic). The first point holds the first token; a peak at the needle that "
                "stands out from the others is retrieval."
            ),
            header=("group", "from_token", "mean_attention"),
            rows=long_rows({(name,): mean for name, mean in means.items()}, places=starts.tolist()),
        )

    def _heads(self) -> Picture:
        """Draw the attention of single heads by the key's position."""
        starts, widths = self._buckets(POINTS)
        panels = {
            (*place, kind): np.add.reduceat(attention[place], starts) / widths
            for place in self.shown
            for kind, attention in (("average", self.view.average), ("last token", self.view.last))
        }
        needle = self.prompt.needle
        return Picture(
            name="needle_heads",
            figure=spans(
                {
                    f"{self.shown[layer, head]}\n{kind}": values.tolist()
                    for (layer, head, kind), values in panels.items()
                },
                starts.tolist(),
                marked=(needle.start, needle.stop),
                x="position of the key (tokens)",
                y="attention weight",
            ),
            caption=(
                "Attention of single heads by the key's position (each panel with its own scale): "
                "the mean over all queries, where a query counts as 0 for keys after it, and the "
                "attention of the last token alone. Dashed, and shaded: the needle, from token "
                f"{needle.start:,} to {needle.stop - 1:,}."
            ),
            header=("layer", "head", "of", "from_token", "mean_attention"),
            rows=long_rows(panels, places=starts.tolist()),
        )

    def _maps(self) -> Picture:
        """Draw attention maps of single heads."""
        maps = {place: self.view.maps[place] for place in self.shown}
        step = -(-self.length // len(next(iter(maps.values()))))
        figure, rows = draw_attention_maps(
            maps, list(self.shown.values()), step, low=1e-5, height=2.6
        )
        return Picture(
            name="attention_maps",
            figure=figure,
            caption=(
                f"Attention of single heads (cells of {step} × {step} tokens, logarithmic "
                "colour). A bright column is a token that all later ones attend to; the needle is "
                f"at {self.prompt.needle.start:,}."
            ),
            header=MAP_HEADER,
            rows=rows,
        )

    def _directions(self) -> Picture:
        """Draw cosines of the last queries with the directions of all queries."""
        start = self.length - self.prompt.question
        cosines = {place: self.view.similarity[place] for place in self.shown}
        return Picture(
            name="query_directions",
            figure=heat_maps(
                {self.shown[place]: values for place, values in cosines.items()},
                Scale("cosine similarity", -1, 1, signed=True),
                x="eigenvector of the head's queries, from the largest eigenvalue on",
                y=f"token, from {start:,} on",
            ),
            caption=(
                "Cosine similarity of the last queries with the eigenvectors of the Gram matrix of "
                "their head. Colour in the first columns alone: a head that uses few directions; "
                "stripes down a column are periods."
            ),
            header=("layer", "head", "token", "eigenvector", "cosine"),
            rows=[
                (layer, head, start + token, *direction)
                for layer, head, token, *direction in long_rows(cosines)
            ],
        )
