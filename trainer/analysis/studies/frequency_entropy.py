"""Frequency entropy of a model's rotary pairs: bands, periods, and what a model loses without them
(Probing Rotary Position Embeddings through Frequency Entropy, Fig. 1 to 10)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.frequency_entropy import MEASURES, FrequencyEntropy, frequency_entropy_of
from trainer.analysis.grids import cell_means
from trainer.analysis.pairs import Side, pair_counts, pair_norms
from trainer.analysis.settings import rules
from trainer.analysis.studies.arrays import known, plain, stacked
from trainer.analysis.studies.attenuation import NAMES, attenuation_part
from trainer.analysis.studies.entropy_pictures import (
    COLUMNS,
    SIDES,
    EntropyPictures,
    HeadNorms,
    Values,
)
from trainer.analysis.studies.section import Picture, Section, joined
from trainer.analysis.studies.shorter_texts import NEAR, shorter_texts_part
from trainer.analysis.studies.study import Study, Target
from trainer.positional.layout import LayerEncoding

CELLS = 256
PERIODIC = 0.6
"""SequenceFE below which a pair counts as periodic (Sec. 5.2)."""


class FrequencyEntropyStudy(Study):
    """SpectrumFE and SequenceFE of every layer, head and pair, also of the target's prefixes, and
    its attenuation."""

    key: ClassVar[str] = "frequency_entropy"
    title: ClassVar[str] = "Frequency entropy"
    shortest: ClassVar[int] = 6  # with fewer than 1,024 SpectrumFE alone is left out

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.frames = target.frames
        long = target.length >= self.frames.frame
        self.measures = [m for m in MEASURES if m != "spectrum" or long]
        self._layers: list[FrequencyEntropy] = []
        self._norms: dict[tuple[int, int], HeadNorms] = {}
        self._shown = _layers_to_show(target)

    def on_layer(self, heads: Heads) -> None:
        """Entropies of all its pairs; the norms of heads that are shown."""
        found = frequency_entropy_of(heads, self.measures, self.frames)
        self._layers.append(found)
        chosen = [head for layer, head in self.target.chosen if layer == heads.layer]
        if not self.target.chosen and heads.layer in self._shown:
            # The one with the most concentrated pair.
            entropy = found.query[self.measures[0]].nan_to_num(nan=1.0)
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
        """Scatter plots, maps, and the sweep."""
        values: Values = {
            (m, side): stacked(
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
                "entropy": {f"{NAMES[m]} {side}": plain(of) for (m, side), of in values.items()},
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
        found = [pictures.scatter(some, side) for side in SIDES]
        found += [
            pictures.heads(row, side, number)
            for side in SIDES
            for number, row in enumerate(rows, start=1)
        ]
        found.append(pictures.means())
        if len(some) < len(layers):
            found += [pictures.layers(measure) for measure in self.measures]
        return found

    def _findings(self, values: Values) -> list[str]:
        found = []
        if "spectrum" not in self.measures:
            found.append(
                f"SpectrumFE is left out: its frames take {self.frames.frame:,} tokens, the text "
                f"has {self.target.length:,}."
            )
        for m in self.measures:
            low, middle, high = np.quantile(known(values[m, "query"]), [0.05, 0.5, 0.95])
            found.append(
                f"{NAMES[m]} of query pairs: median {middle:.2f}, nine in ten between {low:.2f} "
                f"and {high:.2f}."
            )
        if "spectrum" in self.measures:
            found.append(_band(values["spectrum", "query"]))
        found += [_periods(values["sequence", side], kind) for side, kind in SIDES.items()]
        turning = np.array([_rotates(e) for e in self.target.model.layout.layers])
        if turning.any() and not turning.all():
            for m in self.measures:
                with_it, without = (
                    known(values[m, "query"][chosen]).mean() for chosen in (turning, ~turning)
                )
                found.append(
                    f"Mean {NAMES[m]} of queries is {with_it:.2f} in layers that rotate and "
                    f"{without:.2f} in the others."
                )
        return found


def _layers_to_show(target: Target) -> list[int]:
    """Layers whose norms are shown of a head: those that were asked for, else the first, the middle
    and the last, and one without rotation."""
    if target.chosen:
        return list(dict.fromkeys(layer for layer, _ in target.chosen))
    encodings = target.model.layout.layers
    still = [layer for layer, encoding in enumerate(encodings) if not _rotates(encoding)]
    last = len(encodings) - 1
    return sorted({0, last // 2, last, *still[:1]})


def _rotates(encoding: LayerEncoding) -> bool:
    return any(spectrum.rotates for spectrum in encoding.spectra)


def _norm_map(heads: Heads, x: Tensor, head: int, cell: int) -> Array:
    """``[pairs, cells]``, means over neighbouring tokens of the first text."""
    norms = pair_norms(x[0, head], pair_counts(heads.encoding, x.shape[1], x.shape[-1])[head])
    return cell_means(norms, cell).cpu().numpy()


def _band(entropy: Array) -> str:
    """Where the heads have their strongest band."""
    lowest = np.nanargmin(entropy.reshape(-1, entropy.shape[-1]), axis=-1)
    band = int(np.bincount(lowest).argmax())
    share = float((np.abs(lowest - band) <= NEAR).mean())
    return (
        f"The strongest frequency band of queries is most often pair {band}; {share:.0%} of heads "
        f"have theirs within {NEAR} pairs of it."
    )


def _periods(entropy: Array, kind: str) -> str:
    """How many pairs have a period."""
    periodic = (entropy < PERIODIC).sum(axis=(1, 2))
    text = (
        f"{periodic.sum():,} of {len(known(entropy)):,} pairs of {kind} have SequenceFE below "
        f"{PERIODIC}"
    )
    if not periodic.any():
        return f"{text}: none has a clear period."
    return f"{text}, most of them in layer {periodic.argmax()} ({periodic.max():,})."
