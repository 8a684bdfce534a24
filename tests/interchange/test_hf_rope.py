"""Spectra out of rope_parameters against transformers' own frequencies and attention factors."""

import json

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.positional.examples import encode, one_layer, slowed
from tests.reference import turned
from trainer.interchange.hf_rope import ROPE_TYPES, spectrum_from_rope_parameters
from trainer.positional.layout import Layout
from trainer.positional.rescaling import RESCALINGS, position_interpolation
from trainer.positional.rotation import head_groups
from trainer.positional.spectrum import Spectrum

C, D = 4096, 64
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * m for m in range(D // 2)],
    "long_factor": [1.0 + 0.5 * m for m in range(D // 2)],
}


def theirs(values, head_dim=D, training_length=C, seq_len=None):
    """Frequencies and attention factor of transformers."""
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=training_length,
        rope_parameters={"rope_theta": 1e4} | values,
    )
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[kind](config, seq_len=seq_len)


def ours(values, head_dim=D, training_length=C):
    return spectrum_from_rope_parameters({"rope_theta": 1e4} | values, head_dim, training_length)


def assert_same(values, head_dim=D, training_length=C, seq_len=None):
    expected, scale = theirs(values, head_dim, training_length, seq_len)
    spectrum = ours(values, head_dim, training_length).at(seq_len or 1, training_length)
    inv_freq = torch.tensor(spectrum.inv_freq)
    torch.testing.assert_close(inv_freq, expected, rtol=5e-6, atol=0)
    torch.testing.assert_close(inv_freq, expected, rtol=0, atol=1e-6)
    assert spectrum.rotary_scale == pytest.approx(scale, rel=1e-6)
    assert spectrum.temperature.is_constant
    assert spectrum.temperature.scale == 1


@pytest.mark.parametrize(
    "values",
    [
        {"rope_type": "default"},
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.5},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", "factor": 8.0, "partial_rotary_factor": 0.5},
        LONG | {"original_max_position_embeddings": 1024},
        LONG | {"original_max_position_embeddings": 1024, "attention_factor": 1.1},
        LONG | {"original_max_position_embeddings": 1024, "factor": 32.0},
        LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 1024},
        LLAMA3 | {"factor": 32.0, "rope_theta": 5e5, "partial_rotary_factor": 0.25},
        {"rope_type": "proportional"},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0},
        {"rope_type": "proportional", "partial_rotary_factor": 0.0},
    ],
    ids=str,
)
def test_every_type_has_the_numbers_of_transformers(values):
    assert_same(values)


def test_every_type_of_transformers_is_known():
    assert set(ROPE_TYPES) == {"default", *ROPE_INIT_FUNCTIONS}


@pytest.mark.parametrize("seq_len", [1, C, C + 1, 2 * C, 5 * C + 7])
def test_dynamic_ntk_depends_on_the_length(seq_len):
    assert_same({"rope_type": "dynamic", "factor": 2.0}, seq_len=seq_len)


@pytest.mark.parametrize("seq_len", [1, 1024, 1025, C])
def test_longrope_changes_beyond_the_length_before_extension(seq_len):
    assert_same(LONG | {"original_max_position_embeddings": 1024}, seq_len=seq_len)


@given(
    st.sampled_from([16, 64, 80, 128]),
    st.floats(1e3, 1e6),
    st.floats(1, 64),
    st.integers(512, 1 << 15),
    st.floats(8, 64),
    st.floats(0.5, 4),
    st.booleans(),
)
def test_yarn(head_dim, base, factor, original, fast, slow, truncate):
    assume(head_dim > 16 or original < 1 << 12)
    values = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "beta_fast": fast}
    more = {"original_max_position_embeddings": original, "beta_slow": slow, "truncate": truncate}
    assert_same(values | more, head_dim, 1 << 16)


@given(
    st.sampled_from([16, 64, 80, 128]),
    st.floats(1e3, 1e6),
    st.floats(1, 64),
    st.integers(512, 1 << 15),
    st.floats(0.5, 2),
    st.floats(3, 16),
)
def test_llama3(head_dim, base, factor, original, low, high):
    values = {"rope_type": "llama3", "rope_theta": base, "factor": factor, "low_freq_factor": low}
    more = {"high_freq_factor": high, "original_max_position_embeddings": original}
    assert_same(values | more, head_dim, 1 << 16)


@given(st.sampled_from([16, 64, 80]), st.floats(0, 1), st.floats(1, 8))
def test_proportional(head_dim, share, factor):
    values = {"rope_type": "proportional", "partial_rotary_factor": share, "factor": factor}
    assert_same(values, head_dim)


def test_the_old_key_names_the_type_too_and_null_is_no_value():
    new = ours({"rope_type": "linear", "factor": 2.0})
    assert ours({"type": "linear", "factor": 2.0, "attention_factor": None}) == new


@pytest.mark.parametrize("values", [{"rope_type": "dynamic", "factor": 2.0}, LONG])
def test_it_survives_a_checkpoint(values):
    layout = one_layer(C, ours(values))
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize("length", [8, 12])
@pytest.mark.parametrize("batched", [False, True])
def test_the_forward_pass_takes_frequencies_of_its_length_and_scales_rotated_channels(
    length, batched
):
    """Against a turn by complex numbers; channels that do not rotate keep their size."""
    inv = tuple(0.5**m for m in range(4))
    values = {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5}
    spectrum = spectrum_from_rope_parameters(values | {"rope_theta": 16.0}, 16, 8)
    assert spectrum.inv_freq == pytest.approx(inv)
    spectrum = Spectrum(spectrum.inv_freq, rotary_scale=1.25, long=spectrum.long)
    s = 1 if length <= 8 else 2.0 * length / 8 - 1
    slowed = [f * s ** (-m / 3) for m, f in enumerate(inv)]
    q, k = torch.randn(2, 1, 1, length, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length)
    positions = positions[None] if batched else positions
    (groups,) = head_groups(one_layer(8, spectrum), positions, length)
    for before, after in zip((q, k), encode(q, k, groups), strict=True):
        for t in range(length):
            vector = before[0, 0, t].tolist()
            expected = turned([1.25 * x for x in vector[:8]] + vector[8:], t, slowed)
            torch.testing.assert_close(after[0, 0, t], torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_rescaling_takes_the_place_of_growth_with_the_length():
    dynamic, longrope = ours({"rope_type": "dynamic", "factor": 2.0}), ours(LONG)
    after = slowed(position_interpolation, dynamic, 4.0, C)
    for length in (1, C + 1, 9 * C):
        assert after.at(length, C).inv_freq == tuple(f / 4 for f in dynamic.inv_freq)
    for name, change in RESCALINGS.items():
        slow = slowed(change, longrope, 4.0, C).at(C + 1, C).inv_freq[-1]
        expected = 0 if name == "cope" else longrope.long.inv_freq[-1] / 4
        assert slow == pytest.approx(expected), name
