"""The section on positional bias of heads, its gradients before training, and the effect of a
rescaling on positional and semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from trainer.analysis.arrays import Array, Averages
from trainer.analysis.attention import attention_rows
from trainer.analysis.capture import Heads
from trainer.analysis.positional_bias.measure import (
    TOKENS,
    FreshResult,
    biases,
    fresh_decoders,
    prefix_spreads,
)
from trainer.analysis.positional_bias.rescaling import (
    NeedleShift,
    YarnShift,
    needle_shift,
    scaling_factors,
    yarn_shift,
)
from trainer.analysis.studies.section import Part, joined
from trainer.analysis.studies.study import Study, Target
from trainer.positional.spectrum import Spectrum
from trainer.report.geometry.bias_figures import (
    factor_figure,
    gradient_figure,
    needle_figure,
    rescaled_figure,
    shift_figure,
    spread_figure,
)
from trainer.report.geometry.entropy_figures import Scale, heat_maps
from trainer.report.geometry.section import Picture, Section

STRONG = 0.5
"""From here on a head counts as positional: about half of its attention lies on that one key."""
KINDS = {"diagonal": "its own token", "previous": "the previous token"}
VERSIONS = {"encoded": "fresh, with positions", "nope": "fresh, NoPE", "model": "this model"}


class PositionalBiasStudy(Study):
    """Aᶜ of every head within the training length, and its causes."""

    key: ClassVar[str] = "positional_bias"
    title: ClassVar[str] = "Positional bias"
    shortest: ClassVar[int] = 2  # a single token attends to itself alone

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._bias = Averages()

    def on_layer(self, heads: Heads) -> None:
        """Add Aᶜ of the layer's heads on the first tokens, at most the training length."""
        rows = attention_rows(_prefix(heads, self._length))
        self._bias.add(heads.layer, **biases(rows))

    @property
    def _length(self) -> int:
        return min(self.target.length, self.target.training_length)

    def section(self) -> Section:
        """Write the section: heads, gradients before training, spreads, and rescaling if the model
        rotates."""
        bias, model = {kind: self._bias.stacked(kind) for kind in KINDS}, self.target.model
        fresh = fresh_decoders(model, self.target.ids)
        spread = prefix_spreads(model, self.target.ids[:1, : min(TOKENS, self._length)])
        strongest = np.maximum(*bias.values())
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


def heads_part(values: Mapping[str, Array]) -> Part:
    """Report Aᶜ of every head by :data:`KINDS`, ``[layers, heads]`` each (Def. 3.1)."""
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
        for layer, head in np.ndindex(values["diagonal"].shape)
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
    """Report gradients before training (Fig. 4)."""
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
    """Report prefix spreads (Thm. 3.4)."""
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
    """Return a layer's first tokens; later tokens do not affect their attention."""
    names = ("q", "k", "rotated_q", "rotated_k")
    return replace(heads, **{name: getattr(heads, name)[:, :, :length] for name in names})


METHODS = {"pi": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}
LAYOUTS = {"trained": "as trained", "yarn": "YaRN, s = 2"}
FACTORS = (2.0, 3.0, 4.0)


