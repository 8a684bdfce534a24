"""The section on positional bias of heads, its gradients before training, and the effect of a
rescaling on positional and semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from trainer.analysis.arrays import Array, Averages
from trainer.analysis.attention import attention_rows
from trainer.analysis.capture import Heads, capture
from trainer.analysis.positional_bias.measure import (
    TOKENS,
    FreshResult,
    fresh_decoders,
    positional_biases,
    prefix_spreads,
)
from trainer.analysis.positional_bias.rescaling import (
    factors_part,
    needle_part,
    yarn_part,
    yarn_shift,
)
from trainer.analysis.studies.section import (
    Part,
    Picture,
    Section,
    joined,
    long_rows,
    wide_rows,
)
from trainer.analysis.studies.study import Study
from trainer.plotting.lines import Frame, Panel, Series, log_if_wide, side_by_side, whole_x
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.style import STYLE_NUMBERS

STRONG = 0.5
"""Least Aᶜ of a positional head: about half of its attention lies on that one key."""
KINDS = {"diagonal": "its own token", "previous": "the previous token"}
VERSIONS = {
    "encoded": ("fresh, with positions", STYLE_NUMBERS["RoPE"]),
    "nope": ("fresh, NoPE", STYLE_NUMBERS["NoPE from scratch"]),
    "model": ("this model", 1),
}
"""Labels and style numbers of a model before training and as it is."""


class PositionalBiasStudy(Study):
    """Aᶜ of every head within the training length, and its causes."""

    key: ClassVar[str] = "positional_bias"
    title: ClassVar[str] = "Positional bias"
    shortest: ClassVar[int] = 2  # a single token attends to itself alone

    @property
    def _length(self) -> int:
        return min(self.target.length, self.target.training_length)

    def _bias(self) -> dict[str, Array]:
        """Compute Aᶜ of every head, ``[layers, heads]`` by :data:`KINDS`.

        The beginning of the text is read by itself: in a longer one, temperatures and frequencies
        may differ.
        """
        averages = Averages()

        def on_layer(heads: Heads) -> None:
            averages.add(heads.layer, **positional_biases(attention_rows(heads)))

        capture(self.target.model, self.target.ids[:, : self._length], on_layer)
        return {kind: averages.stacked(kind) for kind in KINDS}

    def section(self) -> Section:
        """Write the section: heads, gradients before training, spreads, and rescaling if the model
        rotates."""
        bias, model = self._bias(), self.target.model
        fresh = fresh_decoders(model, self.target.ids)
        spread = prefix_spreads(model, self.target.ids[:1, : min(TOKENS, self._length)])
        strongest = np.maximum(*bias.values())
        rotating = [s for s in model.layout.spectra if s.rotates]
        parts = [Part(numbers={"tokens": self._length})]
        parts += [heads_part(bias), fresh_part(fresh), spread_part(spread, fresh)]
        if rotating:
            parts += [
                yarn_part(yarn_shift(model, self.target.ids, strongest), strongest),
                needle_part(model, self.target.prompt),
                factors_part(rotating[0], self.target.training_length),
            ]
        else:
            parts.append(
                Part(
                    (
                        "No head of this model rotates: there is nothing to rescale, and attention "
                        "under YaRN and the factors of the frequencies are left out.",
                    )
                )
            )
        return Section(
            key=self.key,
            title=self.title,
            text=(
                "Positional bias says how much of its attention a head puts on one place, whatever "
                "stands there: on its own token (diagonal head) or on the one before it "
                "(previous-token head). It is 1 where all attention lies there and about 0 where "
                "attention is uniform. Its gradient before training bounds how fast a head can "
                "learn the pattern, and in a decoder without positions it is bounded by how far "
                "the states of a text lie apart, the prefix spread. Rescaling the frequencies for "
                "longer texts moves the attention of heads. All of it is measured in texts of at "
                f"most the training length, here {self._length} tokens. Layers and heads are "
                "counted from 0."
            ),
            formula=(
                "Aᶜ = 1/T Σᵢ Σ_{j≤i} c_ij α_ij,  c_ij = 1 at j = i − s, −1/(i − 1) elsewhere;"
                "  s = 0: diagonal, s = 1: previous token",
                "Δ⁽ˡ⁾ = max_{j≤i} ‖mean(h₁⁽ˡ⁾ … hᵢ⁽ˡ⁾) − h_j⁽ˡ⁾‖  (NoPE: Aᶜ and its gradients "
                "are at most a constant times Δ⁽¹⁾)",
                "ω′_m = γ_m ω_m",
            ),
            source="DroPE, Def. 3.1, Prop. 3.2 and 3.3, Thm. 3.4, Eq. 3; Fig. 4, 6, 7, 8 and 11.",
            **vars(joined(parts)),
        )


def heads_part(biases: Mapping[str, Array]) -> Part:
    """Report Aᶜ of every head by :data:`KINDS`, ``[layers, heads]`` each (Def. 3.1)."""
    findings = []
    for kind, bias in biases.items():
        layer, head = np.unravel_index(bias.argmax(), bias.shape)
        strong = int((bias >= STRONG).sum())
        findings.append(
            f"Towards {KINDS[kind]}, layer {layer} head {head} leans most, Aᶜ = {bias.max():.3f}; "
            f"{strong} of {bias.size} heads reach {STRONG}, the mean is {bias.mean():.3f}."
        )
    picture = Picture(
        name="positional_bias_heads",
        figure=heat_maps(
            {f"towards {KINDS[kind]}": bias for kind, bias in biases.items()},
            Scale("Aᶜ", low=min(0.0, *(bias.min() for bias in biases.values()))),
            x="query head",
            y="layer",
        ),
        caption=(
            "Positional bias Aᶜ of every head on the text: 1 is all attention on that key, 0 the "
            "share of uniform attention. Bright cells are positional heads."
        ),
        header=("layer", "head", "diagonal", "previous"),
        rows=wide_rows(list(biases.values())),
    )
    return Part(tuple(findings), (picture,), numbers=dict(biases))


def fresh_part(fresh: FreshResult | None) -> Part:
    """Report gradients before training (Fig. 4)."""
    if fresh is None:
        return Part(
            (
                "Gradients before training were left out: for a model of this size they take too "
                "long on any text that would say something.",
            )
        )
    means = {version: norms.mean(axis=0) for version, norms in fresh.gradients.items()}
    findings = []
    for kind, towards in enumerate(KINDS.values()):
        ratio = means["encoded"][kind] / np.maximum(means["nope"][kind], 1e-30)
        larger = int((ratio > 1).sum())
        findings.append(
            f"Before training, the gradient of Aᶜ towards {towards} is larger with positions than "
            f"without in {larger} of {len(ratio)} layers: {ratio[0]:.2f} times in the first and "
            f"{ratio[-1]:.2f} times in the last layer."
        )
    count = len(fresh.gradients["nope"])
    seeds = "1 seed" if count == 1 else f"{count} seeds, bars from the least to the largest"
    frame = Frame("layer", "gradient norm of Aᶜ", whole_x(log_if_wide))
    panels = [
        Panel(
            f"towards {towards}",
            [_over_layers(version, norms[:, kind]) for version, norms in fresh.gradients.items()],
            frame,
        )
        for kind, towards in enumerate(KINDS.values())
    ]
    picture = Picture(
        name="positional_bias_gradients",
        figure=side_by_side(panels),
        caption=(
            "Norm of the gradient of Aᶜ by W_Q and W_K, mean over heads, in decoders of this shape "
            "with random weights (normal, 0.02 in every matrix, also in matrices that write to the "
            f"residual stream; {seeds}), on {fresh.tokens} tokens of the text; with positions: "
            f"{fresh.encoding}. Higher: the head can learn the pattern faster. DroPE finds RoPE "
            "higher, more so in deeper layers."
        ),
        header=("version", "seed", "layer", "diagonal", "previous"),
        rows=[
            (version, *row)
            for version, norms in fresh.gradients.items()
            for row in wide_rows([norms[:, 0], norms[:, 1]])
        ],
    )
    numbers = {"encoding": fresh.encoding, "tokens": fresh.tokens, "gradients": fresh.gradients}
    return Part(tuple(findings), (picture,), numbers={"fresh": numbers})


def spread_part(spread: Array, fresh: FreshResult | None) -> Part:
    """Report prefix spreads (Thm. 3.4)."""
    spreads = ({} if fresh is None else fresh.spreads) | {"model": spread[None]}
    growth = {name: float((norms[:, -1] / norms[:, 0]).mean()) for name, norms in spreads.items()}
    finding = (
        "From the first attention to the end of the last block the prefix spread of this model's "
        f"normalised states grows {growth['model']:.3g}-fold"
    )
    if fresh is not None:
        finding += (
            f"; before training it grows {growth['nope']:.3g}-fold without positions and "
            f"{growth['encoded']:.3g}-fold with them"
        )
    growths = {version: norms / norms[:, :1] for version, norms in spreads.items()}
    panels = [
        Panel(
            title,
            [_over_layers(version, norms) for version, norms in shown.items()],
            Frame("blocks passed", label, whole_x(log_if_wide)),
        )
        for title, label, shown in (
            ("prefix spread", "spread (norm, of what enters attention)", spreads),
            ("growth over the first", "spread / spread at the first attention", growths),
        )
    ]
    picture = Picture(
        name="prefix_spread",
        figure=side_by_side(panels),
        caption=(
            "Prefix spread of the normalised states that enter attention after so many blocks; on "
            "the right, over the spread at the first attention. In a fresh NoPE decoder it stays "
            "within a constant times the first spread, at any length of text, so that where the "
            "embeddings lie close together attention stays close to uniform."
        ),
        header=("version", "seed", "blocks", "spread"),
        rows=long_rows({(version,): norms for version, norms in spreads.items()}),
    )
    return Part((f"{finding}.",), (picture,), numbers={"prefix_spread": spreads})


def _over_layers(version: str, values: Array) -> Series:
    """Return the mean over seeds of ``[seeds, layers]``, with the least and the largest value."""
    label, style = VERSIONS[version]
    mean, low, high = values.mean(axis=0).tolist(), None, None
    if len(values) > 1:
        low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
    return Series(label, style, range(values.shape[1]), mean, low, high)
