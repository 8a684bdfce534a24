"""Methods by name: parts joined by ``+``, each a change of the layout for an extension factor.

:func:`changed` makes the changes that need no text. The parts in :data:`FITS` are fitted on
held-out text, for the layout of the parts before them, so that every intervention can be combined
with every rescaling.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from trainer.analysis import weighted_rope
from trainer.analysis.frequency_entropy import choose_factors
from trainer.common.errors import UserError
from trainer.config import EvaluationConfig
from trainer.evaluation import dope
from trainer.evaluation.fitting import FitText, LayoutAt, Notes
from trainer.evaluation.longrope import fit_longrope
from trainer.evaluation.results import AS_IS, AS_IS_TITLE, counted
from trainer.evaluation.saved_model import SavedModel
from trainer.evaluation.temperature import fit_temperature, tempered
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, ntk_aware
from trainer.positional.spectrum import Spectrum

TITLES = {
    AS_IS: AS_IS_TITLE,
    "crop": "cropped",
    "window": "sliding window",
    "pi": "PI",
    "ntk": "NTK-aware",
    "ntk_by_parts": "NTK-by-parts",
    "yarn": "YaRN",
    "llama3": "Llama 3",
    "yarn_full_range": "YaRN over all frequencies",
    "ntk_by_parts_turns": "NTK-by-parts over turns",
    "yarn_turns": "YaRN over turns",
    "cope": "CoPE",
    "dynamic_ntk_alpha": "dynamic NTK (alpha)",
    "longrope": "LongRoPE",
    "temperature": "temperature",
    "temperature_rope_id": "RoPE-ID temperature",
    "dope": "DoPE",
    "weighted_rope": "Weighted RoPE",
    "drop": "dropped",
}
"""Titles of all parts in tables, by the names of ``evaluation.methods``."""
TITLES |= {f"dynamic_{name}": f"dynamic {TITLES[name]}" for name in RESCALINGS}


def changed(layout: Layout, part: str, factor: float, config: EvaluationConfig) -> Layout:
    """Return the layout after a part that is not fitted, for sequences of ``factor`` times the
    training length."""
    s, layers = max(factor, 1.0), config.layers
    if part in RESCALINGS:
        layout = layout.rescaled(RESCALINGS[part], s, layers)
    elif part == "dynamic_ntk_alpha":  # s = alpha n / C - (alpha - 1) (DoPE, App. A.2)
        alpha = s if config.dynamic_ntk_alpha is None else config.dynamic_ntk_alpha
        layout = layout.dynamically_rescaled(ntk_aware, alpha, layers)
    elif part.startswith("dynamic_"):  # with the length of each sequence
        rescaling = RESCALINGS[part.removeprefix("dynamic_")]
        layout = layout.dynamically_rescaled(rescaling, layers=layers)
    elif part == "temperature_rope_id":  # (1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or another exponent
        layout = tempered(layout, 0.1, config.temperature.rope_id_exponent, layers)
    elif part == "window":  # no wider than C
        C = layout.training_length
        windows = (replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
        layout = replace(layout, layers=tuple(windows))
    elif part == "drop":  # no recalibration; a trained temperature stays
        layout = layout.map(lambda spectrum: Spectrum(temperature=spectrum.temperature))
    elif part not in (AS_IS, "crop"):  # crop shortens the text, not the layout
        raise KeyError(part)
    return layout


def fit_choice(
    part: str,
    before: LayoutAt,
    model: LanguageModel,
    text: FitText,
    config: EvaluationConfig,
    notes: Notes,
) -> LayoutAt:
    """Change heads (dope) or pairs (weighted_rope) of extreme entropy, chosen at each length, or at
    ``choice.length`` for all."""

    @cache
    def change(factor: float) -> Callable[[Layout], Layout]:
        layout, length = before(factor), round(factor * model.layout.training_length)
        ids = text.choice(config, length)
        if part == "dope":
            heads = dope.select(model, ids, config.dope, layout)
            chosen = ", ".join(f"L{layer}H{head}" for layer, head in heads) or "no head"
            change = partial(dope.apply, chosen=heads, settings=config.dope, model=model)
        else:
            factors = choose_factors(model, ids, config.weighted_rope, layout)
            chosen = f"{counted(weighted_rope.count_pairs(factors), 'pair')} of queries and keys"
            change = partial(weighted_rope.apply, chosen=factors)
        texts, tokens = counted(len(ids), "text"), f"{ids.shape[1]:,} tokens"
        notes.append(f"{chosen}, chosen on {texts} of {tokens} ({config.choice.text})")
        return change

    return lambda factor: change(config.choice.length or factor)(before(factor))


Fit = Callable[[LayoutAt, LanguageModel, FitText, EvaluationConfig, Notes], LayoutAt]
"""Maps the layouts before a part to those after it, and adds to the notes."""
FITS: dict[str, Fit] = {
    "longrope": fit_longrope,
    "temperature": fit_temperature,
    "dope": partial(fit_choice, "dope"),
    "weighted_rope": partial(fit_choice, "weighted_rope"),
}


def title_of(method: str) -> str:
    """Return the method's name in tables."""
    return " + ".join(TITLES[part] for part in method.split("+"))


