"""Rescalings against transformers and the formulas of the papers, with a factor and with length."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, modeling_rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.positional.examples import slowed
from trainer.interchange.hf_rope import spectrum_from_rope_parameters
from trainer.positional.encodings import by_name
from trainer.positional.rescaling import (
    RESCALINGS,
    dynamic,
    llama3,
    longrope,
    ntk_aware,
    ntk_by_parts,
    ntk_by_parts_turns,
    position_interpolation,
    rebased,
    rescaled,
    yarn,
)
from trainer.positional.spectrum import Spectrum, Step

C = 2048
cases = pytest.mark.parametrize(
    ("head_dim", "base", "factor"),
    [(64, 1e4, 2.0), (64, 1e4, 8.0), (128, 5e5, 4.0), (32, 1e6, 1.5), (16, 1e4, 32.0)],
)


def rope(head_dim=64, base=1e4, length=C):
    return by_name("rope", head_dim, length, base=base)


class Float64:
    """torch, but for transformers' float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def theirs(kind, head_dim, base, factor, seq_len=None, **more):
    """Frequencies and attention factor of transformers, computed in float64."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=C,
        rope_parameters={"rope_type": kind, "rope_theta": base, "factor": factor, **more},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_rope_utils, "torch", Float64())
        return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)


def assert_frequencies(spectrum, expected, rtol=1e-12):
    inv_freq = torch.tensor(spectrum.inv_freq, dtype=torch.float64)
    torch.testing.assert_close(inv_freq, expected.double(), rtol=rtol, atol=0)


@cases
@pytest.mark.parametrize(
    ("rescaling", "kind", "more"),
    [
        (position_interpolation, "linear", {}),
        (yarn, "yarn", {"original_max_position_embeddings": C}),
        (
            llama3,
            "llama3",
            {
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": C,
            },
        ),
    ],
)
def test_methods_are_those_of_transformers(rescaling, kind, more, head_dim, base, factor):
    expected, attention = theirs(kind, head_dim, base, factor, **more)
    ours = slowed(rescaling, rope(head_dim, base), factor, C)
    assert_frequencies(ours, expected)
    assert ours.rotary_scale == pytest.approx(attention, rel=1e-12)
    assert ours.temperature == rope().temperature


@cases
def test_ntk_aware_is_dynamic_scaling_of_transformers_at_that_length(head_dim, base, factor):
    expected, _ = theirs("dynamic", head_dim, base, 1.0, seq_len=round(C * factor))
    assert_frequencies(slowed(ntk_aware, rope(head_dim, base), factor, C), expected)


@pytest.mark.parametrize("rescaling", [ntk_by_parts, yarn])
def test_a_second_stage_counts_the_turns_of_each_pair(rescaling):
    """RoPE-ID, App. A.9 tunes to 32k and then to 128k; YaRN's paper: pairs that turn less than once
    are interpolated in full, those that turn more than 32 times not at all."""
    first = slowed(yarn, rope(64, 1e4, 4096), 8.0, 4096)
    second = slowed(rescaling, first, 4.0, 32_768)
    turns = [f * 32_768 / (2 * math.pi) for f in first.inv_freq]
    assert turns[-1] < 1 < turns[20] < 32 < turns[0]
    for f, slower, times in zip(first.inv_freq, second.inv_freq, turns, strict=True):
        if times <= 1:
            assert slower == pytest.approx(f / 4, rel=1e-12)
        elif times >= 32:
            assert slower == f
        else:
            share = math.log(times) / math.log(32)
            assert slower == pytest.approx(f * (share + (1 - share) / 4), rel=1e-12)


@pytest.mark.parametrize(
    ("head_dim", "base", "length", "bounds"),
    [
        (4, 1e4, C, {}),  # two pairs are enough for a ramp
        # All pairs are so fast that one that turns once in C would lie far beyond the last.
        (16, 5.0, 246, {}),
        (16, 1e4, 128, {}),  # the fastest pair turns fewer than 32 times in C
        (64, 1e4, C, {"beta_fast": 16, "beta_slow": 2}),
    ],
)
def test_ends_of_yarns_ramp_are_those_of_transformers(head_dim, base, length, bounds):
    more = {"original_max_position_embeddings": length} | bounds
    expected, _ = theirs("yarn", head_dim, base, 4.0, **more)
    assert_frequencies(slowed(yarn, rope(head_dim, base, length), 4.0, length, **bounds), expected)


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_yarn_scales_only_the_rotated_part_of_a_head(fraction):
    more = {"original_max_position_embeddings": C, "partial_rotary_factor": fraction}
    expected, attention = theirs("yarn", 64, 1e4, 4.0, **more)
    ours = slowed(yarn, by_name("rope", 64, C, rotary_fraction=fraction), 4.0, C)
    assert_frequencies(ours, expected)
    assert ours.rotary_scale == pytest.approx(attention, rel=1e-12)


@cases
def test_dynamic_ntk_is_dynamic_scaling_of_transformers_at_every_length(head_dim, base, factor):
    spectrum = dynamic(rope(head_dim, base), ntk_aware, C, factor)
    for length in (1, C, C + 1, 3 * C, 32 * C):
        expected, _ = theirs("dynamic", head_dim, base, factor, seq_len=length)
        assert_frequencies(spectrum.at(length, C), expected)


@pytest.mark.parametrize("length", [1, C, C + 1, 4 * C])
def test_longrope_is_longrope_of_transformers(length):
    short, long = [1 + m / 100 for m in range(32)], [1 + m / 2 for m in range(32)]
    expected, _ = theirs(
        "longrope",
        64,
        1e4,
        4.0,
        seq_len=length,
        short_factor=short,
        long_factor=long,
        original_max_position_embeddings=C,
    )
    # LongRoPE's exponents are float32 in any case.
    assert_frequencies(longrope(rope(), short, long, C).at(length, C), expected, rtol=1e-6)


@pytest.mark.parametrize("length", [1, C - 1, C, C + 1, 5 * C])
@pytest.mark.parametrize(("head_dim", "fraction"), [(64, 0.5), (80, 0.4), (32, 0.25)])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("linear", {}),
        ("dynamic", {}),
        ("yarn", {"original_max_position_embeddings": C // 4}),
        (
            "yarn",
            {"original_max_position_embeddings": C // 4, "truncate": False, "beta_fast": 16.0},
        ),
        (
            "llama3",
            {
                "original_max_position_embeddings": C // 4,
                "low_freq_factor": 2.0,
                "high_freq_factor": 8.0,
            },
        ),
    ],
)
def test_a_part_of_a_head_is_rescaled_as_by_transformers_at_every_length(
    kind, more, head_dim, fraction, length
):
    more = more | {"partial_rotary_factor": fraction}
    expected, attention = theirs(kind, head_dim, 5e5, 3.0, seq_len=length, **more)
    parameters = {"rope_type": kind, "rope_theta": 5e5, "factor": 3.0, **more}
    ours = spectrum_from_rope_parameters(parameters, head_dim, C).at(length, C)
    assert_frequencies(ours, expected)
    assert ours.rotary_scale == pytest.approx(attention, rel=1e-12)


@given(
    st.sampled_from(sorted(RESCALINGS)),
    st.sampled_from(["rope", "half_rope", "high_frequency", "p_rope", "rope_id", "hope"]),
    st.integers(1, 64 * C),
)
def test_the_dynamic_schedule_is_the_static_method_at_its_length(rescaling, name, length):
    """Frequencies and YaRN's attention factor; inside the training length nothing changes."""
    before = by_name(name, 32, C)
    now = dynamic(before, RESCALINGS[rescaling], C).at(length, C)
    then = slowed(RESCALINGS[rescaling], before, max(length / C, 1.0), C)
    assert now.inv_freq == pytest.approx(then.inv_freq, rel=1e-12)
    assert now.rotary_scale == pytest.approx(then.rotary_scale, rel=1e-12)
    assert (now.temperature, now.long) == (then.temperature.at(length, C), None)
    if length <= C:
        assert now == before.at(length, C)


