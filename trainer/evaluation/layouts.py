"""Changes of a trained model's layout that need no training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from trainer.common.errors import UserError
from trainer.evaluation.published_factors import KEY, PublishedFactors
from trainer.positional.layout import Layout
from trainer.positional.rescaling import longrope
from trainer.positional.spectrum import Spectrum

Per = Literal["sequence", "query"]
LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor."""
LongRopeFactors = tuple[tuple[float, ...], ...]
"""One for every pair of every distinct spectrum of a layout; none where nothing rotates."""

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
    """The layout with attention windows of at most the training length."""
    C = layout.training_length
    layers = tuple(replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
    return replace(layout, layers=layers)


def with_factors(layout: Layout, factors: LongRopeFactors) -> Layout:
    """The layout with these factors beyond the training length, for its distinct spectra in turn.

    Raises:
        ValueError: there are not as many as spectra, or in one as pairs.
    """
    of = dict(zip(layout.spectra, factors, strict=True))
    C = layout.training_length
    return layout.map(lambda s: longrope(s, (1.0,) * len(s.inv_freq), of[s], C))


def with_published(layout: Layout, published: PublishedFactors, factor: float) -> Layout:
    """The layout with published factors at an extension factor, in every spectrum that rotates."""
    C = layout.training_length
    attention = published.attention_at(factor, C)

    def changed(spectrum: Spectrum) -> Spectrum:
        if not spectrum.rotates:
            return spectrum
        slowed = longrope(spectrum, published.short, published.long, C)
        return replace(slowed, rotary_scale=spectrum.rotary_scale * attention)

    return layout.map(changed)


def check_published(layout: Layout, published: PublishedFactors) -> None:
    """Refuse factors for another model.

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
    layout: Layout, coefficient: float, per: Per = "sequence", exponent: float = 1.0
) -> Layout:
    """Logits times (1 + c ln s)^exponent beyond the training length, in place of what depended on
    the length before: DroPE's (App. C.2), or with c = 0.1 and exponent 2 RoPE-ID's (App. A.4)."""
    return layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=coefficient, exponent=exponent, per=per
        )
    )


def is_free_of_positions(layout: Layout) -> bool:
    """Whether no head has any encoding, so that only the temperature is left to choose."""
    return not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)
