"""Intervals and tests are those of the literature: compared with scipy and with plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from trainer.evaluation.statistics import (
    Comparison,
    Estimate,
    average,
    change,
    estimate,
    sign_test,
    wilson_interval,
)

bits = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)
quarters = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=60)


@given(bits)
def test_success_rates_have_wilsons_interval(scores):
    own = estimate(scores)
    wanted = binomtest(int(sum(scores)), len(scores)).proportion_ci(method="wilson")
    assert (own.low, own.high) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
    assert own.mean == pytest.approx(sum(scores) / len(scores))


def test_fractions_have_the_percentile_bootstraps_interval():
    scores = np.round(np.random.default_rng(1).beta(0.5, 1.5, 120), 2)
    own = estimate(scores.tolist())
    wanted = bootstrap(
        (scores,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    assert own.mean == pytest.approx(scores.mean())
    assert (own.low, own.high) == pytest.approx((wanted.low, wanted.high), abs=0.006)


@given(quarters)
def test_an_interval_lies_around_its_mean_whatever_the_order(scores):
    own = estimate(scores)
    assert 0 <= own.low <= own.mean + 1e-12
    assert own.mean - 1e-12 <= own.high <= 1
    assert estimate(scores[::-1]) == own


def test_a_change_has_the_percentile_bootstraps_interval_over_pairs():
    generator = np.random.default_rng(3)
    reference = generator.normal(4, 0.5, 80)  # windows differ more than the models on one of them
    values = 1.03 * reference + generator.normal(0, 0.05, 80)
    own = change(values.tolist(), reference.tolist())
    wanted = bootstrap(
        (values, reference),
        lambda a, b, axis: a.mean(axis) / b.mean(axis) - 1,
        n_resamples=20_000,
        method="percentile",
        paired=True,
        rng=np.random.default_rng(4),
    ).confidence_interval
    assert own.mean == pytest.approx(values.mean() / reference.mean() - 1)
    assert (own.low, own.high) == pytest.approx((wanted.low, wanted.high), abs=0.0005)
    assert own.high - own.low < 0.01


def test_without_scores_there_is_no_mean():
    with pytest.raises(ValueError, match="no scores"):
        estimate([])
    with pytest.raises(ValueError, match="no pairs"):
        change([], [])


def test_an_average_of_independent_estimates_is_surer_than_each():
    parts = [Estimate(0.4, 0.3, 0.5), Estimate(0.8, 0.7, 0.9)]
    own = average(parts)
    assert own.mean == pytest.approx(0.6)
    # Normal theory: variances add, so half widths do in squares.
    assert own.high - own.mean == pytest.approx(math.sqrt(0.1**2 + 0.1**2) / 2)
    assert own.mean - own.low == pytest.approx(own.high - own.mean)
    assert average(parts[:1]) == parts[0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_the_sign_test_is_the_exact_binomial_test(pairs):
    a, b = [x / 3 for x, _ in pairs], [y / 3 for _, y in pairs]
    own = sign_test(a, b)
    assert own.better == sum(x > y for x, y in pairs)
    assert own.worse == sum(x < y for x, y in pairs)
    n = own.better + own.worse
    wanted = binomtest(own.better, n).pvalue if n else 1.0
    assert own.p_value == pytest.approx(wanted, rel=1e-9)


def test_mcnemars_exact_test_by_hand():
    # 8 discordant pairs, one of them worse: 2 (C(8, 0) + C(8, 1)) / 2^8.
    own = sign_test([1] * 7 + [0] + [1] * 90, [0] * 7 + [1] + [1] * 90)
    assert (own.better, own.worse, own.p_value) == (7, 1, 18 / 256)
    assert own.mark == ""


def test_thousands_of_pairs_do_not_overflow():
    own = sign_test([1.0] * 3000 + [0.0] * 2000, [0.0] * 3000 + [1.0] * 2000)
    assert own.p_value == pytest.approx(binomtest(3000, 5000).pvalue, rel=1e-9)


def test_a_difference_is_marked_by_its_direction():
    assert sign_test([1.0] * 9, [0.0] * 9).mark == "↑"
    assert sign_test([0.0] * 9, [1.0] * 9).mark == "↓"
    assert sign_test([1.0] * 9, [1.0] * 9).mark == ""


def test_a_difference_is_marked_below_one_in_twenty():
    assert Comparison(9, 1, 0.05).mark == ""
    assert Comparison(9, 1, 0.0499).mark == "↑"
    assert Comparison(1, 9, 0.0499).mark == "↓"


def test_intervals_are_the_same_in_every_repetition():
    """Of the first 2000 resamples of numpy's generator with seed 0: each resample draws how often
    each value occurs."""
    draws = np.random.default_rng(0).multinomial(4, [0.5, 0.25, 0.25], size=2000)
    low, high = np.quantile(draws @ [0.0, 0.5, 1.0] / 4, (0.025, 0.975))
    assert estimate([0.0, 1.0, 0.5, 0.0]) == Estimate(0.375, low, high)
    draws = np.random.default_rng(0).multinomial(2, [0.5, 0.5], size=2000) @ [[2.0, 1.0], [9, 3]]
    low, high = np.quantile(draws[:, 0] / draws[:, 1] - 1, (0.025, 0.975))
    assert change([2.0, 9.0], [1.0, 3.0]) == Estimate(1.75, low, high)


def test_an_average_keeps_the_sides_of_its_parts_apart():
    own = average([Estimate(0.5, 0.2, 0.6), Estimate(0.5, 0.1, 0.8)])
    assert (own.low, own.high) == pytest.approx((0.5 - 0.5 / 2, 0.5 + 0.1**0.5 / 2))


def test_pairs_come_in_pairs():
    with pytest.raises(ValueError, match="longer"):
        sign_test([1.0], [1.0, 0.0])


@pytest.mark.parametrize(
    ("successes", "trials", "interval"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), Table I, method 3.
        (81, 263, (0.2553, 0.3662)),
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_the_wilson_interval_gives_published_values(successes, trials, interval):
    assert wilson_interval(successes, trials) == pytest.approx(interval, abs=5e-5)


@pytest.mark.parametrize(("successes", "trials"), [(-1, 10), (11, 10), (0, 0)])
def test_what_is_no_success_rate_has_no_interval(successes, trials):
    with pytest.raises(ValueError, match="not a success rate"):
        wilson_interval(successes, trials)
