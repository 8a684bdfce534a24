"""The section on positional bias of heads, its gradients before training, and the effect of a
rescaling on positional and semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    STYLES,
    needle_part,
    needle_shift,
    scaling_factors,
    yarn_part,
    yarn_shift,
)
from trainer.analysis.studies.section import Part, Picture, Section, joined
from trainer.analysis.studies.study import Study
from trainer.plotting.lines import Frame, Panel, Series, log_if_wide, side_by_side, whole_x
from trainer.plotting.maps import Scale, heat_maps
from trainer.positional.spectrum import Spectrum

STRONG = 0.5
"""Least Aᶜ of a positional head: about half of its attention lies on that one key."""
KINDS = {"diagonal": "its own token", "previous": "the previous token"}
VERSIONS = {"encoded": "fresh, with positions", "nope": "fresh, NoPE", "model": "this model"}


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


METHODS = {"pi": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}
FACTORS = (2.0, 3.0, 4.0)


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


def gradient_figure(gradients: Mapping[str, Array], names: Mapping[str, str]) -> Figure:
    """Draw ``gradients`` ``[seeds, 2, layers]`` by version."""
    frame = Frame("layer", "gradient norm of Aᶜ", whole_x(log_if_wide))
    titles = ("towards its own token", "towards the previous token")
    return side_by_side(
        [
            Panel(
                title,
                [
                    _over_layers(names[version], STYLES[version], values[:, kind])
                    for version, values in gradients.items()
                ],
                frame,
            )
            for kind, title in enumerate(titles)
        ]
    )


def spread_figure(spreads: Mapping[str, Array], names: Mapping[str, str]) -> Figure:
    """Draw ``spreads`` ``[seeds, layers + 1]`` by version, and divided by the first attention's."""
    panels = []
    for title, label, relative in (
        ("prefix spread", "spread (norm, of what enters attention)", False),
        ("growth over the first", "spread / spread at the first attention", True),
    ):
        shown = {
            version: values / values[:, :1] if relative else values
            for version, values in spreads.items()
        }
        series = [
            _over_layers(names[version], STYLES[version], values)
            for version, values in shown.items()
        ]
        panels.append(Panel(title, series, Frame("blocks passed", label, whole_x(log_if_wide))))
    return side_by_side(panels)


def factor_figure(
    factors: Mapping[float, Mapping[str, Array]], slow: int | None, names: Mapping[str, str]
) -> Figure:
    """Draw ``factors``, gamma ``[pairs]`` by extension factor s and method.

    ``slow``: the first pair that rotates less than once in the training length, if there is one.
    """

    def prepare(axes: Axes) -> None:
        axes.set_ylim(0, 1.05)

    vertical = None if slow is None else (slow - 0.5, "right of it: less than one turn")
    return side_by_side(
        [
            Panel(
                f"s = {factor:g}",
                [
                    Series(names[method], STYLES[method], range(len(gamma)), gamma.tolist())
                    for method, gamma in methods.items()
                ],
                Frame("pair, fastest first", "frequency factor γ", prepare, vertical),
            )
            for factor, methods in factors.items()
        ]
    )


def _over_layers(label: str, style: int, values: Array) -> Series:
    """Return the mean over seeds of ``[seeds, layers]``, with the least and the largest value."""
    low, high = (None, None)
    if len(values) > 1:
        low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
    return Series(label, style, range(values.shape[1]), values.mean(axis=0).tolist(), low, high)