def tokens_read(method: str, layout: Layout) -> int | None:
    """Return the number of last tokens that the model reads (None: all tokens)."""
    return layout.training_length if "crop" in method.split("+") else None


def longest_fit(methods: Collection[str], config: EvaluationConfig) -> float:
    """Return the length of the longest text that methods are fitted on, in training lengths; 0 if
    none is fitted."""
    read = dict.fromkeys(FITS, config.lengths)
    if config.temperature.lengths:
        read["temperature"] = config.temperature.lengths
    if config.choice.length is not None:
        read["dope"] = read["weighted_rope"] = [config.choice.length]
    parts = {part for method in methods for part in method.split("+")}
    return max((length for part in parts & FITS.keys() for length in read[part]), default=0)


def layout_inputs(text: FitText, config: EvaluationConfig) -> list[Any]:
    """Return all inputs of a method's layouts besides the model and the lengths, for their key."""
    held_out = text.held_out
    inputs: list[Any] = [held_out.corpus.fingerprint, held_out.bos, text.count, text.longest]
    inputs += [config.lengths, config.layers, config.dynamic_ntk_alpha, config.temperature]
    inputs += [config.longrope, config.choice, config.dope, config.weighted_rope]
    if config.choice.text != "validation":  # a task's prompts
        inputs += [config.needles, config.many_shot]
        if file := config.many_shot.file:
            inputs.append(Path(file).read_text(encoding="utf-8"))
    return inputs


def layouts_for(
    method: str,
    layout: Layout,
    factors: Sequence[float],
    config: EvaluationConfig,
    load: Callable[[], LanguageModel],
    text: FitText,
) -> tuple[list[Layout], list[str]]:
    """Return a model's layout for every extension factor, and sentences about what was fitted.

    ``layout``: the model's own. ``load``: reads the model, if a part is fitted.
    """
    config = replace(config, layers=layout.chosen(config.layers))
    notes: Notes = []

    def after(part: str, before: LayoutAt) -> LayoutAt:
        if part in FITS:
            return FITS[part](before, load(), text, config, notes)
        return lambda factor: changed(before(factor), part, factor, config)

    layout_at: LayoutAt = lambda factor: layout  # noqa: E731
    for part in method.split("+"):
        layout_at = cache(after(part, layout_at))
    return [*map(layout_at, factors)], [*dict.fromkeys(notes)]


def applicable(
    models: Sequence[SavedModel], config: EvaluationConfig
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the methods that change each model, by its name, and a sentence for each that changes
    none.

    Raises:
        UserError: no method changes any model.
        IndexError: a model has no such layer.
    """
    methods: dict[str, list[str]] = {model.name: [] for model in models}
    notes = []
    for method in config.methods:
        reasons = {model.name: why_idle(method, model, config) for model in models}
        for name in (name for name, why in reasons.items() if not why):
            methods[name].append(method)
        if all(reasons.values()):
            why = "; ".join(f"{name} {why}" for name, why in reasons.items())
            notes.append(f"{method}: {why}.")
    if len(notes) == len(config.methods):
        raise UserError(f"evaluation.methods: {' '.join(notes)}")
    return methods, notes


def why_idle(method: str, model: SavedModel, config: EvaluationConfig) -> str:
    """Return why a method cannot change a model; empty if it can."""
    parts, layout = {*method.split("+")}, model.layout
    chosen = layout.of_layers(config.layers)
    dynamic = {part for part in parts if part.startswith("dynamic_")}
    slowing = parts & {*RESCALINGS, "longrope"} | dynamic
    tempering = parts & {"temperature", "temperature_rope_id"}
    # transformers rotates all heads of a layer alike, the same at every length, in its own windows.
    if model.computed_by and (dynamic or parts & {"longrope", "dope", "window"}):
        return "is computed by transformers, and this method needs the decoder of this program"
    if (slowing or parts & {"dope", "weighted_rope"}) and not layout.rotates:
        return "has no rotation"
    if (slowing and not chosen.rotates) or (tempering and not chosen.layers):
        return "has no such layer that sees more than the training length (evaluation.layers)"
    if tempering and any(x.temperature.is_trained(layout.training_length) for x in layout.spectra):
        return "was trained with logits that follow the length"
    has_positions = any(spectrum.rotates or spectrum.alibi for spectrum in layout.spectra)
    if "temperature" in parts and has_positions and config.temperature.models != "all":
        return "has positions (evaluation.temperature.models=all)"
    return ""
