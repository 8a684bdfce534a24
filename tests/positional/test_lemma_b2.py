"""DroPE, Lemma B.2 (App. B.2): RoPE on equal states does not attend evenly from row d_k + 1 on.

Where all states are one x, a head has one query q and one key k, and its logits depend on the
distance alone: s_ij = f(j - i), a sum over pairs m of A_m cos((j - i) w_m) + B_m sin((j - i) w_m)
with A_m^2 + B_m^2 = |q_m|^2 |k_m|^2 / d_k. The head is degenerate where all of these are zero.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.positional.encodings import by_name
from trainer.positional.rotation import rotate


@st.composite
def distinct_frequencies(draw):
    """One to four, 0.2 to 2.9 radians a token, no two within 0.15 of each other."""
    steps = draw(st.lists(st.integers(1, 14), min_size=1, max_size=4, unique=True))
    return tuple(0.2 * step + draw(st.floats(0, 0.05)) for step in steps)


def harmonics(frequencies, row):
    """1 and every pair's cosine and sine at the distances of a row, ``[row, d_k + 1]``. The proof
    writes it in exp(+-i w), as a Vandermonde matrix."""
    phase = np.outer(np.arange(row), frequencies)
    return np.concatenate([np.ones((row, 1)), np.cos(phase), np.sin(phase)], axis=1)


def logits(q, k, frequencies, row):
    """s_i1, ..., s_ii of ``row`` i, by the rotation that models have."""
    phase = torch.outer(torch.arange(row).double(), torch.tensor(frequencies, dtype=torch.float64))
    cos, sin = torch.cat([phase.cos()] * 2, dim=-1), torch.cat([-phase.sin(), phase.sin()], dim=-1)
    q, k = (rotate(torch.tensor(x).expand(1, 1, row, -1), cos, sin)[0, 0] for x in (q, k))
    return (k @ q[-1] / math.sqrt(q.shape[-1])).numpy()


def is_even(q, k, frequencies, row):
    """Whether every weight of attention is 1 / i."""
    weights = torch.tensor(logits(q, k, frequencies, row)).softmax(-1).numpy()
    return np.abs(weights - 1 / row).max() < 1e-9


def head_of(cosines, sines):
    """A query of ones and the key with which f has these multiples of cosines and sines."""
    return np.repeat([1.0, 0.0], len(cosines)), np.concatenate([cosines, sines])


@given(distinct_frequencies(), st.integers(0, 2**32 - 1))
def test_a_row_of_d_k_plus_1_is_uneven_by_what_the_rank_of_its_harmonics_says(frequencies, seed):
    """No constant is nearer to the logits than their least singular value allows."""
    rng = np.random.default_rng(seed)
    M = len(frequencies)
    row = 2 * M + 1
    q, k = rng.normal(size=(2, 2, M)) * (np.arange(M) < rng.integers(1, M + 1))
    s = logits(q.ravel(), k.ravel(), frequencies, row)
    size = np.linalg.norm(np.linalg.norm(q, axis=0) * np.linalg.norm(k, axis=0)) / math.sqrt(2 * M)
    least = np.linalg.svd(harmonics(frequencies, row), compute_uv=False)[-1]
    assert np.linalg.norm(s - s.mean()) > 0.999 * least * size > 1e-9
    assert not is_even(q.ravel(), k.ravel(), frequencies, row)


@given(distinct_frequencies())
def test_harmonics_of_d_k_plus_1_distances_are_independent(frequencies):
    """The determinant is Vandermonde's, with 1/2 for each pair of exponentials that becomes a
    cosine and a sine."""
    square = harmonics(frequencies, 2 * len(frequencies) + 1)
    points = np.exp(1j * np.array([0.0, *frequencies, *(-w for w in frequencies)]))
    apart = [abs(points[j] - points[i]) for j in range(len(points)) for i in range(j)]
    expected = math.prod(apart) / 2 ** len(frequencies)
    assert abs(np.linalg.det(square)) == pytest.approx(expected, rel=1e-6)
    assert expected > 0


@given(distinct_frequencies())
def test_no_earlier_row_will_do(frequencies):
    """A head that is not degenerate attends evenly in its first d_k rows, and not in the next."""
    M = len(frequencies)
    _, *waves = np.linalg.svd(harmonics(frequencies, 2 * M))[2][-1]
    q, k = head_of(waves[:M], waves[M:])
    assert np.linalg.norm(k) > 1e-3
    assert all(is_even(q, k, frequencies, row) for row in range(1, 2 * M + 1))
    assert np.ptp(logits(q, k, frequencies, 2 * M + 1)) > 1e-9


@pytest.mark.parametrize(
    ("cosines", "sines", "frequencies"),
    [
        pytest.param([0.0, 0.0], [0.0, 0.0], [1.0, 0.1], id="degenerate"),
        pytest.param([1.0, -1.0], [2.0, -2.0], [1.0, 1.0], id="equal frequencies"),
        pytest.param([1.0, 0.0], [2.0, 0.0], [0.0, 1.0], id="a pair that does not turn"),
        pytest.param([0.0, 0.0], [1.0, 0.0], [math.pi, 1.0], id="half a turn a token"),
        pytest.param([1.0, -1.0], [2.0, 2.0], [1.0, 2 * math.pi - 1], id="a turn in two together"),
    ],
)
def test_a_head_may_attend_evenly_in_every_row(cosines, sines, frequencies):
    """The last two have distinct frequencies between 0 and 2 pi, of which the text says that they
    will do. It takes frequencies below pi."""
    q, k = head_of(np.array(cosines), np.array(sines))
    assert all(is_even(q, k, frequencies, row) for row in range(1, 30))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("base", [1e4, 5e5])
def test_frequencies_of_rope_are_distinct_and_below_pi(head_dim, base):
    frequencies = by_name("rope", head_dim, 4096, base=base).inv_freq
    assert len(set(frequencies)) == head_dim // 2
    assert 0 < min(frequencies) <= max(frequencies) < math.pi
