"""Sample order and randomness are pure functions of (seed, counter)."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import sample_indices, uniforms


@given(seed=st.integers(0, 2**31), size=st.integers(1, 50))
def test_every_epoch_visits_every_item_once(seed, size):
    indices = sample_indices(seed, np.arange(3 * size), size)
    for epoch in range(3):
        assert sorted(indices[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ():
    orders = [
        tuple(sample_indices(seed, np.arange(40) + 40 * e, 40)) for seed in (0, 1) for e in (0, 1)
    ]
    assert len(set(orders)) == 4


@given(cut=st.integers(1, 29))
def test_batching_does_not_matter(cut):
    counters = np.arange(30)
    for function in (lambda c: sample_indices(5, c, 7), lambda c: uniforms(5, c, 4)):
        whole = function(counters)
        parts = np.concatenate([function(counters[:cut]), function(counters[cut:])])
        np.testing.assert_array_equal(whole, parts)


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
