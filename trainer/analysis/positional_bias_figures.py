"""Positional bias of heads, its gradients before training, and the effect of a rescaling on
positional and semantic heads (DroPE Sec. 3 and 4.1, Fig. 4, 6, 7, 8 and 11)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

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
from trainer.analysis.topic import Results, Target, results, stacked, tidy
from trainer.plotting.maps import Scale, heat_maps
from trainer.plotting.panels import Line, Panel, draw, log_if_wide
from trainer.plotting.style import STYLE_NUMBERS, Plot
from trainer.positional.spectrum import Spectrum

KINDS = {"diagonal": "its own token", "previous": "the previous token"}
VERSIONS = {
    "encoded": ("fresh, with positions", STYLE_NUMBERS["RoPE"]),
    "nope": ("fresh, NoPE", STYLE_NUMBERS["NoPE"]),
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
Under = dict[str, tuple[Place, int, dict[str, Array]]]
"""Attention as trained and under YaRN by metric, with the head and the place of the first entry."""
Factors = dict[float, dict[str, Array]]
"""Factors ``[pairs]`` on every frequency by s and method."""


def analyze_positional_bias(target: Target) -> Results:
    """Measure Aᶜ of every head within the training length, its causes, and what YaRN does to
    attention."""
    target.require(2)  # a single token attends to itself alone
    model, C = target.model, target.training_length
    ids = target.ids[:, :C]
    bias, fresh = head_biases(target), fresh_decoders(model, target.ids)
    spread = prefix_spreads(model, ids[:1, :TOKENS])
    spreads = (fresh.spreads if fresh else {}) | {"model": spread[None]}
    gradients = fresh.gradients if fresh else {}
    lowest = min(0.0, *(values.min() for values in bias.values()))
    plots = [
        Plot(
            "positional_bias_heads",
            heat_maps(
                {f"towards {KINDS[kind]}": values for kind, values in bias.items()},
                Scale("Aᶜ", low=lowest),
                x="query head",
                y="layer",
            ),
            f"Positional bias Aᶜ of every head on {ids.shape[1]:,} tokens; 1: all attention on "
            "that key, 0: uniform (DroPE, Def. 3.1).",
        )
    ]
    if fresh:
        plots.append(gradients_plot(fresh))
    rotating = [spectrum for spectrum in model.layout.spectra if spectrum.rotates]
    curves: Under = {}
    factors: Factors = {}
    if rotating:
        spectrum = rotating[0].at(C, C)
        curves = _under_yarn(target, ids, bias)
        factors = {s: scaling_factors(spectrum, C, s) for s in FACTORS}
        plots += [yarn_plot(curves), factors_plot(factors, spectrum, C)]
    tables = [
        tidy(bias, "layer", "head", length=ids.shape[1]),
        *_rows(spreads, gradients, curves, factors),
    ]
    return results("positional_bias", "Positional bias", target.name, plots, tables)


def _rows(
    spreads: Mapping[str, Array], gradients: Mapping[str, Array], curves: Under, factors: Factors
) -> list[pd.DataFrame]:
    """Return spreads, gradients, attention under YaRN and factors of frequencies."""
    by_seed = [(version, "prefix_spread", seeds) for version, seeds in spreads.items()]
    for version, norms in gradients.items():
        by_seed += [(version, f"gradient_{kind}", norms[:, i]) for i, kind in enumerate(KINDS)]
    tables = [
        tidy({metric: values}, "layer", variant=f"{VERSIONS[version][0]}, seed {seed}")
        for version, metric, seeds in by_seed
        for seed, values in enumerate(seeds)
    ]
    for metric, ((layer, head), first, by_name) in curves.items():
        for name, curve in by_name.items():
            places = {"length": range(first, first + len(curve))}
            at: dict[str, Any] = {"variant": name, "layer": layer, "head": head}
            tables.append(tidy({metric: curve}, "length", places=places, **at))
    for s, by_method in factors.items():
        for name, gamma in by_method.items():
            variant = f"{METHODS[name][0]}, s = {s:g}"
            tables.append(tidy({"frequency_factor": gamma}, "pair", variant=variant))
    return tables


def head_biases(target: Target) -> dict[str, Array]:
    """Compute Aᶜ of every head ``[layers, heads]``, by :data:`KINDS`.

    The beginning of the text is read by itself: in a longer one, temperatures and frequencies may
    differ.
    """
    ids = target.ids[:, : target.training_length]
    return stacked(
        capture(target.model, ids, lambda heads: positional_biases(attention_rows(heads)))
    )


def _under_yarn(target: Target, ids: Tensor, bias: Mapping[str, Array]) -> Under:
    """Measure the most positional head by distance, and near a needle the head that attends to it
    most."""
    model, prompt = target.model, target.prompt
    place = highest_rotating(np.maximum(*bias.values()), model.layout)
    measured = {"attention_by_distance": (place, 0, profiles(model, ids, place))}
    if prompt is not None:
        maps, needle = needle_attention(model, prompt), prompt.needle
        place = highest_rotating(maps["trained"][..., needle].sum(axis=-1), model.layout)
        first = max(0, needle.start - REACH)
        near = {name: map_[place][first : needle.stop + REACH] for name, map_ in maps.items()}
        measured["attention_near_needle"] = place, first - needle.start, near
    return measured


def yarn_plot(measured: Under) -> Plot:
    """Draw attention as trained and under YaRN (Fig. 7 and 8)."""
    looks = {
        "attention_by_distance": ("positional", "distance (tokens back)", BESIDE),
        "attention_near_needle": ("needle", "key, tokens from the needle's first", None),
    }
    panels = []
    for metric, ((layer, head), first, curves) in measured.items():
        kind, x_label, most = looks[metric]
        shown = {name: curve[:most] for name, curve in curves.items()}
        x = range(first, first + len(shown["trained"]))
        title = f"{kind}: layer {layer} head {head}"
        panels.append(Panel(title, _lines(shown, x), x_label, "attention"))
    return Plot(
        "attention_under_yarn",
        draw(panels),
        "Attention as trained and under YaRN with s = 2: of the most positional head by distance, "
        "and of a needle prompt's last token around the needle, in the head that attends to it "
        "most (DroPE, Fig. 7, 8).",
    )


def gradients_plot(fresh: FreshResult) -> Plot:
    """Draw means over seeds of gradients before training, with the least and the largest value
    (Fig. 4)."""

    def prepare(axes: Axes) -> None:
        log_if_wide(axes)
        axes.locator_params(axis="x", integer=True)

    panels = []
    for kind, towards in enumerate(KINDS.values()):
        lines = []
        for version, gradients in fresh.gradients.items():
            norms = gradients[:, kind]
            mean, layers = norms.mean(axis=0).tolist(), range(norms.shape[1])
            low, high = norms.min(axis=0).tolist(), norms.max(axis=0).tolist()
            lines.append(Line(*VERSIONS[version], layers, mean, low, high))
        panels.append(Panel(f"towards {towards}", lines, "layer", "gradient norm of Aᶜ", prepare))
    return Plot(
        "positional_bias_gradients",
        draw(panels),
        f"Gradient of Aᶜ by W_Q and W_K before training, mean over heads, on {fresh.tokens} "
        "tokens, with positions and without; bars: range of seeds (DroPE, Fig. 4).",
    )


def factors_plot(factors: Factors, spectrum: Spectrum, training_length: int) -> Plot:
    """Draw the factor on every frequency (Fig. 6 and 11)."""
    turns = np.array(spectrum.inv_freq) * training_length / (2 * math.pi)
    slow = (turns > 0) & (turns < 1)

    def prepare(axes: Axes) -> None:
        axes.set_ylim(0, 1.05)

    first_slow = (int(np.argmax(slow)) - 0.5, "right of it: less than one turn")
    panels = [
        Panel(
            f"s = {s:g}",
            _lines(by_method, range(len(turns))),
            "pair, fastest first",
            "frequency factor γ",
            prepare,
            first_slow if slow.any() else None,
        )
        for s, by_method in factors.items()
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
