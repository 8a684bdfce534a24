"""Sets of factors: rising, within bounds, and beginning with what is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.positional.examples import one_layer, slowed
from trainer.evaluation.factor_spaces import CRITICAL, EveryPair, FromCriticalPair, critical_pair
from trainer.evaluation.layouts import with_factors
from trainer.positional.encodings import make_spectrum
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS

C, S = 512, 4.0
NAMES = ("rope", "half_rope", "nope", "rope_id", "p_rope")


def mixed():
    """A layout of several spectra, one of them without a pair, one without a slow pair."""
    layers = [one_layer(C, make_spectrum(name, 32, C, {})).layers[0] for name in NAMES]
    return Layout(C, tuple(layers))


def generations(space, count=40, seed=0):
    """Starts and descendants."""
    generator = np.random.default_rng(seed)
    found = list(space.starts())
    for _ in range(count):
        one, other = (found[i] for i in generator.integers(len(found), size=2))
        found.append(space.child(one, other, generator))
    return found


@pytest.mark.parametrize("make", [EveryPair, FromCriticalPair])
def test_factors_rise_from_1_to_no_more_than_a_quarter_above_the_extension(make):
    space = make(mixed(), S)
    for individual in generations(space):
        for spectrum, factors in zip(mixed().spectra, space.factors(individual), strict=True):
            assert len(factors) == len(spectrum.inv_freq)
            assert list(factors) == sorted(factors)
            assert all(1 <= f <= 1.25 * S * (1 + 1e-12) for f in factors)


@given(st.sampled_from([16, 64, 128]), st.floats(1e3, 1e6), st.floats(1.5, 64))
def test_the_start_has_the_frequencies_of_known_methods(head_dim, base, factor):
    spectrum = make_spectrum("rope", head_dim, C, {"base": base})
    layout = one_layer(C, spectrum)
    start = [with_factors(layout, f).spectra[0] for f in EveryPair(layout, factor).starts()]
    for name in ("pi", "ntk", "ntk_by_parts"):
        known = slowed(RESCALINGS[name], spectrum, factor, C).inv_freq
        assert any(s.at(C + 1, C).inv_freq == pytest.approx(known, rel=1e-9) for s in start)
    assert any(s.at(C + 1, C).inv_freq == spectrum.inv_freq for s in start)


@given(st.sampled_from([16, 64, 128]), st.floats(1e3, 1e6))
def test_the_critical_pair_is_that_of_longrope2(head_dim, base):
    """d_tcd = 2 ceil(d / 2 log_base(C / 2 pi)), the first dimension whose period exceeds C."""
    spectrum = make_spectrum("rope", head_dim, C, {"base": base})
    pairs = head_dim / 2
    expected = math.ceil(pairs * math.log(C / (2 * math.pi), base))
    assert critical_pair(spectrum, C) == min(max(expected, 1), head_dim // 2)


def test_from_the_critical_pair_on_the_factor_is_the_whole_extension():
    spectrum = make_spectrum("rope", 64, C, {"base": 1e4})
    layout = one_layer(C, spectrum)
    critical = critical_pair(spectrum, C)
    (factors,) = EveryPair(layout, S).starts()[4]
    assert factors[critical:] == pytest.approx([S] * (32 - critical))
    assert factors[critical - 1] < S
    assert factors[0] == 1


def test_by_needles_pairs_before_the_critical_one_are_rescaled_as_by_ntk():
    """lambda_i = lambda_cd^(i / cd) below the critical pair, which is base * lambda^(d / (2 cd));
    at least s from it on; the pair itself at 0.7 of the theoretical one or later."""
    spectrum = make_spectrum("rope", 64, C, {"base": 1e4})
    latest = critical_pair(spectrum, C)
    pairs = set()
    for ((pair, factors),) in generations(FromCriticalPair(one_layer(C, spectrum), S), 200):
        assert round(0.7 * latest) <= pair <= latest
        base = 1e4 * factors[pair] ** (32 / pair)
        expected = [base ** (i / 32) / 1e4 ** (i / 32) for i in range(pair)]
        assert factors[:pair] == pytest.approx(expected)
        assert min(factors[pair:]) >= S
        pairs.add(pair)
    assert len(pairs) > len(CRITICAL)


def test_where_every_pair_turns_ntk_reaches_the_extension_behind_the_last():
    layout = one_layer(C, make_spectrum("rope_id", 32, C, {}))
    pairs = len(layout.spectra[0].inv_freq)
    ((pair, factors),) = FromCriticalPair(layout, S).starts()[0]
    assert pair == pairs
    assert factors == pytest.approx([S ** (i / pairs) for i in range(pairs)])


def test_the_first_pair_may_be_critical_and_is_slowed_by_the_whole_extension_after_it():
    """A base so large that the second pair takes 10^6 tokens to turn a radian."""
    layout = one_layer(C, make_spectrum("rope", 4, C, {"base": 1e12}))
    starts = FromCriticalPair(layout, S).starts()
    assert starts == [((1, (1.0, S)),), ((1, (1.0, 1.125 * S)),)]
    assert EveryPair(layout, S).starts()[-1] == ((1.0, S),)