@given(st.sampled_from(sorted(RESCALINGS)), st.floats(1, 64))
def test_without_rotation_there_is_nothing_to_rescale(rescaling, factor):
    nope = by_name("nope", 32, C)
    assert slowed(RESCALINGS[rescaling], nope, factor, C) == nope
    assert dynamic(nope, RESCALINGS[rescaling], C) == nope
    assert longrope(nope, (), (), C) == nope


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("rope", {}),
        ("rope", {"rotary_fraction": 0.25}),
        ("rope", {"angle_scale": 0.125}),
        ("p_rope", {"p": 0.5}),
    ],
)
def test_a_new_base_gives_the_encoding_with_that_base(name, parameters):
    before, after = (by_name(name, 64, 512, **parameters, base=b) for b in (5e4, 2e6))
    assert rebased(before, 2e6) == after
    assert rebased(rebased(before, 1e7), 2e6).inv_freq == pytest.approx(after.inv_freq, rel=1e-12)


def test_a_new_base_moves_no_pair_if_the_first_ones_stand_still():
    before, after = (by_name("rope", 64, 512, base=b).inv_freq for b in (5e4, 2e6))
    changed = rebased(Spectrum((0.0,) * 5 + before[5:]), 2e6)
    assert changed.inv_freq == pytest.approx((0.0,) * 5 + after[5:], rel=1e-12)


