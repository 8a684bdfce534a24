"""Positional bias of heads, its gradients before training, and the effect of a rescaling on
positional and semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from torch import Tensor

from trainer.analysis.attention import Array, Place, attention_rows, capture
from trainer.analysis.positional_bias import (
    TOKENS,
    FreshResult,
    fresh_decoders,
    highest_rotating,
    needle_attention,
    positional_biases,
    prefix_spreads,
    profiles,
    scaling_factors,
)
from trainer.analysis.topic import Target, Topic, stacked, tidy
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, draw, log_if_wide
from trainer.plotting.style import STYLE_NUMBERS, Plot, whole_ticks
from trainer.positional.spectrum import Spectrum

KINDS = {"diagonal": "its own token", "previous": "the previous token"}
VERSIONS = {
    "encoded": ("fresh, with positions", STYLE_NUMBERS["RoPE"]),
    "nope": ("fresh, NoPE", STYLE_NUMBERS["NoPE from scratch"]),
    "model": ("this model", 1),
}
"""Labels and style numbers of a model before training and as it is."""
METHODS = {
    "trained": ("as trained", STYLE_NUMBERS["RoPE"]),
    "yarn": ("YaRN", STYLE_NUMBERS["RoPE + YaRN"]),
    "pi": ("PI", STYLE_NUMBERS["RoPE + PI"]),
    "ntk": ("NTK-aware", STYLE_NUMBERS["RoPE + NTK-aware"]),
}
BESIDE, REACH = 32, 8
"""Distances that a profile shows, and tokens around a needle."""
FACTORS = (2.0, 3.0, 4.0)


class PositionalBiasFigures(Topic):
    """Aᶜ of every head within the training length, its causes, and what YaRN does to attention.

    ``bias``: Aᶜ ``[layers, heads]`` by :data:`KINDS`. ``yarn``: curves as trained and under YaRN by
    metric, with the head that they are of and the place of their first entry.
    """

    key = "positional_bias"
    title = "Positional bias"
    shortest = 2  # a single token attends to itself alone

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.bias: dict[str, Array] = {}
        self.fresh: FreshResult | None = None
        self.spreads: dict[str, Array] = {}
        self.yarn: dict[str, tuple[Place, int, dict[str, Array]]] = {}
        self.spectrum: Spectrum | None = None

    @property
    def length(self) -> int:
        """Tokens that are read, at most the training length."""
        return min(self.target.length, self.target.training_length)

    def measured_bias(self) -> dict[str, Array]:
        """Compute Aᶜ of every head.

        The beginning of the text is read by itself: in a longer one, temperatures and frequencies
        may differ.
        """
        layers: list[dict[str, Tensor]] = []
        ids = self.target.ids[:, : self.length]
        capture(
            self.target.model, ids, lambda h: layers.append(positional_biases(attention_rows(h)))
        )
        return stacked(layers)

    def measure(self) -> None:
        """Read the text for every measure; rescale the frequencies of a model that rotates."""
        model, ids, prompt = self.target.model, self.target.ids, self.target.prompt
        self.bias = self.measured_bias()
        self.fresh = fresh_decoders(model, ids)
        spread = prefix_spreads(model, ids[:1, : min(TOKENS, self.length)])
        self.spreads = ({} if self.fresh is None else self.fresh.spreads) | {"model": spread[None]}
        rotating = [s for s in model.layout.spectra if s.rotates]
        if not rotating:
            return
        C = self.target.training_length
        self.spectrum = rotating[0].at(C, C)
        place = highest_rotating(np.maximum(*self.bias.values()), model.layout)
        curves = profiles(model, ids[:, : self.length], place)
        self.yarn["attention_by_distance"] = place, 0, curves
        if prompt is not None:
            maps, needle = needle_attention(model, prompt), prompt.needle
            place = highest_rotating(maps["trained"][..., needle].sum(axis=-1), model.layout)
            first = max(0, needle.start - REACH)
            shown = {name: map_[place][first : needle.stop + REACH] for name, map_ in maps.items()}
            self.yarn["attention_near_needle"] = place, first - needle.start, shown

    def plots(self) -> list[Plot]:
        """Draw heads, gradients before training, spreads, and the effects of rescaling."""
        lowest = min(0.0, *(bias.min() for bias in self.bias.values()))
        plots = [
            Plot(
                "positional_bias_heads",
                heat_maps(
                    {f"towards {KINDS[kind]}": bias for kind, bias in self.bias.items()},
                    Scale("Aᶜ", low=lowest),
                    x="query head",
                    y="layer",
                ),
                f"Positional bias Aᶜ of every head on {self.length:,} tokens; 1: all attention on "
                "that key, 0: uniform (DroPE, Def. 3.1).",
            ),
            *([] if self.fresh is None else [gradients_plot(self.fresh)]),
            spread_plot(self.spreads),
        ]
        if self.yarn:
            plots.append(self._under_yarn())
        if self.spectrum is not None:
            plots.append(factors_plot(self.spectrum, self.target.training_length))
        return plots

    def rows(self) -> pd.DataFrame:
        """Return biases, gradients, spreads, attention under YaRN and factors of frequencies."""
        tables = [tidy({k: b}, "layer", "head", length=self.length) for k, b in self.bias.items()]
        by_seed: list[tuple[str, str, Array]] = [
            (version, "prefix_spread", spreads) for version, spreads in self.spreads.items()
        ]
        for version, norms in self.fresh.gradients.items() if self.fresh else ():
            by_seed += [(version, f"gradient_{k}", norms[:, i]) for i, k in enumerate(KINDS)]
        for version, metric, values in by_seed:
            label = VERSIONS[version][0]
            for seed, value in enumerate(values):
                tables.append(tidy({metric: value}, "layer", variant=f"{label}, seed {seed}"))
        for metric, ((layer, head), first, curves) in self.yarn.items():
            for name, curve in curves.items():
                places = {"length": range(first, first + len(curve))}
                table = tidy({metric: curve}, "length", places=places, variant=name)
                tables.append(table.assign(layer=layer, head=head))
        if self.spectrum is not None:
            for s in FACTORS:
                factors = scaling_factors(self.spectrum, self.target.training_length, s)
                for name, gamma in factors.items():
                    variant = f"{METHODS[name][0]}, s = {s:g}"
                    tables.append(tidy({"frequency_factor": gamma}, "pair", variant=variant))
        return pd.concat(tables)

    def _under_yarn(self) -> Plot:
        """Draw attention as trained and under YaRN (Fig. 7 and 8)."""
        looks = {
            "attention_by_distance": ("positional", "distance (tokens back)", BESIDE),
            "attention_near_needle": ("needle", "key, tokens from the needle's first", None),
        }
        panels = []
        for metric, ((layer, head), first, curves) in self.yarn.items():
            kind, x_label, most = looks[metric]
            shown = {name: curve[:most] for name, curve in curves.items()}
            x = range(first, first + len(shown["trained"]))
            title = f"{kind}: layer {layer} head {head}"
            panels.append(Panel(title, _lines(shown, x), x_label, "attention"))
        return Plot(
            "attention_under_yarn",
            draw(panels),
            "Attention as trained and under YaRN with s = 2: of the most positional head by "
            "distance, and of a needle prompt's last token around the needle, in the head that "
            "attends to it most (DroPE, Fig. 7, 8).",
        )


def gradients_plot(fresh: FreshResult) -> Plot:
    """Draw gradients before training (Fig. 4)."""
    panels = [
        _over_layers(
            f"towards {towards}",
            {version: norms[:, kind] for version, norms in fresh.gradients.items()},
            "layer",
            "gradient norm of Aᶜ",
        )
        for kind, towards in enumerate(KINDS.values())
    ]
    return Plot(
        "positional_bias_gradients",
        draw(panels),
        f"Gradient of Aᶜ by W_Q and W_K before training, mean over heads, on {fresh.tokens} "
        "tokens, with positions and without; bars: range of seeds (DroPE, Fig. 4).",
    )


def spread_plot(spreads: Mapping[str, Array]) -> Plot:
    """Draw prefix spreads (Thm. 3.4)."""
    return Plot(
        "prefix_spread",
        draw([_over_layers("", spreads, "blocks passed", "prefix spread")]),
        "Prefix spread of the normalised states that enter attention after so many blocks (DroPE, "
        "Thm. 3.4).",
    )


def _over_layers(title: str, versions: Mapping[str, Array], x: str, y: str) -> Panel:
    """Return the means over seeds of ``[seeds, layers]``, with the least and the largest value."""

    def prepare(axes: Axes) -> None:
        log_if_wide(axes)
        whole_ticks(axes.xaxis.get_major_locator())

    lines = []
    for version, values in versions.items():
        layers, mean = range(values.shape[1]), values.mean(axis=0).tolist()
        low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
        lines.append(Line(*VERSIONS[version], layers, mean, low, high))
    return Panel(title, lines, x, y, prepare)


def factors_plot(spectrum: Spectrum, training_length: int) -> Plot:
    """Draw the factor on every frequency (Fig. 6 and 11)."""
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    slow = (turns > 0) & (turns < 1)

    def prepare(axes: Axes) -> None:
        axes.set_ylim(0, 1.05)

    first_slow = (int(np.argmax(slow)) - 0.5, "right of it: less than one turn")
    panels = [
        Panel(
            f"s = {s:g}",
            _lines(scaling_factors(spectrum, training_length, s), range(len(turns))),
            "pair, fastest first",
            "frequency factor γ",
            prepare,
            first_slow if slow.any() else None,
        )
        for s in FACTORS
    ]
    return Plot(
        "rescaling_factors",
        draw(panels),
        "Factor on every frequency, for texts 2, 3 and 4 times as long (DroPE, Fig. 6, 11).",
    )


def _lines(curves: Mapping[str, Array], x: Iterable[float]) -> list[Line]:
    """Return a line for each layout or method."""
    places = list(x)
    return [Line(*METHODS[name], places, curve.tolist()) for name, curve in curves.items()]
