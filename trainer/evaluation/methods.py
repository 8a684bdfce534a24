"""Methods of the program, and methods by name: parts joined by ``+``.

Each part changes the layout of the parts before it, so that every intervention can be combined with
every rescaling.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.analysis import weighted_rope
from trainer.analysis.frequency_entropy import choose_factors
from trainer.common.errors import UserError, nearest
from trainer.config import EvaluationConfig
from trainer.evaluation import dope, longrope, temperature  # noqa: F401 - they register methods
from trainer.evaluation.fitting import VALIDATION, Change, FitText, LayoutAt, Notes
from trainer.evaluation.method import METHODS, Method, far_rotation, method, own_decoder, rotation
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.results import AS_IS, counted
from trainer.evaluation.saved_model import SavedModel
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, TITLES, Rescaling, ntk_aware
from trainer.positional.spectrum import Spectrum

CROP = "crop"
"""Method that shortens the text."""


@method(AS_IS, "as is", reads=())
@method(CROP, "cropped", reads=())
def unchanged(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Return the layout itself."""
    return layout


@method("window", "sliding window", own_decoder, reads=())
def windowed(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Let queries see no more than C keys."""
    C = layout.training_length
    windows = (replace(layer, window=min(layer.window or C, C)) for layer in layout.layers)
    return replace(layout, layers=tuple(windows))


@method(
    "dynamic_ntk_alpha",
    "dynamic NTK (alpha)",
    own_decoder,
    far_rotation,
    reads=("dynamic_ntk_alpha",),
)
def dynamic_ntk_alpha(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Slow each sequence by s = alpha n / C - (alpha - 1) (DoPE, App. A.2)."""
    alpha = config.dynamic_ntk_alpha
    if alpha is None:
        alpha = max(factor, 1.0)
    return layout.dynamically_rescaled(ntk_aware, alpha, config.layers)


@method("drop", "dropped", reads=())
def dropped(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Drop every encoding, without recalibration; a trained temperature stays."""
    return layout.map(lambda spectrum: Spectrum(temperature=spectrum.temperature))


def rescaled(
    rescaling: Rescaling, layout: Layout, factor: float, config: EvaluationConfig
) -> Layout:
    """Slow all sequences by the s of the evaluation."""
    return layout.rescaled(rescaling, max(factor, 1.0), config.layers)


def dynamically_rescaled(
    rescaling: Rescaling, layout: Layout, factor: float, config: EvaluationConfig
) -> Layout:
    """Slow each sequence by its own s."""
    return layout.dynamically_rescaled(rescaling, layers=config.layers)


@method("dope", "DoPE", own_decoder, rotation, is_fitted=True, reads=("choice", "dope"))
def fit_dope(
    before: LayoutAt, model: LanguageModel, text: FitText, config: EvaluationConfig, notes: Notes
) -> LayoutAt:
    """Change heads of extreme matrix entropy."""

    def choose(ids: Tensor, layout: Layout) -> tuple[Change, str]:
        heads = dope.select(model, ids, config.dope, layout)
        change = partial(dope.apply, chosen=heads, settings=config.dope, model=model)
        names = ", ".join(f"L{layer}H{head}" for layer, head in heads)
        return change, names or "no head"

    return text.changed_by(choose, before, model.layout.training_length, config, notes)


@method(
    "weighted_rope", "Weighted RoPE", rotation, is_fitted=True, reads=("choice", "weighted_rope")
)
def fit_weighted_rope(
    before: LayoutAt, model: LanguageModel, text: FitText, config: EvaluationConfig, notes: Notes
) -> LayoutAt:
    """Change pairs of extreme frequency entropy."""

    def choose(ids: Tensor, layout: Layout) -> tuple[Change, str]:
        factors = choose_factors(model, ids, config.weighted_rope, layout)
        pairs = counted(weighted_rope.count_pairs(factors), "pair")
        return partial(weighted_rope.apply, chosen=factors), f"{pairs} of queries and keys"

    return text.changed_by(choose, before, model.layout.training_length, config, notes)


def known_methods() -> dict[str, Method]:
    """Return the registered methods, and each rescaling with the s of the evaluation and with that
    of every sequence, by name; raise a UserError if two have one name."""
    methods = dict(METHODS)
    for name, function in RESCALINGS.items():
        if not methods.keys().isdisjoint([name, f"dynamic_{name}"]):
            raise UserError(f"rescaling: a method has the name of {name!r}; expected another name")
        title = TITLES[name]
        methods[name] = Method(title, partial(rescaled, function), (far_rotation,), reads=())
        needs = own_decoder, far_rotation
        dynamic = partial(dynamically_rescaled, function)
        methods[f"dynamic_{name}"] = Method(f"dynamic {title}", dynamic, needs, reads=())
    return methods


def parts_of(name: str) -> list[Method]:
    """Return the parts of a method from left to right; raise a UserError if one is unknown."""
    known = known_methods()
    parts = name.split("+")
    missing = [part for part in parts if part not in known]
    if missing:
        raise UserError(f"there is no method {missing[0]!r}{nearest(missing[0], known)}")
    return [known[part] for part in parts]


def title_of(name: str) -> str:
    """Return the method's name in tables."""
    return " + ".join(part.title for part in parts_of(name))


def tokens_read(name: str, layout: Layout) -> int | None:
    """Return the number of last tokens that the model reads (None: all tokens)."""
    return layout.training_length if CROP in name.split("+") else None


def changed(name: str, layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Return the layout after a method that is not fitted, at ``factor`` training lengths."""
    for part in parts_of(name):
        layout = part.apply(layout, factor, config)
    return layout


def layout_inputs(name: str, text: FitText, config: EvaluationConfig) -> list[Any]:
    """Return all inputs of a method's layouts besides the model and the lengths, for their key."""
    parts = parts_of(name)
    reads = sorted({key for part in parts for key in part.reads})
    inputs: list[Any] = [name, [part.apply for part in parts], config.layers]
    inputs += [getattr(config, key) for key in reads]
    if any(part.is_fitted for part in parts):
        inputs += [text.held_out.corpus.fingerprint, text.held_out.bos, text.count]
    if "choice" in reads and config.choice.text != VALIDATION:  # a task's prompts
        inputs += [config.needles, NEEDLE_TASKS.get(config.choice.text), config.many_shot]
        if config.many_shot.file:
            inputs.append(Path(config.many_shot.file).read_text(encoding="utf-8"))
    return inputs


def layouts_for(
    name: str,
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

    def after(part: Method, before: LayoutAt) -> LayoutAt:
        if part.is_fitted:
            return part.apply(before, load(), text, config, notes)
        return lambda factor: part.apply(before(factor), factor, config)

    layout_at: LayoutAt = lambda factor: layout  # noqa: E731
    for part in parts_of(name):
        layout_at = cache(after(part, layout_at))
    return [*map(layout_at, factors)], [*dict.fromkeys(notes)]


def why_not(name: str, model: SavedModel, config: EvaluationConfig) -> str:
    """Return why a method cannot change a model; empty if it can."""
    needs = [need for part in parts_of(name) for need in part.needs]
    return next(filter(None, (need(model, config) for need in needs)), "")