def test_frequencies_read_from_float32_tables_are_geometric():
    before, after = (by_name("rope", 64, 512, base=b).inv_freq for b in (5e4, 2e6))
    rounded = Spectrum(tuple(torch.tensor(before).tolist()))
    assert rebased(rounded, 2e6).inv_freq == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize("inv_freq", [(0.5,), (0.5, 0.0)])
def test_a_single_pair_that_turns_has_neither_a_ramp_nor_a_base(inv_freq):
    single = Spectrum(inv_freq)
    assert rebased(single, 2e6) == single
    for name in ("ntk_by_parts", "yarn_full_range"):
        assert slowed(RESCALINGS[name], single, 4.0, C) == single


def test_the_full_range_ends_with_the_slowest_pair_that_turns():
    before = by_name("p_rope", 16, C, p=0.5).inv_freq
    after = slowed(RESCALINGS["yarn_full_range"], Spectrum(before), 4.0, C).inv_freq
    assert (after[0], after[3]) == pytest.approx((before[0], before[3] / 4))
    assert after[4:] == (0.0,) * 4


def test_a_new_base_is_refused_where_some_pairs_were_slowed_more():
    rope = by_name("rope", 64, 512)
    for uneven in (rescaled(rope, yarn, 512, 4.0), dynamic(rope, ntk_aware, 512)):
        with pytest.raises(ValueError, match="have no base to replace"):
            rebased(uneven, 2e6)


def test_a_second_schedule_starts_from_the_long_frequencies_of_the_first():
    followed = dynamic(longrope(Spectrum((1.0, 0.1)), (1.0, 1.0), (2.0, 4.0), C), ntk_aware, C)
    assert followed.at(C + 1, C).inv_freq != followed.at(C, C).inv_freq
    assert dynamic(followed, ntk_aware, C) == followed


def test_a_schedule_on_longrope_begins_at_its_own_length():
    """LongRoPE changes frequencies at C; a model that trained on 4 C is extended from there."""
    plain = Spectrum((1.0, 0.1))
    long = longrope(plain, (1.0, 1.0), (2.0, 4.0), C)
    followed = dynamic(long, position_interpolation, 4 * C)
    assert followed.at(C, 4 * C) == plain
    for reached in (C + 1, 2 * C, 4 * C):
        assert followed.at(reached, 4 * C).inv_freq == (0.5, 0.025)
    assert followed.at(8 * C, 4 * C).inv_freq == (0.25, 0.0125)
    fixed = rescaled(long, position_interpolation, 4 * C, 2.0)
    assert [fixed.at(n, 4 * C).inv_freq for n in (C, C + 1)] == [(0.5, 0.05), (0.25, 0.0125)]
    again = longrope(long, (1.0, 1.0), (2.0, 2.0), 4 * C)
    assert again.at(C + 1, 4 * C).inv_freq == (0.25, 0.0125)


def test_an_origin_has_the_options_of_a_method():
    method = partial(yarn, beta_fast=16.0)
    fixed, followed = rescaled(rope(), method, C, 4.0), dynamic(rope(), method, C, 2.0)
    assert fixed.origin[1:] == (
        Step("yarn", {"factor": 4.0, "training_length": C, "beta_fast": 16.0}),
    )
    assert followed.origin[1:] == (
        Step("dynamic", {"method": "yarn", "growth": 2.0, "beta_fast": 16.0}),
    )


def test_long_frequencies_are_stretched_by_their_own_wavelengths():
    factors = [float(2**i) for i in range(8)]
    spectrum = longrope(by_name("rope", 16, 32), [1.0] * 8, factors, 32)
    long = spectrum.long.inv_freq
    stretched = rescaled(spectrum, ntk_by_parts_turns, 32, 4.0).long.inv_freq
    assert stretched == ntk_by_parts_turns(long, 32).frequencies(long, 4.0)
