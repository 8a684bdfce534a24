"""Softmax temperatures that a model is trained with: Llama 4's steps, and the logarithm of the
length."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from tests.reference import eager
from trainer.model.attention import LayerPass
from trainer.model.backends import BACKENDS, Mask
from trainer.positional.config import TemperatureConfig
from trainer.positional.rotation import head_groups

IDS = torch.randint(50, (2, 50), generator=torch.Generator().manual_seed(1))
LLAMA_4 = TemperatureConfig(coefficient=0.3, reference=8, steps=True, heads="free")
LOGARITHM = TemperatureConfig(coefficient=2.0, scale=0.4, reference=1)
OF_SEQUENCES = TemperatureConfig(coefficient=0.5, reference=8, per="sequence")


@torch.no_grad()
def test_attention_is_llama_4_s_of_a_layer_without_rotation(tiny_decoder):
    model = tiny_decoder(layers=["nope"], temperature=LLAMA_4)
    config = Llama4TextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        no_rope_layers=[0],
        attn_temperature_tuning=True,
        floor_scale=8,
        attn_scale=0.3,
        use_qk_norm=False,
        attention_bias=False,
        attn_implementation="eager",
    )
    theirs, ours = Llama4TextAttention(config, 0), model.layers[0].self_attn
    theirs.load_state_dict(ours.state_dict())
    x, positions = torch.randn(2, 50, 32), torch.arange(50)
    later = torch.full((50, 50), -math.inf).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=torch.zeros(()), attention_mask=later)
    (groups, _) = head_groups(model.layout, positions, 50)
    output = ours(x, LayerPass(groups, groups, Mask()))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [False, True])
def test_a_window_bounds_the_keys_that_count(tiny_decoder, steps):
    """A query of a layer with a window sees no more keys than those, wherever it stands."""
    temperature = replace(LOGARITHM, reference=3, steps=steps)
    layout = tiny_decoder(temperature=temperature, windows=[7, None]).layout
    positions = torch.stack([torch.arange(40), torch.arange(100, 140)])
    for window, groups in zip((7, 1000), head_groups(layout, positions, 140), strict=True):
        for row, first in zip(groups[0].temperature, (0, 100), strict=True):
            seen = [min(first + i + 1, window) for i in range(40)]
            stretches = [1 + n // 3 if steps else max(n, 3) / 3 for n in seen]
            expected = [0.4 * (1 + 2 * math.log(stretch)) for stretch in stretches]
            assert row.flatten().tolist() == pytest.approx(expected)


@torch.no_grad()
@pytest.mark.parametrize("temperature", [LLAMA_4, LOGARITHM, OF_SEQUENCES], ids=str)
def test_all_ways_to_read_are_one_model(tiny_decoder, temperature):
    """Backends, documents in one row, and a cache."""
    model = tiny_decoder(layers=["rope", "nope"], temperature=temperature)
    plain = tiny_decoder(layers=["rope", "nope"])
    whole = model(IDS)
    assert (whole - plain(IDS)).abs().max() > 1e-3
    for block in model.layers:
        block.self_attn.attend = eager
    torch.testing.assert_close(model(IDS), whole, rtol=0, atol=1e-5)
    documents = torch.zeros_like(IDS)
    documents[:, 20:] = 1
    expected = model(IDS, mask=Mask(documents=documents))
    for block in model.layers:
        block.self_attn.attend = BACKENDS["sdpa"].attend
    masked = model(IDS, mask=Mask(documents=documents))
    torch.testing.assert_close(masked, expected, rtol=0, atol=1e-5)
    cache = model.empty_cache(2, 50)
    parts = [model(IDS[:, a:b], cache=cache, length=50) for a, b in ((0, 30), (30, 31), (31, 50))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-5)
