"""Frequency entropy of a model's rotary pairs: bands, periods, and what a model loses without them
(Probing Rotary Position Embeddings through Frequency Entropy, Fig. 1 to 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from torch import Tensor

from trainer.analysis.averages import Array
from trainer.analysis.capture import Heads
from trainer.analysis.frequency_entropy import MEASURES, FrequencyEntropy, frequency_entropy_of
from trainer.analysis.pairs import Side, pair_counts, pair_norms
from trainer.analysis.settings import rules
from trainer.analysis.studies.arrays import known, mean_over_heads, plain, stacked
from trainer.analysis.studies.attenuation import NAMES, attenuation_part
from trainer.analysis.studies.part import joined
from trainer.analysis.studies.shorter_texts import NEAR, shorter_texts_part
from trainer.analysis.studies.study import Study, Target
from trainer.positional.layout import LayerEncoding
from trainer.report.geometry.entropy_figures import Scale, heat_maps, pair_scatter
from trainer.report.geometry.section import Picture, Section

FRAME = 1024
PERIODIC = 0.6
"""SequenceFE below which a pair counts as periodic (Sec. 5.2)."""
SIDES: dict[Side, str] = {"query": "queries", "key": "keys"}
NORMS: dict[Side, str] = {"query": "its queries", "key": "the keys it reads"}
LAYERS_SHOWN, CELLS = 4, 256
Values = Mapping[tuple[str, Side], Array]


class FrequencyEntropyStudy(Study):
    """SpectrumFE and SequenceFE of every layer, head and pair, also of the target's prefixes, and
    its attenuation."""

    key: ClassVar[str] = "frequency_entropy"
    title: ClassVar[str] = "Frequency entropy"
    shortest: ClassVar[int] = 6  # with fewer than 1,024 SpectrumFE alone is left out

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.measures = [m for m in MEASURES if m != "spectrum" or target.length >= FRAME]
        self._layers: list[FrequencyEntropy] = []
        self._norms: dict[tuple[int, int], dict[Side, Array]] = {}
        self._shown = _layers_to_show(target)

    def on_layer(self, heads: Heads) -> None:
        """Entropies of all its pairs; the norms of one head of a layer that is shown."""
        found = frequency_entropy_of(heads, self.measures)
        self._layers.append(found)
        if heads.layer not in self._shown:
            return
        head = self._shown[heads.layer]
        if head is None:  # the one with the most concentrated pair
            head = int(found.query[self.measures[0]].nan_to_num(nan=1.0).amin(dim=-1).argmin())
        self._norms[heads.layer, head] = {
            "query": _norm_map(heads, heads.q, head),
            "key": _norm_map(heads, heads.k, head // heads.queries_per_key),
        }

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
                shorter_texts_part(self.target, queries, list(self._norms), FRAME),
                attenuation_part(self.target, self.measures, self._layers),
            ]
        )
        pictures = [self._scatter(values, side) for side in SIDES]
        pictures += [self._norm_maps(), _mean_maps(values, self.target.pair_axis)]
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
                "S[k, t] = |Σₙ sⱼ[512 t + n] w[n] exp(−2πi k n / 1024)|²,  w: Hann",
                "SpectrumFE = −Σₖ pₖ log pₖ / log 513,  pₖ ∝ meanₜ S[k, t]",
                "SequenceFE = −Σₖ pₖ log pₖ / log(⌊L/2⌋ − 1),  pₖ ∝ |DFT(sⱼ)[k]|²,  1 ≤ k < ⌊L/2⌋",
            ),
            "Probing Rotary Position Embeddings through Frequency Entropy, Eq. 4–12, Fig. 1–10.",
            (*self._findings(values), *part.findings),
            (*pictures, *part.pictures),
            numbers={
                "tokens": self.target.length,
                "entropy": {f"{NAMES[m]} {side}": plain(of) for (m, side), of in values.items()},
                **part.numbers,
            },
        )

    def _titles(self) -> dict[int, str]:
        encodings = self.target.model.layout.layers
        return {
            layer: f"layer {layer}" + ("" if _rotates(encodings[layer]) else ", no rotation")
            for layer, _ in self._norms
        }

    def _scatter(self, values: Values, side: Side) -> Picture:
        panels = {
            NAMES[m]: {title: values[m, side][layer] for layer, title in self._titles().items()}
            for m in self.measures
        }
        rows = [
            (layer, head, pair, *(float(values[m, side][layer, head, pair]) for m in self.measures))
            for layer, head, pair in np.argwhere(np.isfinite(values[self.measures[0], side]))
        ]
        gates = [rule for gate in self.target.attenuation.gates for rule in rules(gate)]
        thresholds = {NAMES[m]: sorted({tau for of, _, tau in gates if of == m}) for m in MEASURES}
        dashed = " and ".join(
            f"{' and '.join(f'{tau:g}' for tau in taus)} of {name}"
            for name, taus in thresholds.items()
            if taus
        )
        return Picture(
            f"frequency_entropy_{SIDES[side]}",
            pair_scatter(panels, thresholds, self.target.pair_axis),
            f"Frequency entropy (0 to 1) of every pair of the {SIDES[side]} of some layers "
            f"by the pair's index, a colour for each head. Dashed: the thresholds {dashed}. "
            "Low SpectrumFE: bands; low SequenceFE: periods. The file has all layers.",
            ("layer", "head", "pair", *(NAMES[m] for m in self.measures)),
            rows,
        )

    def _norm_maps(self) -> Picture:
        panels, rows, step = {}, [], -(-self.target.length // CELLS)
        for side in SIDES:
            for (layer, head), maps in self._norms.items():
                panels[f"L{layer}H{head}, {NORMS[side]}"] = maps[side]
                rows += [
                    (layer, head, side, pair, cell * step, float(norm))
                    for (pair, cell), norm in np.ndenumerate(maps[side])
                ]
        return Picture(
            "pair_norms",
            heat_maps(
                panels,
                Scale("l2 norm of the pair", log=True),
                x="token",
                y=self.target.pair_axis,
                columns=len(self._norms),
                cell=(step, 1),
            ),
            "Norms of the pairs of one query head a layer, and of the keys it reads, along "
            f"the first text (means over {step} tokens, logarithmic colour). A bright row is a "
            "frequency band, stripes across it are periods.",
            ("layer", "query_head", "side", "pair", "from_token", "norm"),
            rows,
        )

    def _findings(self, values: Values) -> list[str]:
        found = []
        if "spectrum" not in self.measures:
            found.append(
                f"SpectrumFE is left out: its frames take {FRAME:,} tokens, the text has "
                f"{self.target.length:,}."
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


def _layers_to_show(target: Target) -> dict[int, int | None]:
    """Layers with the head whose norms are shown, None for the study to choose: those that were
    asked for, else the first, the middle and the last, and one without rotation."""
    asked = dict(reversed(target.chosen))
    if asked:
        return dict(sorted(asked.items())[:LAYERS_SHOWN])
    encodings = target.model.layout.layers
    still = [layer for layer, encoding in enumerate(encodings) if not _rotates(encoding)]
    last = len(encodings) - 1
    return dict.fromkeys(sorted({0, last // 2, last, *still[:1]}))


def _rotates(encoding: LayerEncoding) -> bool:
    return any(spectrum.rotates for spectrum in encoding.spectra)


def _norm_map(heads: Heads, x: Tensor, head: int) -> Array:
    """``[pairs, cells]``, means over neighbouring tokens of the first text."""
    norms = pair_norms(x[0, head], pair_counts(heads.encoding, x.shape[1], x.shape[-1])[head])
    cells = norms.split(-(-norms.shape[-1] // CELLS), dim=-1)
    return np.stack([cell.mean(dim=-1).cpu().numpy() for cell in cells], axis=-1)


def _mean_maps(values: Values, x_label: str) -> Picture:
    panels, scales, rows = {}, [], []
    for (m, side), entropy in values.items():
        means = mean_over_heads(entropy)
        panels[f"{NAMES[m]} of {SIDES[side]}"] = means
        scales.append(Scale("entropy"))
        rows += [(NAMES[m], side, *at, float(mean)) for at, mean in np.ndenumerate(means)]
    return Picture(
        "frequency_entropy_layers",
        heat_maps(panels, scales, x=x_label, y="layer"),
        "Mean frequency entropy over the heads of a layer (0 to 1, each panel with its own "
        "colours), by pair. Dark columns are bands (SpectrumFE) or periods (SequenceFE) at the "
        "same pair in many layers.",
        ("measure", "side", "layer", "pair", "mean_over_heads"),
        rows,
    )


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
