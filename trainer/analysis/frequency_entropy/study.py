"""The section on frequency entropy: bands, periods, and the model's loss without them (Probing
Rotary Position Embeddings through Frequency Entropy, Fig. 1 to 10 and 15 to 17)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np
from torch import Tensor

from trainer.analysis.arrays import (
    Array,
    Side,
    cell_means,
    finite,
    pair_counts,
    pair_norms,
    stack_layers,
    to_json,
)
from trainer.analysis.capture import Heads
from trainer.analysis.frequency_entropy.figures import (
    COLUMNS,
    SIDES,
    EntropyPictures,
    HeadNorms,
    Values,
)
from trainer.analysis.frequency_entropy.measure import (
    MEASURES,
    NAMES,
    FrequencyEntropy,
    Gate,
    Gates,
    Sweep,
    frequency_entropies,
    frequency_entropy_of,
    sweep,
)
from trainer.analysis.settings import rules
from trainer.analysis.studies.section import Part, Picture, Section, joined
from trainer.analysis.studies.study import Study, Target
from trainer.plotting.lines import curves
from trainer.plotting.points import pair_scatter
from trainer.positional.layout import LayerEncoding

CELLS = 256
PERIODIC = 0.6
"""SequenceFE below which a pair counts as periodic (Sec. 5.2)."""


class FrequencyEntropyStudy(Study):
    """SpectrumFE and SequenceFE of every layer, head and pair, also on the target's prefixes, and
    perplexity with extreme pairs attenuated."""

    key: ClassVar[str] = "frequency_entropy"
    title: ClassVar[str] = "Frequency entropy"
    shortest: ClassVar[int] = 6  # with fewer than a frame, only SpectrumFE is left out

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.frames = target.frames
        long = target.length >= self.frames.frame
        self.measures = [m for m in MEASURES if m != "spectrum" or long]
        self._layers: list[FrequencyEntropy] = []
        self._norms: dict[tuple[int, int], HeadNorms] = {}
        self._shown = _layers_to_show(target)

    def on_layer(self, heads: Heads) -> None:
        """Compute the entropies of all pairs, and norms of the heads that are shown."""
        entropies = frequency_entropy_of(heads, self.measures, self.frames)
        self._layers.append(entropies)
        chosen = [head for layer, head in self.target.chosen if layer == heads.layer]
        if not self.target.chosen and heads.layer in self._shown:
            # Without a chosen head, show the one with the most concentrated pair.
            entropy = entropies.query[self.measures[0]].nan_to_num(nan=1.0)
            chosen = [int(entropy.amin(dim=-1).argmin())]
        cell = -(-self.target.length // CELLS)
        for head in chosen:
            key = head // heads.queries_per_key
            norms: dict[Side, Array] = {
                "query": _norm_map(heads, heads.q, head, cell),
                "key": _norm_map(heads, heads.k, key, cell),
            }
            self._norms[heads.layer, head] = HeadNorms(heads.layer, head, key, cell, norms)

    def section(self) -> Section:
        """Write the section: scatter plots, maps, and the attenuation."""
        values: Values = {
            (m, side): stack_layers(
                [(layer.query if side == "query" else layer.key)[m] for layer in self._layers]
            )
            for m in self.measures
            for side in SIDES
        }
        queries = {m: values[m, "query"] for m in self.measures}
        part = joined(
            [
                shorter_texts_part(self.target, queries, list(self._norms)),
                attenuation_part(self.target, self.measures, self._layers),
            ]
        )
        pictures = self._pictures(values)
        frame, hop = self.frames.frame, self.frames.step
        return Section(
            self.key,
            self.title,
            "The norms of one pair of channels at all tokens are a signal; its frequency entropy "
            "says how concentrated the power of that signal is, from 0 for a pure tone to 1 for "
            "white noise. SpectrumFE, of short frames with the mean left in, is low where a pair "
            "is large throughout: a frequency band. SequenceFE, of the whole text without the "
            "mean, is low where the norm oscillates. In heads without rotation the pairs are those "
            "that RoPE would turn together.",
            (
                "sⱼ[n] = ‖qₙ⁽ʲ⁾‖₂",
                f"S[k, t] = |Σₙ sⱼ[{hop} t + n] w[n] exp(−2πi k n / {frame})|²,  "
                f"w: {self.frames.window.capitalize()}",
                f"SpectrumFE = −Σₖ pₖ log pₖ / log {frame // 2 + 1},  pₖ ∝ meanₜ S[k, t]",
                "SequenceFE = −Σₖ pₖ log pₖ / log(⌊L/2⌋ − 1),  pₖ ∝ |DFT(sⱼ)[k]|²,  1 ≤ k < ⌊L/2⌋",
            ),
            "Probing Rotary Position Embeddings through Frequency Entropy, Eq. 4–12, Fig. 1–10 "
            "and 15–21.",
            (*self._findings(values), *part.findings),
            (*pictures, *part.pictures),
            numbers={
                "tokens": self.target.length,
                "frames": {"window": self.frames.window, "frame": frame, "hop": hop},
                "entropy": {f"{NAMES[m]} {side}": to_json(of) for (m, side), of in values.items()},
                **part.numbers,
            },
        )

    def _pictures(self, values: Values) -> list[Picture]:
        layers = self.target.model.layout.layers
        still = frozenset(i for i, encoding in enumerate(layers) if not _rotates(encoding))
        gates = [rule for gate in self.target.attenuation.gates for rule in rules(gate)]
        thresholds = {m: sorted({tau for of, _, tau in gates if of == m}) for m in MEASURES}
        pictures = EntropyPictures(values, still, self.target.pair_axis, thresholds)
        some = self._shown[:COLUMNS]
        heads = [self._norms[at] for at in dict.fromkeys(self.target.chosen or self._norms)]
        rows = [heads[start : start + COLUMNS] for start in range(0, len(heads), COLUMNS)]
        drawn = [pictures.scatter(some, side) for side in SIDES]
        drawn += [
            pictures.heads(row, side, number)
            for side in SIDES
            for number, row in enumerate(rows, start=1)
        ]
        drawn.append(pictures.means())
        if len(some) < len(layers):
            drawn += [pictures.layers(measure) for measure in self.measures]
        return drawn

    def _findings(self, values: Values) -> list[str]:
        findings = []
        if "spectrum" not in self.measures:
            findings.append(
                f"SpectrumFE is left out: its frames take {self.frames.frame:,} tokens, the text "
                f"has {self.target.length:,}."
            )
        for m in self.measures:
            low, middle, high = np.quantile(finite(values[m, "query"]), [0.05, 0.5, 0.95])
            findings.append(
                f"{NAMES[m]} of query pairs: median {middle:.2f}, nine in ten between {low:.2f} "
                f"and {high:.2f}."
            )
        if "spectrum" in self.measures:
            findings.append(_band(values["spectrum", "query"]))
        findings += [_periods(values["sequence", side], kind) for side, kind in SIDES.items()]
        turning = np.array([_rotates(e) for e in self.target.model.layout.layers])
        if turning.any() and not turning.all():
            for m in self.measures:
                with_it, without = (
                    finite(values[m, "query"][chosen]).mean() for chosen in (turning, ~turning)
                )
                findings.append(
                    f"Mean {NAMES[m]} of queries is {with_it:.2f} in layers that rotate and "
                    f"{without:.2f} in the others."
                )
        return findings


def _layers_to_show(target: Target) -> list[int]:
    """Return layers that have a head whose norms are shown: the chosen ones, or the first, the
    middle, the last and one without rotation."""
    if target.chosen:
        return list(dict.fromkeys(layer for layer, _ in target.chosen))
    encodings = target.model.layout.layers
    still = [layer for layer, encoding in enumerate(encodings) if not _rotates(encoding)]
    last = len(encodings) - 1
    return sorted({0, last // 2, last, *still[:1]})


def _rotates(encoding: LayerEncoding) -> bool:
    return any(spectrum.rotates for spectrum in encoding.spectra)


def _norm_map(heads: Heads, x: Tensor, head: int, cell: int) -> Array:
    """Average norms of the first text over neighbouring tokens, ``[pairs, cells]``."""
    norms = pair_norms(x[0, head], pair_counts(heads.encoding, x.shape[1], x.shape[-1])[head])
    return cell_means(norms, cell).cpu().numpy()


def _band(entropy: Array) -> str:
    """Describe where the heads have their strongest band."""
    lowest = np.nanargmin(entropy.reshape(-1, entropy.shape[-1]), axis=-1)
    band = int(np.bincount(lowest).argmax())
    share = float((np.abs(lowest - band) <= NEAR).mean())
    return (
        f"The strongest frequency band of queries is most often pair {band}; {share:.0%} of heads "
        f"have theirs within {NEAR} pairs of it."
    )


def _periods(entropy: Array, kind: str) -> str:
    """Describe how many pairs have a period."""
    periodic = (entropy < PERIODIC).sum(axis=(1, 2))
    text = (
        f"{periodic.sum():,} of {len(finite(entropy)):,} pairs of {kind} have SequenceFE below "
        f"{PERIODIC}"
    )
    if not periodic.any():
        return f"{text}: none has a clear period."
    return f"{text}, most of them in layer {periodic.argmax()} ({periodic.max():,})."


NEAR = 2
"""Distance in pairs that counts as the same place."""


def shorter_texts_part(
    target: Target, whole: Mapping[str, Array], shown: Collection[tuple[int, int]]
) -> Part:
    """Compare entropies of queries on the target's prefixes with the whole text's (App. F, Fig. 15
    to 17).

    Args:
        target: a model and its text.
        whole: entropies on the whole text, ``[layers, heads, pairs]`` by measure.
        shown: (layer, query head) of the pictures.
    """
    prefixes = sorted({n for n in target.prefixes if n < target.length})
    if not prefixes:
        return Part()
    by_length: dict[int, Mapping[str, Array]] = {}
    for n in prefixes:
        measures = [m for m in whole if m != "spectrum" or n >= target.frames.frame]
        layers = frequency_entropies(target.model, target.ids[:, :n], measures, target.frames)
        by_length[n] = {m: stack_layers([layer.query[m] for layer in layers]) for m in measures}
    by_length[target.length] = whole
    lengths = list(by_length)
    missing: Array = np.full(next(iter(whole.values())).shape, np.nan)
    by_measure = {m: np.stack([by_length[n].get(m, missing) for n in lengths]) for m in whole}
    panels = {
        NAMES[m]: {f"L{i}H{j}": values[:, i, j] for i, j in shown}
        for m, values in by_measure.items()
    }
    picture = Picture(
        "frequency_entropy_lengths",
        pair_scatter(panels, {}, target.pair_axis, ("tokens", [f"{n:,}" for n in lengths])),
        "Frequency entropy (0 to 1) of the query pairs of one head a layer, on the first tokens of "
        "the text and on the whole of it. Points on top of each other: bands and periods are where "
        "they are at every length.",
        ("tokens", "layer", "head", "pair", *(NAMES[m] for m in whole)),
        [
            (lengths[n], layer, head, pair, *(float(v[n, layer, head, pair]) for v in each))
            for each in [list(by_measure.values())]
            for layer, head in shown
            for n, pair in np.ndindex(len(lengths), missing.shape[-1])
            if any(np.isfinite(v[n, layer, head, pair]) for v in each)
        ],
    )
    return Part(
        tuple(_findings({m: (lengths, values) for m, values in by_measure.items()})), (picture,)
    )


def _findings(by_measure: Mapping[str, tuple[list[int], Array]]) -> list[str]:
    """Compare entropies on the shortest text that has a measure with the whole text's."""
    findings = []
    for m, (lengths, values) in by_measure.items():
        with_it = [k for k, of in enumerate(values) if np.isfinite(of).any()]
        if len(with_it) < 2:
            continue
        first, whole = values[with_it[0]], values[-1]
        lowest = [np.nanargmin(of.reshape(-1, of.shape[-1]), axis=-1) for of in (first, whole)]
        same = (np.abs(lowest[0] - lowest[1]) <= NEAR).mean()
        findings.append(
            f"From {lengths[with_it[0]]:,} to {lengths[-1]:,} tokens {NAMES[m]} of a query pair "
            f"changes by {np.nanmean(np.abs(whole - first)):.3f} on average; in {same:.0%} of "
            f"heads the pair where it is lowest stays within {NEAR} of its place."
        )
    return findings


