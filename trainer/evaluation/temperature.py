"""The softmax temperature 1 + c ln s beyond the training length (DroPE, App. C.2), and its fit."""

import math

import numpy as np

from trainer.config import EvaluationConfig
from trainer.evaluation.fitting import FitText, LayoutAt, Notes
from trainer.evaluation.method import far_layers, method
from trainer.evaluation.saved_model import SavedModel
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerChoice, Layout

GRID = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.2, 2.0)
"""Coefficients that a fit tries; DroPE's own are 0.412 and 0.103."""


def tempered(
    layout: Layout, coefficient: float, exponent: float = 1.0, layers: LayerChoice = None
) -> Layout:
    """Multiply the logits of ``layers`` by (1 + c ln s)^exponent beyond the training length.

    This is DroPE's temperature (App. C.2), or with c = 0.1 and exponent 2 RoPE-ID's (App. A.4). It
    replaces what of an earlier temperature follows the length, also another one than C.
    """
    return layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=coefficient, exponent=exponent, per="sequence", reference=None, steps=False
        ),
        layers,
    )


@method("temperature_rope_id", "RoPE-ID temperature", far_layers, reads=("temperature",))
def rope_id_temperature(layout: Layout, factor: float, config: EvaluationConfig) -> Layout:
    """Multiply logits by (1 + 0.1 ln s)^2 (RoPE-ID, App. A.4), or another exponent."""
    return tempered(layout, 0.1, config.temperature.rope_id_exponent, config.layers)


def no_positions(model: SavedModel, config: EvaluationConfig) -> str:
    """Need a model without positions, unless ``evaluation.temperature.models`` is all."""
    has_positions = any(spectrum.rotates or spectrum.alibi for spectrum in model.layout.spectra)
    if has_positions and config.temperature.models != "all":
        return "has positions (evaluation.temperature.models=all)"
    return ""


@method(
    "temperature",
    "temperature",
    far_layers,
    no_positions,
    is_fitted=True,
    reads=("temperature", "lengths"),
)
def fit_temperature(
    before: LayoutAt, model: LanguageModel, text: FitText, config: EvaluationConfig, notes: Notes
) -> LayoutAt:
    """Multiply logits by 1 + c ln s, with the c of least loss, summed over the lengths beyond the
    training length.

    c is the best value of :data:`GRID`, or the minimum of the parabola through it and its
    neighbours if that is better.
    """
    settings = config.temperature
    C = model.layout.training_length
    lengths = [round(s * C) for s in settings.lengths or config.lengths]
    lengths = [length for length in lengths if length > C]
    if not lengths:
        return before
    coefficient = settings.coefficient
    if coefficient is None:
        windows = {length: text.windows(length) for length in lengths}

        def loss(coefficient: float) -> float:
            total = 0.0
            for length, rows in windows.items():
                with model.using(tempered(before(length / C), coefficient, layers=config.layers)):
                    total += text.loss(model, rows, config.batch_tokens)
            return total if math.isfinite(total) else math.inf

        losses = [*map(loss, GRID)]
        best = int(np.argmin(losses))
        coefficient = GRID[best]
        near = slice(best - 1, best + 2)
        if 0 < best < len(GRID) - 1 and math.isfinite(sum(losses[near])):
            square, linear, _ = np.polyfit(GRID[near], losses[near], 2)
            lowest = float(-linear / (2 * square))
            if loss(lowest) < losses[best]:
                coefficient = lowest
    notes.append(f"logits times 1 + {coefficient:.3g} ln s")
    return lambda s: tempered(before(s), coefficient, layers=config.layers)
