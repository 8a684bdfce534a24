"""The search for LongRoPE's factors: within bounds and budget, never worse than its start."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.positional.examples import one_layer, slowed
from trainer.errors import UserError
from trainer.evaluation import longrope
from trainer.evaluation.layouts import with_factors
from trainer.evaluation.longrope import search_longrope, starting_points
from trainer.evaluation.loss import losses_by_position
from trainer.positional.encodings import make_spectrum
from trainer.positional.rescaling import RESCALINGS

C, S = 8, 4.0
WINDOWS = np.random.default_rng(0).integers(0, 50, (3, 32))


def loss(model, factors):
    layout = model.layout
    model.layout = with_factors(layout, factors)
    found = losses_by_position(model, WINDOWS, 0, 64).mean().item()
    model.layout = layout
    return found


@pytest.fixture
def model(tiny_decoder):
    return tiny_decoder(training_length=C, layers=["rope", "half_rope"], heads={"nope": 0.5})


def test_what_is_found_is_no_worse_than_any_start_and_better_than_the_best(model):
    layout = model.layout
    found = search_longrope(model, WINDOWS, 0, S, budget=30, seed=0, batch_tokens=64)
    assert model.layout is layout
    start = min(loss(model, factors) for factors in starting_points(layout, S))
    assert loss(model, found) < start


def test_factors_rise_from_1_to_no_more_than_a_quarter_above_the_extension(model):
    for seed in range(3):
        found = search_longrope(model, WINDOWS, 0, S, budget=12, seed=seed)
        for spectrum, factors in zip(model.layout.spectra, found, strict=True):
            assert len(factors) == len(spectrum.inv_freq)
            assert list(factors) == sorted(factors)
            assert all(1 <= f <= 1.25 * S for f in factors)


def test_a_seed_gives_the_same_factors_again_and_another_others(model):
    a, b, c = (search_longrope(model, WINDOWS, 0, S, budget=16, seed=s) for s in (1, 1, 2))
    assert a == b
    assert a != c


@pytest.mark.parametrize("budget", [1, 3, 20])
def test_no_more_is_read_than_the_budget_allows(model, budget):
    told = []
    search_longrope(model, WINDOWS, 0, S, budget=budget, read=lambda *shape: told.append(shape))
    assert told == [WINDOWS.shape] * budget


@given(st.sampled_from([16, 64, 128]), st.floats(1e3, 1e6), st.floats(1.5, 64))
def test_the_start_has_the_frequencies_of_known_methods(head_dim, base, factor):
    spectrum = make_spectrum("rope", head_dim, 512, {"base": base})
    layout = one_layer(512, spectrum)
    start = [with_factors(layout, f).spectra[0] for f in starting_points(layout, factor)]
    for name in ("pi", "ntk", "ntk_by_parts"):
        known = slowed(RESCALINGS[name], spectrum, factor, 512).inv_freq
        assert any(s.at(513, 512).inv_freq == pytest.approx(known, rel=1e-9) for s in start)
    assert any(s.at(513, 512).inv_freq == spectrum.inv_freq for s in start)


def test_from_the_critical_pair_on_the_factor_is_the_whole_extension():
    """The first pair that does not turn once within C (LongRoPE2)."""
    spectrum = make_spectrum("rope", 64, 512, {"base": 1e4})
    layout = one_layer(512, spectrum)
    critical = math.ceil(32 * math.log(512 / (2 * math.pi)) / math.log(1e4))
    (factors,) = starting_points(layout, S)[4]
    assert factors[critical:] == pytest.approx([S] * (32 - critical))
    assert factors[critical - 1] < S
    assert factors[0] == 1


def test_the_best_are_kept_as_parents(monkeypatch, model):
    """With a loss that is least where the slowest pair is divided by 2.7, the search goes there."""

    def slowest(layout):
        return next(s for s in layout.at(C + 1).spectra if s.rotates).inv_freq[-1]

    wanted = slowest(model.layout) / 2.7
    monkeypatch.setattr(
        longrope,
        "losses_by_position",
        lambda model, *_: np.array([abs(math.log(slowest(model.layout) / wanted))]),
    )
    found = search_longrope(model, WINDOWS, 0, S, budget=100)
    assert next(f for f in found if f)[-1] == pytest.approx(2.7, rel=0.05)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": ["nope"]}, "needs heads that rotate"),
        ({"factor": 1.0}, "beyond the training length of 8"),
        ({"windows": WINDOWS[:, :8]}, "got windows of 8"),
        ({"budget": 0}, "expected 1 or more, got 0"),
    ],
)
def test_what_cannot_be_searched_is_said(tiny_decoder, change, said):
    model = tiny_decoder(training_length=C, layers=change.get("layers", ["rope"]))
    windows = change.get("windows", WINDOWS)
    with pytest.raises(UserError, match=said):
        search_longrope(model, windows, 0, change.get("factor", S), change.get("budget", 9))
