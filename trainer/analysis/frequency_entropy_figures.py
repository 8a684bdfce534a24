"""Frequency entropy of every pair, and perplexity with extreme pairs attenuated (Probing Rotary
Position Embeddings through Frequency Entropy, Fig. 1 to 10 and 15 to 21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from trainer.analysis.attention import (
    SIDES,
    Array,
    Heads,
    Place,
    Side,
    capture,
    cell_means,
    pair_counts,
    pair_norms,
    stack_layers,
)
from trainer.analysis.frequency_entropy import (
    MEASURES,
    NAMES,
    FrequencyEntropy,
    Gates,
    Sweep,
    frequency_entropies,
    frequency_entropy_of,
    rules,
    sweep,
)
from trainer.analysis.topic import Target, Topic, tidy
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, draw, graded, log_if_wide
from trainer.plotting.style import GREY, Plot

CELLS = 256
COLUMNS = 4
"""Largest number of layers or heads beside each other."""
PAIR_INDEX = "pair index, from the fastest on"


class FrequencyEntropyFigures(Topic):
    """SpectrumFE and SequenceFE of every layer, head and pair, also on the target's prefixes, and
    perplexity with extreme pairs attenuated.

    ``values``: entropies ``[layers, heads, pairs]`` by measure and side, NaN where a head has no
    such pair.
    """

    key = "frequency_entropy"
    title = "Frequency entropy"
    shortest = 6  # with fewer than a frame, only SpectrumFE is left out

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.cell = -(-target.length // CELLS)
        long = target.length >= target.config.frequency_entropy.frame
        self.measures = [m for m in MEASURES if m != "spectrum" or long]
        self.values: dict[tuple[str, Side], Array] = {}
        self.prefixes: dict[int, dict[str, Array]] = {}
        self.sweeps: list[Sweep] = []
        self._layers: list[FrequencyEntropy] = []
        # [pairs, cells]: mean norms of a query head's pairs and of the keys that it reads.
        self._norms: dict[Place, dict[Side, Array]] = {}
        encodings = target.model.layout.layers
        still = [i for i, e in enumerate(encodings) if not any(s.rotates for s in e.spectra)]
        # Without chosen heads: the first, the middle, the last layer and one without rotation.
        last = len(encodings) - 1
        chosen = list(dict.fromkeys(layer for layer, _ in target.config.chosen))
        self._shown = (chosen or sorted({0, last // 2, last, *still[:1]}))[:COLUMNS]
        gates = [rule for gate in target.config.attenuation.gates for rule in rules(gate)]
        self._thresholds = {m: sorted({g.tau for g in gates if g.measure == m}) for m in NAMES}

    def _on_layer(self, heads: Heads) -> None:
        """Compute the entropies of all pairs, and norms of the heads that are shown."""
        entropies = frequency_entropy_of(heads, self.measures, self.target.config.frequency_entropy)
        self._layers.append(entropies)
        asked = self.target.config.chosen
        chosen = [head for layer, head in asked if layer == heads.layer]
        if not asked and heads.layer in self._shown:
            # Without a chosen head, show the one with the most concentrated pair.
            entropy = entropies["query"][self.measures[0]].nan_to_num(nan=1.0)
            chosen = [int(entropy.amin(dim=-1).argmin())]
        for head in chosen:
            self._norms[heads.layer, head] = {
                "query": self._norm_map(heads, "query", head),
                "key": self._norm_map(heads, "key", head // heads.queries_per_key),
            }

    def _norm_map(self, heads: Heads, side: Side, head: int) -> Array:
        """Average norms of the first text over neighbouring tokens, ``[pairs, cells]``."""
        x = heads.q if side == "query" else heads.k
        norms = pair_norms(x[0, head], pair_counts(heads.encoding, x.shape[1], x.shape[-1])[head])
        return cell_means(norms, self.cell).cpu().numpy()

    def measure(self) -> None:
        """Stack the layers; read the prefixes and the attenuated texts."""
        capture(self.target.model, self.target.ids, self._on_layer)
        target = self.target
        self.values = {
            (m, side): stack_layers([layer[side][m] for layer in self._layers])
            for m in self.measures
            for side in SIDES
        }
        frames = target.config.frequency_entropy
        for n in sorted({n for n in target.config.prefixes if n < target.length}):
            measures = [m for m in self.measures if m != "spectrum" or n >= frames.frame]
            layers = frequency_entropies(target.model, target.ids[:, :n], measures, frames)
            self.prefixes[n] = {
                m: stack_layers([layer["query"][m] for layer in layers]) for m in measures
            }
        self.sweeps = attenuation_sweeps(target, self.measures, self._layers)

    def plots(self) -> list[Plot]:
        """Draw entropies by pair, norms by token, and the attenuation."""
        plots = [plot for side in SIDES for plot in self._side(side)]
        if len(self._shown) < len(self.target.model.layout.layers):
            plots += [self._all_layers(m) for m in self.measures]
        return [*plots, *([attenuation_plot(self.sweeps)] if self.sweeps else [])]

    def rows(self) -> pd.DataFrame:
        """Return every pair's entropies, on prefixes too, and the perplexities."""
        axes, T = ("layer", "head", "pair"), self.target.length
        tables = [
            tidy({NAMES[m]: values}, *axes, variant=SIDES[side], length=T)
            for (m, side), values in self.values.items()
        ]
        tables += [
            tidy({NAMES[m]: values}, *axes, variant=SIDES["query"], length=n)
            for n, by_measure in self.prefixes.items()
            for m, values in by_measure.items()
        ]
        for measured in self.sweeps:
            name, tokens = in_words(measured.gates), measured.tokens
            numbers = {f"perplexity, alpha={a:g}": p for a, p in measured.perplexity.items()}
            numbers["attenuated_pairs"] = float(measured.pairs)
            tables.append(tidy(numbers, variant=name, length=tokens))
        return pd.concat(tables)

    def _panel(self, title: str, measure: str, values: Array, y: str = "") -> Panel:
        """Return the points of entropies ``[rows, pairs]``, coloured by the number of the row."""

        def prepare(axes: Axes) -> None:
            for height in self._thresholds[measure]:
                axes.axhline(height, color=GREY, linewidth=0.7, linestyle="--", zorder=0)
            axes.set_ylim(0, 1.02)

        row, pair = np.meshgrid(*map(np.arange, values.shape), indexing="ij")
        return graded(title, pair, values, row, y=y, prepare=prepare)

    def _side(self, side: Side) -> list[Plot]:
        """Draw all heads of some layers (Fig. 3), and single heads with their norms (Fig. 1)."""
        name = SIDES[side]
        panels = [
            self._panel(f"layer {i}", m, self.values[m, side][i], "" if column else NAMES[m])
            for m in self.measures
            for column, i in enumerate(self._shown)
        ]
        look: dict[str, Any] = {"x": PAIR_INDEX, "height": 1.75, "share": True}
        lengths = ", ".join(f"{i}: {n:,}" for i, n in enumerate(self._by_length(side)))
        figures = "(Fig. 1, 2, 5, 8-10, 18-21, "
        return [
            Plot(
                f"frequency_entropy_{name}",
                draw(panels, columns=len(self._shown), index="head", **look),
                f"Entropy of every pair of the {name} of some layers; dashed: thresholds of the "
                "attenuation (Fig. 3).",
            ),
            Plot(
                f"frequency_entropy_heads_{name}",
                draw(
                    self._heads(side),
                    columns=min(COLUMNS, len(self._norms)),
                    index=f"tokens ({lengths})",
                    **look,
                ),
                f"Entropy of every pair of the {name} of single heads, by the length of the text "
                f"{figures}above; App. F, Fig. 15-17).",
            ),
            Plot(
                f"frequency_entropy_norms_{name}",
                heat_maps(
                    {f"layer {i}, head {j}": norms[side] for (i, j), norms in self._norms.items()},
                    Scale("l2 norm of the pair", log=True),
                    x="token",
                    y=PAIR_INDEX,
                    columns=COLUMNS,
                    cell=(self.cell, 1),
                ),
                f"Norms of the pairs of these {name} along the first text {figures}below).",
            ),
        ]

    def _by_length(self, side: Side) -> dict[int, dict[str, Array]]:
        """Return entropies by measure of the whole text, of queries also of its prefixes."""
        whole = {m: self.values[m, side] for m in self.measures}
        return {**(self.prefixes if side == "query" else {}), self.target.length: whole}

    def _heads(self, side: Side) -> list[Panel]:
        """Return single query heads, or the key heads that they read, by length."""
        places, panels = list(self._norms), []
        for start in range(0, len(places), COLUMNS):
            for m in self.measures:
                whole, queries = self.values[m, side], self.values[m, "query"].shape[1]
                missing = np.full(whole.shape, np.nan)
                values = np.stack([by.get(m, missing) for by in self._by_length(side).values()])
                for column, (i, j) in enumerate(places[start : start + COLUMNS]):
                    shown = values[:, i, j * whole.shape[1] // queries]
                    y = "" if column else NAMES[m]
                    panels.append(self._panel(f"layer {i}, head {j}", m, shown, y))
        return panels

    def _all_layers(self, measure: str) -> Plot:
        """Draw queries of all heads of all layers (Fig. 6 and 7)."""
        name, layers = NAMES[measure], enumerate(self.values[measure, "query"])
        panels = [self._panel(f"layer {i}", measure, heads) for i, heads in layers]
        look: dict[str, Any] = {"columns": 6, "height": 0.95, "size": 1.5, "share": True}
        return Plot(
            f"frequency_entropy_all_layers_{measure}",
            draw(panels, x=PAIR_INDEX, y=name, index="head", **look),
            f"{name} of every pair of the queries of all layers (Fig. 6 and 7).",
        )


def attenuation_sweeps(
    target: Target, measures: Sequence[str], entropies: Sequence[FrequencyEntropy]
) -> list[Sweep]:
    """Measure perplexity of the target's texts by gate and alpha (Sec. 5.2, Fig. 4).

    ``measures``: measures for which the text is long enough; gates of others are skipped.
    ``entropies``: entropies on these texts. A model without rotation, or with an intervention, is
    not measured.
    """
    settings, layout = target.config.attenuation, target.model.layout
    gates = [g for g in map(rules, settings.gates) if {rule.measure for rule in g} <= {*measures}]
    busy = any(layer.intervention for layer in layout.layers)
    if not (settings.alphas and gates and layout.rotates) or busy:
        return []
    choice = target.choice
    if choice is not None:
        needed = sorted({rule.measure for together in gates for rule in together})
        entropies = frequency_entropies(
            target.model, choice, needed, target.config.frequency_entropy
        )
    most = target.length - 1
    sweeps = []
    for n in dict.fromkeys(min(n, most) for n in settings.tokens or [most]):
        ids = target.ids[:1, : n + 1]
        sweeps += sweep(target.model, ids, entropies, gates, settings.alphas)
    return sweeps


def attenuation_plot(sweeps: Sequence[Sweep]) -> Plot:
    """Draw perplexity by the factor on the chosen pairs, a panel for each number of tokens."""
    panels = []
    for tokens in dict.fromkeys(measured.tokens for measured in sweeps):
        shown = [measured for measured in sweeps if measured.tokens == tokens]
        lines = [
            Line(f"{in_words(gates)} ({pairs:,})", number, [*curve], [*curve.values()])
            for number, (gates, _, pairs, curve) in enumerate(shown)
        ]
        x, y = "factor α on the chosen pairs", "perplexity"
        panels.append(Panel(f"{tokens:,} tokens", lines, x, y, log_if_wide))
    return Plot(
        "attenuation",
        draw(panels, columns=2),
        "Perplexity by the factor on pairs of extreme entropy; in brackets the number of pairs "
        "(Sec. 5.2, Fig. 4).",
    )


def in_words(gates: Gates) -> str:
    """Describe gates in words."""
    signs = {"below": "<", "above": ">"}
    return " or ".join(f"{NAMES[g.measure]} {signs[g.side]} {g.tau:g}" for g in gates)
