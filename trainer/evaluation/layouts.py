"""Changes of a trained model's layout that need no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from trainer.common.errors import UserError
from trainer.evaluation.published_factors import KEY, PublishedFactors
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import longrope
from trainer.positional.spectrum import Spectrum

Per = Literal["sequence", "query"]
LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor."""
LongRopeFactors = tuple[tuple[float, ...], ...]
"""One for every pair of every distinct spectrum of the layers that are changed; none where nothing
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
}
"""How tables call :data:`~trainer.positional.rescaling.RESCALINGS`."""


def windowed(layout: Layout) -> Layout:
    """Limit attention windows to the training length."""
    C = layout.training_length
    layers = tuple(replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
    return replace(layout, layers=layers)


def with_factors(layout: Layout, factors: LongRopeFactors, layers: LayerChoice = None) -> Layout:
    """Set factors beyond the training length for the distinct spectra of ``layers``, in order.

    Raises:
        ValueError: the number of factors differs from that of spectra, or of pairs.
    """
    of = dict(zip(layout.of_layers(layers).spectra, factors, strict=True))
    C = layout.training_length
    chosen = layout.chosen(layers)
    return layout.map(lambda s: longrope(s, (1.0,) * len(s.inv_freq), of[s], C), chosen)


def with_published(
    layout: Layout, published: PublishedFactors, factor: float, layers: LayerChoice = None
) -> Layout:
    """Apply published factors at an extension factor to every rotating spectrum of ``layers``."""
    C = layout.training_length
    attention = published.attention_at(factor, C)

    def changed(spectrum: Spectrum) -> Spectrum:
        if not spectrum.rotates:
            return spectrum
        slowed = longrope(spectrum, published.short, published.long, C)
        return replace(slowed, rotary_scale=spectrum.rotary_scale * attention)

    return layout.map(changed, layout.chosen(layers))


def check_published(layout: Layout, published: PublishedFactors) -> None:
    """Check that published factors are for this model.

    Raises:
        UserError: they are for another training length, or another number of pairs.
    """
    C, original = layout.training_length, published.original_length
    if original not in (None, C):
        raise UserError.at(
            KEY,
            f"expected original_max_position_embeddings of {C}, the tokens that the model was "
            f"trained at, got {original}.",
        )
    pairs = {len(spectrum.inv_freq) for spectrum in layout.spectra if spectrum.rotates}
    if other := sorted(pairs - {len(published.long)}):
        raise UserError.at(
            KEY,
            f"expected {other[0]} factors, one for each pair that rotates, got "
            f"{len(published.long)}.",
        )


def tempered(
    layout: Layout,
    coefficient: float,
    per: Per = "sequence",
    exponent: float = 1.0,
    layers: LayerChoice = None,
) -> Layout:
    """Multiply the logits of ``layers`` by (1 + c ln s)^exponent beyond the training length.

    Replaces what depended on the length before. This is DroPE's temperature (App. C.2), or with
    c = 0.1 and exponent 2 RoPE-ID's (App. A.4). C is the longest length of training, whatever
    length the earlier temperature referred to.
    """
    return layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=coefficient, exponent=exponent, per=per, reference=None, steps=False
        ),
        layout.chosen(layers),
    )


def is_free_of_positions(layout: Layout) -> bool:
    """Whether no head has an encoding, so that only the temperature remains to be chosen."""
    return not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)
