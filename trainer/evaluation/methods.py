"""Methods by name: parts joined by ``+``, each a change of the layout for an extension factor.

A part that is fitted on held-out text is fitted for the layout of the parts before it, so that
every intervention can be combined with every rescaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.analysis import weighted_rope
from trainer.analysis.frequency_entropy import choose_factors
from trainer.common.errors import UserError
from trainer.config import EvaluationConfig
from trainer.evaluation import dope
from trainer.evaluation.fitting import Fitting
from trainer.evaluation.longrope import fitted_layout
from trainer.evaluation.results import AS_IS, AS_IS_TITLE, counted
from trainer.evaluation.saved_model import SavedModel
from trainer.evaluation.store import fingerprint
from trainer.evaluation.temperature import (
    fit_coefficient,
    fit_line,
    is_largest_tried,
    tempered,
)
from trainer.positional.intervention import Intervention
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, Rescaling, ntk_aware
from trainer.positional.spectrum import Spectrum

LayoutAt = Callable[[float], Layout]
"""A layout for every extension factor. ``yarn+dope`` maps the model's own to YaRN's, and those to
DoPE's."""
PartChange = Callable[[LayoutAt, Fitting, EvaluationConfig], LayoutAt]
"""Maps the layouts before a part to those after it; its configuration lists layers as indices."""
TITLES = {
    "pi": "PI",
    "ntk": "NTK-aware",
    "ntk_by_parts": "NTK-by-parts",
    "yarn": "YaRN",
    "llama3": "Llama 3",
    "yarn_full_range": "YaRN over all frequencies",
    "ntk_by_parts_turns": "NTK-by-parts over turns",
    "yarn_turns": "YaRN over turns",
    "cope": "CoPE",
}
"""Titles of :data:`~trainer.positional.rescaling.RESCALINGS` in tables."""


LAYOUT_KEYS = (
    *("lengths", "layers", "temperature", "dynamic_ntk_alpha", "longrope"),
    *("choice", "dope", "weighted_rope"),
)
"""Keys below ``evaluation`` that methods read."""


@dataclass(frozen=True)
class Part:
    """One part of a method.

    ``rotation``: whether it only affects rotating heads. ``layered``: whether it changes the layers
    of ``evaluation.layers`` alone. ``fits``: lengths of the texts that it is fitted on, in training
    lengths; empty if it is not fitted.
    """

    title: str
    change: PartChange
    rotation: bool = False
    layered: bool = False
    fits: Callable[[EvaluationConfig], Sequence[float]] = lambda config: ()


@dataclass(frozen=True, eq=False)
class Method:
    """A method for one model: ``key`` names its parts, ``layout`` is the model's own, and
    ``config`` lists layers as indices."""

    key: str
    layout: Layout
    config: EvaluationConfig

    @property
    def parts(self) -> list[Part]:
        """The parts, in the order in which they apply."""
        return [PARTS[name] for name in self.key.split("+")]

    @property
    def title(self) -> str:
        """The method's name in tables."""
        return " + ".join(part.title for part in self.parts)

    @property
    def reads(self) -> int | None:
        """Number of last tokens that the model reads (None: all tokens)."""
        return self.layout.training_length if "crop" in self.key.split("+") else None

    @property
    def settings(self) -> dict[str, Any]:
        """All keys below ``evaluation`` that layouts depend on, as JSON values."""
        values, used, config = asdict(self.config), {*LAYOUT_KEYS}, self.config
        if config.choice.text != "validation":
            used |= {"needles", "many_shot"}  # make its prompts
            if file := config.many_shot.file:
                values["many_shot"]["file"] = fingerprint(Path(file).read_text(encoding="utf-8"))
        return {name: values[name] for name in sorted(used)}

    @property
    def fits(self) -> list[float]:
        """Lengths of the texts that its parts are fitted on, in training lengths; empty if none
        is."""
        return [factor for part in self.parts for factor in part.fits(self.config)]

    def layouts(self, fitting: Fitting) -> LayoutAt:
        """Return the layout for every extension factor; the calls fit what is fitted."""
        layout_at: LayoutAt = lambda factor: self.layout  # noqa: E731
        for part in self.parts:
            layout_at = cache(part.change(layout_at, fitting, self.config))
        return layout_at


