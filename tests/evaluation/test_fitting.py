"""What a fit and a choice depend on, and the temperature, against plain computation."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.evaluation import fitting
from trainer.evaluation.fitting import FitText, Fitting, fit_coefficient, fit_line
from trainer.evaluation.layouts import tempered
from trainer.evaluation.store import Claims, Share, Store

TEXT = FitText({8: np.zeros((2, 8), int)}, 0, "text", {}, {8: np.zeros((1, 8), int)})
OTHERS = {
    "windows": {8: np.zeros((3, 8), int)},
    "end_of_text": 1,
    "fingerprint": "other",
    "needles": {8: None},
    "choice": {8: np.ones((1, 8), int)},
}


def test_a_fit_depends_on_its_text_and_a_choice_on_its_own_too():
    assert {one.name for one in fields(FitText)} == {*OTHERS}
    changed = {name: replace(TEXT, **{name: other}) for name, other in OTHERS.items()}
    of_fits = {name for name, text in changed.items() if text.key != TEXT.key}
    of_choices = {name for name, text in changed.items() if text.choice_key != TEXT.choice_key}
    assert of_fits == {"windows", "end_of_text", "fingerprint"}
    assert of_choices == of_fits | {"choice"}
    # Another longest length: the windows of 8 tokens end elsewhere.
    longer = replace(TEXT, windows={**TEXT.windows, 16: np.zeros((2, 16), int)})
    assert longer.key != TEXT.key


def test_what_is_kept_is_taken_for_the_same_weights_text_and_settings_alone(tmp_path):
    made = []

    def kept(model="weights", text=TEXT, settings=("a", 1), kind="temperature"):
        def make():
            made.append(1)
            return len(made)

        return Fitting(None, model, text, Store(tmp_path), 64).kept(kind, settings, make)

    assert [kept(), kept()] == [1, 1]
    others = [
        {"model": "other"}, {"settings": ("a", 2)}, {"kind": "longrope"},
        *({"text": replace(TEXT, **{k: OTHERS[k]})} for k in ("windows", "fingerprint")),
        {"text": replace(TEXT, end_of_text=1)},
    ]  # fmt: skip
    assert [kept(**other) for other in others] == [2, 3, 4, 5, 6, 7]
    assert kept() == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_a_loss_that_is_not_a_number_is_the_worst_one(tmp_path, processes):
    """Also where processes share the values through the store, whose JSON has no NaN."""
    claims = Claims(tmp_path, Share(0, processes, "now"))
    have = Fitting(None, "weights", TEXT, Store(tmp_path), 64, claims=claims)
    losses = {0.0: math.nan, 0.5: 2.0, 1.0: math.inf}
    assert have.of_each("settings", [*losses], losses.get) == [math.inf, 2.0, math.inf]


C, GRID = 8, [0.0, 0.5, 1.0, 2.0]
WINDOWS = {n: np.random.default_rng(n).integers(0, 50, (3, n)) for n in (16, 32)}


def fitting_of(model, **more):
    return Fitting(model, "weights", FitText(WINDOWS, 0, "text"), Store(Path()), 64, **more)


def fit(model, windows=WINDOWS, **form):
    layout = model.layout
    return fit_coefficient(
        fitting_of(model), lambda c: lambda _: tempered(layout, c, **form), windows, GRID, None
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

    monkeypatch.setattr(fitting, "losses_by_position", losses)
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
    stand_in(monkeypatch, lambda c: (c - 0.8) ** 2)
    layout = model.layout

    def tempered_with(coefficient):
        return lambda factor: factors.append(factor) or tempered(layout, coefficient)

    have = fitting_of(model, read=lambda *shape: told.append(shape))
    found = fit_coefficient(have, tempered_with, WINDOWS, GRID, None)
    assert found == pytest.approx(0.8)
    assert factors == [2.0, 4.0] * 5
    assert told == [(3, 16), (3, 32)] * 5


def test_a_line_goes_through_the_best_scale_of_every_length(monkeypatch, tiny_decoder):
    """Peng et al.: the scale of least perplexity at each s, and 1 + c ln s through all of them."""
    at = {16: 0.4, 32: 1.1}

    def losses(model, windows, end_of_text, batch_tokens):
        c = model.layout.spectra[0].temperature.coefficient
        return torch.tensor([(c - at[windows.shape[1]]) ** 2], dtype=torch.float64)

    monkeypatch.setattr(fitting, "losses_by_position", losses)
    model = tiny_decoder(training_length=C)
    logs = np.log([16 / C, 32 / C])
    scales = 1 + np.array(list(at.values())) * logs
    expected = np.linalg.lstsq(logs[:, None], scales - 1, rcond=None)[0].item()

    def best(windows):
        return fit(model, windows)

    assert fit_line(best, WINDOWS, C) == pytest.approx(expected)
    one = {16: WINDOWS[16]}
    assert fit_line(best, one, C) == pytest.approx(0.4)
    assert best(one) == pytest.approx(0.4)
