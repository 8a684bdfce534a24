"""One section about two models: RoPE before the drop and DroPE behind it, or any two others.

Each reads the same text, layer by layer; what is kept of a layer are means. Heads are compared
within the training length, where either model is at home; predictions and indicators also beyond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import ClassVar

import numpy as np
import torch

from trainer.analysis.attention_statistics import divergence_by_position
from trainer.analysis.averages import Array
from trainer.analysis.grids import bucket_means, position_edges
from trainer.analysis.reading import Reading, read
from trainer.analysis.recovery import recovery
from trainer.analysis.studies.compared_heads import heads_part
from trainer.analysis.studies.drop_figures import indicator_figure, position_figure, recovery_figure
from trainer.analysis.studies.section import Part, Picture, Section, joined
from trainer.analysis.studies.study import Target
from trainer.common.errors import UserError

Curve = Sequence[tuple[int, float]]
INDICATORS = {
    "sink_mass": "attention on the first token",
    "key_stable_rank": "stable rank of keys",
    "silhouette": "silhouette of queries and keys",
}


class DropStudy:
    """The comparison of two models, read one after the other.

    ``before`` and ``after``: two targets with one text. ``curve``: (step, training loss) of the
    run, ``drop_step``: the last step that it trained with its encoding; both or none.

    Raises:
        UserError: vocabularies or texts differ, or the text has fewer than 2 tokens.
    """

    key: ClassVar[str] = "drop"
    title: ClassVar[str] = "Before and after the drop"

    def __init__(
        self,
        before: Target,
        after: Target,
        curve: Curve | None = None,
        drop_step: int | None = None,
    ) -> None:
        sizes = [target.model.config.vocab_size for target in (before, after)]
        if sizes[0] != sizes[1]:
            raise UserError.at(
                "model",
                f"the two models must share a vocabulary, got {sizes[0]} and {sizes[1]} tokens.",
            )
        if not torch.equal(before.ids.cpu(), after.ids.cpu()):
            raise UserError.at("text", "the two models must read the same tokens, got two texts.")
        if before.length < 2:
            raise UserError.at("text", f"expected 2 tokens or more, got {before.length}.")
        self.before, self.after = before, after
        self.names = (before.name, after.name)
        self.curve = sorted((step, loss) for step, loss in curve or () if math.isfinite(loss))
        self.drop_step = drop_step

    @property
    def trained(self) -> int:
        """The shorter of both training lengths."""
        return min(self.before.training_length, self.after.training_length)

    def run(self) -> Section:
        """Read the text with both models, and compare."""
        within = min(self.trained, self.before.length)
        before, after = (
            read(target.model, target.ids, within=within, seed=target.seed)
            for target in (self.before, self.after)
        )
        divergence = divergence_by_position(self.before.model, self.after.model, self.before.ids)
        parts = [
            heads_part(before.heads, after.heads, self.names),
            self._positions(before, after, divergence[:-1]),
            self._indicators(before, after),
        ]
        if self.drop_step is not None and (recovery := self._recovery(self.drop_step)):
            parts.append(recovery)
        whole = joined(parts)
        return Section(
            self.key,
            self.title,
            f"Two models read the same text of {self.before.length} tokens, {self.names[0]} and "
            f"{self.names[1]}. Heads are compared on its first {within} tokens, within the "
            "training length: how far and how evenly they attend, how much on the first token, "
            "and how much by position alone. Predictions are compared at every position, and "
            "indicators of the geometry at prefixes of growing length. Layers and heads are "
            "counted from 0.",
            (
                "distance = mean over i of Σ_j α_ij (i − j),  "
                "entropy = mean over i of −Σ_j α_ij log α_ij / log i",
                "Aᶜ = 1/T Σᵢ Σ_{j≤i} c_ij α_ij",
                "KL(p ‖ q) = Σ_v p(v) log(p(v) / q(v)),  stable rank = ‖K‖²_F / ‖K‖²₂",
            ),
            "DroPE, Sec. 5 and Def. 3.1; RoPE-ID, Sec. 3 (sinks, stable rank, clusters).",
            whole.findings,
            whole.pictures,
            whole.grids,
            whole.numbers,
        )

    def _positions(self, before: Reading, after: Reading, divergence: Array) -> Part:
        edges = position_edges(len(before.loss), per_octave=4)
        curves = {"kl": divergence, "loss_before": before.loss, "loss_after": after.loss}
        means = {
            name: bucket_means(torch.from_numpy(curve), edges).numpy()
            for name, curve in curves.items()
        }
        middles = (np.array(edges[:-1]) + 1 + np.array(edges[1:])) / 2
        findings, inside = [], np.arange(len(before.loss)) < self.trained
        for where, among in (("within", inside), ("beyond", ~inside)):
            if not among.any():
                continue
            kl, first, second = (curve[among].mean() for curve in curves.values())
            findings.append(
                f"{where.capitalize()} the training length the loss of {self.names[0]} is "
                f"{first:.3f} and that of {self.names[1]} {second:.3f} nats a token, and their "
                f"predictions are {kl:.3f} nats apart (KL)."
            )
        picture = Picture(
            "drop_positions",
            position_figure(
                middles,
                means["kl"],
                (means["loss_before"], means["loss_after"]),
                self.names,
                self.trained,
            ),
            "By how much of the text has been read, on a logarithmic axis: how far apart the two "
            "models' predictions of the next token are, and the loss of either. Means over texts "
            "and over positions that lie close together.",
            ("from_position", "to_position", *means),
            list(zip(edges[:-1], edges[1:], *(m.tolist() for m in means.values()), strict=True)),
        )
        numbers = {name: curve.tolist() for name, curve in means.items()}
        return Part(tuple(findings), (picture,), numbers={"edges": edges} | numbers)

    def _indicators(self, before: Reading, after: Reading) -> Part:
        lengths = before.lengths
        inside = max((i for i, n in enumerate(lengths) if n <= self.trained), default=0)
        shown = dict.fromkeys((inside, len(lengths) - 1))
        both = {name: (before.indicators[name], after.indicators[name]) for name in INDICATORS}
        findings = [
            f"At {lengths[at]} tokens, from {self.names[0]} to {self.names[1]}: "
            + ", ".join(
                f"{INDICATORS[name]} {was[at]:.3f} → {now[at]:.3f}"
                for name, (was, now) in both.items()
            )
            + "."
            for at in shown
        ]
        picture = Picture(
            "drop_indicators",
            indicator_figure(
                lengths,
                {INDICATORS[name]: pair for name, pair in both.items()},
                self.names,
                self.trained,
            ),
            "Means over all heads by the length of the prefix: attention on the first token by the "
            "queries since the length before, stable rank of a head's keys and silhouette score "
            "of its queries and keys as they meet in the scores (1: two clusters apart). Right "
            "of the dashed line the models were not trained.",
            ("length", *(f"{name}_{when}" for name in both for when in ("before", "after"))),
            [
                (n, *(float(values[i]) for pair in both.values() for values in pair))
                for i, n in enumerate(lengths)
            ],
        )
        numbers = {
            name: {"before": was.tolist(), "after": now.tolist()}
            for name, (was, now) in both.items()
        }
        return Part(
            tuple(findings), (picture,), numbers={"lengths": lengths, "indicators": numbers}
        )

    def _recovery(self, drop_step: int) -> Part | None:
        found = recovery(self.curve, drop_step)
        if found is None:
            return None
        rises = "rises to" if found.peak > found.before else "is at most"
        sentence = (
            f"Before the drop the training loss is {found.before:.3f}; after it, it {rises} "
            f"{found.peak:.3f} and "
        )
        if found.back is None or found.peak <= found.before:
            apart = found.end - found.before
            sentence += f"ends {abs(apart):.3f} nats {'above' if apart > 0 else 'below'}."
        else:
            sentence += f"is back {found.back - drop_step} steps later; it ends at {found.end:.3f}."
        span = self.curve[-1][0] - drop_step
        shown = [(step, loss) for step, loss in self.curve if step >= drop_step - span]
        steps, losses = map(list, zip(*shown, strict=True))
        picture = Picture(
            "drop_recovery",
            recovery_figure(steps, losses, drop_step),
            "Training loss around the drop, in nats a token: as many steps before it as there are "
            "behind.",
            ("step", "loss"),
            shown,
        )
        return Part((sentence,), (picture,), numbers={"recovery": asdict(found)})
