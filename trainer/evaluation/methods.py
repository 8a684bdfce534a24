"""Methods by name: parts joined by ``+``, each of which changes a layout for an extension factor.

A part that is fitted on held-out text is fitted to the layout that the parts before it give, so
that every intervention can be combined with every rescaling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

from trainer.evaluation import dope, weighted_rope
from trainer.evaluation.fitting import TEXTS, Fitting
from trainer.evaluation.layouts import (
    TITLES,
    check_published,
    is_free_of_positions,
    tempered,
    windowed,
    with_factors,
    with_published,
)
from trainer.evaluation.longrope import fitted_factors
from trainer.evaluation.method_config import MethodsConfig
from trainer.evaluation.published_factors import read_factors
from trainer.evaluation.settings import LongRopeSettings
from trainer.evaluation.temperature import fit_coefficient
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, Rescaling, ntk_aware
from trainer.positional.spectrum import Spectrum
from trainer.report.outcomes import AS_IS_TITLE

LayoutAt = Callable[[float], Layout]


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
    reads at an extension factor to choose something. ``make``: from the layouts before it to those
    after it."""

    title: str
    make: Callable[[LayoutAt, Fitting, MethodsConfig], LayoutAt]
    rotation: bool = False
    uses: tuple[str, ...] = ()
    fits: Callable[[MethodsConfig, float], int] = lambda config, factor: 0


@dataclass(frozen=True, eq=False)
class Recipe:
    """A method that is not made yet; ``settings``: all that it depends on beside the model;
    ``fits``: how many sequences its choices take at an extension factor."""

    key: str
    title: str
    settings: dict[str, Any]
    fits: Callable[[float], int]
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
    if tempering and any(s.temperature.is_trained for s in layout.spectra):
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
    used = {key: _plain(getattr(config, key)) for part in parts for key in part.uses}
    return Recipe(name, title, used, lambda s: sum(p.fits(config, s) for p in parts), make)


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, LongRopeSettings):
        return value.of_choice
    # Which models have a temperature changes nothing of those that do.
    return {key: of_key for key, of_key in asdict(value).items() if key != "models"}


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
    """No encoding at all, without recalibration."""
    return lambda factor: before(factor).map(lambda _: Spectrum())


def _longrope(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    settings = config.longrope
    if settings.factors is not None:
        published = read_factors(settings.factors)
        return lambda factor: with_published(before(factor), published, factor)

    def at(factor: float) -> Layout:
        layout = before(factor)
        if factor <= 1:
            return layout
        asked = [factor, settings.of_choice, layout.to_dict()]
        search = partial(fitted_factors, fitting, settings, factor, layout)
        factors = fitting.kept("longrope", asked, search)
        return with_factors(layout, tuple(tuple(row) for row in factors))

    return at


def _temperature(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """1 + c ln s (DroPE, App. C.2), c fitted on the lengths beyond the training length."""
    per = config.temperature.per

    def tempered_with(coefficient: float) -> LayoutAt:
        return lambda factor: tempered(before(factor), coefficient, per)

    def fit() -> float:
        return fit_coefficient(
            fitting.model,
            tempered_with,
            fitting.beyond(),
            fitting.text.end_of_text,
            config.temperature.grid,
            fitting.batch_tokens,
            fitting.read,
        )

    if not fitting.beyond():
        return before
    layouts = [before(n / C).to_dict() for n in fitting.beyond() if (C := _length(fitting))]
    asked = [layouts, _plain(config.temperature)]
    coefficient = fitting.kept("temperature", asked, fit)
    fitting.notes.append(f"logits times 1 + {coefficient:.3g} ln s, fitted on validation text")
    fitting.temperature = {
        "coefficient": coefficient,
        "per": per,
        "lengths": list(fitting.beyond()),
        "tokens": sum(windows.size for windows in fitting.beyond().values()),
        "text": fitting.text.fingerprint,
    }
    return tempered_with(coefficient)


def _length(fitting: Fitting) -> int:
    return fitting.model.layout.training_length


def _rope_id_temperature(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """(1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or with another coefficient and exponent."""
    settings = config.temperature
    c, exponent = settings.rope_id_coefficient, settings.rope_id_exponent
    return lambda factor: tempered(before(factor), c, settings.per, exponent=exponent)


def _dope(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    def at(factor: float) -> Layout:
        layout = before(factor)
        ids = fitting.ids(factor)
        chosen = dope.select(fitting.model, ids, config.dope, layout)
        return dope.apply(layout, chosen)

    return at


def _weighted_rope(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    def at(factor: float) -> Layout:
        layout = before(factor)
        ids = fitting.ids(factor)
        weights = weighted_rope.select(fitting.model, ids, config.weighted_rope, layout)
        changed = weighted_rope.apply(layout, weights)
        said = "at some lengths no pair has such an entropy, and nothing changes"
        if changed == layout and said not in fitting.notes:
            fitting.notes.append(said)
        return changed

    return at


def _longrope_fits(config: MethodsConfig, factor: float) -> int:
    settings = config.longrope
    if factor <= 1 or settings.factors is not None:
        return 0
    most = settings.windows if settings.search == "needles" else config.fit_windows
    return settings.evaluations * min(settings.windows, most)


def _temperature_fits(config: MethodsConfig, factor: float) -> int:
    return len(config.temperature.grid) * config.fit_windows if factor > 1 else 0


def _texts(config: MethodsConfig, factor: float) -> int:
    return min(TEXTS, config.fit_windows)


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
    "longrope": Part("LongRoPE", _longrope, True, ("longrope",), _longrope_fits),
    "temperature": Part("temperature", _temperature, False, ("temperature",), _temperature_fits),
    "temperature_rope_id": Part("RoPE-ID temperature", _rope_id_temperature, uses=("temperature",)),
    "dope": Part("DoPE", _dope, True, ("dope",), _texts),
    "weighted_rope": Part("Weighted RoPE", _weighted_rope, True, ("weighted_rope",), _texts),
    "drop": Part("dropped", _dropped),
}
"""By the names of :data:`~trainer.evaluation.method_config.PARTS`."""

FOR_ANY_MODEL = {
    *("none", "crop", *RESCALINGS, "temperature", "temperature_rope_id"),
    *("weighted_rope", "drop"),
}
"""Parts that rotate all heads of a layer alike, the same at every length, and leave windows alone:
models that our decoder does not compute can have them too."""
