"""Configurations of published models; that logits agree is tested with the weights."""

import copy
import math

import pytest
import transformers

from trainer.common.errors import UserError
from trainer.interchange.hf_config import ARCHITECTURES, from_drope_config, from_hf_config
from trainer.positional.rescaling import rescaled, yarn

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
}


def read(**changes):
    return from_hf_config(LLAMA | changes)


def windows(layout):
    return [layer.window for layer in layout.layers]


def rotating(layout):
    return [layer.spectra[0].rotates for layer in layout.layers]


def test_shape_and_training_length():
    config, layout = read(head_dim=32)
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 128, 8)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert (config.head_size, config.vocab_size, config.rms_norm_eps) == (32, 100, 1e-5)
    assert not config.tie_word_embeddings
    assert layout.training_length == 2048
    assert len(layout.layers) == 8
    assert len(layout.spectra) == 1
    assert layout.spectra[0].inv_freq[1] == pytest.approx(1e5 ** (-1 / 16))


def test_a_softmax_scale_is_in_place_of_the_root_of_the_head_s_own_size():
    """Which need not be the width divided by the heads."""
    names = {"architectures": ["DroPELlamaForCausalLM"], "head_dim": 36, "softmax_scale": 0.25}
    _, layout = from_drope_config(LLAMA | names)
    factors = {spectrum.temperature.scale / math.sqrt(36) for spectrum in layout.spectra}
    assert factors == {0.25}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_absent_keys_mean_what_they_mean_to_transformers(kind):
    """A file that holds the sizes alone, against the defaults of the published class."""
    theirs = getattr(transformers, kind.removesuffix("ForCausalLM") + "Config")()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes_of_theirs = {key: getattr(theirs, key) for key in (*sizes, "vocab_size")}
    config, layout = from_hf_config(
        sizes_of_theirs | {"architectures": [kind], "max_position_embeddings": 4096}
    )
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.num_key_value_heads == theirs.num_key_value_heads
    assert config.head_size == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    base = theirs.rope_parameters["rope_theta"]
    rotates = layout.layers[0].spectra[0].inv_freq
    assert rotates[1] == pytest.approx(base ** (-2 / config.head_size))
    expected = getattr(theirs, "no_rope_layers", None) or [1] * config.num_hidden_layers
    assert rotating(layout) == [bool(turns) for turns in expected]
    window = theirs.sliding_window if kind.startswith("Mistral") else None
    assert set(windows(layout)) == {window}


def test_the_length_before_extension_may_stand_beside_the_parameters():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    _, layout = read(
        rope_scaling={"type": "longrope"} | factors, original_max_position_embeddings=512
    )
    spectrum = layout.spectra[0]
    assert spectrum.long.length == 512
    assert spectrum.rotary_scale == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)))
    assert (layout.training_length, layout.longest) == (512, 2048)


def test_the_old_key_counts_where_the_new_one_stands_beside_it():
    old, new = {"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}
    assert read(rope_scaling=old, rope_parameters=new) == read(rope_scaling=old)
    config = transformers.LlamaConfig(rope_scaling=dict(old), rope_parameters=dict(new))
    assert config.rope_parameters["factor"] == 2.0
    assert read(rope_scaling=None, rope_parameters=new) == read(rope_parameters=new)


def test_the_old_key_is_taken_whole_with_the_base_of_its_class():
    old, new = {"rope_type": "linear", "factor": 2.0}, {"rope_theta": 500_123.0}
    both = {"rope_scaling": old, "rope_parameters": new}
    config = transformers.LlamaConfig(**copy.deepcopy(both))
    assert config.rope_parameters["rope_theta"] == 10_000
    without = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    assert from_hf_config(without | both) == read(rope_theta=1e4, rope_scaling=old)


@pytest.mark.parametrize("original", [64, 2048, 4096])
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic"])
def test_types_of_one_length_count_from_the_longest_position(kind, original):
    """Whatever length before an extension a file has beside them."""
    rope = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": original}
    _, layout = read(rope_scaling=rope)
    assert (layout.training_length, layout.longest) == (2048, 2048)
    if kind == "dynamic":
        assert layout.at(2048).spectra == read(rope_scaling=None)[1].spectra
        assert layout.at(2049).spectra != layout.at(2048).spectra


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "longest", "reach", "warned"),
    [({}, 64, 256, False), ({}, 256, 256, False), ({"factor": 2.0}, 256, 128, True)],
)
def test_yarn_in_a_file_reaches_its_factor_times_the_length_before(
    changes, longest, reach, warned, caplog
):
    """transformers warns, and also takes the factor; a further YaRN starts from the
    reach."""
    rope = YARN | changes
    _, layout = read(max_position_embeddings=longest, rope_scaling=rope)
    assert (layout.training_length, layout.longest) == (64, reach)
    assert ["Using the explicit factor" in text for text in caplog.messages] == [True] * warned
    for length in (64, 128, reach):
        assert layout.rescaled(yarn, length / 64) == layout
    farther = layout.rescaled(yarn, 2 * reach / 64).spectra[0]
    assert farther == rescaled(layout.spectra[0], yarn, reach, 2.0)


def test_qwen2_has_biases_and_windows_in_its_upper_layers():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "max_window_layers": 6}
    config, layout = read(**qwen, use_sliding_window=True)
    assert config.qkv_bias
    assert windows(layout) == [None] * 6 + [128] * 2
    assert windows(read(**qwen)[1]) == [None] * 8
    types = ["full_attention", "sliding_attention"] * 4
    _, layout = read(**qwen, use_sliding_window=True, layer_types=types)
    assert windows(layout) == [None, 128] * 4


def test_smollm3_does_not_rotate_in_some_layers():
    smollm3 = {"architectures": ["SmolLM3ForCausalLM"]}
    assert rotating(read(**smollm3)[1]) == [True, True, True, False] * 2
    assert rotating(read(**smollm3, no_rope_layer_interval=2)[1]) == [True, False] * 4
    _, layout = read(**smollm3, no_rope_layers=[1, 0, 0, 1, 1, 1, 1, 0, 1])
    assert rotating(layout) == [True, False, False, True, True, True, True, False]
    _, layout = read(**smollm3, use_sliding_window=True, sliding_window=64)
    assert windows(layout) == [None, None, None, 64] * 2


def test_a_file_may_name_its_type_alone():
    values = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert from_hf_config(values | {"model_type": "llama"}) == read()
    with pytest.raises(UserError, match="expected one of LlamaForCausalLM"):
        from_hf_config(values | {"model_type": "gpt2"})


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Olmo2ForCausalLM"]},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"quantization_config": {"bits": 4}},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"type": "yarm", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "new_key": 1}},
    ],
    ids=str,
)
def test_what_would_compute_something_else_is_refused(changes):
    with pytest.raises((UserError, KeyError)):
        read(**changes)
