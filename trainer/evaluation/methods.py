"""Methods by name: parts joined by ``+``, each a change of the layout for an extension factor.

A part that is fitted on held-out text is fitted for the layout of the parts before it, so that
every intervention can be combined with every rescaling.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainer.common.errors import UserError
from trainer.common.words import counted
from trainer.config import BY_LAYER, EvaluationConfig
from trainer.data.order import Integers
from trainer.evaluation import dope, weighted_rope
from trainer.evaluation.fitting import Fitting, fit_coefficient, fit_line, is_largest_tried
from trainer.evaluation.layouts import (
    TITLES,
    LayoutAt,
    is_free_of_positions,
    tempered,
    windowed,
    with_factors,
)
from trainer.evaluation.longrope import fitted_factors
from trainer.evaluation.loss import mean_loss
from trainer.evaluation.results import AS_IS, AS_IS_TITLE
from trainer.evaluation.store import fingerprint
from trainer.positional.layout import Intervention, Layout
from trainer.positional.rescaling import RESCALINGS, Rescaling, ntk_aware
from trainer.positional.spectrum import Spectrum

if TYPE_CHECKING:
    from trainer.evaluation.engine import Subject


@dataclass(frozen=True)
class Method:
    """A layout for every extension factor.

    ``reads``: number of last tokens that the model reads (None: all tokens).
    """

    layout_at: LayoutAt
    reads: int | None = None


Make = Callable[[LayoutAt, Fitting, EvaluationConfig], LayoutAt]
"""Maps the layouts before a part to those after it; its configuration lists layers as indices."""


@dataclass(frozen=True)
class Part:
    """One part of a method.

    ``rotation``: whether it only affects rotating heads. ``uses``: configuration keys that it
    depends on. ``fits``: extension factors at whose lengths it reads text for a choice.
    """

    title: str
    make: Make
    rotation: bool = False
    uses: tuple[str, ...] = ()
    fits: Callable[[EvaluationConfig, float], Iterable[float]] = lambda config, factor: ()


@dataclass(frozen=True, eq=False)
class Recipe:
    """A method before it is fitted.

    ``settings``: all its inputs besides the model. ``fits``: extension factors at whose lengths it
    reads text, by the factor that it is set for.
    """

    key: str
    title: str
    settings: dict[str, Any]
    fits: Callable[[float], set[float]]
    make: Callable[[Fitting], Method]


def applicable(
    subjects: Sequence[Subject], config: EvaluationConfig
) -> tuple[dict[str, list[Recipe]], list[str]]:
    """Return the methods that change each model, by its name, and a sentence for each that changes
    none.

    Raises:
        UserError: no method changes any model.
    """
    recipes: dict[str, list[Recipe]] = {subject.name: [] for subject in subjects}
    idle: dict[str, list[str]] = {}
    for name in config.names:
        for subject in subjects:
            made = recipe(name, subject.layout, config, native=subject.native)
            if isinstance(made, Recipe):
                if "dope" in made.settings:
                    dope.check_heads(subject.layout, subject.config, config.dope)
                recipes[subject.name].append(made)
            else:
                idle.setdefault(name, []).append(f"{subject.name} {made}")
    used = {made.key for applied in recipes.values() for made in applied}
    notes = [f"{name}: {'; '.join(why)}." for name, why in idle.items() if name not in used]
    if not used:
        raise UserError(f"evaluation.methods: {' '.join(notes)}")
    return recipes, notes


def recipe(
    name: str, layout: Layout, config: EvaluationConfig, *, native: bool = True
) -> Recipe | str:
    """Return the named method for a model, or why it cannot change the model.

    ``native``: whether our decoder computes the model.
    """
    keys = name.split("+")
    parts = [MAKERS[key] for key in keys]
    if reason := _idle(keys, layout, config, native):
        return reason
    count = len(layout.layers)
    if isinstance(config.layers, list) and not {*config.layers} <= {*range(-count, count)}:
        raise UserError(
            f"evaluation.layers: expected indices of {count} layers, got {config.layers}"
        )
    config = replace(config, layers=layout.chosen(config.layers))

    def make(fitting: Fitting) -> Method:
        layout_at: LayoutAt = lambda factor: layout  # noqa: E731
        for part in parts:
            # Cached: a choice is made once for all tasks.
            layout_at = cache(part.make(layout_at, fitting, config))
        return Method(layout_at, layout.training_length if "crop" in keys else None)

    settings = {key: _plain(getattr(config, key)) for part in parts for key in part.uses}
    if {*keys} & {*BY_LAYER}:
        settings["layers"] = config.layers

    def fits(factor: float) -> set[float]:
        factors, read = {factor}, set[float]()
        for part in reversed(parts):
            of_part = {s for at_factor in factors for s in part.fits(config, at_factor)}
            read |= of_part
            factors |= of_part  # where a part is fitted, it applies the parts before it
        return read

    title = " + ".join(part.title for part in parts)
    return Recipe(name, title, settings, fits, make)


def _idle(keys: Sequence[str], layout: Layout, config: EvaluationConfig, native: bool) -> str:
    """Return why some part cannot change a model; empty if all can."""
    if not native and not FOR_ANY_MODEL.issuperset(keys):
        return "is computed by transformers, and this method needs the decoder of this program"
    if any(MAKERS[key].rotation for key in keys) and not layout.rotates:
        return "has no rotation"
    for key in {*keys} & {*BY_LAYER}:
        changed = layout.rotating if MAKERS[key].rotation else layout.chosen
        if not changed(config.layers):
            return "has no such layer that sees more than the training length (evaluation.layers)"
    tempering = [key for key in keys if key.startswith("temperature")]
    if tempering and layout.has_trained_temperature:
        return "was trained with logits that follow the length"
    is_free = config.temperature.models == "all" or is_free_of_positions(layout)
    if "temperature" in keys and not is_free:
        return "has positions (evaluation.temperature.models=all)"
    return ""


def _unchanged(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    return before


def _rescaled(rescaling: Rescaling) -> Make:
    """Slow every rotation for the factor, at least 1."""

    def make(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
        return lambda factor: before(factor).rescaled(rescaling, max(factor, 1.0), config.layers)

    return make


def _dynamic(rescaling: Rescaling) -> Make:
    """Slow every rotation by the length of each sequence."""

    def make(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
        return lambda factor: before(factor).dynamically_rescaled(rescaling, layers=config.layers)

    return make


def _dynamic_ntk_alpha(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Apply dynamic NTK with s = alpha n / C - (alpha - 1) (DoPE, App. A.2)."""

    def layout_at(factor: float) -> Layout:
        alpha = config.dynamic_ntk.alpha
        growth = max(factor, 1.0) if alpha is None else alpha
        return before(factor).dynamically_rescaled(ntk_aware, growth, config.layers)

    return layout_at