def applicable(
    models: Sequence[SavedModel], config: EvaluationConfig
) -> tuple[dict[str, list[Method]], list[str]]:
    """Return the methods that change each model, by its name, and a sentence for each that changes
    none.

    Raises:
        UserError: no method changes any model.
    """
    methods: dict[str, list[Method]] = {model.name: [] for model in models}
    idle: dict[str, list[str]] = {}
    for name in config.methods:
        for model in models:
            if why := why_idle(name, model, config):
                idle.setdefault(name, []).append(f"{model.name} {why}")
                continue
            methods[model.name].append(method_for(name, model.layout, config))
    used = {method.key for applied in methods.values() for method in applied}
    notes = [f"{name}: {'; '.join(why)}." for name, why in idle.items() if name not in used]
    if not used:
        raise UserError(f"evaluation.methods: {' '.join(notes)}")
    return methods, notes


def method_for(name: str, layout: Layout, config: EvaluationConfig) -> Method:
    """Return the named method for a model with this layout."""
    return Method(name, layout, replace(config, layers=layout.chosen(config.layers)))


def why_idle(name: str, model: SavedModel, config: EvaluationConfig) -> str:
    """Return why the named method cannot change a model; empty if it can."""
    names, layout, layers = {*name.split("+")}, model.layout, config.layers
    count = len(layout.layers)
    if isinstance(layers, list) and not {*layers} <= {*range(-count, count)}:
        raise UserError(f"evaluation.layers: expected indices of {count} layers, got {layers}")
    if model.computed_by and not names <= FOR_ANY_MODEL:
        return "is computed by transformers, and this method needs the decoder of this program"
    if any(PARTS[part].rotation for part in names) and not layout.rotates:
        return "has no rotation"
    for part in (PARTS[name] for name in names if PARTS[name].layered):
        chosen = layout.of_layers(layers)
        if not (chosen.rotates if part.rotation else chosen.layers):
            return "has no such layer that sees more than the training length (evaluation.layers)"
    trained = any(s.temperature.is_trained(layout.training_length) for s in layout.spectra)
    if names & {"temperature", "temperature_rope_id"} and trained:
        return "was trained with logits that follow the length"
    has_positions = any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)
    if "temperature" in names and has_positions and config.temperature.models != "all":
        return "has positions (evaluation.temperature.models=all)"
    return ""


