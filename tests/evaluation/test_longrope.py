"""The search for LongRoPE's factors: within bounds and budget, never worse than its start."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from trainer.common.errors import UserError
from trainer.evaluation.factor_spaces import EveryPair
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.layouts import with_factors
from trainer.evaluation.longrope import fitted_factors, search_longrope
from trainer.evaluation.loss import losses_by_position
from trainer.evaluation.needle_loss import AnsweredTexts, answer_loss
from trainer.evaluation.settings import LongRopeSettings
from trainer.evaluation.store import Store

C, S = 8, 4.0
WINDOWS = np.random.default_rng(0).integers(0, 50, (3, 32))
ASKED = AnsweredTexts(WINDOWS[:2], np.array([3, 5]))


def text_loss(model):
    return losses_by_position(model, WINDOWS, 0, 64).mean().item()


def loss_with(model, factors, loss):
    with model.using(with_factors(model.layout, factors)):
        return loss(model)


@pytest.fixture
def model(tiny_decoder):
    return tiny_decoder(training_length=C, layers=["rope", "half_rope"], heads={"nope": 0.5})


@pytest.fixture
def fitting(tmp_path):
    def make(model):
        text = FitText({32: WINDOWS}, 0, "text", {32: ASKED})
        return Fitting(model, "weights", text, Store(tmp_path), 64)

    return make


def test_what_is_found_is_no_worse_than_any_start_and_better_than_the_best(model):
    layout = model.layout
    found = search_longrope(model, lambda: text_loss(model), S, budget=30)
    assert model.layout is layout
    start = min(loss_with(model, f, text_loss) for f in EveryPair(layout, S).starts())
    assert loss_with(model, found, text_loss) < start


@pytest.mark.parametrize("search", ["perplexity", "needles"])
def test_a_seed_gives_the_same_factors_again_and_another_others(model, search):
    a, b, c = (
        search_longrope(model, lambda: text_loss(model), S, search, budget=16, seed=s)
        for s in (1, 1, 2)
    )
    assert a == b
    assert a != c


@pytest.mark.parametrize("budget", [1, 3, 20])
@pytest.mark.parametrize("search", ["perplexity", "needles"])
def test_no_more_is_tried_than_the_budget_allows(model, budget, search):
    tried = []
    search_longrope(
        model, lambda: tried.append(model.layout) or float(len(tried)), S, search, budget
    )
    assert len(tried) == len(set(tried)) == budget


def slowest(layout):
    return next(s for s in layout.at(C + 1).spectra if s.rotates).inv_freq[-1]


@pytest.mark.parametrize(("search", "ideal"), [("perplexity", 2.7), ("needles", 4.4)])
def test_the_best_are_kept_as_parents(model, search, ideal):
    """With a loss that is least where the slowest pair is divided by so much, the search goes
    there."""
    wanted = slowest(model.layout) / ideal

    def loss():
        return abs(math.log(slowest(model.layout) / wanted))

    found = search_longrope(model, loss, S, search, budget=100)
    assert next(f for f in found if f)[-1] == pytest.approx(ideal, rel=0.05)


def test_each_search_takes_its_own_loss_of_its_own_texts(model, fitting):
    """Of the last tokens that are answers alone, where it searches by needles (LongRoPE2)."""
    for search, loss, shape in (
        ("perplexity", text_loss, (3, 32)),
        ("needles", lambda model: answer_loss(model, ASKED, 64), (2, 32)),
    ):
        have, read = fitting(model), []
        have.read = lambda *shape, read=read: read.append(shape)
        settings = LongRopeSettings(search=search, evaluations=12)
        found = fitted_factors(have, settings, S, model.layout)
        assert found == search_longrope(model, lambda f=loss: f(model), S, search, budget=12)
        assert read == [shape] * 12


def test_a_model_that_does_not_rotate_has_nothing_to_search(tiny_decoder, fitting):
    model = tiny_decoder(training_length=C, layers=["nope"])
    with pytest.raises(UserError, match="longrope needs heads that rotate"):
        fitted_factors(fitting(model), LongRopeSettings(), S, model.layout)


def test_a_choice_depends_on_what_decides_it_and_on_nothing_else():
    usual = LongRopeSettings()
    assert usual.of_choice == {"evaluations": 64, "windows": 4, "seed": 0}
    assert replace(usual, search="needles").of_choice != usual.of_choice
