"""Methods: what can be done to a trained model's positions at no cost, at a given length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, longrope

Per = Literal["sequence", "query"]
LongRopeFactors = tuple[tuple[float, ...], ...]
"""One for every pair of every distinct spectrum of a layout; none where nothing rotates."""

TITLES = {
    "pi": "PI",
    "ntk": "NTK-aware",
    "ntk_by_parts": "NTK-by-parts",
    "yarn": "YaRN",
    "llama3": "Llama 3",
    "yarn_full_range": "YaRN over all frequencies",
}
"""Of :data:`~trainer.positional.rescaling.RESCALINGS`."""


@dataclass(frozen=True)
class Method:
    """A layout for every extension factor.

    ``role``: what it is, for comparisons (``rope``, ``rope_yarn``, ``drope_temperature``);
    ``name``: how tables call it. ``reads``: how many of the last tokens the model reads at all
    (None: every token).
    """

    role: str
    name: str
    layout_at: Callable[[float], Layout]
    reads: int | None = None


def as_is(role: str, name: str, layout: Layout) -> Method:
    """The model as it was trained."""
    return Method(role, name, lambda _: layout)


def windowed(layout: Layout) -> Layout:
    """Every query sees no more keys than in training."""
    C = layout.training_length
    return replace(
        layout, layers=tuple(replace(x, window=min(x.window or C, C)) for x in layout.layers)
    )


def rescaled(role: str, name: str, layout: Layout, rescaling: str) -> Method:
    """Every rotation rescaled for the length (DroPE, Eq. 3), beyond the training length."""
    change = RESCALINGS[rescaling]
    return Method(
        f"{role}_{rescaling}",
        f"{name} + {TITLES[rescaling]}",
        lambda factor: layout.rescaled(change, max(factor, 1.0)),
    )


def with_factors(layout: Layout, factors: LongRopeFactors) -> Layout:
    """The layout with these factors beyond the training length, for its distinct spectra in turn.

    Raises:
        ValueError: there are not as many as spectra, or in one as pairs.
    """
    of = dict(zip(layout.spectra, factors, strict=True))
    C = layout.training_length
    return layout.map(lambda s: longrope(s, (1.0,) * len(s.inv_freq), of[s], C))


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


def with_temperature(role: str, name: str, layout: Layout, coefficient: float) -> Method:
    """The model with the fitted softmax temperature."""
    changed = tempered(layout, coefficient)
    return Method(f"{role}_temperature", f"{name} + temperature", lambda _: changed)


def rotates(layout: Layout) -> bool:
    """Whether any head rotates, so that a rescaling does something."""
    return layout.rotates


def is_free_of_positions(layout: Layout) -> bool:
    """Whether no head has any encoding, so that only the temperature is left to choose."""
    return not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)
