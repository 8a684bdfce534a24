"""Matrix entropy of every head, and attention of the extreme heads on a needle (DoPE, Sec. 4.3, 5.4
and 5.5, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.arrays import SIDES, Array, Place, Side, stack_layers
from trainer.analysis.capture import Heads, capture
from trainer.analysis.matrix_entropy import (
    MatrixEntropy,
    NeedleView,
    Stage,
    copy_prompt,
    matrix_entropy_of,
    needle_view,
)
from trainer.analysis.sinks import map_figure
from trainer.analysis.topic import Plot, Target, Topic, tidy
from trainer.plotting.lines import Frame, Panel, Series, side_by_side
from trainer.plotting.maps import Scale, heat_maps

RANKS = (1, 4, 8, 16, 32)
SHOWN = 16
"""Rank of the maps and of the ranking, if a head has more channels."""
STAGES: dict[Stage, str] = {"pre_ntk": "before the rotation", "post_ntk": "as they attend"}
ATTENDING: Stage = "post_ntk"
POINTS = 2048
Measure = Literal["bands", "all"] | int
"""The mean entropy of a head's bands, or the effective rank of all or of the r largest
eigenvalues."""
Scores = dict[Measure, Array]
"""``[layers, heads]`` by measure."""


class MatrixEntropyFigures(Topic):
    """Band entropies and truncated effective ranks of every head, and its attention on a needle.

    The model is read with one layout, so the two stages after the rotation are equal.

    ``scores`` and ``bands``: entropies of heads and of pairs ``[layers, heads, pairs]`` by side and
    stage. ``shown``: titles of the heads that are shown.
    """

    key = "matrix_entropy"
    title = "Matrix entropy"
    shortest = 16  # room for a needle

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        # Without a rotation both stages are equal.
        stages = STAGES if target.rotates else {ATTENDING: STAGES[ATTENDING]}
        self._entropies: dict[tuple[Side, Stage], list[MatrixEntropy]] = {
            (side, stage): [] for side in SIDES for stage in stages
        }
        self.scores: dict[tuple[Side, Stage], Scores] = {}
        self.bands: dict[tuple[Side, Stage], Array] = {}
        self.shown: dict[Place, str] = {}
        self._measures: list[Measure] = []
        self.prompt = target.question or copy_prompt(target.ids)
        self.view: NeedleView | None = None

    def on_layer(self, heads: Heads) -> None:
        """Compute matrix entropies of both sides at every stage."""
        for (side, stage), entropies in self._entropies.items():
            entropies.append(matrix_entropy_of(heads, side, stage, self.target.model.layout))

    def finish(self) -> None:
        """Rank the heads, and read the prompt with the needle."""
        entropies = self._entropies.items()
        self.scores = {at: _scores(layers) for at, layers in entropies}
        self.bands = {at: stack_layers([x.bands for x in layers]) for at, layers in entropies}
        attending = self.scores["query", ATTENDING]
        self._measures = ["bands", SHOWN if SHOWN in attending else "all"]
        needle = self.target.needle
        ranks = self.scores[needle.by, ATTENDING]
        if needle.ranked_on == "prompt":
            ranks = self._in_the_prompt(needle.by)
        copies = self.target.model.config.num_attention_heads // len(ranks["all"][0])
        of_keys = " of keys" if needle.by == "key" else ""
        ranking = {label(m) + of_keys: ranks[m].repeat(copies, axis=1) for m in self._measures}
        self.shown = {(i, j): f"L{i}H{j}" for i, j in self.target.chosen}
        if not self.shown:
            for name, values in ranking.items():
                for end, index in (("lowest", values.argmin()), ("highest", values.argmax())):
                    i, j = divmod(int(index), values.shape[1])
                    self.shown.setdefault((i, j), f"L{i}H{j}: {end} {name}")
        self.view = needle_view(self.target.model, self.prompt, self.shown)

    def plots(self) -> list[Plot]:
        """Draw entropies of heads and pairs, and the attention of the extreme heads."""
        panels = {
            (m, side): self.scores[side, ATTENDING][m] for m in self._measures for side in SIDES
        }
        means = {
            f"{SIDES[side]}, {STAGES[stage]}": np.ma.masked_invalid(values)
            .mean(axis=1)
            .filled(np.nan)
            for (side, stage), values in self.bands.items()
        }
        return [
            Plot(
                "head_entropy",
                heat_maps(
                    {f"{label(m)} of {SIDES[side]}": v for (m, side), v in panels.items()},
                    [Scale("nats" if m == "bands" else "rank") for m, _ in panels],
                    x="head",
                    y="layer",
                ),
                "Matrix entropy of every head as it attends: mean over its bands, and truncated "
                "effective rank (DoPE, Eq. 26, 30).",
            ),
            Plot(
                "band_entropy",
                heat_maps(
                    means,
                    Scale("entropy (nats)", 0, math.log(2)),
                    x="pair index, from the fastest on",
                    y="layer",
                ),
                "Entropy of every band, mean over the heads of a layer (DoPE, Eq. 25).",
            ),
            *self._needle_plots(),
        ]

    def rows(self) -> pd.DataFrame:
        """Return entropies of heads and pairs, and attention on the needle."""
        assert self.view is not None
        tables = []
        for (side, stage), scores in self.scores.items():
            at = f"{SIDES[side]}, {STAGES[stage]}"
            named = {label(m): values for m, values in scores.items()}
            tables.append(tidy(named, "layer", "head", variant=at))
            bands = {"band entropy of a pair": self.bands[side, stage]}
            tables.append(tidy(bands, "layer", "head", "pair", variant=at))
        numbers = {
            "attention_on_needle": self._on_needle(self.view.attention),
            "attention_on_first_token": self.view.attention[..., 0],
            "last_token_on_needle": self._on_needle(self.view.last),
        }
        tables.append(tidy(numbers, "layer", "head", variant="needle prompt"))
        return pd.concat(tables)

    def _on_needle(self, attention: Array) -> Array:
        total: Array = attention[..., self.prompt.needle].sum(axis=-1)
        return total

    def _in_the_prompt(self, side: Side) -> Scores:
        """Compute scores of all heads in the text with the needle."""
        entropies: list[MatrixEntropy] = []
        layout = self.target.model.layout
        capture(
            self.target.model,
            self.prompt.ids[:1],
            lambda heads: entropies.append(matrix_entropy_of(heads, side, ATTENDING, layout)),
        )
        return _scores(entropies)

    def _needle_plots(self) -> list[Plot]:
        """Draw the attention of single heads by position, maps, and directions."""
        assert self.view is not None
        view, shown = self.view, self.shown
        T, needle = self.target.length, self.prompt.needle
        mark = ((needle.start + needle.stop) / 2, "needle")
        position = "position of the key (tokens)"
        starts, widths = _buckets(T, POINTS)
        single = [
            Panel(
                f"{title}\n{kind}",
                [Series("", 1, starts.tolist(), values.tolist(), marked=False)],
                Frame("", "", _from_zero, mark),
            )
            for place, title in shown.items()
            for kind, attention in (
                ("average", view.average[place]),
                ("last token", view.last[place]),
            )
            for values in [np.add.reduceat(attention, starts) / widths]
        ]
        step = -(-T // len(next(iter(view.maps.values()))))
        cosines = {title: view.similarity[place] for place, title in shown.items()}
        return [
            Plot(
                "needle_heads",
                side_by_side(single, columns=2, height=1.7, x_label=position),
                "Attention weight of single heads by the key's position, mean over all queries and "
                "of the last token (DoPE, Fig. 2).",
            ),
            Plot(
                "attention_maps",
                map_figure({shown[p]: view.maps[p] for p in shown}, step, 1e-5, height=2.6),
                f"Attention of single heads in cells of {step} × {step} tokens, logarithmic "
                f"colour; the needle is at {needle.start:,} (DoPE, Fig. 2).",
            ),
            Plot(
                "query_directions",
                heat_maps(
                    cosines,
                    Scale("cosine similarity", -1, 1, signed=True),
                    x="eigenvector of the head's queries, from the largest eigenvalue on",
                    y=f"token, from {T - self.prompt.question:,} on",
                ),
                "Cosines of the last queries with the eigenvectors of their head's Gram matrix "
                "(DoPE, Fig. 3-6).",
            ),
        ]


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


def _buckets(length: int, count: int) -> tuple[Array, Array]:
    """Return the starts and the widths of at most ``count`` buckets of positions."""
    starts = np.arange(0, length, -(-length // count))
    return starts, np.diff([*starts, length])


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
