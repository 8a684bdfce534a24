"""Parameters that stand for a spectrum: those it came from, in the plainest numbers."""

from dataclasses import replace

import pytest

from tests.positional.examples import slowed
from trainer.interchange.hf_rope import NO_ROTATION, rope_parameters, spectrum_from_rope_parameters
from trainer.positional.encodings import by_name
from trainer.positional.rescaling import dynamic, ntk_aware, position_interpolation, rebased, yarn
from trainer.positional.spectrum import LongFrequencies, Spectrum

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * m for m in range(48)],
    "long_factor": [1.0 + 0.5 * m for m in range(48)],
}
PUBLISHED = {
    "Llama 2": ({"rope_type": "default", "rope_theta": 10_000.0}, 128, 4096),
    "SmolLM2": ({"rope_type": "default", "rope_theta": 100_000.0}, 64, 8192),
    "Llama 3.1": (
        LLAMA3 | {"rope_theta": 500_000.0, "original_max_position_embeddings": 8192},
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
    "nothing turns": (NO_ROTATION, 64, 8192),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models_come_back(name):
    values, head_dim, length = PUBLISHED[name]
    spectrum = spectrum_from_rope_parameters(values, head_dim, length)
    parameters = rope_parameters(spectrum, head_dim, length)
    assert parameters == values
    assert spectrum_from_rope_parameters(parameters, head_dim, length) == spectrum


def test_nothing_turns_with_the_original_length_that_llama_cpp_assumes():
    values = NO_ROTATION | {"original_max_position_embeddings": 8192}
    assert not spectrum_from_rope_parameters(values, 64, 4096).rotates


def test_longrope_comes_back_as_the_same_frequencies():
    values = LONG | {"rope_theta": 500.0, "original_max_position_embeddings": 4096}
    spectrum = spectrum_from_rope_parameters(values, 96, 131_072)
    parameters = rope_parameters(spectrum, 96, 131_072)
    again = spectrum_from_rope_parameters(parameters, 96, 131_072)
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
