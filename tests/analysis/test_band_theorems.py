"""DoPE, Sec. 4.2 and App. A.1: a band whose rotations stay within a cone makes one large direction.

Queries and keys of a band are vectors of two channels; every bound is held against random
instances, and against the case that its assumption excludes.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

ROUNDING = 1 - 1e-9
seeds = st.integers(0, 2**32 - 1)


def cone(rng, count, axis, half_angle, least):
    """``count`` vectors within ``half_angle`` of the direction ``axis`` (radians), no shorter than
    ``least``."""
    angles = axis + rng.uniform(-half_angle, half_angle, count)
    sizes = least * (1 + rng.exponential(size=count))
    return sizes[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def largest(matrix):
    """Its largest singular value, and the right singular direction."""
    _, values, rows = np.linalg.svd(matrix)
    return values[0], rows[0]


@given(seeds)
def test_some_entry_is_as_large_as_the_spectral_norm_spread_over_all(seed):
    """Lemma A.1, and Remark A.2 for as many rows as columns."""
    rng = np.random.default_rng(seed)
    m, n = rng.integers(1, 9, 2)
    for shape in ((m, n), (n, n)):
        M = rng.normal(size=shape)
        assert np.abs(M).max() >= largest(M)[0] / np.sqrt(M.size) * ROUNDING
    flat = np.full((m, n), 3.0)  # where the bound is reached
    np.testing.assert_allclose(largest(flat)[0] / np.sqrt(m * n), 3.0)


@given(seeds, st.floats(0.0, 1.5))
def test_vectors_in_a_cone_add_up(seed, half_angle):
    """Eq. 16 to 19, and Eq. 40: the root of their number times the shortest in the direction of the
    cone; with the Rayleigh quotient of Eq. 16 between."""
    rng = np.random.default_rng(seed)
    n, least = int(rng.integers(1, 40)), rng.uniform(0.1, 3)
    k = cone(rng, n, rng.uniform(0, 2 * np.pi), half_angle, least)
    total = np.linalg.norm(k.sum(axis=0))
    assert total >= n * least * np.cos(half_angle) * ROUNDING
    eigenvalue = np.linalg.eigvalsh(k.T @ k)[-1]
    assert eigenvalue >= total**2 / n * ROUNDING
    assert largest(k)[0] >= least * np.sqrt(n) * np.cos(half_angle) * ROUNDING


def test_vectors_all_around_do_not_add_up():
    """Where a band turns within the context there is no cone, and its sum stays small."""
    angles = np.linspace(0, 2 * np.pi, 1000, endpoint=False)
    k = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert np.linalg.norm(k.sum(axis=0)) < 1e-9
    assert largest(k)[0] < 0.8 * np.sqrt(1000)


@given(seeds)
def test_scores_of_two_cones_have_a_large_direction_and_a_large_entry(seed):
    """Eq. 20 to 22 and Cor. A.3, for any numbers of queries and keys. Psi is the angle of the
    principal directions."""
    rng = np.random.default_rng(seed)
    m, n = (int(x) for x in rng.integers(1, 30, 2))
    (a, b), (g_q, g_k), d = rng.uniform(0.1, 3, 2), rng.uniform(0, 1.5, 2), 64
    q = cone(rng, m, rng.uniform(0, 2 * np.pi), g_q, a)
    k = cone(rng, n, rng.uniform(0, 2 * np.pi), g_k, b)
    scores = q @ k.T / np.sqrt(d)
    (s_q, v_q), (s_k, v_k) = largest(q), largest(k)
    cos_psi = abs(v_q @ v_k)
    bound = s_q * s_k * cos_psi / np.sqrt(d)
    assert largest(scores)[0] >= bound * ROUNDING
    cones = a * b * np.sqrt(m * n) * np.cos(g_q) * np.cos(g_k) * cos_psi / np.sqrt(d)
    assert bound >= cones * ROUNDING
    assert np.abs(scores).max() >= cones / np.sqrt(m * n) * ROUNDING


def apart(a, b):
    """The angle of two lines in degrees."""
    return np.degrees(np.arccos(min(1.0, abs(a @ b) / np.linalg.norm(a) / np.linalg.norm(b))))


@given(seeds, st.floats(0.0, 44.9))
def test_a_principal_direction_lies_within_a_cone_of_up_to_45_degrees(seed, half_angle):
    """The text behind Eq. 21 takes it to lie within any cone below 90 degrees."""
    rng = np.random.default_rng(seed)
    axis = rng.uniform(0, 2 * np.pi)
    k = cone(rng, int(rng.integers(1, 30)), axis, np.radians(half_angle), 1.0)
    middle = np.array([np.cos(axis), np.sin(axis)])
    assert apart(largest(k)[1], middle) <= half_angle + 1e-5


def test_a_principal_direction_may_lie_outside_of_a_wider_cone():
    """Two vectors 80 degrees to either side are largest across their middle."""
    k = np.array([[np.cos(t), np.sin(t)] for t in np.radians([80, -80])])
    assert apart(largest(k)[1], np.array([1.0, 0.0])) > 89
