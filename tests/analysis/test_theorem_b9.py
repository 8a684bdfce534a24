"""DroPE, Theorem B.9 (App. B.3): the spread of states stays within a constant of the first layer's,
and the constant depends on matrices, heads and depth, not on the length of the text.

First on blocks as the proof has them, where what leaves a block is normalised; then on the decoder
of this project, which normalises what enters attention and MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.test_uniformity_theorems import spread
from trainer.analysis.positional_bias import prefix_spreads

ROUNDING = 1 + 1e-9
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
def test_spreads_stay_within_the_theorems_constant_at_any_length(seed, L, H):
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


def test_the_epsilon_of_the_proof_is_enough_for_one_block_only():
    """Of the recursion A_1 x + A_2 x^2, said to stay below 2 A_1 x; here A_1 = 3 and A_2 = 4."""
    first = min(1, 3 / 4)
    second = 3 * first + 4 * first**2
    third = 3 * second + 4 * second**2
    assert second <= 2 * 3 * first
    assert third > 2 * 3 * second


IDS = torch.randint(50, (1, 256), generator=torch.Generator().manual_seed(1))


def decoder(tiny_decoder, embeddings):
    """Without positions, three layers in float64, with these embeddings ``[50, 32]``."""
    model = tiny_decoder(layers=["nope"], model={"num_hidden_layers": 3}).double()
    with torch.no_grad():
        model.embed_tokens.weight.copy_(embeddings)
    return model


def test_spreads_of_normalised_states_do_not_bound_the_next_ones_in_a_decoder(tiny_decoder):
    """As the theorem is written they would. Embeddings along one line are equal once they are
    normalised; what attention adds to all alike turns the short ones further than the long."""
    common = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)).double()
    model = decoder(tiny_decoder, common * torch.linspace(0.5, 2, 50).double()[:, None])
    first, second, *_ = prefix_spreads(model, IDS[:, :16])
    assert first < 1e-3
    assert second > 0.5
