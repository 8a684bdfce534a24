"""Methods by name: parts joined by ``+``, each a change of the layout for an extension factor.

A part that is fitted on held-out text is fitted for the layout of the parts before it, so that
every intervention can be combined with every rescaling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from trainer.evaluation.fitted_parts import (
    choice_fits,
    denoised,
    fitted_temperature,
    longrope,
    longrope_fits,
    plain,
    some_layers,
    temperature_fits,
    weighted,
)
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.layouts import (
    TITLES,
    LayoutAt,
    check_published,
    is_free_of_positions,
    read_factors,
    tempered,
    windowed,
)
from trainer.evaluation.method_config import BY_LAYER, LAYERS_KEY, MethodsConfig
from trainer.evaluation.outcomes import AS_IS_TITLE
from trainer.positional.layout import LayerChoice, Layout
from trainer.positional.rescaling import RESCALINGS, Rescaling, ntk_aware
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class Method:
    """A layout for every extension factor. ``reads``: number of last tokens that the model reads
    (None: all tokens)."""

    layout_at: LayoutAt
    reads: int | None = None


@dataclass(frozen=True)
class Part:
    """One part of a method.

    ``rotation``: whether it only affects rotating heads. ``uses``: configuration keys that it
    depends on. ``fits``: numbers of held-out sequences it reads for a choice, by extension factor.
    ``make``: maps the layouts before it to those after it; its configuration lists layers as
    indices.
    """

    title: str
    make: Callable[[LayoutAt, Fitting, MethodsConfig], LayoutAt]
    rotation: bool = False
    uses: tuple[str, ...] = ()
    fits: Callable[[MethodsConfig, float], dict[float, int]] = lambda config, factor: {}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A method before it is fitted.

    ``settings``: all that it depends on besides the model; ``fits``: numbers of sequences that its
    choices read, by extension factor; ``fixed``: the method itself if it chooses nothing and needs
    no model.
    """

    key: str
    title: str
    settings: dict[str, Any]
    fits: Callable[[float], dict[float, int]]
    make: Callable[[Fitting], Method]
    fixed: Method | None = None

    @property
    def fit_is_shared(self) -> bool:
        """Whether several processes can fit it together. What other parts choose takes one."""
        parts = {*self.key.split("+")}
        return "temperature" in parts and not parts & {"longrope", "dope", "weighted_rope"}


def recipe(
    name: str,
    layout: Layout,
    config: MethodsConfig,
    *,
    own: bool = True,
    layers_key: str = LAYERS_KEY,
) -> Recipe | tuple[str, str]:
    """Return the named method for a model, or why it changes nothing and for which parts.

    The reason is a sentence with braces for the parts' titles. ``own``: whether our decoder
    computes the model. ``layers_key``: the key that chooses layers.
    """
    keys = name.split("+")
    parts = [MAKERS[key] for key in keys]
    if not own and (beyond := [MAKERS[key].title for key in keys if key not in FOR_ANY_MODEL]):
        why = "is computed by transformers, and the decoder of this program is needed for {}"
        return why, " + ".join(beyond)
    if (idle := [part.title for part in parts if part.rotation]) and not layout.rotates:
        return "has no rotation, so there is nothing to do for {}", " + ".join(idle)
    by_layer = [MAKERS[key] for key in keys if key in BY_LAYER]
    if idle_by_layer := _idle_by_layer(by_layer, layout, config.layers, layers_key):
        return idle_by_layer
    config = replace(config, layers=layout.chosen(config.layers))
    if "longrope" in keys and config.longrope.factors is not None:
        changed = layout.of_layers(config.layers)
        check_published(changed, read_factors(config.longrope.factors))
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
    some = some_layers(layout, config)
    if some is not None and by_layer:
        used[LAYERS] = some  # omitted for all layers, so that older cells stay valid

    def fits(factor: float) -> dict[float, int]:
        # A head selection at another length applies the methods before it at that length, too.
        at = {factor, (config.choice.length or factor) if CHOICE in used else factor}
        found: Counter[float] = Counter()
        for part in parts:
            found.update({s: n for one in at for s, n in part.fits(config, one).items()})
        return dict(found)

    # Parts without a fit do not depend on the text.
    fixed = None if any(map(fits, config.factors)) else make(cast("Fitting", None))
    return Recipe(name, title, used, fits, make, fixed)


def _idle_by_layer(
    parts: Sequence[Part], layout: Layout, layers: LayerChoice, key: str
) -> tuple[str, str] | None:
    """Why a choice of layers leaves nothing to do for some parts, and their titles; None if every
    part changes a layer. ``key``: where the choice stands."""
    C = layout.training_length
    for rotation, does in ((True, "rotates"), (False, "attends")):
        changed = layout.rotating(layers) if rotation else layout.chosen(layers)
        idle = [part.title for part in parts if part.rotation == rotation]
        if idle and not changed:
            where = f"only in layers whose window is at most the training length of {C:,} tokens"
            where = where if layers is None else f"in no layer of {key}={layers}"
            why = f"{does} {where}, so there is nothing to do for {{}} ({key}=all changes them all)"
            return why, " + ".join(idle)
    return None


def _unchanged(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    return before


def _rescaled(rescaling: Rescaling) -> Callable[..., LayoutAt]:
    """Slow every rotation for the factor, which is at least 1."""

    def make(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
        return lambda factor: before(factor).rescaled(rescaling, max(factor, 1.0), config.layers)

    return make


def _dynamic(rescaling: Rescaling) -> Callable[..., LayoutAt]:
    """Slow every rotation by the length of each sequence."""

    def make(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
        return lambda factor: before(factor).dynamically_rescaled(rescaling, layers=config.layers)

    return make


def _dynamic_ntk_alpha(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Apply dynamic NTK with s = alpha n / C - (alpha - 1) (DoPE, App. A.2)."""

    def at(factor: float) -> Layout:
        alpha = config.dynamic_ntk.alpha
        growth = max(factor, 1.0) if alpha is None else alpha
        return before(factor).dynamically_rescaled(ntk_aware, growth, config.layers)

    return at


def _windowed(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    return lambda factor: windowed(before(factor))


def _dropped(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Remove all encodings without recalibration; a trained temperature stays."""
    return lambda factor: before(factor).map(lambda s: Spectrum(temperature=s.temperature))


def _without_channels(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Remove the rotary channels from the scores: cos = sin = 0, where ``drop`` has cos = 1 and
    sin = 0. A head all of whose channels are rotary then attends uniformly to what it may see."""

    def without(spectrum: Spectrum) -> Spectrum:
        # Zero frequencies, so that no YaRN before or after it adds its attention factor.
        still = (0.0,) * len(spectrum.inv_freq)
        return replace(spectrum, inv_freq=still, rotary_scale=0.0, long=None)

    return lambda factor: before(factor).map(without)


def _rope_id_temperature(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Multiply logits by (1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or as configured."""
    settings = config.temperature
    c, exponent = settings.rope_id_coefficient, settings.rope_id_exponent
    return lambda factor: tempered(before(factor), c, settings.per, exponent, config.layers)


CHOICE, LAYERS = "choice", "layers"
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
    "drop_channels": Part("rotary channels removed", _without_channels, rotation=True),
}
"""By the names of :data:`~trainer.evaluation.method_config.PARTS`."""

FOR_ANY_MODEL = {
    *("none", "crop", *RESCALINGS, "temperature", "temperature_rope_id"),
    *("weighted_rope", "drop", "drop_channels"),
}
"""Parts that rotate all heads of a layer alike, the same at every length, and leave windows alone:
models that our decoder does not compute can have them too."""
