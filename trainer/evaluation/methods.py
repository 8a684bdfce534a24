"""Methods by name: parts joined by ``+``, each a change of the layout for an extension factor.

A part that is fitted on held-out text is fitted for the layout of the parts before it, so that
every intervention can be combined with every rescaling.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any, cast

from torch import Tensor

from trainer.common.words import counted
from trainer.data.order import Integers
from trainer.evaluation import dope, weighted_rope
from trainer.evaluation.fitting import (
    LARGEST_TRIED,
    Fitting,
    fit_coefficient,
    fit_line,
    goes_beyond,
    is_largest_tried,
)
from trainer.evaluation.layouts import (
    TITLES,
    LayoutAt,
    check_published,
    is_free_of_positions,
    read_factors,
    tempered,
    windowed,
    with_factors,
    with_published,
)
from trainer.evaluation.longrope import fitted_factors
from trainer.evaluation.method_config import (
    BY_LAYER,
    LAYERS_KEY,
    ON_TEXT,
    LongRopeSettings,
    MethodsConfig,
)
from trainer.evaluation.outcomes import AS_IS_TITLE
from trainer.evaluation.store import fingerprint
from trainer.positional.layout import Intervention, LayerChoice, Layout
from trainer.positional.rescaling import RESCALINGS, Rescaling, longest, ntk_aware
from trainer.positional.spectrum import Spectrum


@dataclass(frozen=True)
class Method:
    """A layout for every extension factor.

    ``reads``: number of last tokens that the model reads (None: all tokens).
    """

    layout_at: LayoutAt
    reads: int | None = None

    def crops(self, length: int) -> bool:
        """Whether the model reads fewer than all ``length`` tokens."""
        return self.reads is not None and self.reads < length


Make = Callable[[LayoutAt, Fitting, MethodsConfig], LayoutAt]
"""Maps the layouts before a part to those after it; its configuration lists layers as indices."""


@dataclass(frozen=True)
class Part:
    """One part of a method.

    ``rotation``: whether it only affects rotating heads. ``uses``: configuration keys that it
    depends on. ``fits``: numbers of held-out sequences it reads for a choice, by extension factor.
    """

    title: str
    make: Make
    rotation: bool = False
    uses: tuple[str, ...] = ()
    fits: Callable[[MethodsConfig, float], dict[float, int]] = lambda config, factor: {}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A method before it is fitted.

    ``settings``: all its inputs besides the model. ``fits``: numbers of sequences that its choices
    read, by extension factor. ``fixed``: the method itself, if it chooses nothing and needs no
    model. ``within``: the method up to the training length, if it chooses nothing there.
    ``also_at``: extension factors, besides those evaluated, for which parts before a temperature
    choose something because the temperature is fitted there.
    """

    key: str
    title: str
    settings: dict[str, Any]
    fits: Callable[[float], dict[float, int]]
    make: Callable[[Fitting], Method]
    fixed: Method | None = None
    within: Method | None = None
    also_at: tuple[float, ...] = ()

    def known_at(self, factor: float) -> Method | None:
        """Return the method at an extension factor if it is known without a fit."""
        return self.fixed or (self.within if factor <= 1 else None)

    @property
    def fit_is_shared(self) -> bool:
        """Whether several processes can fit it together; other choices take one process."""
        parts = {*self.key.split("+")}
        return "temperature" in parts and not parts & {"longrope", "dope", "weighted_rope"}


HAS_POSITIONS = "has positions, and a {} is for models without (evaluation.temperature.models)"
"""Why a fitted temperature is left out of a model with an encoding."""


