"""The section on frequency entropy: bands, periods, and the model's loss without them (Probing
Rotary Position Embeddings through Frequency Entropy, Fig. 1 to 10 and 15 to 17)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from trainer.analysis.arrays import (
    SIDES,
    Array,
    Place,
    Side,
    cell_means,
    finite,
    mean_over_heads,
    pair_counts,
    pair_norms,
    stack_layers,
    to_json,
)
from trainer.analysis.capture import Heads
from trainer.analysis.frequency_entropy.attenuation import attenuation_part
from trainer.analysis.frequency_entropy.measure import (
    MEASURES,
    NAMES,
    FrequencyEntropy,
    frequency_entropies,
    frequency_entropy_of,
)
from trainer.analysis.settings import rules
from trainer.analysis.studies.section import Part, Picture, Section, joined, long_rows
from trainer.analysis.studies.study import Study, Target
from trainer.common.words import counted
from trainer.plotting.maps import Scale, draw_map, heat_maps
from trainer.plotting.points import entropy_axis, layer_panels, pair_scatter
from trainer.plotting.style import BLUE, WIDTH, blank, paper_style
from trainer.positional.layout import LayerEncoding

CELLS = 256
NEAR = 2
"""Distance in pairs that counts as the same place."""
PERIODIC = 0.6
"""SequenceFE below which a pair counts as periodic (Sec. 5.2)."""
COLUMNS = 4
"""Largest number of layers or heads beside each other."""
LOW = {
    "spectrum": "Low values are frequency bands.",
    "sequence": "Low values are periods.",
}


class FrequencyEntropyStudy(Study):
    """SpectrumFE and SequenceFE of every layer, head and pair, also on the target's prefixes, and
    perplexity with extreme pairs attenuated.

    ``values``: entropies ``[layers, heads, pairs]`` by measure and side, NaN where a head has no
    such pair.
    """

    key: ClassVar[str] = "frequency_entropy"
    title: ClassVar[str] = "Frequency entropy"
    shortest: ClassVar[int] = 6  # with fewer than a frame, only SpectrumFE is left out

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.frames = target.frames
        self.cell = -(-target.length // CELLS)
        long = target.length >= self.frames.frame
        self.measures = [m for m in MEASURES if m != "spectrum" or long]
        self.values: dict[tuple[str, Side], Array] = {}
        self._layers: list[FrequencyEntropy] = []
        # [pairs, cells]: mean norms of a query head's pairs and of the keys that it reads.
        self._norms: dict[Place, dict[Side, Array]] = {}
        encodings = target.model.layout.layers
        self._still = [i for i, encoding in enumerate(encodings) if not _rotates(encoding)]
        # Without chosen heads: the first, the middle, the last layer and one without rotation.
        last = len(encodings) - 1
        chosen = list(dict.fromkeys(layer for layer, _ in target.chosen))
        self._shown = chosen or sorted({0, last // 2, last, *self._still[:1]})
        gates = [rule for gate in target.attenuation.gates for rule in rules(gate)]
        self._thresholds: dict[str, Sequence[float]] = {
            m: sorted({tau for measure, _, tau in gates if measure == m}) for m in NAMES
        }

    def on_layer(self, heads: Heads) -> None:
        """Compute the entropies of all pairs, and norms of the heads that are shown."""
        entropies = frequency_entropy_of(heads, self.measures, self.frames)
        self._layers.append(entropies)
        chosen = [head for layer, head in self.target.chosen if layer == heads.layer]
        if not self.target.chosen and heads.layer in self._shown:
            # Without a chosen head, show the one with the most concentrated pair.
            entropy = entropies["query"][self.measures[0]].nan_to_num(nan=1.0)
            chosen = [int(entropy.amin(dim=-1).argmin())]
        for head in chosen:
            key = head // heads.queries_per_key
            self._norms[heads.layer, head] = {
                "query": _norm_map(heads, heads.q, head, self.cell),
                "key": _norm_map(heads, heads.k, key, self.cell),
            }

    def section(self) -> Section:
        """Write the section: scatter plots, maps, and the attenuation."""
        self.values = {
            (m, side): stack_layers([layer[side][m] for layer in self._layers])
            for m in self.measures
            for side in SIDES
        }
        queries = {m: self.values[m, "query"] for m in self.measures}
        frame, hop = self.frames.frame, self.frames.step
        numbers = {
            "tokens": self.target.length,
            "frames": {"window": self.frames.window, "frame": frame, "hop": hop},
            "entropy": {
                f"{NAMES[m]} {side}": to_json(values) for (m, side), values in self.values.items()
            },
        }
        parts = [
            Part(tuple(self._findings()), tuple(self._pictures()), numbers=numbers),
            shorter_texts_part(self.target, queries, list(self._norms)),
            attenuation_part(self.target, self.measures, self._layers),
        ]
        return Section(
            key=self.key,
            title=self.title,
            text=(
                "The norms of one pair of channels at all tokens are a signal; its frequency "
                "entropy says how concentrated the power of that signal is, from 0 for a pure tone "
                "to 1 for white noise. SpectrumFE, of short frames with the mean left in, is low "
                "where a pair is large throughout: a frequency band. SequenceFE, of the whole text "
                "without the mean, is low where the norm oscillates. In heads without rotation the "
                "pairs are those that RoPE would turn together."
            ),
            formula=(
                "sⱼ[n] = ‖qₙ⁽ʲ⁾‖₂",
                f"S[k, t] = |Σₙ sⱼ[{hop} t + n] w[n] exp(−2πi k n / {frame})|²,  "
                f"w: {self.frames.window.capitalize()}",
                f"SpectrumFE = −Σₖ pₖ log pₖ / log {frame // 2 + 1},  pₖ ∝ meanₜ S[k, t]",
                "SequenceFE = −Σₖ pₖ log pₖ / log(⌊L/2⌋ − 1),  pₖ ∝ |DFT(sⱼ)[k]|²,  1 ≤ k < ⌊L/2⌋",
            ),
            source=(
                "Probing Rotary Position Embeddings through Frequency Entropy, Eq. 4–12, Fig. 1–10 "
                "and 15–21."
            ),
            **vars(joined(parts)),
        )

    def _findings(self) -> list[str]:
        findings = []
        if "spectrum" not in self.measures:
            findings.append(
                f"SpectrumFE is left out: its frames take {self.frames.frame:,} tokens, the text "
                f"has {self.target.length:,}."
            )
        for m in self.measures:
            low, middle, high = np.quantile(finite(self.values[m, "query"]), [0.05, 0.5, 0.95])
            findings.append(
                f"{NAMES[m]} of query pairs: median {middle:.2f}, nine in ten between {low:.2f} "
                f"and {high:.2f}."
            )
        if "spectrum" in self.measures:
            findings.append(_band(self.values["spectrum", "query"]))
        findings += [_periods(self.values["sequence", side], kind) for side, kind in SIDES.items()]
        turning = np.array([_rotates(e) for e in self.target.model.layout.layers])
        if turning.any() and not turning.all():
            for m in self.measures:
                rotating, still = (
                    finite(self.values[m, "query"][chosen]).mean() for chosen in (turning, ~turning)
                )
                findings.append(
                    f"Mean {NAMES[m]} of queries is {rotating:.2f} in layers that rotate and "
                    f"{still:.2f} in the others."
                )
        return findings

    def _pictures(self) -> list[Picture]:
        layers = self._shown[:COLUMNS]
        heads = list(dict.fromkeys(self.target.chosen or self._norms))
        rows = [heads[start : start + COLUMNS] for start in range(0, len(heads), COLUMNS)]
        drawn = [self._scatter(layers, side) for side in SIDES]
        drawn += [
            self._heads(row, side, number)
            for side in SIDES
            for number, row in enumerate(rows, start=1)
        ]
        drawn.append(self._means())
        if len(layers) < len(self.target.model.layout.layers):
            drawn += [self._all_layers(measure) for measure in self.measures]
        return drawn

    def _scatter(self, layers: Sequence[int], side: Side) -> Picture:
        """Draw all heads of some layers (Fig. 3)."""
        values = {m: self.values[m, side] for m in self.measures}
        panels = {
            NAMES[m]: {self._title(layer): entropy[layer] for layer in layers}
            for m, entropy in values.items()
        }
        thresholds = [
            f"{' and '.join(f'{tau:g}' for tau in taus)} of {NAMES[m]}"
            for m, taus in self._thresholds.items()
            if taus
        ]
        by_name = {NAMES[m]: taus for m, taus in self._thresholds.items()}
        dashed = f" Dashed: the thresholds {' and '.join(thresholds)}." if thresholds else ""
        return Picture(
            name=f"frequency_entropy_{SIDES[side]}",
            figure=pair_scatter(panels, by_name, self.target.pair_axis),
            caption=(
                f"Frequency entropy (0 to 1) of every pair of the {SIDES[side]} of some layers "
                f"by the pair's index, a colour for each head.{dashed} Low SpectrumFE: bands; "
                "low SequenceFE: periods."
            ),
            header=("layer", "head", "pair", *panels),
            rows=[
                (*place, *(float(entropy[place]) for entropy in values.values()))
                for place, first in np.ndenumerate(values[self.measures[0]])
                if place[0] in layers and np.isfinite(first)
            ],
        )

    def _heads(self, shown: Sequence[Place], side: Side, number: int) -> Picture:
        """Draw entropies and norms of single heads, a column each (Fig. 1, 2, 5 and 8 to 10)."""
        readers = "" if side == "query" else " that these heads read"
        cells = range(0, self.target.length, self.cell)
        return Picture(
            name=f"frequency_entropy_heads_{SIDES[side]}" + (f"_{number}" if number > 1 else ""),
            figure=self._head_columns(shown, side),
            caption=(
                f"Frequency entropy (0 to 1) of every pair of the {SIDES[side]}{readers}, a head "
                "in a column; below it the norms of its pairs along the first text (means over "
                f"{counted(self.cell, 'token')}, logarithmic colour). A bright row is a frequency "
                "band and has a low SpectrumFE, stripes across a row are periods and have a low "
                "SequenceFE."
            ),
            header=("layer", "query_head", "side", "pair", "from_token", "norm"),
            rows=long_rows(
                {(*place, side): self._norms[place][side] for place in shown}, places=cells
            ),
        )

    def _head_columns(self, shown: Sequence[Place], side: Side) -> Figure:
        """Draw heads beside each other: entropies by pair, and below them the norms by token."""
        maps = [self._norms[place][side] for place in shown]
        scale = Scale("l2 norm of the pair", log=True)
        norm = scale.norm(maps)
        count = len(self.measures)
        with paper_style():
            figure = blank(0.6 + 1.35 * count + 1.9, width=WIDTH * (0.6 + 0.1 * len(shown)))
            grid = figure.subplots(
                *(count + 1, len(shown)),
                squeeze=False,
                sharey="row",
                height_ratios=[1.0] * count + [1.4],
            )
            for column, (layer, head), norms in zip(grid.T, shown, maps, strict=True):
                title = f"layer {layer}, head {head}"
                still = "\nno rotation" if layer in self._still else ""
                column[0].set_title(title + still, pad=3)
                for axes, m in zip(column, self.measures, strict=False):
                    entropies, queries = self.values[m, side][layer], self.values[m, "query"][layer]
                    drawn = entropies[head * len(entropies) // len(queries), : len(norms)]
                    axes.plot(drawn, "o", color=BLUE, markersize=2.2, markeredgewidth=0)
                    entropy_axis(axes, self._thresholds[m])
                    axes.locator_params(axis="x", integer=True)
                column[count - 1].set_xlabel("pair index")
                image = draw_map(column[-1], norms, scale, norm, (self.cell, 1))
                column[-1].set_ylim(max(map(len, maps)) - 0.5, -0.5)
                column[-1].locator_params(integer=True, nbins=5)
                column[-1].set_xlabel("token")
            labels = [*(NAMES[m] for m in self.measures), "pair index"]
            for axes, label in zip(grid[:, 0], labels, strict=True):
                axes.set_ylabel(label)
            figure.colorbar(image, ax=list(grid[-1]), label=scale.label, pad=0.02)
        return figure

    def _means(self) -> Picture:
        """Draw means over heads, by layer and pair."""
        means = {place: mean_over_heads(entropy) for place, entropy in self.values.items()}
        panels = {f"{NAMES[m]} of {SIDES[side]}": mean for (m, side), mean in means.items()}
        scales = [Scale("entropy")] * len(panels)
        return Picture(
            name="frequency_entropy_layers",
            figure=heat_maps(panels, scales, x=self.target.pair_axis, y="layer"),
            caption=(
                "Mean frequency entropy over the heads of a layer (0 to 1, each panel with its own "
                "colours), by pair. Dark columns are bands (SpectrumFE) or periods (SequenceFE) at "
                "the same pair in many layers."
            ),
            header=("measure", "side", "layer", "pair", "mean_over_heads"),
            rows=long_rows({(NAMES[m], side): mean for (m, side), mean in means.items()}),
        )

    def _all_layers(self, measure: str) -> Picture:
        """Draw queries of all heads of all layers (Fig. 6 and 7); the CSV file has the keys too."""
        name = NAMES[measure]
        by_side = {(side,): self.values[measure, side] for side in SIDES}
        panels = {self._title(i): heads for i, heads in enumerate(self.values[measure, "query"])}
        return Picture(
            name=f"frequency_entropy_all_layers_{measure}",
            figure=layer_panels(panels, self._thresholds[measure], self.target.pair_axis, name),
            caption=(
                f"{name} (0 to 1) of every pair of the queries of all layers, a colour for "
                f"each head. Dashed: the thresholds. {LOW[measure]} The file has keys too."
            ),
            header=("side", "layer", "head", "pair", name),
            rows=[row for row in long_rows(by_side) if np.isfinite(row[-1])],
        )

    def _title(self, layer: int) -> str:
        return f"layer {layer}" + (", no rotation" if layer in self._still else "")


def shorter_texts_part(
    target: Target, whole: Mapping[str, Array], shown: Collection[tuple[int, int]]
) -> Part:
    """Compare entropies of queries on the target's prefixes with the whole text's (App. F, Fig. 15
    to 17).

    ``whole``: entropies on the whole text, ``[layers, heads, pairs]`` by measure. ``shown``:
    (layer, query head) of the pictures.
    """
    prefixes = sorted({n for n in target.prefixes if n < target.length})
    if not prefixes:
        return Part()
    by_length: dict[int, Mapping[str, Array]] = {}
    for n in prefixes:
        measures = [m for m in whole if m != "spectrum" or n >= target.frames.frame]
        layers = frequency_entropies(target.model, target.ids[:, :n], measures, target.frames)
        by_length[n] = {m: stack_layers([layer["query"][m] for layer in layers]) for m in measures}
    by_length[target.length] = whole
    lengths = list(by_length)
    missing: Array = np.full(next(iter(whole.values())).shape, np.nan)
    by_measure = {m: np.stack([by_length[n].get(m, missing) for n in lengths]) for m in whole}
    panels = {
        NAMES[m]: {f"L{i}H{j}": values[:, i, j] for i, j in shown}
        for m, values in by_measure.items()
    }
    picture = Picture(
        name="frequency_entropy_lengths",
        figure=pair_scatter(panels, {}, target.pair_axis, ("tokens", [f"{n:,}" for n in lengths])),
        caption=(
            "Frequency entropy (0 to 1) of the query pairs of one head a layer, on the first "
            "tokens of the text and on the whole text. Points on top of each other: bands and "
            "periods are at the same pairs at every length."
        ),
        header=("tokens", "layer", "head", "pair", *(NAMES[m] for m in whole)),
        rows=[
            (lengths[n], layer, head, pair, *entropies)
            for layer, head in shown
            for n, pair in np.ndindex(len(lengths), missing.shape[-1])
            for entropies in [[float(v[n, layer, head, pair]) for v in by_measure.values()]]
            if np.isfinite(entropies).any()
        ],
    )
    return Part(tuple(_changes(lengths, by_measure)), (picture,))


def _changes(lengths: Sequence[int], by_measure: Mapping[str, Array]) -> list[str]:
    """Compare entropies ``[lengths, layers, heads, pairs]`` on the shortest text that has a measure
    with the whole text's."""
    findings = []
    for m, values in by_measure.items():
        last = len(values) - 1
        shortest = next((i for i in range(last) if np.isfinite(values[i]).any()), last)
        if shortest == last:
            continue
        first, whole = values[shortest], values[-1]
        same = (np.abs(strongest_pairs(first) - strongest_pairs(whole)) <= NEAR).mean()
        findings.append(
            f"From {lengths[shortest]:,} to {lengths[-1]:,} tokens {NAMES[m]} of a query pair "
            f"changes by {np.nanmean(np.abs(whole - first)):.3f} on average; in {same:.0%} of "
            f"heads the pair where it is lowest stays within {NEAR} of its place."
        )
    return findings


