"""Parts of methods that are fitted on held-out text, each after the parts before it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache, partial
from typing import Any

from torch import Tensor

from trainer.common.words import counted
from trainer.data.order import Integers
from trainer.evaluation import dope, weighted_rope
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.layouts import (
    LayoutAt,
    read_factors,
    tempered,
    with_factors,
    with_published,
)
from trainer.evaluation.longrope import fitted_factors
from trainer.evaluation.method_config import LongRopeSettings, MethodsConfig
from trainer.evaluation.temperature import fit_coefficient, fit_line
from trainer.positional.layout import Intervention, Layout


def plain(value: Any) -> Any:
    """Convert settings to JSON values."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, LongRopeSettings):
        return value.of_choice
    # The choice of models to fit does not affect the models that are fitted.
    return {key: of_key for key, of_key in asdict(value).items() if key != "models"}


def told_apart(layout: Layout) -> Any:
    """Return what identifies a layout in the key of a stored choice."""
    if any(layer.intervention is not None for layer in layout.layers):
        return hashlib.sha256(repr(layout).encode()).hexdigest()
    return layout.to_dict()


def some_layers(layout: Layout, config: MethodsConfig) -> list[int] | None:
    """Return the layers that rescalings and temperatures change; None for all."""
    chosen = layout.chosen(config.layers)
    return None if len(chosen) == len(layout.layers) else chosen


def longrope(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Divide each pair by its own factor: published ones, or searched at each length beyond C."""
    settings = config.longrope
    if settings.factors is not None:
        published = read_factors(settings.factors)
        return lambda factor: with_published(before(factor), published, factor, config.layers)

    def at(factor: float) -> Layout:
        layout = before(factor)
        if factor <= 1:
            return layout
        some = some_layers(layout, config)
        asked = [factor, settings.of_choice, told_apart(layout), *([] if some is None else [some])]
        search = partial(fitted_factors, fitting, settings, factor, layout, config.layers)
        factors = fitting.kept("longrope", asked, search)
        return with_factors(layout, tuple(tuple(row) for row in factors), config.layers)

    return at


def fitted_temperature(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Multiply logits by 1 + c ln s (DroPE, App. C.2), with c fitted on the lengths beyond C."""
    per, settings, layers = config.temperature.per, config.temperature, config.layers
    if not any(factor > 1 for factor in config.factors):
        return before
    windows = fitting.at(settings.lengths or config.factors)
    if not windows:  # 1.001 times the training length rounds to it
        return before
    C = fitting.model.layout.training_length
    some = some_layers(fitting.model.layout, config)
    of_some = [] if some is None else [some]

    def tempered_with(coefficient: float) -> LayoutAt:
        return lambda factor: tempered(before(factor), coefficient, per, layers=layers)

    def best(on: Mapping[int, Integers]) -> float:
        layouts = [told_apart(before(n / C)) for n in on]
        return fit_coefficient(
            fitting.model,
            tempered_with,
            on,
            fitting.text.end_of_text,
            settings.grid,
            fitting.batch_tokens,
            fitting.read,
            partial(fitting.of_each, [layouts, per, list(on), *of_some]),
        )

    def fit() -> float:
        return fit_line(best, windows, C) if settings.fit == "line" else best(windows)

    layouts = [told_apart(before(n / C)) for n in windows]
    asked = [layouts, plain(settings), *of_some]
    coefficient = fitting.kept("temperature", asked, fit)
    how = "fitted on validation text" if len(set(settings.grid)) > 1 else "as given"
    fitting.notes.append(f"logits times 1 + {coefficient:.3g} ln s, {how}")
    fitting.temperature = {
        "coefficient": coefficient,
        "per": per,
        "lengths": list(windows),
        "tokens": sum(of_length.size for of_length in windows.values()),
        "text": fitting.text.fingerprint,
    } | ({} if some is None else {"layers": some})
    return tempered_with(coefficient)


def denoised(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Remove what heads of extreme matrix entropy lose (DoPE)."""

    @cache
    def chosen(factor: float) -> dope.Selection:
        ids = fitting.ids(factor, config.choice.texts)
        found = dope.select(fitting.model, ids, config.dope, before(factor))
        fitting.notes.append(f"{found.words}, {_chosen_on(ids, config)}")
        return found

    return lambda factor: dope.apply(before(factor), chosen(config.choice.length or factor))


def weighted(before: LayoutAt, fitting: Fitting, config: MethodsConfig) -> LayoutAt:
    """Multiply pairs of extreme frequency entropy by a factor (Weighted RoPE)."""

    @cache
    def chosen(factor: float) -> tuple[Intervention, ...]:
        ids = fitting.ids(factor, config.choice.texts)
        found = weighted_rope.select(fitting.model, ids, config.weighted_rope, before(factor))
        pairs = counted(weighted_rope.pairs(found), "pair")
        fitting.notes.append(f"{pairs} of queries and keys, {_chosen_on(ids, config)}")
        return found

    return lambda factor: weighted_rope.apply(
        before(factor), chosen(config.choice.length or factor)
    )


def _chosen_on(ids: Tensor, config: MethodsConfig) -> str:
    texts, tokens = ids.shape
    kind = config.choice.text
    return f"chosen on {counted(texts, 'text')} of {tokens:,} tokens ({kind})"


def longrope_fits(config: MethodsConfig, factor: float) -> dict[float, int]:
    """Return the numbers of sequences that the search reads, by extension factor."""
    settings = config.longrope
    if factor <= 1 or settings.factors is not None:
        return {}
    most = settings.windows if settings.search == "needles" else config.fit_windows
    return {factor: settings.evaluations * min(settings.windows, most)}


def temperature_fits(config: MethodsConfig, factor: float) -> dict[float, int]:
    """Return the numbers of sequences that the fit reads, by extension factor."""
    tried = len(config.temperature.grid) * config.fit_windows
    return dict.fromkeys(config.temperature.lengths or [factor], tried) if factor > 1 else {}


def choice_fits(config: MethodsConfig, factor: float) -> dict[float, int]:
    """Return the numbers of texts that heads or pairs are chosen on, by extension factor."""
    settings = config.choice
    of_windows = settings.text == "validation"
    texts = min(settings.texts, config.fit_windows) if of_windows else settings.texts
    return {settings.length or factor: texts}