def recipe(
    name: str,
    layout: Layout,
    config: MethodsConfig,
    *,
    native: bool = True,
    layers_key: str = LAYERS_KEY,
) -> Recipe | tuple[str, str]:
    """Return the named method for a model, or why it changes nothing and for which parts.

    The reason is a sentence with braces for the parts' titles. ``native``: whether our decoder
    computes the model. ``layers_key``: the key that chooses layers.
    """
    keys = name.split("+")
    parts = [MAKERS[key] for key in keys]
    if reason := _idle(keys, layout, config.layers, native, layers_key):
        return reason
    config = replace(config, layers=layout.chosen(config.layers))
    if "longrope" in keys and config.longrope.factors is not None:
        check_published(layout.of_layers(config.layers), read_factors(config.longrope.factors))
    if reason := _untempered(keys, layout, config):
        return reason

    def make(fitting: Fitting, parts: Sequence[Part] = parts) -> Method:
        layout_at: LayoutAt = lambda factor: layout  # noqa: E731
        for part in parts:
            # Cached: a choice is made once for all tasks.
            layout_at = cache(part.make(layout_at, fitting, config))
        return Method(layout_at, layout.training_length if "crop" in keys else None)

    settings = {key: _plain(getattr(config, key)) for part in parts for key in part.uses}
    if (some := _some_layers_key(layout, config)) and {*keys} & {*BY_LAYER}:
        settings[LAYERS] = some[0]
    if "temperature" in keys and (beyond := _beyond_key(config)):
        settings["beyond"] = beyond[0]

    def fits(factor: float) -> dict[float, int]:
        counts: Counter[float] = Counter()
        factors = {factor}
        for part in reversed(parts):
            reads = {s: n for at_factor in factors for s, n in part.fits(config, at_factor).items()}
            counts.update(reads)
            factors |= reads.keys()  # where a part is fitted, it applies the parts before it
        return dict(counts)

    # Parts without a fit do not depend on the text.
    no_text = cast("Fitting", None)
    fixed = None if any(map(fits, config.factors)) else make(no_text)
    choosing = [part for part in parts if any(part.fits(config, s) for s in config.factors)]
    others = [part for part in parts if part not in choosing]
    chooses_within = any(part.fits(config, 1.0) for part in choosing)
    within = None if chooses_within else make(no_text, others)
    before = keys[: keys.index("temperature")] if "temperature" in keys else []
    chooses_before = bool({*before} & {*ON_TEXT})
    also_at = tuple(config.temperature.lengths or ()) if chooses_before else ()
    return Recipe(name, _titles(keys), settings, fits, make, fixed, within, also_at)


def _idle(
    keys: Sequence[str], layout: Layout, layers: LayerChoice, native: bool, layers_key: str
) -> tuple[str, str] | None:
    """Return why some parts cannot change a model, and their titles; None if all can."""
    if not native and (beyond := [key for key in keys if key not in FOR_ANY_MODEL]):
        why = "is computed by transformers, and the decoder of this program is needed for {}"
        return why, _titles(beyond)
    if (rotating := [key for key in keys if MAKERS[key].rotation]) and not layout.rotates:
        return "has no rotation, so there is nothing to do for {}", _titles(rotating)
    for rotation, does in ((True, "rotates"), (False, "attends")):
        idle = [key for key in keys if key in BY_LAYER and MAKERS[key].rotation == rotation]
        if idle and not (layout.rotating(layers) if rotation else layout.chosen(layers)):
            C = layout.training_length
            where = f"only in layers whose window is at most the training length of {C:,} tokens"
            where = where if layers is None else f"in no layer of {layers_key}={layers}"
            why = f"{does} {where}, so there is nothing to do for {{}} "
            return f"{why}({layers_key}=all changes them all)", _titles(idle)
    return None


TOO_FAST = "has no pair slow enough for {}: all frequencies stay, and yarn_full_range slows them"
"""What a note says of a model that a rescaling leaves as fast as it was."""


def keeps_frequencies(name: str, layout: Layout, layers: LayerChoice) -> bool:
    """Return whether a method's rescaling changes no frequency, although full-range YaRN would.

    YaRN's attention factor then acts alone (RoPE-ID, App. A.9). With several rescalings, one may
    act on what another has slowed: the answer is False.
    """
    parts = [part.removeprefix("dynamic_") for part in name.split("+")]
    rescalings = [part for part in parts if part in RESCALINGS]
    if len(rescalings) != 1:
        return False
    C = layout.training_length
    spectra = [longest(s, C) for s in layout.of_layers(layers).spectra if s.rotates]

    def keeps(key: str) -> bool:
        return all(RESCALINGS[key](pairs, C).frequencies(pairs, 2.0) == pairs for pairs in spectra)

    return keeps(rescalings[0]) and not keeps("yarn_full_range")


def _untempered(
    keys: Sequence[str], layout: Layout, config: MethodsConfig
) -> tuple[str, str] | None:
    """Return why a model has no place for a temperature, and its title; None if it has one."""
    tempering = [key for key in keys if key.startswith("temperature")]
    if tempering and layout.has_trained_temperature:
        why = "was trained with logits that follow the length, so there is no place for a {}"
        return why, _titles(tempering[:1])
    if (
        "temperature" in keys
        and config.temperature.models == "free"
        and not is_free_of_positions(layout)
    ):
        return HAS_POSITIONS, _titles(["temperature"])
    return None


def _titles(keys: Iterable[str]) -> str:
    return " + ".join(MAKERS[key].title for key in keys)


