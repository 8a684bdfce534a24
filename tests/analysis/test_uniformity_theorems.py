"""DroPE, App. B.3: without positions, layers that read nearly uniform states stay nearly uniform.

Every statement is held against random instances, computed here from the paper's definitions, and
against the case that its assumption excludes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROUNDING, SMALL = 1 + 1e-9, 1e-9


def means(x):
    """Of the first i rows, for every i."""
    return np.cumsum(x, axis=0) / np.arange(1, len(x) + 1)[:, None]


def spread(x):
    """The largest distance of a row from the mean of a prefix that holds it."""
    return max(np.linalg.norm(x[: i + 1] - mean, axis=1).max() for i, mean in enumerate(means(x)))


@dataclass
class Head:
    """One head of a layer of H, without positions; ``B`` bounds the norms of its matrices."""

    h: np.ndarray
    H: int
    B: float
    v: np.ndarray
    s: list[np.ndarray]
    alpha: list[np.ndarray]

    @property
    def z(self):
        return np.stack([a @ self.v[: len(a)] for a in self.alpha])


def head(seed, H, normalized=True):
    """With states near each other, of the norm that a normalization layer gives them."""
    rng = np.random.default_rng(seed)
    T, d_k = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    d = H * d_k
    h = rng.normal(size=d) + 10.0 ** rng.uniform(-3, 0.5) * rng.normal(size=(T, d))
    norm = np.sqrt(d) * (1.0 if normalized else 100.0)
    h *= norm / np.linalg.norm(h, axis=1, keepdims=True)
    W_Q, W_K, W_V = 10.0 ** rng.uniform(-1, 1) * rng.normal(size=(3, d_k, d))
    B = max(np.linalg.norm(W, 2) for W in (W_Q, W_K, W_V))
    q, k, v = h @ W_Q.T, h @ W_K.T, h @ W_V.T
    s = [q[i] @ k[: i + 1].T / np.sqrt(d_k) for i in range(T)]
    alpha = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in s]
    return Head(h, H, B, v, s, alpha)


heads = st.builds(head, st.integers(0, 2**32 - 1), st.integers(1, 4))


def logit_spread(sample):
    return max(np.abs(row - row.mean()).max() for row in sample.s)


@given(heads)
def test_logits_spread_as_far_as_states_allow(sample):
    """Prop. B.3."""
    assert (
        logit_spread(sample)
        <= sample.B**2 * np.sqrt(sample.H) * spread(sample.h) * ROUNDING + SMALL
    )


@given(heads)
def test_attention_is_uniform_up_to_the_spread_and_outputs_are_means_up_to_its_square(sample):
    """Prop. B.5, Eq. 12 and 13."""
    delta, root = spread(sample.h), np.sqrt(sample.H)
    for alpha in sample.alpha:
        assert np.abs(alpha - 1 / len(alpha)).sum() <= sample.B**2 * root * delta * ROUNDING + SMALL
    apart = np.linalg.norm(sample.z - means(sample.v), axis=1)
    assert (apart <= sample.B**3 * root * delta**2 * ROUNDING + SMALL).all()


@given(st.integers(0, 2**32 - 1))
def test_means_of_prefixes_lie_within_the_prefix(seed):
    """Lemma B.6."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(int(rng.integers(1, 9)), int(rng.integers(1, 4))))
    mean = means(x)
    for i in range(len(x)):
        apart = np.linalg.norm(x[: i + 1] - mean[i], axis=1)
        for j in range(i + 1):
            assert np.linalg.norm(mean[j] - mean[i]) <= apart[: j + 1].max() * ROUNDING + 1e-15


def spread_of_a_head(delta, B, H):
    """The bound of Prop. B.7."""
    return 2 * B * delta + 2 * B**3 * np.sqrt(H) * delta**2


@given(heads)
def test_the_outputs_of_a_head_spread_linearly_and_quadratically(sample):
    """Prop. B.7."""
    assert (
        spread(sample.z)
        <= spread_of_a_head(spread(sample.h), sample.B, sample.H) * ROUNDING + SMALL
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 3))
def test_a_block_spreads_linearly_and_quadratically(seed, H):
    """Prop. B.8 with its constants: heads side by side, an output matrix, the residual, and a map
    of Lipschitz constant B on every position."""
    rng = np.random.default_rng(seed)
    samples = [head(seed, H) for _ in range(H)]  # equal heads are the worst case
    sample, d = samples[0], samples[0].h.shape[1]
    W_O, W = rng.normal(size=(2, d, d))
    B = max(sample.B, np.linalg.norm(W_O, 2), np.linalg.norm(W, 2))
    stream = sample.h + np.concatenate([x.z for x in samples], axis=1) @ W_O.T
    after = np.abs(stream @ W.T)
    linear, quadratic = 1 + 2 * B**2 * np.sqrt(H), 2 * B**4 * H
    delta = spread(sample.h)
    # A map of positions moves their mean too, hence twice its constant.
    assert spread(after) <= 2 * B * (linear * delta + quadratic * delta**2) * ROUNDING + SMALL


def test_a_map_of_positions_may_spread_them_by_more_than_its_lipschitz_constant():
    """The proof of Prop. B.8 says "at most B". Corners of a simplex are all as far apart as two of
    them, and further from each other than from their mean."""
    corners = np.eye(8) / np.sqrt(2)  # at distance 1
    line = np.array([[0.0]] * 7 + [[1.0]])  # Lipschitz with constant 1
    assert spread(line) > 1.2 * spread(corners)
    assert spread(line) <= 2 * spread(corners)


@given(heads, st.integers(0, 2**32 - 1))
def test_gradients_of_the_positional_bias_sum_to_zero_in_every_row(sample, seed):
    """Lemma B.10: any weights, and any vectors."""
    rng = np.random.default_rng(seed)
    for alpha in sample.alpha:
        c, a = rng.normal(size=len(alpha)), rng.normal(size=(len(alpha), 3))
        g = alpha * (c - alpha @ c)
        assert abs(g.sum()) < 1e-12
        np.testing.assert_allclose(g @ a, g @ (a - a.mean(axis=0)), atol=1e-12)
        if len(alpha) > 1:
            without_centring = alpha * c
            assert abs(without_centring.sum()) > 1e-12 or c.std() == pytest.approx(0)
