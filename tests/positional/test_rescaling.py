"""PI, NTK-aware and YaRN against transformers and the formulas of the papers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.positional.encodings import ENCODINGS, make_spectrum
from trainer.positional.rescaling import RESCALINGS, ntk_aware, position_interpolation, yarn
from trainer.positional.spectrum import Spectrum

C = 2048
cases = pytest.mark.parametrize(
    ("head_dim", "base", "factor"),
    [(64, 1e4, 2.0), (64, 1e4, 8.0), (128, 5e5, 4.0), (32, 1e6, 1.5), (16, 1e4, 32.0)],
)


def rope(head_dim=64, base=1e4, length=C):
    return make_spectrum("rope", head_dim, length, {"base": base})


def theirs(kind, head_dim, base, factor, seq_len=None, **more):
    """Frequencies and attention factor of transformers."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=C,
        rope_parameters={"rope_type": kind, "rope_theta": base, "factor": factor, **more},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)


def assert_frequencies(spectrum, expected):
    torch.testing.assert_close(torch.tensor(spectrum.inv_freq), expected, rtol=1e-6, atol=0)


@cases
def test_pi_is_linear_scaling_of_transformers(head_dim, base, factor):
    expected, _ = theirs("linear", head_dim, base, factor)
    assert_frequencies(position_interpolation(rope(head_dim, base), factor), expected)


@cases
def test_ntk_aware_is_dynamic_scaling_of_transformers_at_that_length(head_dim, base, factor):
    expected, _ = theirs("dynamic", head_dim, base, 1.0, seq_len=round(C * factor))
    assert_frequencies(ntk_aware(rope(head_dim, base), factor), expected)


@cases
def test_yarn_is_yarn_of_transformers(head_dim, base, factor):
    """There the attention factor multiplies queries and keys both; here the logits, once."""
    expected, attention = theirs("yarn", head_dim, base, factor, original_max_position_embeddings=C)
    ours = yarn(rope(head_dim, base), factor)
    assert_frequencies(ours, expected)
    assert ours.temperature.at(C, C) == pytest.approx(attention**2, rel=1e-6)


def test_yarn_takes_other_bounds_of_its_ramp():
    expected, _ = theirs(
        "yarn", 64, 1e4, 4.0, original_max_position_embeddings=C, beta_fast=16, beta_slow=2
    )
    assert_frequencies(yarn(rope(), 4.0, beta_fast=16, beta_slow=2), expected)


@given(st.integers(2, 64), st.floats(2, 1e6), st.floats(1, 64))
def test_ntk_has_the_factors_of_drope_eq_3(pairs, base, s):
    """gamma_m = (1 / s)^(2 m / (d - 2)), with m from 0 as in omega = b^(-2 m / d).

    The paper counts its frequencies from m = 1 (omega_m = b^(-2 (m - 1) / d)); taken literally,
    Eq. 3 would then slow the fastest pair and divide the slowest by more than s.
    """
    d, before = 2 * pairs, rope(2 * pairs, base)
    gammas = [
        after / f for after, f in zip(ntk_aware(before, s).inv_freq, before.inv_freq, strict=True)
    ]
    assert gammas == pytest.approx([(1 / s) ** (2 * m / (d - 2)) for m in range(pairs)], rel=1e-9)
    assert gammas[0] == 1
    assert gammas[-1] == pytest.approx(1 / s)


@given(st.sampled_from(sorted(RESCALINGS)), st.sampled_from(sorted(ENCODINGS)))
def test_every_rescaling_is_the_identity_at_factor_1(rescaling, name):
    before = make_spectrum(name, 32, C, {})
    after = RESCALINGS[rescaling](before, 1.0)
    assert after.inv_freq == pytest.approx(before.inv_freq, rel=1e-15)
    assert after.temperature == before.temperature


@given(st.sampled_from(sorted(RESCALINGS)), st.floats(1, 64))
def test_without_rotation_there_is_nothing_to_rescale(rescaling, factor):
    nope = make_spectrum("nope", 32, C, {})
    assert RESCALINGS[rescaling](nope, factor) == nope


@given(
    st.sampled_from(sorted(RESCALINGS)),
    st.sampled_from(["rope", "half_rope", "high_frequency", "p_rope", "rope_id", "hope"]),
    st.floats(1, 64),
)
def test_every_pair_is_slowed_by_at_most_the_factor(rescaling, name, factor):
    before = make_spectrum(name, 32, C, {})
    after = RESCALINGS[rescaling](before, factor)
    for old, new in zip(before.inv_freq, after.inv_freq, strict=True):
        assert old / factor * (1 - 1e-9) <= new <= old * (1 + 1e-9)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    before, s = rope(128, 1e4), 4.0
    after = yarn(before, s)
    turns = [C * f / (2 * math.pi) for f in before.inv_freq]
    for f, g, n in zip(before.inv_freq, after.inv_freq, turns, strict=True):
        if n > 40:
            assert g == f
        if n < 0.8:
            assert g == pytest.approx(f / s, rel=1e-12)


def test_yarn_leaves_a_spectrum_of_one_speed_alone():
    """Its ramp goes from fast pairs to slow ones, and there are none."""
    for inv_freq in [(0.5,), (0.5, 0.5), (0.5, 0.0)]:
        assert yarn(Spectrum(C, inv_freq), 4.0) == Spectrum(C, inv_freq)


def test_pi_at_a_longer_length_has_the_angles_of_the_training_length():
    before = rope()
    after = position_interpolation(before, 4.0)
    assert [f * 4 * C for f in after.inv_freq] == pytest.approx([f * C for f in before.inv_freq])