def _unchanged(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    return before


def _rescaled(rescaling: Rescaling) -> Make:
    """Slow every rotation for the factor, at least 1."""

    def make(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
        return lambda factor: before(factor).rescaled(rescaling, max(factor, 1.0), config.layers)

    return make


def _dynamic(rescaling: Rescaling) -> Make:
    """Slow every rotation by the length of each sequence."""

    def make(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
        return lambda factor: before(factor).dynamically_rescaled(rescaling, layers=config.layers)

    return make


def _dynamic_ntk_alpha(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Apply dynamic NTK with s = alpha n / C - (alpha - 1) (DoPE, App. A.2)."""

    def layout_at(factor: float) -> Layout:
        alpha = config.dynamic_ntk.alpha
        growth = max(factor, 1.0) if alpha is None else alpha
        return before(factor).dynamically_rescaled(ntk_aware, growth, config.layers)

    return layout_at


def _windowed(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    return lambda factor: windowed(before(factor))


def _dropped(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Remove all encodings without recalibration; a trained temperature stays."""
    return lambda factor: before(factor).map(lambda s: Spectrum(temperature=s.temperature))


def _without_channels(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Remove the rotary channels from the scores: cos = sin = 0, while ``drop`` has cos = 1.

    A head without other channels then attends uniformly to all visible tokens.
    """

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


def _plain(value: Any) -> Any:
    """Convert settings to JSON values."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, LongRopeSettings):
        return value.of_choice
    # The choice of models to fit does not affect the models that are fitted.
    return {key: item for key, item in asdict(value).items() if key != "models"}


def _identity(layout: Layout) -> Any:
    """Return JSON values that identify a layout in the key of a stored choice."""
    if any(layer.intervention is not None for layer in layout.layers):
        return hashlib.sha256(repr(layout).encode()).hexdigest()
    return layout.to_dict()


def _some_layers_key(layout: Layout, config: MethodsConfig) -> list[list[int]]:
    """Return the part of a key with the layers that rescalings and temperatures change.

    It is empty if all layers change, so that older results stay valid.
    """
    chosen = layout.chosen(config.layers)
    return [] if len(chosen) == len(layout.layers) else [chosen]


def _beyond_key(config: MethodsConfig) -> list[float]:
    """Return the part of a key with the end of the search for a temperature beyond its grid."""
    return [LARGEST_TRIED] if goes_beyond(config.temperature.grid) else []


def _longrope(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Divide each pair by its own factor: a published one, or one searched at each length."""
    settings = config.longrope
    if settings.factors is not None:
        published = read_factors(settings.factors)
        return lambda factor: with_published(before(factor), published, factor, config.layers)

    def layout_at(factor: float) -> Layout:
        layout = before(factor)
        if factor <= 1:
            return layout
        key = [factor, settings.of_choice, _identity(layout), *_some_layers_key(layout, config)]
        if settings.search == "needles":
            length = round(factor * fitting.model.layout.training_length)
            key.append(fingerprint(fitting.text.needles[length]))
        search = partial(fitted_factors, fitting, settings, factor, layout, config.layers)
        factors = fitting.stored("longrope", key, search)
        return with_factors(layout, tuple(tuple(row) for row in factors), config.layers)

    return layout_at


def _fit_windows(fitting: Fitting, config: MethodsConfig) -> dict[int, Integers]:
    """Return the windows that a temperature is fitted on; empty without a length beyond C.

    A factor of 1.001 may round to the training length.
    """
    extends = any(factor > 1 for factor in config.factors)
    return fitting.windows_beyond(config.temperature.lengths or config.factors) if extends else {}


def _fitted_temperature(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Multiply logits by 1 + c ln s (DroPE, App. C.2), with c fitted on the lengths beyond C."""
    per, settings, layers = config.temperature.per, config.temperature, config.layers
    windows = _fit_windows(fitting, config)
    if not windows:
        return before
    layout = fitting.model.layout
    C = layout.training_length
    some = _some_layers_key(layout, config)

    def tempered_with(coefficient: float) -> LayoutAt:
        return lambda factor: tempered(before(factor), coefficient, per, layers=layers)

    def best(windows: Mapping[int, Integers]) -> float:
        layouts = [_identity(before(n / C)) for n in windows]
        loss_key = [layouts, per, list(windows), *some]
        fit = partial(fit_coefficient, fitting, tempered_with, windows, settings.grid, loss_key)
        key = [layouts, list(windows), _plain(settings), *_beyond_key(config), *some]
        coefficient: float = fitting.stored("temperature", key, fit)
        if is_largest_tried(coefficient, settings.grid):
            unbounded.extend(windows)
        return coefficient

    unbounded: list[int] = []
    coefficient = fit_line(best, windows, C) if settings.fit == "line" else best(windows)
    how = "fitted on validation text" if len(set(settings.grid)) > 1 else "as given"
    fitting.notes.append(f"logits times 1 + {coefficient:.3g} ln s, {how}")
    if unbounded:
        fitting.notes.append(
            f"at {', '.join(map(str, unbounded))} tokens the largest coefficient tried fits best, "
            "so that a larger one may fit better"
        )
    fitting.temperature = _record(fitting, windows, coefficient, per)
    if some:
        fitting.temperature["layers"] = some[0]
    return tempered_with(coefficient)


def _record(
    fitting: Fitting, windows: Mapping[int, Integers], coefficient: float, per: str
) -> dict[str, Any]:
    """Return the fields of :class:`~trainer.runs.fitted_temperature.FittedTemperature`."""
    return {
        "coefficient": coefficient,
        "per": per,
        "lengths": list(windows),
        "tokens": sum(of_length.size for of_length in windows.values()),
        "text": fitting.text.fingerprint,
        "training_length": fitting.model.layout.training_length,
    }


def _denoised(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Remove the encoding, or parts of it, of heads of extreme matrix entropy (DoPE)."""

    @cache
    def chosen(factor: float) -> dope.Selection:
        ids = fitting.ids(factor, config.choice.texts)
        selection = dope.select(fitting.model, ids, config.dope, before(factor))
        fitting.notes.append(f"{selection.words}, {_chosen_on(ids, config)}")
        return selection

    return lambda factor: dope.apply(before(factor), chosen(config.choice.length or factor))


def _weighted(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Multiply pairs of extreme frequency entropy by a factor (Weighted RoPE)."""

    @cache
    def chosen(factor: float) -> tuple[Intervention, ...]:
        ids = fitting.ids(factor, config.choice.texts)
        factors = weighted_rope.select(fitting.model, ids, config.weighted_rope, before(factor))
        pairs = counted(weighted_rope.pairs(factors), "pair")
        fitting.notes.append(f"{pairs} of queries and keys, {_chosen_on(ids, config)}")
        return factors

    return lambda factor: weighted_rope.apply(
        before(factor), chosen(config.choice.length or factor)
    )


def _chosen_on(ids: Tensor, config: MethodsConfig) -> str:
    texts, tokens = ids.shape
    kind = config.choice.text
    return f"chosen on {counted(texts, 'text')} of {tokens:,} tokens ({kind})"


def _longrope_fits(config: MethodsConfig, factor: float) -> dict[float, int]:
    """Return the numbers of sequences that the search reads, by extension factor."""
    settings = config.longrope
    if factor <= 1 or settings.factors is not None:
        return {}
    most = settings.windows if settings.search == "needles" else config.fit_windows
    return {factor: settings.evaluations * min(settings.windows, most)}


def _temperature_fits(config: MethodsConfig, factor: float) -> dict[float, int]:
    """Return the numbers of sequences that the fit reads, by extension factor."""
    tried = len(config.temperature.grid) * config.fit_windows
    return dict.fromkeys(config.temperature.lengths or [factor], tried) if factor > 1 else {}


def _choice_fits(config: MethodsConfig, factor: float) -> dict[float, int]:
    """Return the numbers of texts that heads or pairs are chosen on, by extension factor."""
    settings = config.choice
    most = config.fit_windows if settings.text == "validation" else settings.texts
    return {settings.length or factor: min(settings.texts, most)}


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
    "longrope": Part("LongRoPE", _longrope, True, ("longrope",), _longrope_fits),
    "temperature": Part(
        "temperature", _fitted_temperature, False, ("temperature",), _temperature_fits
    ),
    "temperature_rope_id": Part("RoPE-ID temperature", _rope_id_temperature, uses=("temperature",)),
    "dope": Part("DoPE", _denoised, True, ("dope", CHOICE), _choice_fits),
    "weighted_rope": Part(
        "Weighted RoPE", _weighted, True, ("weighted_rope", CHOICE), _choice_fits
    ),
    "drop": Part("dropped", _dropped),
    "drop_channels": Part("rotary channels removed", _without_channels, rotation=True),
}
"""By the names of :data:`~trainer.evaluation.method_config.PARTS`."""

FOR_ANY_MODEL = {
    *("none", "crop", *RESCALINGS, "temperature", "temperature_rope_id"),
    *("weighted_rope", "drop", "drop_channels"),
}
"""Parts for models that our decoder does not compute too: they rotate all heads of a layer alike,
the same at every length, and leave windows alone."""
