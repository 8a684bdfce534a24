"""Matrix entropy of every head, and attention of the extreme heads on a needle (DoPE, Sec. 4.3, 5.4
and 5.5, Fig. 2 to 6, Table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes

from trainer.analysis.attention import SIDES, Array, Heads, Place, Side, capture, stack_layers
from trainer.analysis.matrix_entropy import (
    MatrixEntropy,
    NeedleView,
    Stage,
    copy_prompt,
    matrix_entropy_of,
    needle_view,
)
from trainer.analysis.sinks import map_figure
from trainer.analysis.topic import Target, Topic, tidy
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, draw
from trainer.plotting.style import Plot

RANKS = (1, 4, 8, 16, 32)
SHOWN = 16
"""Rank of the maps and of the ranking, if a head has more channels."""
STAGES: dict[Stage, str] = {"pre_ntk": "before the rotation", "post_ntk": "as they attend"}
POINTS = 2048
Scores = dict[str, Array]
"""Band entropy and effective ranks by name, ``[layers, heads]``."""
Key = tuple[Side, Stage]


def scores_of(layers: Sequence[MatrixEntropy]) -> Scores:
    """Return the mean entropy of every head's bands, and the effective rank of its r largest
    eigenvalues and of all."""
    channels = layers[0].eigenvalues.shape[-1]
    scores = {"band entropy": [layer.band_mean for layer in layers]}
    for r in (*(r for r in RANKS if r < channels), None):
        name = "effective rank" if r is None else f"effective rank, r = {r}"
        scores[name] = [layer.effective_rank(r) for layer in layers]
    return {name: torch.stack(values).cpu().numpy() for name, values in scores.items()}


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
        stages: list[Stage] = ["pre_ntk", "post_ntk"] if target.rotates else ["post_ntk"]
        self._entropies: dict[Key, list[MatrixEntropy]] = {
            (side, stage): [] for side in SIDES for stage in stages
        }
        self.scores: dict[Key, Scores] = {}
        self.bands: dict[Key, Array] = {}
        self.shown: dict[Place, str] = {}
        self.prompt = target.question or copy_prompt(target.ids)
        self.view: NeedleView

    def _on_layer(self, heads: Heads) -> None:
        """Compute matrix entropies of both sides at every stage."""
        for (side, stage), entropies in self._entropies.items():
            entropies.append(matrix_entropy_of(heads, side, stage, self.target.model.layout))

    def measure(self) -> None:
        """Rank the heads, and read the prompt with the needle."""
        capture(self.target.model, self.target.ids, self._on_layer)
        model, needle = self.target.model, self.target.config.needle
        self.scores = {at: scores_of(layers) for at, layers in self._entropies.items()}
        self.bands = {
            at: stack_layers([x.bands for x in layers]) for at, layers in self._entropies.items()
        }
        ranks = self.scores[needle.by, "post_ntk"]
        if needle.ranked_on == "prompt":
            entropies: list[MatrixEntropy] = []

            def on_layer(heads: Heads) -> None:
                entropies.append(matrix_entropy_of(heads, needle.by, "post_ntk", model.layout))

            capture(model, self.prompt.ids[:1], on_layer)
            ranks = scores_of(entropies)
        self.shown = {(i, j): f"L{i}H{j}" for i, j in self.target.config.chosen}
        for name in () if self.shown else self._measures:
            copies = model.config.num_attention_heads // ranks[name].shape[1]
            values = ranks[name].repeat(copies, axis=1)
            of_keys = " of keys" if needle.by == "key" else ""
            for end, index in (("lowest", values.argmin()), ("highest", values.argmax())):
                i, j = divmod(int(index), values.shape[1])
                self.shown.setdefault((i, j), f"L{i}H{j}: {end} {name}{of_keys}")
        self.view = needle_view(model, self.prompt, self.shown)

    @property
    def _measures(self) -> list[str]:
        """The two scores that are mapped and ranked."""
        rank = f"effective rank, r = {SHOWN}"
        known = rank in self.scores["query", "post_ntk"]
        return ["band entropy", rank if known else "effective rank"]

    def plots(self) -> list[Plot]:
        """Draw the entropies of heads, and the attention of the extreme heads."""
        maps = {
            f"{name} of {SIDES[side]}": self.scores[side, "post_ntk"][name]
            for name in self._measures
            for side in SIDES
        }
        units = [Scale("nats" if title.startswith("band") else "rank") for title in maps]
        caption = (
            "Matrix entropy of every head as it attends: mean over its bands, and truncated "
            "effective rank (DoPE, Eq. 26, 30)."
        )
        return [
            Plot("head_entropy", heat_maps(maps, units, x="head", y="layer"), caption),
            *self._needle_plots(),
        ]

    def rows(self) -> pd.DataFrame:
        """Return entropies of heads and pairs, and attention on the needle."""
        tables = []
        for (side, stage), scores in self.scores.items():
            at = f"{SIDES[side]}, {STAGES[stage]}"
            tables.append(tidy(scores, "layer", "head", variant=at))
            bands = {"band entropy of a pair": self.bands[side, stage]}
            tables.append(tidy(bands, "layer", "head", "pair", variant=at))
        needle = self.prompt.needle
        numbers = {
            "attention_on_needle": self.view.attention[..., needle].sum(axis=-1),
            "attention_on_first_token": self.view.attention[..., 0],
            "last_token_on_needle": self.view.last[..., needle].sum(axis=-1),
        }
        return pd.concat([*tables, tidy(numbers, "layer", "head", variant="needle prompt")])

    def _needle_plots(self) -> list[Plot]:
        """Draw the attention of single heads by position, maps, and directions."""
        view, shown, needle = self.view, self.shown, self.prompt.needle
        T = self.prompt.ids.shape[1]
        mark = ((needle.start + needle.stop) / 2, "needle")
        # Means within at most so many buckets of positions.
        starts = np.arange(0, T, -(-T // POINTS))
        widths, panels = np.diff([*starts, T]), []
        for place, title in shown.items():
            kinds = {"average": view.average[place], "last token": view.last[place]}
            for kind, attention in kinds.items():
                values = (np.add.reduceat(attention, starts) / widths).tolist()
                line = Line("", 1, starts.tolist(), values, marked=False)
                name = f"{title}\n{kind}"
                panels.append(Panel(name, [line], prepare=_from_zero, vertical=mark))
        step = -(-T // len(next(iter(view.maps.values()))))
        return [
            Plot(
                "needle_heads",
                draw(panels, columns=2, height=1.7, x="position of the key (tokens)"),
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
                    {title: view.similarity[place] for place, title in shown.items()},
                    Scale("cosine similarity", -1, 1, signed=True),
                    x="eigenvector of the head's queries, from the largest eigenvalue on",
                    y=f"token, from {T - self.prompt.question:,} on",
                ),
                "Cosines of the last queries with the eigenvectors of their head's Gram matrix "
                "(DoPE, Fig. 3-6).",
            ),
        ]


def _from_zero(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