def attenuation_part(
    target: Target, measures: Sequence[str], entropies: Sequence[FrequencyEntropy]
) -> Part:
    """Measure perplexity of the page's texts by gate and alpha (Sec. 5.2, Fig. 4).

    ``measures``: measures for which the text is long enough; gates of others are skipped.
    ``entropies``: entropies on the page's texts. A model without rotation, or with an intervention,
    is not measured.
    """
    settings, layout = target.attenuation, target.model.layout
    gates = [
        together
        for together in (tuple(Gate(*rule) for rule in rules(gate)) for gate in settings.gates)
        if all(gate.measure in measures for gate in together)
    ]
    busy = any(layer.intervention for layer in layout.layers)
    if not (settings.alphas and gates and layout.rotates) or busy:
        return Part(numbers={"sweep": []})
    ids, most = target.ids[: settings.texts], target.length - 1
    where = "the text that they were chosen on"
    chosen = target.choice
    if chosen is None and settings.choice_length is not None:
        chosen = target.ids[:, : settings.choice_length]
        where = f"that text; they were chosen on its first {chosen.shape[1]:,} tokens"
    elif chosen is not None:
        where = f"it; they were chosen on {chosen.shape[1]:,} tokens of validation text"
    if chosen is not None:
        asked = sorted({gate.measure for together in gates for gate in together})
        entropies = frequency_entropies(target.model, chosen, asked, target.frames)
    lengths = dict.fromkeys(min(n, most) for n in settings.tokens or [most])
    by_length = [
        sweep(target.model, ids[:, : n + 1], entropies, gates, settings.alphas) for n in lengths
    ]
    sweeps = [one for of_length in by_length for one in of_length]
    return Part(
        tuple(_finding(one) for one in sweeps if one.pairs),
        tuple(_picture(one, where, alone=len(by_length) == 1) for one in by_length),
        numbers={
            "sweep": [
                {"gate": in_words(one.gates), "tokens": one.tokens, "pairs": one.pairs}
                | {f"alpha={alpha:g}": value for alpha, value in one.perplexity.items()}
                for one in sweeps
            ]
        },
    )


