"""Methods by name: parts joined by ``+``, each of which changes a layout for an extension factor.

A part that is fitted on held-out text is fitted to the layout that the parts before it give, so
that every intervention can be combined with every rescaling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.evaluation.fitted_parts import (
    choice_fits,
    denoised,
    fitted_temperature,
    longrope,
    longrope_fits,
    plain,
    temperature_fits,
    weighted,
)
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.layouts import (
    TITLES,
    LayoutAt,
    check_published,
    is_free_of_positions,
    tempered,
    windowed,
)
from trainer.evaluation.method_config import MethodsConfig
from trainer.evaluation.outcomes import AS_IS_TITLE
from trainer.evaluation.published_factors import read_factors
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, Rescaling, ntk_aware
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class Method:
    """A layout for every extension factor. ``reads``: how many of the last tokens the model reads
    at all (None: every token)."""

    layout_at: LayoutAt
    reads: int | None = None


@dataclass(frozen=True)
class Part:
    """One thing that is done. ``rotation``: whether it does something to rotating heads only.
    ``uses``: keys of the configuration that it depends on. ``fits``: how many held-out sequences it
    reads, by their extension factor, to choose something for one. ``make``: from the layouts before
    it to those after it."""

    title: str
    make: Callable[[LayoutAt, Fitting, MethodsConfig], LayoutAt]
    rotation: bool = False
    uses: tuple[str, ...] = ()
    fits: Callable[[MethodsConfig, float], dict[float, int]] = lambda config, factor: {}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A method that is not made yet; ``settings``: all that it depends on beside the model;
    ``fits``: how many sequences, by their extension factor, its choices for one take."""

    key: str
    title: str
    settings: dict[str, Any]
    fits: Callable[[float], dict[float, int]]
    make: Callable[[Fitting], Method]


def recipe(
    name: str, layout: Layout, config: MethodsConfig, *, own: bool = True
) -> Recipe | tuple[str, str]:
    """The method of that name for a model, or why there is nothing to do and for which parts: a
    sentence with braces for their titles. ``own``: whether our decoder computes the model."""
    keys = name.split("+")
    parts = [MAKERS[key] for key in keys]
    if not own and (beyond := [MAKERS[key].title for key in keys if key not in FOR_ANY_MODEL]):
        why = "is computed by transformers, and the decoder of this program is needed for {}"
        return why, " + ".join(beyond)
    if (idle := [part.title for part in parts if part.rotation]) and not layout.rotates:
        return "has no rotation, so there is nothing to do for {}", " + ".join(idle)
    if "longrope" in keys and config.longrope.factors is not None:
        check_published(layout, read_factors(config.longrope.factors))
    tempering = [key for key in keys if key in ("temperature", "temperature_rope_id")]
    C = layout.training_length
    if tempering and any(s.temperature.is_trained(C) for s in layout.spectra):
        why = "was trained with logits that follow the length, so there is no place for a {}"
        return why, MAKERS[tempering[0]].title
    only_free = config.temperature.models == "free"
    if "temperature" in keys and only_free and not is_free_of_positions(layout):
        why = "has positions, and a {} is for models without (evaluation.temperature.models)"
        return why, MAKERS["temperature"].title

    def make(fitting: Fitting) -> Method:
        at: LayoutAt = lambda factor: layout  # noqa: E731
        for part in parts:
            at = cache(part.make(at, fitting, config))  # a choice is made once for all tasks
        return Method(at, layout.training_length if "crop" in keys else None)

    title = " + ".join(part.title for part in parts)
    used = {key: plain(getattr(config, key)) for part in parts for key in part.uses}

    def fits(factor: float) -> dict[float, int]:
        # Heads that are chosen at another length take what was before them at that length too.
        at = {factor, (config.choice.length or factor) if CHOICE in used else factor}
        found: Counter[float] = Counter()
        for part in parts:
            found.update({s: n for one in at for s, n in part.fits(config, one).items()})
        return dict(found)

    return Recipe(name, title, used, fits, make)


def _unchanged(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    return before


def _rescaled(rescaling: Rescaling) -> Callable[..., LayoutAt]:
    """Every rotation slowed for the factor, which is at least 1."""

    def make(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
        return lambda factor: before(factor).rescaled(rescaling, max(factor, 1.0))

    return make


def _dynamic(rescaling: Rescaling) -> Callable[..., LayoutAt]:
    """Every rotation slowed with the length of each sequence."""

    def make(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
        return lambda factor: before(factor).dynamically_rescaled(rescaling)

    return make


def _dynamic_ntk_alpha(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Dynamic NTK with s = alpha n / C - (alpha - 1) (DoPE, App. A.2)."""

    def at(factor: float) -> Layout:
        alpha = config.dynamic_ntk.alpha
        growth = max(factor, 1.0) if alpha is None else alpha
        return before(factor).dynamically_rescaled(ntk_aware, growth)

    return at


def _windowed(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    return lambda factor: windowed(before(factor))


def _dropped(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """No encoding at all, without recalibration; a temperature that was trained stays."""
    return lambda factor: before(factor).map(lambda s: Spectrum(temperature=s.temperature))


def _rope_id_temperature(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """(1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or with another coefficient and exponent."""
    settings = config.temperature
    c, exponent = settings.rope_id_coefficient, settings.rope_id_exponent
    return lambda factor: tempered(before(factor), c, settings.per, exponent=exponent)


CHOICE = "choice"
MAKERS: dict[str, Part] = {
    "none": Part(AS_IS_TITLE, _unchanged),
    "crop": Part("cropped", _unchanged),
    "window": Part("sliding window", _windowed),
    **{
        name: Part(TITLES[name], _rescaled(rescaling), rotation=True)
        for name, rescaling in RESCALINGS.items()
    },
    **{
        f"dynamic_{name}": Part(f"dynamic {TITLES[name]}", _dynamic(rescaling), rotation=True)
        for name, rescaling in RESCALINGS.items()
    },
    "dynamic_ntk_alpha": Part("dynamic NTK (alpha)", _dynamic_ntk_alpha, True, ("dynamic_ntk",)),
    "longrope": Part("LongRoPE", longrope, True, ("longrope",), longrope_fits),
    "temperature": Part(
        "temperature", fitted_temperature, False, ("temperature",), temperature_fits
    ),
    "temperature_rope_id": Part("RoPE-ID temperature", _rope_id_temperature, uses=("temperature",)),
    "dope": Part("DoPE", denoised, True, ("dope", CHOICE), choice_fits),
    "weighted_rope": Part("Weighted RoPE", weighted, True, ("weighted_rope", CHOICE), choice_fits),
    "drop": Part("dropped", _dropped),
}
"""By the names of :data:`~trainer.evaluation.method_config.PARTS`."""

FOR_ANY_MODEL = {
    *("none", "crop", *RESCALINGS, "temperature", "temperature_rope_id"),
    *("weighted_rope", "drop"),
}
"""Parts that rotate all heads of a layer alike, the same at every length, and leave windows alone:
models that our decoder does not compute can have them too."""
