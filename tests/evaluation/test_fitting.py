"""Keys of fits and choices, and the fit of a temperature."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainer.config import EvaluationConfig, TemperatureSettings
from trainer.data.corpus import HeldOutText, parts_of_windows
from trainer.evaluation.fitting import (
    FitText,
    Fitting,
    fit_coefficient,
    fit_line,
    is_largest_tried,
)
from trainer.evaluation.likelihood import Request
from trainer.evaluation.methods import method_for, tempered

TEXT = FitText({8: np.zeros((2, 8), int)}, 0, {}, {8: np.zeros((1, 8), int)})
OTHERS = {
    "windows": {8: np.zeros((3, 8), int)},
    "first_token": 1,
    "needles": {8: [Request((0,) * 7, (1,))]},
    "choice": {8: np.ones((1, 8), int)},
    "parts": (0, 1),
}


def test_the_key_of_fits_has_all_texts():
    assert {item.name for item in fields(FitText)} == {*OTHERS}
    keys = [replace(TEXT, **{name: other}).key for name, other in OTHERS.items()]
    assert len({TEXT.key, *keys}) == 1 + len(OTHERS)
    assert replace(TEXT).key == TEXT.key


@pytest.mark.parametrize("shares", [(26, 6), (22, 10), (13, 10, 9)])
def test_windows_of_a_mixture_are_chosen_from_each_of_its_texts(shares):
    """As many as their shares of four, apart from each other; a heavy text is not taken alone."""
    parts = parts_of_windows(HeldOutText(tuple((n, range(100)) for n in shares)), 32, 1).tolist()
    text = FitText({1: np.arange(32)[:, None]}, 0, parts=tuple(parts))
    chosen = text.spread(4, 1)[:, 0]
    assert sorted(set(chosen)) == chosen.tolist()
    counts = np.bincount(np.array(parts)[chosen])
    assert (abs(counts - 4 * np.array(shares) / 32) < 1).all()
    assert max(chosen) - min(chosen) > 20
    assert text.spread(40, 1)[:, 0].tolist() == list(range(32))


@pytest.mark.parametrize("by_file", [False, True])
def test_texts_of_a_choice_spread_over_all_windows(tiny_decoder, by_file):
    """The first ones overlap in almost all of their tokens."""
    windows = {16: np.arange(9)[:, None].repeat(16, 1)}
    text = FitText({} if by_file else windows, 0, {}, windows if by_file else None)
    model = tiny_decoder(training_length=8)
    have = Fitting(lambda: model, text, 64)
    for texts, rows in ((1, [0]), (2, [0, 8]), (4, [0, 3, 5, 8]), (12, [*range(9)])):
        ids = have.ids(2.0, texts)
        assert (ids.shape, ids[:, 0].tolist()) == ((len(rows), 16), rows)


C, GRID = 8, [0.0, 0.5, 1.0, 2.0]
WINDOWS = {n: np.random.default_rng(n).integers(0, 50, (3, n)) for n in (16, 32)}


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
    fitting = Fitting(lambda: model, FitText(WINDOWS, 0), 64)
    best = method_for("temperature", layout, config).layouts(fitting)(4.0)
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
    assert is_largest_tried(result, grid) == (not within)


def test_a_grid_of_one_value_is_that_value():
    assert fit(lambda c: c, [0.412]) == (0.412, [])


def test_a_worse_refinement_and_an_infinite_loss_are_not_taken():
    assert fit(lambda c: {0.0: 1.0, 0.5: 0.0, 1.0: 0.4, 2.0: 2.0}.get(c, 9.0))[0] == 0.5
    assert fit(lambda c: 1.0 if c == 1.0 else np.inf)[0] == 1.0
    assert fit(lambda c: 1.0 if c == 1.0 else np.nan)[0] == 1.0


def test_a_line_goes_through_the_best_scale_of_every_length():
    """Peng et al.: the scale of least perplexity at each s, and 1 + c ln s through all of them."""
    lowest = {16: 0.4, 32: 1.1}
    logs = np.log([16 / C, 32 / C])
    scales = 1 + np.array(list(lowest.values())) * logs
    expected = np.linalg.lstsq(logs[:, None], scales - 1, rcond=None)[0].item()

    def best(windows):
        (length,) = windows
        return lowest[length]

    assert fit_line(best, WINDOWS, C) == pytest.approx(expected)
    assert fit_line(best, {16: WINDOWS[16]}, C) == pytest.approx(0.4)
