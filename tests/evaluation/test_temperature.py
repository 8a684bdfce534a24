"""Fit of the temperature, against plain computation and numpy's parabola."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.evaluation import temperature
from trainer.evaluation.layouts import tempered
from trainer.evaluation.temperature import fit_coefficient, fit_line

C, GRID = 8, [0.0, 0.5, 1.0, 2.0]
WINDOWS = {n: np.random.default_rng(n).integers(0, 50, (3, n)) for n in (16, 32)}


def fit(model, **form):
    layout = model.layout
    return fit_coefficient(
        model, lambda c: lambda _: tempered(layout, c, **form), WINDOWS, 0, GRID, 64
    )


def mean_losses(model, layout):
    before, found = model.layout, []
    model.layout = layout
    for windows in WINDOWS.values():
        ids = torch.from_numpy(np.pad(windows, ((0, 0), (1, 0))))
        with torch.no_grad():
            logits = model(ids[:, :-1])
        found.append(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
    model.layout = before
    return found


@pytest.mark.parametrize("layers", [["rope"], ["nope"], ["alibi"]])
@pytest.mark.parametrize("per", ["sequence", "query"])
@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_no_coefficient_of_the_grid_is_better(tiny_decoder, layers, per, exponent):
    model = tiny_decoder(training_length=C, layers=layers)
    layout = model.layout
    found = fit(model, per=per, exponent=exponent)
    assert model.layout is layout
    grid = [sum(mean_losses(model, tempered(layout, c, per, exponent))) for c in GRID]
    best = tempered(layout, found, per, exponent)
    assert sum(mean_losses(model, best)) <= min(grid) + 1e-6


def stand_in(monkeypatch, loss):
    """Losses as a function of the coefficient of the layout; returns those asked for."""
    asked = []

    def losses(model, windows, end_of_text, batch_tokens):
        coefficient = model.layout.spectra[0].temperature.coefficient
        asked.append(coefficient)
        return torch.tensor([loss(coefficient)], dtype=torch.float64)

    monkeypatch.setattr(temperature, "losses_by_position", losses)
    return asked


@pytest.mark.parametrize("at", [0.3, 0.61, 1.2, 1.4])
def test_a_parabola_is_fitted_exactly(monkeypatch, tiny_decoder, at):
    asked = stand_in(monkeypatch, lambda c: 3 + 2 * (c - at) ** 2)
    model = tiny_decoder(training_length=C)
    assert fit(model) == pytest.approx(at)
    assert len(asked) == (len(GRID) + 1) * len(WINDOWS)


def test_the_refined_point_is_that_of_numpys_parabola(monkeypatch, tiny_decoder):
    def loss(c):
        return np.cosh(c - 0.7) + 0.1 * c**3

    asked = stand_in(monkeypatch, loss)
    fit(tiny_decoder(training_length=C))
    a, b, _ = np.polyfit(GRID[:3], [loss(c) for c in GRID[:3]], 2)
    assert asked[-1] == pytest.approx(-b / (2 * a))


@pytest.mark.parametrize(("slope", "end"), [(1.0, 0.0), (-1.0, 2.0), (0.0, 0.0)])
def test_at_an_end_of_the_grid_it_stays_there(monkeypatch, tiny_decoder, slope, end):
    asked = stand_in(monkeypatch, lambda c: slope * c)
    assert fit(tiny_decoder(training_length=C)) == end
    assert len(asked) == len(GRID) * len(WINDOWS)


def test_a_worse_refinement_is_not_taken(monkeypatch, tiny_decoder):
    stand_in(monkeypatch, lambda c: {0.0: 1.0, 0.5: 0.0, 1.0: 0.4, 2.0: 2.0}.get(c, 9.0))
    assert fit(tiny_decoder(training_length=C)) == 0.5


def test_coefficients_of_infinite_loss_are_not_taken(monkeypatch, tiny_decoder):
    stand_in(monkeypatch, lambda c: 1.0 if c == 1.0 else np.inf)
    assert fit(tiny_decoder(training_length=C)) == 1.0


def test_the_layout_may_depend_on_the_extension_too(monkeypatch, tiny_decoder):
    model, told, factors = tiny_decoder(training_length=C), [], []
    read = lambda *shape: told.append(shape)  # noqa: E731
    stand_in(monkeypatch, lambda c: (c - 0.8) ** 2)
    layout = model.layout

    def tempered_with(coefficient):
        return lambda factor: factors.append(factor) or tempered(layout, coefficient)

    found = fit_coefficient(model, tempered_with, WINDOWS, 0, GRID, 64, read)
    assert found == pytest.approx(0.8)
    assert factors == [2.0, 4.0] * 5
    assert told == [(3, 16), (3, 32)] * 5


def test_a_line_goes_through_the_best_scale_of_every_length(monkeypatch, tiny_decoder):
    """Peng et al.: the scale of least perplexity at each s, and 1 + c ln s through all of them."""
    at = {16: 0.4, 32: 1.1}

    def losses(model, windows, end_of_text, batch_tokens):
        c = model.layout.spectra[0].temperature.coefficient
        return torch.tensor([(c - at[windows.shape[1]]) ** 2], dtype=torch.float64)

    monkeypatch.setattr(temperature, "losses_by_position", losses)
    model = tiny_decoder(training_length=C)
    layout = model.layout

    def tempered_with(c):
        return lambda _: tempered(layout, c)

    logs = np.log([16 / C, 32 / C])
    scales = 1 + np.array(list(at.values())) * logs
    expected = np.linalg.lstsq(logs[:, None], scales - 1, rcond=None)[0].item()

    def best(windows):
        return fit_coefficient(model, tempered_with, windows, 0, GRID, 64)

    assert fit_line(best, WINDOWS, C) == pytest.approx(expected)
    one = {16: WINDOWS[16]}
    assert fit_line(best, one, C) == pytest.approx(0.4)
    assert best(one) == pytest.approx(0.4)