def in_words(gates: Gates) -> str:
    """Describe gates in words."""
    return " or ".join(
        f"{NAMES[gate.measure]} {'<' if gate.side == 'below' else '>'} {gate.tau:g}"
        for gate in gates
    )


def _finding(one: Sweep) -> str:
    weakest = min(one.perplexity)
    return (
        f"With the {one.pairs:,} pairs of {in_words(one.gates)} at {weakest:g} of their size, "
        f"perplexity of {one.tokens:,} tokens goes from {one.perplexity[1.0]:.2f} to "
        f"{one.perplexity[weakest]:.2f}."
    )


def _picture(sweeps: Sequence[Sweep], where: str, *, alone: bool) -> Picture:
    lines = {
        f"{in_words(s.gates)}\n({s.pairs:,} pairs)": (
            list(s.perplexity),
            list(s.perplexity.values()),
        )
        for s in sweeps
    }
    tokens = sweeps[0].tokens
    return Picture(
        "attenuation" if alone else f"attenuation_{tokens}",
        curves(
            lines, x="factor α on the chosen pairs of queries and keys", y="perplexity", log_y=True
        ),
        f"Perplexity of the first {tokens:,} tokens of the text with the pairs of extreme entropy "
        f"multiplied by α, queries and keys each by their own entropy, on {where}. A rise to the "
        "left: these pairs matter; sets of very different size cannot be compared.",
        ("tokens", "gate", "pairs", "alpha", "perplexity"),
        [
            (s.tokens, in_words(s.gates), s.pairs, alpha, perplexity)
            for s in sweeps
            for alpha, perplexity in sorted(s.perplexity.items())
        ],
    )
