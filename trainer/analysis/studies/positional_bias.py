"""Positional bias of heads, its gradients before training, and what a rescaling does to positional
and to semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np

from trainer.analysis.attention_rows import attention_rows
from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.fresh_decoders import TOKENS, FreshResult, fresh_decoders
from trainer.analysis.needle_prompt import needle_shift
from trainer.analysis.positional_bias import BiasResult, PositionalBias, prefix_spreads
from trainer.analysis.studies.bias_figures import gradient_figure, spread_figure
from trainer.analysis.studies.rescaled_heads import factors_part, needle_part, yarn_part
from trainer.analysis.studies.section import Part, Picture, Section, joined
from trainer.analysis.studies.study import Study, Target
from trainer.analysis.yarn_shift import yarn_shift
from trainer.plotting.maps import Scale, heat_maps

STRONG = 0.5
"""From here on a head counts as positional: about half of its attention lies on that one key."""
KINDS = {"diagonal": "its own token", "previous": "the previous token"}
VERSIONS = {"encoded": "fresh, with positions", "nope": "fresh, NoPE", "model": "this model"}


class PositionalBiasStudy(Study):
    """Aᶜ of every head in the training length, and where it comes from."""

    key: ClassVar[str] = "positional_bias"
    title: ClassVar[str] = "Positional bias"
    shortest: ClassVar[int] = 2  # a single token attends to itself alone

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._bias = PositionalBias()

    def on_layer(self, heads: Heads) -> None:
        """Aᶜ of its heads, in so much of the text as the model was trained at."""
        self._bias.update(heads.layer, attention_rows(_prefix(heads, self._length)))

    @property
    def _length(self) -> int:
        return min(self.target.length, self.target.training_length)

    def section(self) -> Section:
        """Heads, gradients before training, spreads, and rescaling where there is rotation."""
        bias, model = self._bias.result(), self.target.model
        fresh = fresh_decoders(model, self.target.ids)
        spread = prefix_spreads(model, self.target.ids[:1, : min(TOKENS, self._length)])
        strongest = np.maximum(bias.diagonal, bias.previous)
        rotating = [s for s in model.layout.spectra if s.rotates]
        parts = [heads_part(bias), fresh_part(fresh), spread_part(spread, fresh)]
        if rotating:
            prompt = self.target.prompt
            parts += [
                yarn_part(yarn_shift(model, self.target.ids, strongest), strongest),
                needle_part(None if prompt is None else needle_shift(model, prompt)),
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
        whole = joined(parts)
        return Section(
            self.key,
            self.title,
            "Positional bias says how much of its attention a head puts on one place, whatever "
            "stands there: on its own token (diagonal head) or on the one before it "
            "(previous-token head). It is 1 where all attention lies there and about 0 where "
            "attention is uniform. Its gradient before training bounds how fast a head can learn "
            "the pattern, and in a decoder without positions it is bounded by how far the states "
            "of a text lie apart, the prefix spread. Rescaling the frequencies for longer texts "
            "moves the attention of heads. All of it is measured in texts of at most the training "
            f"length, here {self._length} tokens. Layers and heads are counted from 0.",
            (
                "Aᶜ = 1/T Σᵢ Σ_{j≤i} c_ij α_ij,  c_ij = 1 at j = i − s, −1/(i − 1) elsewhere;"
                "  s = 0: diagonal, s = 1: previous token",
                "Δ⁽ˡ⁾ = max_{j≤i} ‖mean(h₁⁽ˡ⁾ … hᵢ⁽ˡ⁾) − h_j⁽ˡ⁾‖  (NoPE: Aᶜ and its gradients "
                "are at most a constant times Δ⁽¹⁾)",
                "ω′_m = γ_m ω_m",
            ),
            "DroPE, Def. 3.1, Prop. 3.2 and 3.3, Thm. 3.4, Eq. 3; Fig. 4, 6, 7, 8 and 11.",
            whole.findings,
            whole.pictures,
            numbers={"tokens": self._length} | whole.numbers,
        )


def heads_part(bias: BiasResult) -> Part:
    """Aᶜ of every head (Def. 3.1)."""
    values = {"diagonal": bias.diagonal, "previous": bias.previous}
    findings = []
    for kind, of in values.items():
        layer, head = np.unravel_index(of.argmax(), of.shape)
        strong = int((of >= STRONG).sum())
        findings.append(
            f"Towards {KINDS[kind]}, layer {layer} head {head} leans most, Aᶜ = {of.max():.3f}; "
            f"{strong} of {of.size} heads reach {STRONG}, the mean is {of.mean():.3f}."
        )
    figure = heat_maps(
        {f"towards {KINDS[kind]}": of for kind, of in values.items()},
        Scale("Aᶜ", low=min(0.0, *(of.min() for of in values.values()))),
        x="query head",
        y="layer",
    )
    rows = [
        (layer, head, *(float(of[layer, head]) for of in values.values()))
        for layer, head in np.ndindex(bias.diagonal.shape)
    ]
    caption = (
        "Positional bias Aᶜ of every head on the text: 1 is all attention on that key, 0 what "
        "uniform attention has. Bright cells are positional heads."
    )
    picture = Picture(
        "positional_bias_heads", figure, caption, ("layer", "head", "diagonal", "previous"), rows
    )
    return Part(
        tuple(findings), (picture,), numbers={kind: of.tolist() for kind, of in values.items()}
    )


def fresh_part(fresh: FreshResult | None) -> Part:
    """Gradients before training (Fig. 4)."""
    if fresh is None:
        return Part(
            (
                "Gradients before training were left out: for a model of this size they take too "
                "long on any text that would say something.",
            )
        )
    means = {version: of.mean(axis=0) for version, of in fresh.gradients.items()}
    findings = []
    for kind, towards in enumerate(KINDS.values()):
        ratio = means["encoded"][kind] / np.maximum(means["nope"][kind], 1e-30)
        larger = int((ratio > 1).sum())
        findings.append(
            f"Before training, the gradient of Aᶜ towards {towards} is larger with positions than "
            f"without in {larger} of {len(ratio)} layers: {ratio[0]:.2f} times in the first and "
            f"{ratio[-1]:.2f} times in the last layer."
        )
    seeds = len(fresh.gradients["nope"])
    rows = [
        (version, seed, layer, *(float(x) for x in of[seed, :, layer]))
        for version, of in fresh.gradients.items()
        for seed in range(seeds)
        for layer in range(of.shape[2])
    ]
    caption = (
        f"Norm of the gradient of Aᶜ by W_Q and W_K, mean over heads, in decoders of this shape "
        "with random weights (normal, 0.02 in every matrix, also in those that write to the "
        f"residual stream; {seeds} {'seed' if seeds == 1 else 'seeds, bars from the '}"
        f"{'' if seeds == 1 else 'least to the largest'}), on {fresh.tokens} tokens of the text; "
        f"with positions: {fresh.encoding}. Higher: the head can learn the pattern faster. DroPE "
        "finds RoPE higher, more so in deeper layers."
    )
    header = ("version", "seed", "layer", "diagonal", "previous")
    figure = gradient_figure(fresh.gradients, VERSIONS)
    return Part(
        tuple(findings),
        (Picture("positional_bias_gradients", figure, caption, header, rows),),
        numbers={
            "fresh": {
                "encoding": fresh.encoding,
                "tokens": fresh.tokens,
                "gradients": {version: of.tolist() for version, of in fresh.gradients.items()},
            }
        },
    )


def spread_part(spread: Array, fresh: FreshResult | None) -> Part:
    """Prefix spreads (Thm. 3.4)."""
    spreads = ({} if fresh is None else fresh.spreads) | {"model": spread[None]}
    growth = {version: float((of[:, -1] / of[:, 0]).mean()) for version, of in spreads.items()}
    finding = (
        "From the first attention to the end of the last block the prefix spread of this model, "
        f"of normalised states, grows {growth['model']:.3g}-fold"
    )
    if fresh is not None:
        finding += (
            f"; before training it grows {growth['nope']:.3g}-fold without positions and "
            f"{growth['encoded']:.3g}-fold with them"
        )
    rows = [
        (version, seed, blocks, float(of[seed, blocks]))
        for version, of in spreads.items()
        for seed, blocks in np.ndindex(of.shape)
    ]
    caption = (
        "Prefix spread of what is fed into the next attention behind so many blocks, normalised as "
        "it is; on the right, over that at the first. In a fresh NoPE decoder it stays within a "
        "constant of that, at any length of text, so that where the embeddings lie close together "
        "attention stays close to uniform."
    )
    header = ("version", "seed", "blocks", "spread")
    figure = spread_figure(spreads, VERSIONS)
    return Part(
        (f"{finding}.",),
        (Picture("prefix_spread", figure, caption, header, rows),),
        numbers={"prefix_spread": {version: of.tolist() for version, of in spreads.items()}},
    )


def _prefix(heads: Heads, length: int) -> Heads:
    """The first tokens of a layer's texts, whose attention the later ones do not touch."""
    names = ("q", "k", "rotated_q", "rotated_k")
    return replace(heads, **{name: getattr(heads, name)[:, :, :length] for name in names})
