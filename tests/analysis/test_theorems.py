"""What the papers prove about geometry and bias, by the analyses themselves: RoPE-ID App. A.1,
DroPE Sec. 3.1 and App. B."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.attention_examples import turned
from trainer.analysis.attention import Heads, attention_statistics, capture
from trainer.analysis.clusters import cluster_measures
from trainer.analysis.positional_bias import (
    bias_gradients,
    positional_biases,
    prefix_spreads,
)
from trainer.analysis.synthetic import fsv_ratios
from trainer.analysis.target import stacked
from trainer.positional.encodings import by_name
from trainer.positional.layout import LayerEncoding

T = 24
CONSTANT = torch.full((1, T), 7)


def geometry(x, spectrum):
    """The cluster analysis of keys ``[T, D]``; the queries are the same."""
    x = x[None, None]
    rotated = turned(x, spectrum)
    heads = Heads(0, LayerEncoding((spectrum,)), x, x, rotated, rotated, 64)
    return stacked([cluster_measures(heads, [x.shape[2]], points=8)])


def rank_one(length, energies, pairs, seed=0):
    """u v^T with slowly varying u and the given shares of |v|^2 in the planes, and those planes'
    lengths alpha_k."""
    rng = np.random.default_rng(seed)
    alpha = np.sqrt(np.resize(np.array(energies, dtype=float), pairs))
    alpha /= np.linalg.norm(alpha)
    angle = rng.uniform(0, 2 * math.pi, pairs)
    v = np.concatenate([alpha * np.cos(angle), alpha * np.sin(angle)])
    u = 1 + 0.5 * np.arange(length) / length
    return torch.tensor(np.outer(u, v)), alpha


@given(st.integers(1, 300), st.integers(1, 4), st.integers(0, 10**6))
def test_lemma_2_rotation_preserves_the_frobenius_norm(length, pairs, seed):
    x = np.random.default_rng(seed).normal(size=(length, 2 * pairs + 2))
    spectrum = by_name("rope", 2 * pairs, 64)
    rotated = turned(torch.tensor(x)[None, None], spectrum)[0, 0].numpy()
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(x), rel=1e-6)


@pytest.mark.parametrize("energies", [[1, 0, 0, 0], [1, 1, 1, 1], [4, 2, 1, 1], [0, 1, 3, 0]])
def test_lemma_1_and_theorem_1_limits_of_a_rank_one_cluster(energies):
    """FSV ratio to max alpha_k / sqrt 2, stable rank to 2 / max alpha_k^2, in [2, d]; and from one
    length to 30 times that the error shrinks."""
    spectrum = by_name("rope", 8, 64, base=100.0)
    errors = []
    for length in (600, 18_000):
        x, alpha = rank_one(length, energies, 4)
        result = geometry(x.float(), spectrum)
        ratio, rank = (
            result[name][0, 0, -1] for name in ("key_fsv_ratio", "rotated.key_stable_rank")
        )
        assert result["plain.key_stable_rank"][0, 0, -1] == pytest.approx(1, rel=1e-5)
        errors.append(abs(ratio - alpha.max() / math.sqrt(2)))
    assert errors[1] < 0.003
    assert errors[1] < errors[0] + 1e-5
    assert rank == pytest.approx(2 / alpha.max() ** 2, rel=0.01)
    assert 2 * 0.99 <= rank <= 8 * 1.01


@given(st.lists(st.floats(0.1, 1), min_size=4, max_size=4))
def test_lemma_1_for_any_vector_at_a_length_no_memory_holds(energies):
    spectrum = by_name("rope", 8, 64, base=100.0)
    x, alpha = rank_one(1, energies, 4)
    (ratio,) = fsv_ratios(spectrum, x[0].double().numpy(), [10**8], 64)
    assert ratio == pytest.approx(alpha.max() / math.sqrt(2), abs=1e-4)


def test_lemma_1_needs_u_to_vary_slowly():
    """Remark 1: a u that follows the rotation keeps the points where they are."""
    length, spectrum = 18_000, by_name("rope", 2, 64)
    u = 1e-3 + np.cos(np.arange(length)) ** 2  # the only pair turns one radian a token
    x = torch.tensor(np.outer(u, [1.0, 0.0])).float()
    ratio = geometry(x, spectrum)["key_fsv_ratio"][0, 0, -1]
    assert ratio > 1 / math.sqrt(2) + 0.1


def test_lemma_1_partial_rotation_keeps_the_rest():
    """RoPE-ID's criterion 1: what does not rotate stays of rank one, here half of |v|^2."""
    x = torch.ones(20_000, 16)
    ratio = geometry(x, by_name("half_rope", 16, 64, base=100.0))["key_fsv_ratio"]
    assert ratio[0, 0, -1] == pytest.approx(math.sqrt(0.5), abs=1e-3)