def strongest_pairs(entropy: Array) -> Array:
    """Return the pair of lowest entropy of every head, from ``[layers, heads, pairs]``."""
    return np.nanargmin(entropy.reshape(-1, entropy.shape[-1]), axis=-1)


def _rotates(encoding: LayerEncoding) -> bool:
    return any(spectrum.rotates for spectrum in encoding.spectra)


def _norm_map(heads: Heads, x: Tensor, head: int, cell: int) -> Array:
    """Average norms of the first text over neighbouring tokens, ``[pairs, cells]``."""
    norms = pair_norms(x[0, head], pair_counts(heads.encoding, x.shape[1], x.shape[-1])[head])
    return cell_means(norms, cell).cpu().numpy()


def _band(entropy: Array) -> str:
    """Describe where the heads have their strongest band."""
    lowest = strongest_pairs(entropy)
    band = int(np.bincount(lowest).argmax())
    share = float((np.abs(lowest - band) <= NEAR).mean())
    return (
        f"The strongest frequency band of queries is most often pair {band}; in {share:.0%} of "
        f"heads it lies within {NEAR} pairs of that."
    )


def _periods(entropy: Array, kind: str) -> str:
    """Describe how many pairs have a period."""
    periodic = (entropy < PERIODIC).sum(axis=(1, 2))
    text = (
        f"{periodic.sum():,} of {len(finite(entropy)):,} pairs of {kind} have SequenceFE below "
        f"{PERIODIC}"
    )
    if not periodic.any():
        return f"{text}: no pair has a clear period."
    return f"{text}, most of them in layer {periodic.argmax()} ({periodic.max():,})."
