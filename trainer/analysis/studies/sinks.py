"""The first token as a sink of attention, and what becomes of it in long texts (RoPE-ID Sec. 3.2,
App. A.2; Fig. 5, 6 and 9)."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch

from trainer.analysis.attention_rows import Rows, attention_rows
from trainer.analysis.averages import Array, Averages
from trainer.analysis.capture import Heads
from trainer.analysis.grids import bucket_means
from trainer.analysis.sinks import SinkResult, Sinks, attention_map
from trainer.analysis.studies.arrays import plain
from trainer.analysis.studies.section import Indicator, Section
from trainer.analysis.studies.sink_pictures import AttentionMap, SinkPictures, near
from trainer.analysis.studies.study import Study, Target
from trainer.analysis.studies.versions import versions

HALF, SINK = 0.5, 4
SHOWN, CELLS = 3, 128
OF_ROWS = ("previous", "entropy")


class SinksStudy(Study):
    """Norms of keys, attention on the first one, and the largest dot products, by position."""

    key: ClassVar[str] = "sinks"
    title: ClassVar[str] = "Attention sinks"
    shortest: ClassVar[int] = 8  # positions must be apart from the first

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.sinks = Sinks()
        self.versions = versions(target, scores=True)
        self._rows = Averages()
        self._maps: list[AttentionMap] = []
        self._learned: tuple[str, ...] = ()

    def on_layer(self, heads: Heads) -> None:
        """Every row of attention, with the encoding and, where it does something, without."""
        rotated = attention_rows(heads)
        bare = rotated if _is_bare(heads) else attention_rows(heads, rotated=False)
        self.sinks.update(heads, bare, rotated)
        edges = self.sinks.edges
        # A query that sees one key has no choice; the logarithm of 2 stands for that of 1.
        largest = rotated.visible.clamp(min=2).log()
        self._rows.add(
            heads.layer,
            previous=bucket_means(rotated.previous * rotated.visible, edges),
            entropy=bucket_means(rotated.entropy / largest, edges),
        )
        if heads.sinks is not None:
            self._rows.add(heads.layer, learned_sink=bucket_means(rotated.learned, edges))
            self._learned = ("learned_sink",)
        for head in self._pictured(heads, rotated):
            sink = float(rotated.sink[0, head, 1:].mean())
            shown = attention_map(heads, head, size=CELLS)
            self._maps.append(AttentionMap(heads.layer, head, sink, shown))

    def _pictured(self, heads: Heads, rows: Rows) -> list[int]:
        if self.target.chosen:
            return [head for layer, head in self.target.chosen if layer == heads.layer]
        if heads.layer not in self.target.sampled_layers:
            return []
        order = rows.sink[0, :, 1:].mean(dim=-1).argsort().tolist()
        return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]]))

    def section(self) -> Section:
        """Curves by position, a map of heads, attention of some."""
        found = self.sinks.result()
        of_rows = {name: self._rows.stacked(name) for name in (*OF_ROWS, *self._learned)}
        pictures = SinkPictures(
            found, self.versions, self.target.training_length, self.target.length
        )
        return Section(
            self.key,
            self.title,
            "Softmax must put its weight somewhere. A head that has nothing to retrieve puts it on "
            "a placeholder, mostly the first token, whose key is short: where queries and keys lie "
            "on opposite sides of the origin, a key near the origin has the largest dot product. "
            f"{'When the rotation of' if self.target.rotates else 'Where'} a long text spreads the "
            "clouds, other keys get large dot "
            "products by accident and the sink loses its weight. Positions are those of a text "
            "that begins with a beginning-of-text token and holds no other separator, as each "
            "would be a sink of its own; they are counted from 1.",
            (
                "attention on the first key = α_{i1} = softmax_j(⟨q_i, k_j⟩ / √d)₁",
                "dot product of key j = mean over i ≥ j of ⟨q_i, k_j⟩",
                "largest dot product of query i = max over j ≤ i of ⟨q_i, k_j⟩",
            ),
            "RoPE-ID (Frayed RoPE and Long Inputs), Sec. 3.2, App. A.2; Fig. 5, 6, 9.",
            self._findings(found, of_rows),
            (
                pictures.collapse(),
                pictures.keys(),
                pictures.heads(),
                *([pictures.attention(self._shown())] if self._maps else []),
                *(
                    []
                    if "plain" in self.versions
                    else [pictures.without_rotation({name: of_rows[name] for name in OF_ROWS})]
                ),
            ),
            numbers=self._numbers(found, of_rows),
        )

    def _places(self) -> dict[int, str]:
        """Lengths that findings speak of."""
        C, T = self.target.training_length, self.target.length
        if T <= C:
            return {T: f"Near {T:,} tokens"}
        return {C: f"Near the training length of {C:,} tokens", T: f"near {T:,} ({T / C:g} C)"}

    def _findings(self, found: SinkResult, of_rows: dict[str, Array]) -> tuple[str, ...]:
        # The first bucket is the first key alone.
        first, others = found.key_norm[..., 0], np.median(found.key_norm[..., 1:], axis=-1)
        said = [
            f"The first key is shorter than the median key in {100 * (first < others).mean():.0f}% "
            f"of {first.size} key heads; its length is {(first / others).mean():.2f} times the "
            "median, mean over heads."
        ]
        weights = {n: near(found.rotated.sink_weight, found.edges, n) for n in self._places()}
        said.append(
            ", and ".join(
                f"{place} the first token gets {100 * weights[n].mean():.1f}% of the attention, "
                f"and more than half of it in {(weights[n] > HALF).sum()} of {weights[n].size} "
                "heads"
                for n, place in self._places().items()
            )
            + "."
        )
        if self._learned:
            taken = near(of_rows["learned_sink"], found.edges, max(weights)).mean(axis=-1)
            said.append(
                f"There the learned sinks take {100 * taken.mean():.1f}% of the attention, by "
                f"layer {', '.join(f'{100 * one:.0f}%' for one in taken)}."
            )
        if not self._has_sink(found):
            said.append(
                "No head has a sink within the training length: nothing takes what is left over, "
                "or other tokens do."
            )
        ends = list(self._places())
        for version, (label, _) in self.versions.items():
            peak = getattr(found, version).peak
            values = [near(peak, found.edges, n).mean() for n in ends]
            way = " → ".join(f"{value:.3g}" for value in values)
            said.append(
                f"The largest dot product of a query, {label}: {way} "
                f"({' → '.join(f'{n:,}' for n in ends)} tokens)."
            )
        if "plain" not in self.versions:
            before = " → ".join(
                f"{near(of_rows['previous'], found.edges, n).mean():.2f}" for n in ends
            )
            spread = " → ".join(
                f"{near(of_rows['entropy'], found.edges, n).mean():.2f}" for n in ends
            )
            said.append(
                "Without rotation, order is in the states alone: the token just before gets "
                f"{before} times what uniform attention would give it, and entropy over that of "
                f"uniform attention is {spread} ({' → '.join(f'{n:,}' for n in ends)} tokens, mean "
                "over heads)."
            )
        return tuple(said)

    def _has_sink(self, found: SinkResult) -> bool:
        """Whether a head puts much more on the first token than uniform attention would."""
        n = min(self.target.training_length, self.target.length)
        largest = near(found.rotated.sink_weight, found.edges, n).max()
        return bool(largest > max(SINK / n, 0.1))

    def _shown(self) -> list[AttentionMap]:
        """Those asked for, or heads with the most, a medium and the least weight on the sink."""
        if self.target.chosen or len(self._maps) <= SHOWN:
            return self._maps
        ordered = sorted(self._maps, key=lambda one: -one.sink)
        return [ordered[0], ordered[len(ordered) // 2], ordered[-1]]

    def _numbers(self, found: SinkResult, of_rows: dict[str, Array]) -> dict[str, Any]:
        return {
            "training_length": self.target.training_length,
            "layers": found.layers,
            "edges": found.edges,
            "key_norm": plain(found.key_norm),
            **{
                version: {
                    name: plain(getattr(getattr(found, version), name))
                    for name in type(found.plain).__annotations__
                }
                for version in ("plain", "rotated")
            },
            **{name: plain(values) for name, values in of_rows.items()},
            "glance": [one.to_dict() for one in self._glance(found, of_rows)],
        }

    def _glance(self, found: SinkResult, of_rows: dict[str, Array]) -> list[Indicator]:
        C, T = self.target.training_length, self.target.length
        # Quarter octaves that end at the training length and at the end.
        ends = {T, min(C, T)} | {round(C * 2 ** (i / 4)) for i in range(-12, 40)}
        lengths = sorted(n for n in ends if 8 <= n <= T)

        def indicator(
            name: str, values: Array, wanted: Any, meaning: str, **more: Any
        ) -> Indicator:
            y = [float(near(values, found.edges, n).mean()) for n in lengths]
            return Indicator(name, lengths, y, C, wanted, meaning, **more)

        there = self._has_sink(found)
        shown = [
            indicator(
                "Attention on the first token",
                found.rotated.sink_weight,
                "high",
                "by the queries near each length, mean over heads"
                + ("" if there else "; no head here has a sink"),
                percent=True,
                least=0.01,
                judged=there,
            )
        ]
        if "plain" in self.versions:
            peak, meaning = found.rotated.peak, "over keys, mean over queries and heads"
            shown.append(indicator("Largest dot product", peak, "low", meaning, least=1.0))
            return shown
        return [
            *shown,
            indicator(
                "The token before, over uniform",
                of_rows["previous"],
                "high",
                "order from the states alone; 1: none, mean over heads",
                judged=False,
            ),
            indicator(
                "Entropy of attention",
                of_rows["entropy"],
                "low",
                "1: uniform; without a rotation this is what length changes",
            ),
        ]


def _is_bare(heads: Heads) -> bool:
    """Whether a layer's encoding changes nothing that attention sees."""
    if any(s.rotates or s.alibi for s in heads.encoding.spectra):
        return False
    return torch.equal(heads.q, heads.rotated_q) and torch.equal(heads.k, heads.rotated_k)
