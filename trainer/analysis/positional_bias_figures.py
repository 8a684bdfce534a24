"""Positional bias of heads, its gradients before training, and the effect of a rescaling on
positional and semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from trainer.analysis.arrays import Array, Averages
from trainer.analysis.attention import attention_rows
from trainer.analysis.capture import Heads, capture
from trainer.analysis.positional_bias import (
    TOKENS,
    FreshResult,
    fresh_decoders,
    positional_biases,
    prefix_spreads,
)
from trainer.analysis.rescaling_effects import (
    REACH,
    NeedleShift,
    YarnShift,
    needle_shift,
    scaling_factors,
    yarn_shift,
)
from trainer.analysis.topic import Plot, Target, Topic, tidy
from trainer.plotting.lines import Frame, Panel, Series, log_if_wide, side_by_side, whole_x
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.points import Points, points
from trainer.plotting.style import STYLE_NUMBERS
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
BESIDE = 32
"""Number of distances that a profile shows."""
FACTORS = (2.0, 3.0, 4.0)


class PositionalBiasFigures(Topic):
    """Aᶜ of every head within the training length, its causes, and what YaRN does to attention.

    ``bias``: Aᶜ ``[layers, heads]`` by :data:`KINDS`.
    """

    key = "positional_bias"
    title = "Positional bias"
    shortest = 2  # a single token attends to itself alone

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.bias: dict[str, Array] = {}
        self.fresh: FreshResult | None = None
        self.spreads: dict[str, Array] = {}
        self.yarn: YarnShift | None = None
        self.needle: NeedleShift | None = None
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
        averages = Averages()

        def on_layer(heads: Heads) -> None:
            averages.add(heads.layer, **positional_biases(attention_rows(heads)))

        capture(self.target.model, self.target.ids[:, : self.length], on_layer)
        return {kind: averages.stacked(kind) for kind in KINDS}

    def finish(self) -> None:
        """Read the text for every measure; rescale the frequencies of a model that rotates."""
        model, ids = self.target.model, self.target.ids
        self.bias = self.measured_bias()
        self.fresh = fresh_decoders(model, ids)
        spread = prefix_spreads(model, ids[:1, : min(TOKENS, self.length)])
        self.spreads = ({} if self.fresh is None else self.fresh.spreads) | {"model": spread[None]}
        rotating = [s for s in model.layout.spectra if s.rotates]
        if rotating:
            C = self.target.training_length
            self.spectrum = rotating[0].at(C, C)
            self.yarn = yarn_shift(model, ids, np.maximum(*self.bias.values()))
            if self.target.prompt is not None:
                self.needle = needle_shift(model, self.target.prompt)

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
        if self.yarn is not None:
            plots += yarn_plots(self.yarn, np.maximum(*self.bias.values()))
        if self.needle is not None:
            plots.append(needle_plot(self.needle))
        if self.spectrum is not None:
            plots.append(factors_plot(self.spectrum, self.target.training_length))
        return plots

    def rows(self) -> pd.DataFrame:
        """Return biases, gradients, spreads, shifts under YaRN and factors of frequencies."""
        tables = [tidy({k: b}, "layer", "head", length=self.length) for k, b in self.bias.items()]
        for version, spreads in self.spreads.items():
            for seed, values in enumerate(spreads):
                name = f"{VERSIONS[version][0]}, seed {seed}"
                tables.append(tidy({"prefix_spread": values}, "layer", variant=name))
        for version, gradients in ({} if self.fresh is None else self.fresh.gradients).items():
            for seed, norms in enumerate(gradients):
                name = f"{VERSIONS[version][0]}, seed {seed}"
                values = {f"gradient_{k}": norm for k, norm in zip(KINDS, norms, strict=True)}
                tables.append(tidy(values, "layer", variant=name))
        return pd.concat([*tables, *self._yarn_rows(), *self._factor_rows()])

    def _yarn_rows(self) -> list[pd.DataFrame]:
        """Return attention under YaRN, of all heads and of those that figures show."""
        tables, curves = [], []
        if (yarn := self.yarn) is not None:
            numbers = {"recall": yarn.recall, "yarn_shift": yarn.shift}
            tables.append(tidy(numbers, "layer", "head", length=yarn.half))
            tables.append(tidy({"recall": yarn.uniform}, variant="uniform", length=yarn.half))
            around = range(-REACH, REACH + 1)
            profile = range(len(yarn.profile["trained"]))
            curves += [
                ("attention_by_distance", yarn.positional, yarn.profile, profile),
                ("attention_near_repeat", yarn.semantic, yarn.near_repeat, around),
            ]
        if (needle := self.needle) is not None:
            curves.append(("attention_near_needle", needle.head, needle.curves, needle.offsets))
        for metric, (layer, head), by_layout, offsets in curves:
            for name, values in by_layout.items():
                table = tidy({metric: values}, "length", places={"length": offsets}, variant=name)
                tables.append(table.assign(layer=layer, head=head))
        return tables

    def _factor_rows(self) -> list[pd.DataFrame]:
        if self.spectrum is None:
            return []
        by_factor = {
            s: scaling_factors(self.spectrum, self.target.training_length, s) for s in FACTORS
        }
        return [
            tidy({"frequency_factor": gamma}, "pair", variant=f"{METHODS[name][0]}, s = {s:g}")
            for s, factors in by_factor.items()
            for name, gamma in factors.items()
        ]


def gradients_plot(fresh: FreshResult) -> Plot:
    """Draw gradients before training (Fig. 4)."""
    frame = Frame("layer", "gradient norm of Aᶜ", whole_x(log_if_wide))
    panels = [
        Panel(
            f"towards {towards}",
            [_over_layers(version, norms[:, kind]) for version, norms in fresh.gradients.items()],
            frame,
        )
        for kind, towards in enumerate(KINDS.values())
    ]
    return Plot(
        "positional_bias_gradients",
        side_by_side(panels),
        f"Gradient of Aᶜ by W_Q and W_K before training, mean over heads, on {fresh.tokens} "
        f"tokens, with {fresh.encoding} and without; bars: range of seeds (DroPE, Fig. 4).",
    )


def spread_plot(spreads: Mapping[str, Array]) -> Plot:
    """Draw prefix spreads (Thm. 3.4)."""
    growths = {version: norms / norms[:, :1] for version, norms in spreads.items()}
    panels = [
        Panel(
            title,
            [_over_layers(version, norms) for version, norms in shown.items()],
            Frame("blocks passed", "spread", whole_x(log_if_wide)),
        )
        for title, shown in (("prefix spread", spreads), ("growth over the first", growths))
    ]
    return Plot(
        "prefix_spread",
        side_by_side(panels),
        "Prefix spread of the normalised states that enter attention after so many blocks (DroPE, "
        "Thm. 3.4).",
    )


def _over_layers(version: str, values: Array) -> Series:
    """Return the mean over seeds of ``[seeds, layers]``, with the least and the largest value."""
    label, style = VERSIONS[version]
    mean, low, high = values.mean(axis=0).tolist(), None, None
    if len(values) > 1:
        low, high = values.min(axis=0).tolist(), values.max(axis=0).tolist()
    return Series(label, style, range(values.shape[1]), mean, low, high)


def yarn_plots(measured: YarnShift, bias: Array) -> list[Plot]:
    """Draw attention under YaRN (Fig. 7 and 8); ``bias``: ``[layers, heads]``."""
    positional, semantic = (
        f"layer {i} head {j}" for i, j in (measured.positional, measured.semantic)
    )
    beside = {name: curve[:BESIDE] for name, curve in measured.profile.items()}
    near = Frame("key, tokens from the earlier occurrence", "mean attention")
    panels = [
        Panel(
            f"positional: {positional}",
            _lines(beside, range(BESIDE)),
            Frame("distance (tokens back)", "mean attention"),
        ),
        Panel(
            f"finds repeated tokens: {semantic}",
            _lines(measured.near_repeat, range(-REACH, REACH + 1)),
            near,
        ),
    ]
    layer = np.repeat(np.arange(len(bias)), bias.shape[1]).reshape(bias.shape)
    frame = Frame("Aᶜ, the larger of the two", "attention on other keys\n(total variation)")
    cloud = Points.graded("", bias, measured.shift, layer, frame)
    text = f"on a text whose first {measured.half} tokens are read twice"
    return [
        Plot(
            "attention_under_yarn",
            side_by_side(panels),
            f"Mean attention as trained and under YaRN with s = 2, {text} (DroPE, Fig. 7).",
        ),
        Plot(
            "shift_under_yarn",
            points([cloud], size=14, index="layer"),
            f"Attention that YaRN with s = 2 moves, by positional bias, a point a head, {text} "
            "(DroPE, Fig. 8).",
        ),
    ]


def needle_plot(measured: NeedleShift) -> Plot:
    """Draw the attention of the last token around the needle (Fig. 8)."""
    layer, head = measured.head
    frame = Frame("key, tokens from the needle's first", "attention of the last token")
    lines = _lines(measured.curves, measured.offsets)
    return Plot(
        "needle_under_yarn",
        side_by_side([Panel(f"layer {layer} head {head}", lines, frame)]),
        f"Attention of the last token of a needle prompt of {measured.tokens:,} tokens, as trained "
        "and under YaRN with s = 2 (DroPE, Fig. 8).",
    )


def factors_plot(spectrum: Spectrum, training_length: int) -> Plot:
    """Draw the factor on every frequency (Fig. 6 and 11)."""
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    slow = (turns > 0) & (turns < 1)

    def prepare(axes: Axes) -> None:
        axes.set_ylim(0, 1.05)

    first_slow = (int(np.argmax(slow)) - 0.5, "right of it: less than one turn")
    frame = Frame(
        "pair, fastest first", "frequency factor γ", prepare, first_slow if slow.any() else None
    )
    panels = [
        Panel(
            f"s = {s:g}",
            _lines(scaling_factors(spectrum, training_length, s), range(len(turns))),
            frame,
        )
        for s in FACTORS
    ]
    return Plot(
        "rescaling_factors",
        side_by_side(panels),
        "Factor on every frequency, for texts 2, 3 and 4 times as long (DroPE, Fig. 6, 11).",
    )


def _lines(curves: Mapping[str, Array], x: Iterable[float]) -> list[Series]:
    """Return a line for each layout or method; a curve may end before ``x`` does."""
    places = list(x)
    return [
        Series(*METHODS[name], places[: len(curve)], curve.tolist())
        for name, curve in curves.items()
    ]
