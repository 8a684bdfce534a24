"""Presets of published hybrids against the configuration classes and tables of transformers."""

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRotaryEmbedding

from trainer.commands import compose_words, run_of
from trainer.positional.config import build_layout
from trainer.positional.spectrum import Temperature

DEPTH, HEAD = 12, 256


def preset(name, *words, length=8192):
    shape = [f"data.sequence_length={length}", f"model.num_hidden_layers={DEPTH}"]
    words = [f"positional={name}", *shape, *words]
    return build_layout(
        run_of(compose_words(words)).config.positional,
        num_layers=DEPTH,
        num_key_value_heads=1,
        head_dim=HEAD,
        training_length=length,
    )


def assert_frequencies(layer, theirs):
    ours = torch.tensor(layer.spectra[0].inv_freq)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [1, 8])
def test_gemma3_has_five_local_layers_to_a_global_one(factor):
    rope = transformers.Gemma3TextConfig().rope_parameters
    if factor > 1:  # the larger ones: linear interpolation of the global layers
        rope["full_attention"] |= {"rope_type": "linear", "factor": float(factor)}
    theirs = transformers.Gemma3TextConfig(
        num_hidden_layers=DEPTH, head_dim=HEAD, sliding_window=1024, rope_parameters=rope
    )
    tables = Gemma3RotaryEmbedding(theirs)
    layout = preset("gemma3", f"positional.encodings.global.angle_scale={1 / factor}")
    for layer, kind in zip(layout.layers, theirs.layer_types, strict=True):
        local = kind == "sliding_attention"
        assert layer.window == (theirs.sliding_window if local else None)
        assert_frequencies(layer, getattr(tables, f"{kind}_inv_freq"))


@pytest.mark.parametrize(
    ("name", "kind"), [("smollm3", "SmolLM3Config"), ("llama4", "Llama4TextConfig")]
)
def test_every_fourth_layer_has_no_rotation(name, kind):
    theirs = getattr(transformers, kind)(num_hidden_layers=DEPTH)
    layout = preset(name)
    for index, layer in enumerate(layout.layers):
        assert layer.spectra[0].rotates == bool(theirs.no_rope_layers[index])
        chunk = theirs.layer_types[index] == "chunked_attention"
        assert layer.window == (theirs.attention_chunk_size if chunk else None)


def test_llama4_tempers_the_layers_without_rotation_in_steps():
    theirs, layout = transformers.Llama4TextConfig(), preset("llama4")
    base = layout.layers[0].spectra[0].inv_freq[1] ** (-HEAD / 2)
    assert base == pytest.approx(theirs.rope_parameters["rope_theta"])
    expected = Temperature(
        coefficient=theirs.attn_scale, per="query", reference=theirs.floor_scale, steps=True
    )
    assert [s.temperature for s in layout.spectra] == [Temperature(), expected]


def test_a_quarter_of_the_channels_of_qwen3_next_rotates():
    rope = transformers.Qwen3NextConfig().rope_parameters | {"rope_theta": 1e7}
    theirs = transformers.Qwen3NextConfig(rope_parameters=rope)
    assert theirs.head_dim == HEAD
    assert_frequencies(preset("qwen3_next").layers[0], Qwen3NextRotaryEmbedding(theirs).inv_freq)


def test_swan_has_a_global_layer_before_three_with_windows():
    """SWAN-GPT (arXiv 2504.08719): global layers without rotation, windows with RoPE, 1 to 3."""
    layers = preset("swan", length=1024).layers
    assert [layer.window for layer in layers] == [None, 512, 512, 512] * 3
    assert all(layer.spectra[0].rotates == (layer.window is not None) for layer in layers)
