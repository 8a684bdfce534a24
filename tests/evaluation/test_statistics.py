"""Intervals and tests are those of the literature: compared with scipy and with plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from trainer.evaluation.statistics import (
    Estimate,
    Z,
    average,
    change,
    estimate,
    sign_mark,
)

bits = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=60)
quarters = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=2, max_size=60)


def wilson(successes, trials):
    return binomtest(successes, trials).proportion_ci(method="wilson")


@given(bits)
def test_success_rates_have_wilsons_interval(scores):
    result = estimate(scores)
    wanted = wilson(int(sum(scores)), len(scores))
    assert (result.low, result.high) == pytest.approx((wanted.low, wanted.high), abs=1e-6)
    assert result.mean == pytest.approx(sum(scores) / len(scores))


def test_fractions_have_the_interval_of_the_central_limit():
    scores = np.round(np.random.default_rng(1).beta(0.5, 1.5, 1200), 2)
    result = estimate(scores.tolist())
    half = 1.96 * scores.std(ddof=1) / math.sqrt(len(scores))
    assert result.mean == pytest.approx(scores.mean())
    limits = pytest.approx((scores.mean() - half, scores.mean() + half), abs=5e-4)
    assert (result.low, result.high) == limits


@given(quarters)
def test_an_interval_contains_its_mean_in_any_order_of_scores(scores):
    result = estimate(scores)
    assert 0 <= result.low <= result.mean + 1e-12
    assert result.mean - 1e-12 <= result.high <= 1
    assert estimate(scores[::-1]) == pytest.approx(result)


def texts_with_depths(generator, rate, correlation, texts=64, depths=11):
    """Scores of 0 and 1, ``[texts, depths]``, whose chance of success is a text's own."""
    if correlation:
        spread = 1 / correlation - 1
        rates = generator.beta(rate * spread, (1 - rate) * spread, (texts, 1))
    else:
        rates = rate
    return (generator.random((texts, depths)) < rates).astype(float)


@pytest.mark.parametrize("rate", [0.5, 0.95])
@pytest.mark.parametrize("correlation", [0, 0.3, 0.6])
def test_an_interval_over_texts_covers_the_rate_at_any_correlation_of_depths(rate, correlation):
    generator, covered = np.random.default_rng(6), 0
    for _ in range(500):
        scores = texts_with_depths(generator, rate, correlation)
        result = estimate(scores.mean(axis=1).tolist(), scores.size)
        covered += result.low <= rate <= result.high
    assert covered / 500 >= 0.92


def test_an_interval_over_texts_lies_between_those_of_all_trials_and_of_one_each():
    generator = np.random.default_rng(7)
    alone, alike = (
        estimate(scores.mean(axis=1).tolist(), scores.size)
        for scores in (
            texts_with_depths(generator, 0.5, 0, texts=2000),
            texts_with_depths(generator, 0.5, 0.999, texts=2000),
        )
    )
    for result, trials in ((alone, 22_000), (alike, 2000)):
        wanted = wilson(round(result.mean * trials), trials)
        assert result.high - result.low == pytest.approx(wanted.high - wanted.low, rel=0.03)
    for successes in (0, 64):
        result = estimate([successes / 64] * 64, 64 * 11)
        wanted = wilson(successes, 64)
        assert (result.low, result.high) == pytest.approx((wanted.low, wanted.high))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_fractions_have_wilsons_interval_of_an_effective_number_of_trials(hits):
    means = [n / 4 for n in hits]
    p = (sum(means) + 0.5) / (len(means) + 1)
    squares = sum((x - p) ** 2 for x in means) + ((0 - p) ** 2 + (1 - p) ** 2) / 2
    expected = len(means) * p * (1 - p) * (len(means) + 1) / squares
    n = min(4 * len(means), expected)
    assert len(means) <= n + 1e-9
    mean, *limits = estimate(means, 4 * len(means))
    for x in limits:  # the two roots of Wilson's equation
        assert n * (mean - x) ** 2 == pytest.approx(Z**2 * x * (1 - x), abs=1e-9)


def test_a_change_has_the_bootstraps_interval_over_pairs():
    generator = np.random.default_rng(3)
    reference = generator.normal(4, 0.5, 80)  # windows differ more than the models on one of them
    values = 1.03 * reference + generator.normal(0, 0.05, 80)
    result = change(values.tolist(), reference.tolist())
    wanted = bootstrap(
        (values, reference),
        lambda a, b, axis: a.mean(axis) / b.mean(axis) - 1,
        n_resamples=20_000,
        method="percentile",
        paired=True,
        rng=np.random.default_rng(4),
    ).confidence_interval
    assert result.mean == pytest.approx(values.mean() / reference.mean() - 1)
    assert (result.low, result.high) == pytest.approx((wanted.low, wanted.high), abs=0.0008)
    assert result.high - result.low < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 5, 8, 20, 29])
def test_an_interval_over_few_pairs_misses_the_truth_in_one_of_twenty(n):
    generator, missed = np.random.default_rng(n), 0
    for _ in range(400):
        reference = generator.normal(4, 0.3, n)
        result = change((reference + generator.normal(0, 0.1, n)).tolist(), reference.tolist())
        missed += not result.low <= 0 <= result.high
    assert missed / 400 < 0.085


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_the_sign_test_is_the_exact_binomial_test(pairs):
    a, b = [x / 3 for x, _ in pairs], [y / 3 for _, y in pairs]
    better, worse = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
    n = better + worse
    p = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)
    assert sign_mark(a, b) == ("" if p >= 0.05 else "↑" if better > worse else "↓")


def test_an_average_weights_means_and_distances():
    result = average([Estimate(0.4, 0.3, 0.6), Estimate(0.8, 0.7, 0.9)], [3, 1])
    assert result.mean == pytest.approx((3 * 0.4 + 0.8) / 4)
    assert result.mean - result.low == pytest.approx(math.sqrt(9 * 0.1**2 + 0.1**2) / 4)
    assert result.high - result.mean == pytest.approx(math.sqrt(9 * 0.2**2 + 0.1**2) / 4)


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
    _, *limits = estimate([1.0] * successes + [0.0] * (trials - successes))
    assert limits == pytest.approx(interval, abs=5e-5)


def test_scores_that_differ_by_rounding_are_equal():
    assert sign_mark([0.1 + 0.2] * 10, [0.3] * 10) == sign_mark([0.3] * 10, [0.1 + 0.2] * 10) == ""


def test_one_pair_has_a_change_without_an_interval():
    assert change([4.5], [4.0]) == Estimate(0.125, 0.125, 0.125)