def yarn_part(measured: YarnShift | None, bias: Array) -> Part:
    """Report attention under YaRN (Fig. 7 and 8)."""
    if measured is None:
        return Part(
            (
                "Attention under YaRN was left out: it takes two heads that rotate, and a text and "
                "a training length of 19 tokens or more.",
            )
        )
    moved = {name: measured.shift[getattr(measured, name)] for name in ("positional", "semantic")}
    ratio = moved["semantic"] / max(moved["positional"], 1e-12)
    recall = measured.recall[measured.semantic]
    findings = [
        f"The head that finds repeated tokens best is {_head(measured.semantic)}: "
        f"{100 * recall:.1f}% of its attention lies on the earlier occurrence and the token "
        f"behind it, where uniform attention has {100 * measured.uniform:.1f}%"
        + ("." if recall >= 2 * measured.uniform else ", too little to call it a semantic one."),
        f"YaRN with s = 2 puts {100 * moved['positional']:.1f}% of the attention of the strongest "
        f"positional head ({_head(measured.positional)}) on other keys, and "
        f"{100 * moved['semantic']:.1f}% of that of the head that finds repeated tokens, "
        f"{ratio:.2g} times as much.",
    ]
    correlation = rank_correlation(bias, measured.shift)
    if np.isfinite(correlation):
        findings.append(
            f"Over all {bias.size} heads, the rank correlation between positional bias and the "
            f"attention that YaRN moves is {correlation:+.2f}"
            + (": the more positional, the less it moves." if correlation < -0.3 else ".")
        )
    titles = (
        f"positional: {_head(measured.positional)}",
        f"finds repeated tokens: {_head(measured.semantic)}",
    )
    rows = [
        (head, layout, offset, float(value))
        for head, curves, first in (
            ("positional", measured.profile, 0),
            ("semantic", measured.around, -(len(measured.around["yarn"]) // 2)),
        )
        for layout, curve in curves.items()
        for offset, value in enumerate(curve, first)
    ]
    reading = f"on a text whose first {measured.half} tokens are read twice in a row"
    pictures = (
        Picture(
            "attention_under_yarn",
            rescaled_figure(measured.profile, measured.around, LAYOUTS, titles),
            f"Mean attention as trained and under YaRN, {reading}. Left: the head with the "
            "strongest positional bias, by distance. Right: the head that attends most to what "
            "stood there before, on the keys around a token's first occurrence (0) and what "
            "followed it (1). YaRN also sharpens attention by its temperature.",
            ("head", "layout", "offset", "attention"),
            rows,
        ),
        Picture(
            "shift_under_yarn",
            shift_figure(bias, measured.shift),
            f"Every head: its positional bias, the larger of both kinds, and how much of its "
            f"attention lies on other keys under YaRN with s = 2 (half the sum of absolute "
            f"differences, mean over queries), {reading}. DroPE expects positional heads, on the "
            "right, to be low.",
            ("layer", "head", "bias", "shift", "recall"),
            [
                (*at, float(bias[at]), float(measured.shift[at]), float(measured.recall[at]))
                for at in np.ndindex(bias.shape)
            ],
        ),
    )
    return Part(
        tuple(findings),
        pictures,
        numbers={
            "yarn": {
                "repeated_tokens": measured.half,
                "positional_head": list(measured.positional),
                "semantic_head": list(measured.semantic),
                "uniform_recall": measured.uniform,
                "recall": measured.recall.tolist(),
                "shift": measured.shift.tolist(),
                "rank_correlation": correlation if np.isfinite(correlation) else None,
                "profile": {name: curve.tolist() for name, curve in measured.profile.items()},
                "around": {name: curve.tolist() for name, curve in measured.around.items()},
            }
        },
    )


def needle_part(measured: NeedleShift | None) -> Part:
    """Report attention of a needle prompt's last token under YaRN (Fig. 8)."""
    if measured is None:
        return Part(
            (
                "Attention on a needle under YaRN was left out: texts and the training length have "
                "no room for a statement and its question.",
            )
        )
    before, after = (100 * measured.on_needle[name] for name in LAYOUTS)
    where = f"The last token of a needle prompt of {measured.tokens:,} tokens"
    rows = [
        (layout, offset, float(value))
        for layout, curve in measured.around.items()
        for offset, value in enumerate(curve, measured.first)
    ]
    picture = Picture(
        "needle_under_yarn",
        needle_figure(measured.around, measured.first, LAYOUTS, _head(measured.head)),
        f"{where}: its attention on the tokens around the needle, which begins at 0, in the head "
        "that attends most to it, as trained and under YaRN.",
        ("layout", "offset", "attention"),
        rows,
    )
    numbers = {
        "head": list(measured.head),
        "tokens": measured.tokens,
        "on_needle": measured.on_needle,
        "around": {name: curve.tolist() for name, curve in measured.around.items()},
    }
    finding = (
        f"{where} attends most to the needle in {_head(measured.head)}, with {before:.1f}%; under "
        f"YaRN with s = 2 that is {after:.1f}%."
    )
    return Part((finding,), (picture,), numbers={"needle": numbers})


def factors_part(spectrum: Spectrum, training_length: int) -> Part:
    """Report the factor on every frequency (Fig. 6 and 11)."""
    spectrum = spectrum.at(training_length, training_length)
    factors = {s: scaling_factors(spectrum, training_length, s) for s in FACTORS}
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    moving = turns > 0
    slow = moving & (turns < 1)

    def means(among: Array) -> str:
        of = {METHODS[name]: gamma[among].mean() for name, gamma in factors[2.0].items()}
        return ", ".join(f"{name} {mean:.2f}" for name, mean in of.items())

    groups = [(slow, "less than one turn"), (moving & ~slow, "a turn or more")]
    findings = [
        f"{among.sum()} of {moving.sum()} pairs make {turning} in the training length; with s = 2 "
        f"their frequencies are multiplied by {means(among)} on average."
        for among, turning in groups
        if among.any()
    ]
    rows = [
        (s, METHODS[name], pair, spectrum.wavelengths[pair], float(value))
        for s, methods in factors.items()
        for name, gamma in methods.items()
        for pair, value in enumerate(gamma)
    ]
    picture = Picture(
        "rescaling_factors",
        factor_figure(factors, int(np.argmax(slow)) if slow.any() else None, METHODS),
        "What PI, NTK-aware scaling and YaRN multiply every frequency by, for texts 2, 3 and 4 "
        "times as long. All of them slow the low frequencies down by s, on the right, which is "
        "where content is compared over long distances; PI slows all. YaRN's ramp is linear in "
        "the frequency (Eq. 11); the usual implementation has one over the pair's index.",
        ("s", "method", "pair", "wavelength", "factor"),
        rows,
    )
    numbers = {
        f"{s:g}": {name: gamma.tolist() for name, gamma in methods.items()}
        for s, methods in factors.items()
    }
    return Part(tuple(findings), (picture,), numbers={"rescaling_factors": numbers})


def rank_correlation(x: Array, y: Array) -> float:
    """Compute Spearman's rank correlation, without ties; NaN for fewer than three values."""
    if x.size < 3:
        return math.nan
    ranks_of_x, ranks_of_y = (v.ravel().argsort().argsort() for v in (x, y))
    return float(np.corrcoef(ranks_of_x, ranks_of_y)[0, 1])


def _head(at: tuple[int, int]) -> str:
    return f"layer {at[0]} head {at[1]}"
