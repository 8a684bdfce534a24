"""The order of samples: pure functions of (seed, number), without memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.order import PERIOD, assigned, keys, permuted, quotas, sample_indices, uniforms


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**32), epoch=st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_every_item_comes_once_in_an_epoch(size, seed, epoch):
    indices = sample_indices(seed, np.arange(epoch * size, (epoch + 1) * size), size)
    assert sorted(indices) == list(range(size))


@given(
    size=st.integers(1, 10**10) | st.integers(1, 50),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_a_sample_is_the_same_alone_and_among_others(size, seed, data):
    numbers = np.array(data.draw(st.lists(st.integers(0, 3 * size), min_size=1, max_size=8)))
    alone = [sample_indices(seed, numbers[i : i + 1], size)[0] for i in range(len(numbers))]
    np.testing.assert_array_equal(sample_indices(seed, numbers, size), alone)
    assert 0 <= min(alone) <= max(alone) < size


def test_epochs_and_seeds_are_shuffled_anew():
    """Thirty epochs of five seeds have nothing in common but chance, and are in no order."""
    orders = [
        sample_indices(seed, np.arange(100 * epoch, 100 * epoch + 100), 100)
        for seed in range(5)
        for epoch in range(30)
    ]
    whole = np.array([np.arange(100), *orders])
    same = (whole[:, None] == whole[None]).mean(axis=2)[np.triu_indices(len(whole), 1)]
    assert same.max() < 0.2
    assert abs(same.mean() - 0.01) < 0.001


@pytest.mark.parametrize("size", [5, 16])
def test_each_item_is_as_likely_in_each_place(size):
    """Chi-squared over 1,000 seeds: the statistic of a uniform permutation is near its mean."""
    draws = 1000
    counts = np.zeros((size, size))
    places = np.tile(np.arange(size), draws)
    items = permuted(places, size, np.repeat(keys(np.arange(draws)), size))
    np.add.at(counts, (places, items), 1)
    expected = draws / size
    statistic = ((counts - expected) ** 2 / expected).sum()
    mean = (size - 1) ** 2
    assert abs(statistic - mean) < 6 * np.sqrt(2 * mean)


def test_neighbours_in_order_are_no_neighbours_in_the_text():
    """Rank correlation of places and items, and of successive items, is that of chance."""
    indices = sample_indices(0, np.arange(50_000), 50_000)
    assert abs(np.corrcoef(indices, np.arange(50_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(indices[1:], indices[:-1])[0, 1]) < 0.02


def test_a_mixture_has_its_shares_and_leaves_no_sample_out():
    texts, numbers = assigned(3, np.arange(10**5), quotas([0.7, 0.2, 0.1]))
    shares = np.bincount(texts) / 10**5
    np.testing.assert_allclose(shares, [0.7, 0.2, 0.1], atol=1e-3)
    for text in range(3):
        mine = numbers[texts == text]
        assert (np.bincount(mine) == 1).all()


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_quotas_fill_a_period_and_are_the_nearest(weights):
    counts = np.array(quotas(weights))
    assert counts.sum() == PERIOD
    exact = np.array(weights) / sum(weights) * PERIOD
    assert (np.abs(counts - exact) <= len(weights)).all()
    assert (counts >= 1).all()


def test_the_largest_remainders_are_rounded_up():
    assert PERIOD == 10_000
    assert quotas([10.4, 20.9, 9968.7]) == [10, 21, 9969]


def test_a_text_of_next_to_no_weight_has_one_sample_a_period():
    assert quotas([1.0, 1e-9, 1e-9]) == [PERIOD - 2, 1, 1]


def test_uniforms_depend_on_seed_and_row_alone():
    rows = uniforms(0, np.arange(1000), 7)
    np.testing.assert_array_equal(rows[500:503], uniforms(0, np.arange(500, 503), 7))


def test_uniforms_are_uniform_and_independent():
    u = uniforms(3, np.arange(20_000), 4)
    assert u.min() >= 0
    assert u.max() < 1
    # Standard errors: mean 0.29 / sqrt(n), correlation 1 / sqrt(n); five of them.
    assert abs(u.mean() - 0.5) < 5 * 0.29 / np.sqrt(u.size)
    histogram = np.histogram(u, bins=20, range=(0, 1))[0]
    expected = u.size / 20
    assert ((histogram - expected) ** 2 / expected).sum() < 50  # chi-squared, 19 degrees
    columns = np.corrcoef(u.T) - np.eye(4)
    rows = np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]
    seeds = np.corrcoef(u[:, 0], uniforms(4, np.arange(20_000), 4)[:, 0])[0, 1]
    assert max(abs(columns).max(), abs(rows), abs(seeds)) < 5 / np.sqrt(20_000)


def test_every_period_mixes_the_texts_in_an_order_of_its_own():
    texts, _ = assigned(0, np.arange(2 * PERIOD), quotas([1.0, 1.0]))
    first, second = texts.reshape(2, PERIOD)
    assert (first != second).any()
    other, _ = assigned(1, np.arange(PERIOD), quotas([1.0, 1.0]))
    assert (first != other).any()
