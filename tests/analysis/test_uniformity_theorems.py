"""DroPE, App. B.3: without positions, layers that read nearly uniform states stay nearly uniform,
and (Theorem B.9) at any depth within a constant that does not depend on the length of the text.

Every statement is held against random instances, computed here from the paper's definitions, and
against the case that its assumption excludes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.analysis.positional_bias import prefix_spreads

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


def head(seed, H):
    """With states near each other, of the norm that a normalization layer gives them."""
    rng = np.random.default_rng(seed)
    T, d_k = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    d = H * d_k
    h = rng.normal(size=d) + 10.0 ** rng.uniform(-3, 0.5) * rng.normal(size=(T, d))
    h *= np.sqrt(d) / np.linalg.norm(h, axis=1, keepdims=True)
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


D_K = 3


def normalised(x):
    """Of norm sqrt(d), as the proofs have every state."""
    return np.sqrt(x.shape[1]) * x / np.linalg.norm(x, axis=1, keepdims=True)


def attended(h, W_Q, W_K, W_V):
    """z of one causal head without positions."""
    scores = (h @ W_Q.T) @ (h @ W_K.T).T / np.sqrt(len(W_Q))
    scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True) @ (h @ W_V.T)


@dataclass
class Block:
    """W_Q, W_K and W_V of every head ``[H, 3, D_K, d]``, W_O, and the two matrices of an MLP."""

    heads: np.ndarray
    W_O: np.ndarray
    W_1: np.ndarray
    W_2: np.ndarray

    def __call__(self, h):
        """The next states, and B: the largest norm of a matrix or Lipschitz constant of the map
        behind attention, an MLP with its residual and a norm, among states as long as these."""
        u = h + np.concatenate([attended(h, *head) for head in self.heads], axis=1) @ self.W_O.T
        after = u + np.maximum(u @ self.W_1.T, 0) @ self.W_2.T
        mlp = 1 + np.linalg.norm(self.W_1, 2) * np.linalg.norm(self.W_2, 2)
        norm = np.sqrt(h.shape[1]) / np.linalg.norm(after, axis=1).min()
        matrices = [W for head in self.heads for W in head] + [self.W_O]
        return normalised(after), max(mlp * norm, *(np.linalg.norm(W, 2) for W in matrices))


def random_blocks(rng, L, H):
    """With matrices of norm around 1."""
    d = H * D_K
    root = 2 * np.sqrt(d)
    return [
        Block(
            rng.normal(size=(H, 3, D_K, d)) / root,
            *rng.normal(size=(2, d, d)) / root,
            rng.normal(size=(d, d)) / root,
        )
        for _ in range(L - 1)
    ]


def through(blocks, h):
    """Spreads in front of every layer, and B."""
    spreads, bounds = [spread(h)], [1.0]
    for block in blocks:
        h, bound = block(h)
        spreads.append(spread(h))
        bounds.append(bound)
    return np.array(spreads), max(bounds)


def constants(B, L, H):
    """A_1 of Prop. B.8, with C and epsilon of Theorem B.9.

    The proof takes epsilon = min(1, A_1 / A_2), which keeps the quadratic term below the linear one
    in the first block alone; here it does in all of them.
    """
    A_1 = 2 * B * (1 + 2 * B**2 * np.sqrt(H))
    A_2 = 2 * B * 2 * B**4 * H
    return A_1, (2 * A_1) ** (L - 1), min(1, A_1 / A_2) / (2 * A_1) ** max(L - 2, 0)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 2))
def test_theorem_b9_spreads_stay_within_a_constant_at_any_length(seed, L, H):
    rng = np.random.default_rng(seed)
    blocks = random_blocks(rng, L, H)
    common = rng.normal(size=H * D_K)
    _, B = through(blocks, normalised(common[None]))  # of states that are all alike, and a margin
    A_1, C, epsilon = constants(1.1 * B, L, H)
    for length in (2, 8, 64):
        noise = rng.normal(size=(length, H * D_K))
        h = normalised(common + epsilon * np.linalg.norm(common) / 20 * noise)
        spreads_found, measured = through(blocks, h)
        assert measured <= 1.1 * B
        assert 1e-11 < spreads_found[0] <= epsilon
        assert (spreads_found <= (2 * A_1) ** np.arange(L) * spreads_found[0] * ROUNDING).all()
        assert (spreads_found <= C * epsilon).all()


def test_theorem_b9_the_epsilon_of_the_proof_is_enough_for_one_block_only():
    """Of the recursion A_1 x + A_2 x^2, said to stay below 2 A_1 x; here A_1 = 3 and A_2 = 4."""
    first = min(1, 3 / 4)
    second = 3 * first + 4 * first**2
    third = 3 * second + 4 * second**2
    assert second <= 2 * 3 * first
    assert third > 2 * 3 * second


def test_theorem_b9_needs_another_norm_in_a_decoder(tiny_decoder):
    """As the theorem is written they would. Embeddings along one line are equal once they are
    normalised; what attention adds to all alike turns the short ones further than the long."""
    common = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)).double()
    model = tiny_decoder(layers=["nope"], model={"num_hidden_layers": 3}).double()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(common * torch.linspace(0.5, 2, 50).double()[:, None])
    ids = torch.randint(50, (1, 16), generator=torch.Generator().manual_seed(1))
    first, second, *_ = prefix_spreads(model, ids)
    assert first < 1e-3
    assert second > 0.5