def biases_of(model, ids):
    """A^c ``[layers, heads]`` by kind, and the rows of every layer."""
    rows = capture(model, ids, attention_statistics)
    return stacked([positional_biases(row) for row in rows]), rows


def test_proposition_3_2_nope_on_a_constant_sequence(tiny_decoder):
    """Uniform attention, no bias, no gradient, constant states, in every layer."""
    model = tiny_decoder(layers=["nope"], model={"num_hidden_layers": 3})
    biases, rows = biases_of(model, CONSTANT)
    for row in rows:
        logs = row.visible.log().expand_as(row.entropy)
        torch.testing.assert_close(row.entropy, logs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose([biases["diagonal"], biases["previous"]], 0, atol=1e-6)
    np.testing.assert_allclose(bias_gradients(model, CONSTANT), 0, atol=1e-6)
    np.testing.assert_allclose(prefix_spreads(model, CONSTANT), 0, atol=1e-4)


def test_proposition_3_3_rope_on_a_constant_sequence(tiny_decoder):
    """Bias and gradients where NoPE has none; the states are constant all the same (Remark B.1)."""
    model = tiny_decoder(layers=["rope"], model={"num_hidden_layers": 3})
    biases, rows = biases_of(model, CONSTANT)
    assert (np.abs(biases["diagonal"]) > 1e-4).all()
    assert all((row.entropy < row.visible.log() - 1e-3).any(dim=-1).all() for row in rows)
    assert np.min(bias_gradients(model, CONSTANT)[0]) > 1e-5
    np.testing.assert_allclose(prefix_spreads(model, CONSTANT), 0, atol=1e-4)


def test_theorem_3_4_spread_bias_and_gradients_shrink_with_the_embeddings(tiny_decoder):
    """A tenth of the spread of the embeddings: a tenth of all of them, in every layer of NoPE."""

    def measured(spread):
        model = tiny_decoder(layers=["nope"], model={"num_hidden_layers": 3})
        generator = torch.Generator().manual_seed(5)
        common, noises = (torch.randn(n, 32, generator=generator) for n in (1, 50))
        with torch.no_grad():
            model.embed_tokens.weight.copy_(common + spread * noises)
        ids = torch.randint(50, (1, T), generator=generator)
        return prefix_spreads(model, ids), *bias_gradients(model, ids)[1]

    for large, small in zip(measured(1e-2), measured(1e-3), strict=True):
        np.testing.assert_allclose(large.mean(-1) / small.mean(-1), 10, rtol=0.25)


@pytest.mark.slow
def test_theorem_3_4_spread_stays_bounded_across_depth_at_any_length(tiny_decoder):
    """With weights of standard deviation 0.02 eight layers widen the spread of the embeddings less
    than threefold, in a text of 32 tokens as in one of 2,048."""
    model = tiny_decoder(layers=["nope"], model={"initializer": "normal", "num_hidden_layers": 8})
    ids = torch.randint(50, (1, 2048), generator=torch.Generator().manual_seed(1))
    for length in (32, 256, 2048):
        spreads = prefix_spreads(model, ids[:, :length])
        assert len(spreads) == 9
        assert spreads.max() < 3 * spreads[0]