def windowed(layout: Layout) -> Layout:
    """Limit attention windows to the training length."""
    C = layout.training_length
    layers = tuple(replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
    return replace(layout, layers=layers)


def _unchanged(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    return before


def _plain(change: Callable[[Layout, float, EvaluationConfig], Layout]) -> PartChange:
    """Return the part that changes the layout of each extension factor without a fit."""
    return lambda before, fitting, config: lambda factor: change(before(factor), factor, config)


def _rescaled(rescaling: Rescaling) -> PartChange:
    """Slow every rotation for the factor, at least 1."""
    return _plain(
        lambda layout, factor, config: layout.rescaled(rescaling, max(factor, 1.0), config.layers)
    )


def _dynamic(rescaling: Rescaling) -> PartChange:
    """Slow every rotation by the length of each sequence."""
    return _plain(
        lambda layout, factor, config: layout.dynamically_rescaled(rescaling, layers=config.layers)
    )


def _dynamic_ntk_alpha(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Apply dynamic NTK with s = alpha n / C - (alpha - 1) (DoPE, App. A.2)."""
    growth = max(factor, 1.0) if config.dynamic_ntk_alpha is None else config.dynamic_ntk_alpha
    return layout.dynamically_rescaled(ntk_aware, growth, config.layers)


def _dropped(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Remove all encodings without recalibration; a trained temperature stays."""
    return layout.map(lambda spectrum: Spectrum(temperature=spectrum.temperature))


def _rope_id_temperature(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Multiply logits by (1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or with another exponent."""
    exponent = config.temperature.rope_id_exponent
    return tempered(layout, 0.1, exponent, config.layers)


def _longrope(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Divide each pair by its own factor, which is searched at each length."""

    def layout_at(factor: float) -> Layout:
        layout = before(factor)
        if factor <= 1:
            return layout
        return fitted_layout(fitting, config.longrope, factor, layout, config.layers)

    return layout_at


def _fitted_temperature(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Multiply logits by 1 + c ln s (DroPE, App. C.2), with c fitted on the lengths beyond C."""
    if max(config.lengths) <= 1:
        return before
    settings, layers, C = config.temperature, config.layers, fitting.model.layout.training_length
    lengths = [round(factor * C) for factor in settings.lengths or config.lengths]
    windows = {length: fitting.text.windows(length) for length in lengths if length > C}
    if not windows:  # a factor of 1.001 may round to the training length
        return before

    def tempered_with(coefficient: float) -> LayoutAt:
        return lambda factor: tempered(before(factor), coefficient, layers=layers)

    def best(lengths: Sequence[int]) -> float:
        def loss(coefficient: float) -> float:
            layout_at, total = tempered_with(coefficient), 0.0
            for length in lengths:
                with fitting.model.using(layout_at(length / C)):
                    total += fitting.loss(windows[length])
            return total

        coefficient = fit_coefficient(loss, settings.grid)
        if is_largest_tried(coefficient, settings.grid):
            fitting.notes.append("the largest coefficient tried fits best")
        return coefficient

    fitted = fit_line(best, [*windows], C) if settings.fit == "line" else best([*windows])
    fitting.notes.append(f"logits times 1 + {fitted:.3g} ln s")
    return tempered_with(fitted)


def _denoised(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Remove the encoding, or parts of it, of heads of extreme matrix entropy (DoPE)."""

    @cache
    def chosen(factor: float) -> list[dope.Chosen]:
        ids, layout = fitting.ids(factor, config), before(factor)
        heads = dope.select(fitting.model, ids, config.dope, layout)
        names = ", ".join(map(str, heads)) or "no head"
        fitting.notes.append(f"{names}, {_chosen_on(ids, config)}")
        return heads

    def layout_at(factor: float) -> Layout:
        heads = chosen(config.choice.length or factor)
        return dope.apply(before(factor), heads, config.dope, fitting.model.config)

    return layout_at


def _weighted(before: LayoutAt, fitting: Fitting, config: EvaluationConfig) -> LayoutAt:
    """Multiply pairs of extreme frequency entropy by a factor (Weighted RoPE)."""

    @cache
    def chosen(factor: float) -> tuple[Intervention, ...]:
        ids, layout = fitting.ids(factor, config), before(factor)
        factors = choose_factors(fitting.model, ids, config.weighted_rope, layout)
        pairs = counted(weighted_rope.count_pairs(factors), "pair")
        fitting.notes.append(f"{pairs} of queries and keys, {_chosen_on(ids, config)}")
        return factors

    return lambda factor: weighted_rope.apply(
        before(factor), chosen(config.choice.length or factor)
    )


def _chosen_on(ids: Tensor, config: EvaluationConfig) -> str:
    texts, tokens = ids.shape
    return f"chosen on {counted(texts, 'text')} of {tokens:,} tokens ({config.choice.text})"


def _lengths_of_choice(config: EvaluationConfig) -> Sequence[float]:
    return config.lengths if config.choice.length is None else [config.choice.length]


PARTS: dict[str, Part] = {
    AS_IS: Part(AS_IS_TITLE, _unchanged),
    "crop": Part("cropped", _unchanged),
    "window": Part("sliding window", _plain(lambda layout, factor, config: windowed(layout))),
    **{
        name: Part(TITLES[name], _rescaled(rescaling), rotation=True, layered=True)
        for name, rescaling in RESCALINGS.items()
    },
    **{
        f"dynamic_{name}": Part(
            f"dynamic {TITLES[name]}", _dynamic(rescaling), rotation=True, layered=True
        )
        for name, rescaling in RESCALINGS.items()
    },
    "dynamic_ntk_alpha": Part(
        "dynamic NTK (alpha)", _plain(_dynamic_ntk_alpha), rotation=True, layered=True
    ),
    "longrope": Part(
        "LongRoPE", _longrope, rotation=True, layered=True, fits=lambda config: config.lengths
    ),
    "temperature": Part(
        "temperature",
        _fitted_temperature,
        layered=True,
        fits=lambda config: config.temperature.lengths or config.lengths,
    ),
    "temperature_rope_id": Part("RoPE-ID temperature", _plain(_rope_id_temperature), layered=True),
    "dope": Part("DoPE", _denoised, rotation=True, fits=_lengths_of_choice),
    "weighted_rope": Part("Weighted RoPE", _weighted, rotation=True, fits=_lengths_of_choice),
    "drop": Part("dropped", _plain(_dropped)),
}
"""By the names of ``evaluation.methods``."""

FOR_ANY_MODEL = {
    *(AS_IS, "crop", *RESCALINGS, "temperature", "temperature_rope_id"),
    *("weighted_rope", "drop"),
}
"""Parts for models that our decoder does not compute too: they rotate all heads of a layer alike,
the same at every length, and leave windows alone."""