def _windowed(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    return lambda factor: windowed(before(factor))


def _dropped(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Remove all encodings without recalibration; a trained temperature stays."""
    return lambda factor: before(factor).map(lambda s: Spectrum(temperature=s.temperature))


def _rope_id_temperature(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Multiply logits by (1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or with another exponent."""
    exponent = config.temperature.rope_id_exponent
    return lambda factor: tempered(before(factor), 0.1, "sequence", exponent, config.layers)


def _plain(value: Any) -> Any:
    """Convert settings to JSON values."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return asdict(value)


def _identity(layout: Layout) -> str:
    """Return text that identifies a layout in the key of a stored choice."""
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def _longrope(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Divide each pair by its own factor, which is searched at each length."""
    settings = config.longrope

    def layout_at(factor: float) -> Layout:
        layout = before(factor)
        if factor <= 1:
            return layout
        key = [factor, asdict(settings), _identity(layout), config.layers]
        search = partial(fitted_factors, fitting, settings, factor, layout, config.layers)
        factors = fitting.stored("longrope", key, search)
        return with_factors(layout, tuple(tuple(row) for row in factors), config.layers)

    return layout_at


def _fitted_temperature(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Multiply logits by 1 + c ln s (DroPE, App. C.2), with c fitted on the lengths beyond C."""
    settings, layers = config.temperature, config.layers
    if max(config.lengths) <= 1:
        return before
    windows = fitting.windows_beyond(settings.lengths or config.lengths)
    if not windows:  # a factor of 1.001 may round to the training length
        return before
    C = fitting.model.layout.training_length

    def tempered_with(coefficient: float) -> LayoutAt:
        return lambda factor: tempered(before(factor), coefficient, layers=layers)

    def best(windows: Mapping[int, Integers]) -> float:
        def loss(coefficient: float) -> float:
            layout_at, total = tempered_with(coefficient), 0.0
            for length, tokens in windows.items():
                with fitting.model.using(layout_at(length / C)):
                    first, batch_tokens = fitting.text.first_token, fitting.batch_tokens
                    total += mean_loss(fitting.model, tokens, first, batch_tokens)
            return total

        layouts = [_identity(before(n / C)) for n in windows]
        key = [layouts, list(windows), asdict(settings), layers]
        coefficient: float = fitting.stored(
            "temperature", key, partial(fit_coefficient, loss, settings.grid)
        )
        if is_largest_tried(coefficient, settings.grid):
            fitting.notes.append("the largest coefficient tried fits best")
        return coefficient

    coefficient = fit_line(best, windows, C) if settings.fit == "line" else best(windows)
    fitting.notes.append(f"logits times 1 + {coefficient:.3g} ln s")
    fitting.temperature = coefficient
    return tempered_with(coefficient)


def _denoised(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Remove the encoding, or parts of it, of heads of extreme matrix entropy (DoPE)."""

    @cache
    def chosen(factor: float) -> dope.Selection:
        ids, layout = fitting.ids(factor, config.choice.texts), before(factor)
        select = partial(dope.select, fitting.model, ids, config.dope, layout)
        key = [_plain(config.dope), fingerprint(ids.numpy(force=True)), _identity(layout)]
        selection = fitting.chosen("dope", key, dope.Selection, select)
        fitting.notes.append(f"{selection.words}, {_chosen_on(ids, config)}")
        return selection

    return lambda factor: dope.apply(before(factor), chosen(config.choice.length or factor))


def _weighted(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Multiply pairs of extreme frequency entropy by a factor (Weighted RoPE)."""

    @cache
    def chosen(factor: float) -> tuple[Intervention, ...]:
        ids, layout = fitting.ids(factor, config.choice.texts), before(factor)
        rules = config.weighted_rope
        select = partial(weighted_rope.select, fitting.model, ids, rules, layout)
        key = [_plain(rules), fingerprint(ids.numpy(force=True)), _identity(layout)]
        factors = fitting.chosen("weighted_rope", key, tuple[Intervention, ...], select)
        pairs = counted(weighted_rope.pairs(factors), "pair")
        fitting.notes.append(f"{pairs} of queries and keys, {_chosen_on(ids, config)}")
        return factors

    return lambda factor: weighted_rope.apply(
        before(factor), chosen(config.choice.length or factor)
    )


def _chosen_on(ids: Tensor, config: EvaluationConfig) -> str:
    texts, tokens = ids.shape
    return f"chosen on {counted(texts, 'text')} of {tokens:,} tokens ({config.choice.text})"


def _longrope_fits(config: EvaluationConfig, factor: float) -> Iterable[float]:
    return [factor] if factor > 1 else []


def _temperature_fits(config: EvaluationConfig, factor: float) -> Iterable[float]:
    return (config.temperature.lengths or [factor]) if factor > 1 else []


def _choice_fits(config: EvaluationConfig, factor: float) -> Iterable[float]:
    return [config.choice.length or factor]


CHOICE = "choice"
MAKERS: dict[str, Part] = {
    AS_IS: Part(AS_IS_TITLE, _unchanged),
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
}
"""By the names of ``evaluation.methods``."""

FOR_ANY_MODEL = {
    *(AS_IS, "crop", *RESCALINGS, "temperature", "temperature_rope_id"),
    *("weighted_rope", "drop"),
}
"""Parts for models that our decoder does not compute too: they rotate all heads of a layer alike,
the same at every length, and leave windows alone."""
