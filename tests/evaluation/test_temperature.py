"""The fit of a temperature."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.evaluation.conftest import fit_text
from trainer.config import (
    ChoiceSettings,
    EvaluationConfig,
    LongRopeSettings,
    TemperatureSettings,
)
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.methods import layouts_for
from trainer.evaluation.temperature import GRID, tempered
from trainer.positional.rescaling import RESCALINGS


@pytest.mark.parametrize("name", ["dope+temperature", "longrope+temperature"])
def test_what_comes_before_a_temperature_is_fitted_at_its_lengths(model, corpus, name):
    """The temperature is fitted at a length of its own, where the parts before it choose, too."""
    config = EvaluationConfig(
        lengths=[10],
        choice=ChoiceSettings(text="standard", texts=2),
        longrope=LongRopeSettings(search="needles", evaluations=2, windows=1),
        temperature=TemperatureSettings(models="all", lengths=[12.0]),
    )
    text = FitText(HeldOut(corpus, corpus.test, (corpus.end_of_text,), None), 2)
    (layout,), notes = layouts_for(name, model.layout, [10.0], config, lambda: model, text)
    assert layout != model.layout
    assert any("logits times" in note for note in notes)


C = 8
CONFIG = EvaluationConfig(lengths=[2, 4], temperature=TemperatureSettings(models="all"))
TEXT = fit_text(np.random.default_rng(0).integers(0, 50, 100), count=3)
WINDOWS = {n: TEXT.windows(n) for n in (16, 32)}


def summed_loss(model, layout):
    """Return the mean losses at both lengths, summed, in a plain computation."""
    total = 0.0
    with model.using(layout), torch.no_grad():
        for windows in WINDOWS.values():
            ids = torch.from_numpy(np.pad(windows, ((0, 0), (1, 0))))
            logits = model(ids[:, :-1])
            total += F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    return total


@pytest.mark.parametrize("layers", [["rope"], ["nope"], ["alibi"]])
def test_no_other_coefficient_is_better(tiny_decoder, layers):
    model = tiny_decoder(training_length=C, layers=layers)
    layout = model.layout
    (best,), _ = layouts_for("temperature", layout, [4.0], CONFIG, lambda: model, TEXT)
    assert model.layout is layout
    losses = [summed_loss(model, tempered(layout, c)) for c in GRID]
    assert summed_loss(model, best) <= min(losses) + 1e-6


@pytest.mark.parametrize("lowest", [-1.0, 0.0, 0.03, 0.412, 1.4, 3.0])
def test_a_parabola_is_fitted_exactly(tiny_decoder, monkeypatch, lowest):
    def loss(text, model, windows, batch_tokens):
        return 3 + 2 * (model.layout.spectra[0].temperature.coefficient - lowest) ** 2

    monkeypatch.setattr(FitText, "loss", loss)
    model = tiny_decoder(training_length=C)
    (layout,), _ = layouts_for("temperature", model.layout, [2.0], CONFIG, lambda: model, TEXT)
    (spectrum,) = layout.spectra
    assert spectrum.temperature.coefficient == pytest.approx(min(max(lowest, 0), 2))


def test_losses_that_are_not_finite_are_not_taken(tiny_decoder, monkeypatch):
    def loss(text, model, windows, batch_tokens):
        c = model.layout.spectra[0].temperature.coefficient
        return {0.3: 2.0, 0.4: 1.0, 0.5: math.inf}.get(c, math.nan)

    monkeypatch.setattr(FitText, "loss", loss)
    model = tiny_decoder(training_length=C)
    (layout,), _ = layouts_for("temperature", model.layout, [2.0], CONFIG, lambda: model, TEXT)
    assert {spectrum.temperature.coefficient for spectrum in layout.spectra} == {0.4}


def test_a_given_coefficient_is_not_fitted(tiny_decoder, monkeypatch):
    monkeypatch.setattr(FitText, "loss", None)
    monkeypatch.setattr(FitText, "windows", None)
    model = tiny_decoder(training_length=C)
    config = replace(CONFIG, temperature=TemperatureSettings(coefficient=0.412, models="all"))
    (layout,), _ = layouts_for("temperature", model.layout, [2.0], config, lambda: model, TEXT)
    assert layout == tempered(model.layout, 0.412)


def test_losses_are_of_the_layouts_that_the_fit_returns(tiny_decoder, monkeypatch):
    """Of the method before at each length, and changed in the chosen layers alone."""
    seen = {}

    def loss(text, model, windows, batch_tokens):
        seen[windows.shape[1], model.layout.spectra[-1].temperature.coefficient] = model.layout
        return 1.0

    monkeypatch.setattr(FitText, "loss", loss)
    model = tiny_decoder(training_length=C, windows=[4, None])
    for layers in (None, "all"):
        config = replace(CONFIG, layers=layers)
        layouts = (model.layout.rescaled(RESCALINGS["pi"], s, layers) for s in (2.0, 4.0))
        expected = {
            (round(length), c): tempered(layout, c, layers=model.layout.chosen(layers))
            for length, layout in zip(WINDOWS, layouts, strict=True)
            for c in GRID
        }
        seen.clear()
        layouts_for("pi+temperature", model.layout, [4.0], config, lambda: model, TEXT)
        assert seen == expected


def test_a_temperature_replaces_one_of_another_length(tiny_decoder):
    model = tiny_decoder(training_length=C)
    before = model.layout.map(
        lambda spectrum: spectrum.with_temperature(
            coefficient=1.0, exponent=2.0, per="query", reference=100, steps=True
        )
    )
    assert tempered(before, 0.5) == tempered(model.layout, 0.5)
