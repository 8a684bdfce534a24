"""Spectra out of rope_parameters against transformers' own frequencies and attention factors, and
parameters out of spectra, in the plainest numbers."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.positional.examples import slowed
from trainer.hf import NO_ROTATION
from trainer.interchange.hf_rope import (
    ROPE_TYPES,
    rope_forms,
    rotate_alike,
    spectrum_from_rope_parameters,
)
from trainer.positional.encodings import ENCODINGS, by_name
from trainer.positional.layout import Layout, drop, uniform
from trainer.positional.rescaling import (
    RESCALINGS,
    dynamic,
    ntk_aware,
    position_interpolation,
    rebased,
    rescaled,
    yarn,
)
from trainer.positional.spectrum import LongFrequencies, Spectrum, Step

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


def rope_parameters(spectrum, head_dim, length):
    """The first form that rotates like the spectrum, as an export chooses it; None if none does."""
    for form in rope_forms(spectrum, head_dim, length):
        held = spectrum_from_rope_parameters(form, head_dim, length)
        if rotate_alike(held, spectrum, head_dim, length):
            return form
    return None


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


@pytest.mark.parametrize("original", [1024, C, 4 * C])
@pytest.mark.parametrize("kind", ["default", "linear", "proportional", "dynamic"])
def test_types_of_one_length_pass_over_the_length_before_an_extension(kind, original):
    """transformers 5 writes it into files of any type."""
    values = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": original}
    for seq_len in (None, 1024, 1025, C, C + 1, 3 * C):
        assert_same(values, seq_len=seq_len)


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


def test_null_is_no_value():
    new = ours({"rope_type": "linear", "factor": 2.0})
    assert ours({"rope_type": "linear", "factor": 2.0, "attention_factor": None}) == new


def test_a_rescaling_takes_the_place_of_growth_with_the_length():
    growing, longrope = ours({"rope_type": "dynamic", "factor": 2.0}), ours(LONG)
    after = slowed(position_interpolation, growing, 4.0, C)
    for length in (1, C + 1, 9 * C):
        assert after.at(length, C).inv_freq == tuple(f / 4 for f in growing.inv_freq)
    for name, change in RESCALINGS.items():
        slow = slowed(change, longrope, 4.0, C).at(C + 1, C).inv_freq[-1]
        expected = 0 if name == "cope" else longrope.long.inv_freq[-1] / 4
        assert slow == pytest.approx(expected), name


PUBLISHED = {
    "Llama 2": ({"rope_type": "default", "rope_theta": 10_000.0}, 128, 4096),
    "SmolLM2": ({"rope_type": "default", "rope_theta": 100_000.0}, 64, 8192),
    "Llama 3.1": (
        LLAMA3 | {"factor": 8.0, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
        128,
        131_072,
    ),
    "Llama 3.2": (
        LLAMA3
        | {"factor": 32.0, "rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
        64,
        131_072,
    ),
    "Qwen, extended": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
        | {"original_max_position_embeddings": 32_768, "truncate": True},
        128,
        131_072,
    ),
    "linear": ({"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5}, 128, 16_384),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}, 64, 4096),
    "proportional": (
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        256,
        8192,
    ),
    "slow and proportional": (
        {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
        | {"factor": 3.0},
        128,
        8192,
    ),
    "a YaRN with a scale of its own": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "attention_factor": 1.5}
        | {"original_max_position_embeddings": 32_768, "truncate": True},
        128,
        131_072,
    ),
    "nothing turns": (NO_ROTATION | {"rope_theta": 1e4}, 64, 8192),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_come_back(name):
    values, head_dim, length = PUBLISHED[name]
    spectrum = spectrum_from_rope_parameters(values, head_dim, length)
    parameters = rope_parameters(spectrum, head_dim, length)
    assert parameters == values
    assert spectrum_from_rope_parameters(parameters, head_dim, length) == spectrum


def test_nothing_turns_with_the_original_length_that_llama_cpp_assumes():
    values = NO_ROTATION | {"rope_theta": 1e4, "original_max_position_embeddings": 8192}
    assert not spectrum_from_rope_parameters(values, 64, 4096).rotates


def test_longrope_comes_back_as_the_same_frequencies():
    values = LONG | {"rope_theta": 500.0, "original_max_position_embeddings": 4096}
    spectrum = spectrum_from_rope_parameters(values, D, 131_072)
    parameters = rope_parameters(spectrum, D, 131_072)
    again = spectrum_from_rope_parameters(parameters, D, 131_072)
    assert parameters["rope_type"] == "longrope"
    assert again.inv_freq == pytest.approx(spectrum.inv_freq, rel=1e-14)
    assert again.long.inv_freq == pytest.approx(spectrum.long.inv_freq, rel=1e-14)
    assert (again.long.length, again.rotary_scale) == (4096, spectrum.rotary_scale)


@pytest.mark.parametrize(
    "name", ["rope", "half_rope", "high_frequency", "p_rope", "hope", "hope_published"]
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_every_encoding_turns_alike(name, head_dim):
    spectrum = by_name(name, head_dim, 4096)
    held = spectrum_from_rope_parameters(rope_parameters(spectrum, head_dim, 4096), head_dim, 4096)
    padded = [*spectrum.inv_freq, *[0.0] * (head_dim // 2 - len(spectrum.inv_freq))]
    assert held.inv_freq == pytest.approx(padded, rel=1e-8)
    assert rope_parameters(spectrum, head_dim, 4096)["rope_type"] in ("default", "proportional")


def test_a_share_of_the_pairs_survives_the_rounding_of_transformers():
    spectrum = by_name("p_rope", 100, 4096, p=0.58)
    parameters = rope_parameters(spectrum, 100, 4096)
    assert parameters["rope_type"] == "proportional"
    assert int(parameters["partial_rotary_factor"] * 100 // 2) == 29
    assert spectrum_from_rope_parameters(parameters, 100, 4096).inv_freq == spectrum.inv_freq


def test_yarn_names_its_attention_factor_only_if_it_is_not_the_usual_one():
    """Engines that do not read the key compute 0.1 ln s + 1."""
    spectrum = slowed(yarn, by_name("rope", 128, 4096), 8.0, 4096)
    parameters = rope_parameters(spectrum, 128, 4096)
    assert (parameters["rope_type"], parameters["factor"]) == ("yarn", 8.0)
    assert parameters["original_max_position_embeddings"] == 4096
    assert "attention_factor" not in parameters
    held = spectrum_from_rope_parameters(parameters, 128, 4096)
    assert held.rotary_scale == pytest.approx(spectrum.rotary_scale)
    larger = replace(spectrum, rotary_scale=2.0)
    assert rope_parameters(larger, 128, 4096)["attention_factor"] == pytest.approx(2.0)


def test_arbitrary_frequencies_are_a_factor_for_every_pair():
    spectrum = Spectrum((0.7, 0.9, 0.0, 0.1))
    parameters = rope_parameters(spectrum, 8, 100)
    held = spectrum_from_rope_parameters(parameters, 8, 100)
    assert parameters["rope_type"] == "longrope"
    assert held.inv_freq == pytest.approx(spectrum.inv_freq, rel=1e-12, abs=1e-25)


def test_no_type_expresses_growth_of_rescaled_frequencies():
    plain = slowed(position_interpolation, by_name("rope", 16, 100), 2.0, 100)
    assert rope_parameters(dynamic(plain, ntk_aware, 100, 2.0), 16, 100) is None
    uneven = (0.5, 0.2, 0.1, 0.01)
    grows = LongFrequencies(100, uneven, ntk_aware(uneven, 100))
    assert rope_parameters(Spectrum(uneven, long=grows), 8, 100) is None


def test_a_new_base_is_written_as_rope_theta():
    changed = rebased(by_name("rope", 64, 4096, base=5e4), 2e6)
    assert rope_parameters(changed, 64, 65536) == {"rope_type": "default", "rope_theta": 2e6}


TYPES_OF_ENCODINGS = {
    **dict.fromkeys(("rope", "high_frequency"), "default"),
    **dict.fromkeys(("half_rope", "rope_id", "p_rope", "hope", "hope_published"), "proportional"),
    "cope": "longrope",
    **dict.fromkeys(("nope", "alibi"), "llama3"),
}
TYPES_OF_RESCALINGS = {
    "pi": "linear",
    "ntk": "default",
    **dict.fromkeys(("ntk_by_parts", "yarn"), "yarn"),
    **dict.fromkeys(("llama3", "ntk_by_parts_turns", "yarn_turns"), "llama3"),
    **dict.fromkeys(("yarn_full_range", "cope"), "longrope"),
}


def written(spectrum):
    """The spectrum after a checkpoint, with its origin."""
    layout = uniform(spectrum, layers=1, heads=1, training_length=C)
    return Layout.from_dict(json.loads(json.dumps(layout.to_dict()))).spectra[0]


def assert_turns_in_transformers(spectrum, kind):
    """The exported form has that type, and transformers' own frequencies from it are ours."""
    form = rope_parameters(written(spectrum), D, C)
    assert form["rope_type"] == kind
    expected, _ = theirs(form)
    padded = [*spectrum.inv_freq, *[0.0] * (D // 2 - len(spectrum.inv_freq))]
    torch.testing.assert_close(torch.tensor(padded), expected, rtol=5e-6, atol=1e-19)


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_form_of_each_encoding_has_its_frequencies_in_transformers(name):
    assert_turns_in_transformers(by_name(name, D, C), TYPES_OF_ENCODINGS[name])


@pytest.mark.parametrize("name", RESCALINGS)
def test_the_form_of_each_rescaling_has_its_frequencies_in_transformers(name):
    spectrum = rescaled(by_name("rope", D, C), RESCALINGS[name], C, 4.0)
    assert_turns_in_transformers(spectrum, TYPES_OF_RESCALINGS[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_file_says_is_the_origin_of_its_spectrum(name):
    values, head_dim, length = PUBLISHED[name]
    spectrum = spectrum_from_rope_parameters(values, head_dim, length)
    assert bool(spectrum.origin) == spectrum.rotates
    steps = {"linear": "position_interpolation", "dynamic": "dynamic", "yarn": "yarn"}
    expected = steps.get(values["rope_type"], "")
    assert expected in ("", *(step.name for step in spectrum.origin[1:]))
    assert written(spectrum).origin == spectrum.origin


def test_origins_follow_rescalings_and_end_with_a_drop():
    plain = by_name("rope", D, C, base=500.0)
    assert plain.origin == (
        Step("rope", {"base": 500.0, "rotary_fraction": 1.0, "angle_scale": 1.0}),
    )
    slow = rescaled(plain, yarn, C, 4.0)
    assert slow.origin == (*plain.origin, Step("yarn", {"factor": 4.0, "training_length": C}))
    layout = uniform(slow, layers=1, heads=1, training_length=C)
    assert drop(layout).spectra[0].origin == ()


def test_a_layout_that_was_stored_without_origins_turns_and_is_written_all_the_same():
    """Plain RoPE as such, other frequencies as a factor for every pair."""
    for change, kind in ((None, "default"), (yarn, "longrope")):
        spectrum = by_name("rope", D, C)
        if change is not None:
            spectrum = rescaled(spectrum, change, C, 4.0)
        values = uniform(spectrum, layers=1, heads=1, training_length=C).to_dict()
        del values["spectra"][0]["origin"]
        read = Layout.from_dict(values).spectra[0]
        assert read == spectrum
        assert read.origin == ()
        assert rope_parameters(read, D, C)["rope_type"] == kind
        slower = rescaled(read, position_interpolation, C, 2.0)
        assert slower.origin == ()
