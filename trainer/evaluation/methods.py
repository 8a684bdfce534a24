"""Methods: what can be done to a trained model's positions at no cost, at a given length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS
from trainer.positional.spectrum import Temperature

TITLES = {"pi": "PI", "ntk": "NTK-aware", "yarn": "YaRN"}


@dataclass(frozen=True)
class Method:
    """A layout for every extension factor.

    ``role``: what it is, for comparisons (``rope``, ``rope_yarn``, ``drope_temperature``);
    ``name``: how tables call it.
    """

    role: str
    name: str
    layout_at: Callable[[float], Layout]


def as_is(role: str, name: str, layout: Layout) -> Method:
    """The model as it was trained."""
    return Method(role, name, lambda _: layout)


def rescaled(role: str, name: str, layout: Layout, rescaling: str) -> Method:
    """Every rotation rescaled for the length (DroPE, Eq. 3)."""
    change = RESCALINGS[rescaling]
    return Method(
        f"{role}_{rescaling}",
        f"{name} + {TITLES[rescaling]}",
        lambda factor: layout.map(lambda spectrum: change(spectrum, factor)),
    )


def tempered(layout: Layout, coefficient: float) -> Layout:
    """Logits times 1 + c ln s beyond the training length (DroPE, App. C.2)."""
    temperature = Temperature(coefficient=coefficient)
    return layout.map(lambda spectrum: spectrum.with_temperature(**vars(temperature)))


def with_temperature(role: str, name: str, layout: Layout, coefficient: float) -> Method:
    """The model with the fitted softmax temperature."""
    changed = tempered(layout, coefficient)
    return Method(f"{role}_temperature", f"{name} + temperature", lambda _: changed)


def rotates(layout: Layout) -> bool:
    """Whether any head rotates, so that a rescaling does something."""
    return any(spectrum.rotates for spectrum in layout.spectra)


def is_free_of_positions(layout: Layout) -> bool:
    """Whether no head has any encoding, so that only the temperature is left to choose."""
    return not any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)
