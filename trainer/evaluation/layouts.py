"""Changes of a trained model's layout that need no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from trainer.positional.layout import Intervention, LayerChoice, LayerEncoding, Layout
from trainer.positional.rescaling import longrope
from trainer.positional.spectrum import Spectrum

Per = Literal["sequence", "query"]
LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor."""
LongRopeFactors = tuple[tuple[float, ...], ...]
"""One factor for each pair of each distinct spectrum in the changed layers; empty if no head
rotates."""

TITLES = {
    "pi": "PI",
    "ntk": "NTK-aware",
    "ntk_by_parts": "NTK-by-parts",
    "yarn": "YaRN",
    "llama3": "Llama 3",
    "yarn_full_range": "YaRN over all frequencies",
    "ntk_by_parts_turns": "NTK-by-parts over turns",
    "yarn_turns": "YaRN over turns",
    "cope": "CoPE",
}
"""Titles of :data:`~trainer.positional.rescaling.RESCALINGS` in tables."""


def windowed(layout: Layout) -> Layout:
    """Limit attention windows to the training length."""
    C = layout.training_length
    layers = tuple(replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
    return replace(layout, layers=layers)


def with_factors(layout: Layout, factors: LongRopeFactors, layers: LayerChoice = None) -> Layout:
    """Set factors beyond the training length for the distinct spectra of ``layers``, in order.

    Raises:
        ValueError: the number of factors differs from the number of spectra or pairs.
    """
    by_spectrum = dict(zip(layout.of_layers(layers).spectra, factors, strict=True))
    C = layout.training_length

    def changed(spectrum: Spectrum) -> Spectrum:
        return longrope(spectrum, (1.0,) * len(spectrum.inv_freq), by_spectrum[spectrum], C)

    return layout.map(changed, layout.chosen(layers))


def tempered(
    layout: Layout,
    coefficient: float,
    per: Per = "sequence",
    exponent: float = 1.0,
    layers: LayerChoice = None,
) -> Layout:
    """Multiply the logits of ``layers`` by (1 + c ln s)^exponent beyond the training length.

    This is DroPE's temperature (App. C.2), or with c = 0.1 and exponent 2 RoPE-ID's (App. A.4). It
    replaces an earlier temperature, and C is the longest length of training, whatever length the
    earlier one referred to.
    """
    return layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=coefficient, exponent=exponent, per=per, reference=None, steps=False
        ),
        layout.chosen(layers),
    )


def is_free_of_positions(layout: Layout) -> bool:
    """Return whether no head has an encoding, so that only the temperature can be chosen."""
    return not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)


def with_intervention(encoding: LayerEncoding, intervention: Intervention) -> LayerEncoding:
    """Return the layer with an intervention on its heads.

    Raises:
        ValueError: it already has one.
    """
    if encoding.intervention is not None:
        raise ValueError("the layer has an intervention already; two on it do not combine")
    return replace(encoding, intervention=intervention)
