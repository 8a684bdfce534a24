"""The attention layer against a float64 loop, in the combinations that meet in one model."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import attention_layer, turned, watch_attention
from trainer.model.attention import RMSNorm

ROPE = [10_000 ** (-m / 4) for m in range(4)]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 6])
def test_grouped_heads_and_windows(tiny_decoder, kv_heads, window):
    model = tiny_decoder(
        windows=[window], model={"num_hidden_layers": 1, "num_key_value_heads": kv_heads}
    )
    x, y = watch_attention(model, torch.arange(24))
    expected = attention_layer(
        x,
        model.layers[0].self_attn,
        4,
        kv_heads,
        lambda v, i: turned(v, i, ROPE),
        sees=lambda i, j: window is None or i - j < window,
    )
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_no_rotation_is_attention_on_the_bare_projections(tiny_decoder):
    model = tiny_decoder(layers=["nope"], model={"num_hidden_layers": 1})
    x, y = watch_attention(model, torch.arange(24))
    expected = attention_layer(x, model.layers[0].self_attn, 4, 2)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


def test_dropped_model_with_drope_temperature(tiny_decoder):
    """beta = 1 + 0.412 ln s (DroPE, App. C.2) at three times the training length."""
    model = tiny_decoder(
        layers=["nope"],
        training_length=8,
        encodings={"nope": {"temperature": 0.412}},
        model={"num_hidden_layers": 1},
    )
    x, y = watch_attention(model, torch.arange(24))
    expected = attention_layer(x, model.layers[0].self_attn, 4, 2, factor=1 + 0.412 * math.log(3))
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=8), st.floats(0.5, 2))
def test_rms_norm_divides_by_the_root_mean_square(values, gain):
    norm = RMSNorm(len(values), eps=1e-6)
    torch.nn.init.constant_(norm.weight, gain)
    rms = math.sqrt(math.fsum(v * v for v in values) / len(values) + 1e-6)
    expected = torch.tensor([gain * v / rms for v in values])
    torch.testing.assert_close(norm(torch.tensor(values)), expected, rtol=1e-5, atol=1e-6)
