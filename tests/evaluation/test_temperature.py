"""The fit of a temperature."""

from __future__ import annotations

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
from trainer.evaluation.methods import fit_lengths, layouts_for
from trainer.evaluation.temperature import fit_coefficient, tempered


@pytest.mark.parametrize("name", ["dope+temperature", "longrope+temperature"])
def test_what_comes_before_a_temperature_is_fitted_at_its_lengths(model, corpus, name):
    """The temperature is fitted at a length of its own, where the parts before it choose, too."""
    config = EvaluationConfig(
        lengths=[10],
        choice=ChoiceSettings(text="standard", texts=2),
        longrope=LongRopeSettings(search="needles", evaluations=2, windows=1),
        temperature=TemperatureSettings(grid=[0.0, 0.5], models="all", lengths=[12.0]),
    )
    longest = round(32 * max(fit_lengths(name, config)))
    text = FitText(HeldOut(corpus, corpus.test, (corpus.end_of_text,), None), 2, longest)
    notes = []
    assert layouts_for(name, model.layout, config, lambda: model, text, notes)(10.0) != model.layout
    assert any("logits times" in note for note in notes)


C, GRID = 8, [0.0, 0.5, 1.0, 2.0]
TEXT = fit_text(np.random.default_rng(0).integers(0, 50, 100), count=3, longest=32)
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
def test_no_coefficient_of_the_grid_is_better(tiny_decoder, layers):
    model = tiny_decoder(training_length=C, layers=layers)
    layout = model.layout
    settings = TemperatureSettings(grid=GRID, models="all")
    config = EvaluationConfig(lengths=[2, 4], temperature=settings)
    best = layouts_for("temperature", layout, config, lambda: model, TEXT, [])(4.0)
    assert model.layout is layout
    losses = [summed_loss(model, tempered(layout, c)) for c in GRID]
    assert summed_loss(model, best) <= min(losses) + 1e-6


def fit(loss, grid=GRID):
    """Return the coefficient, and those that were tried."""
    tried = []
    return fit_coefficient(lambda c: tried.append(c) or loss(c), grid), tried


@pytest.mark.parametrize("lowest", [0.3, 0.61, 1.2, 1.4])
def test_a_parabola_is_fitted_exactly(lowest):
    result, tried = fit(lambda c: 3 + 2 * (c - lowest) ** 2)
    assert result == pytest.approx(lowest)
    assert len(tried) == len(GRID) + 1


@pytest.mark.parametrize(("slope", "end"), [(1.0, 0.0), (-1.0, 2.0), (0.0, 0.0)])
def test_at_an_end_of_the_grid_it_stays_there(slope, end):
    assert fit(lambda c: slope * c) == (end, GRID)


@pytest.mark.parametrize(
    ("grid", "lowest", "further"),
    [
        ([0.0, 0.5, 0.6], 0.68, [0.7, 0.9]),
        ([0.0, 0.5, 0.6], 1.0, [0.7, 0.9, 1.3]),
        ([0.6, 0.5], 9.0, [0.7, 0.9, 1.3, 2.0]),
        ([0.0, 0.5, 0.6], 0.5, []),
        ([0.0, 3.0], 9.0, []),
    ],
)
def test_a_grid_goes_on_while_its_largest_value_is_the_best(grid, lowest, further):
    result, tried = fit(lambda c: (c - lowest) ** 2, grid)
    within = lowest < 2
    assert result == pytest.approx(lowest if within else max(grid + further))
    refined = [lowest] if within and lowest not in grid else []
    assert tried == pytest.approx(sorted(grid) + further + refined)


def test_a_grid_of_one_value_is_that_value():
    assert fit(lambda c: c, [0.412]) == (0.412, [])


def test_a_worse_refinement_and_an_infinite_loss_are_not_taken():
    assert fit(lambda c: {0.0: 1.0, 0.5: 0.0, 1.0: 0.4, 2.0: 2.0}.get(c, 9.0))[0] == 0.5
    assert fit(lambda c: 1.0 if c == 1.0 else np.inf)[0] == 1.0
    assert fit(lambda c: 1.0 if c == 1.0 else np.nan)[0] == 1.0


@pytest.mark.parametrize(
    ("slope", "grid", "is_noted"), [(-1, GRID, True), (1, GRID, False), (-1, [0.5], False)]
)
def test_a_fit_that_ends_at_the_largest_value_is_noted(
    tiny_decoder, monkeypatch, slope, grid, is_noted
):
    def loss(text, model, windows, batch_tokens):
        return slope * model.layout.spectra[0].temperature.coefficient

    monkeypatch.setattr(FitText, "loss", loss)
    model, notes = tiny_decoder(training_length=C), []
    settings = TemperatureSettings(grid=grid, models="all")
    config = EvaluationConfig(lengths=[2], temperature=settings)
    layouts_for("temperature", model.layout, config, lambda: model, TEXT, notes)
    assert ("the largest coefficient tried fits best" in notes) == is_noted
