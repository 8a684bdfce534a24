"""The attention layer against a float64 loop, in the combinations that meet in one model."""

import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import attention_layer, turned, watch_attention
from trainer.model.attention import RMSNorm
from trainer.model.backends import BACKENDS, Mask, sdpa
from trainer.model.plan import columns_of, masks_of
from trainer.positional.layout import LayerEncoding, Layout
from trainer.positional.spectrum import Spectrum

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


HEADS = {
    "none": (False, False),
    "some": (True, False),
    "others": (False, True),
    "all": (True, True),
}


@pytest.mark.parametrize("last", [None, 3])
@pytest.mark.parametrize("windows", [(None, None), (4, None), (4, 6)])
@pytest.mark.parametrize("kinds", permutations(HEADS, 2), ids="-".join)
def test_a_layer_has_its_own_mask_whatever_the_layers_before_it(kinds, windows, last):
    layers = []
    for kind, window in zip(kinds, windows, strict=True):
        spectra = tuple(Spectrum(alibi=is_biased) for is_biased in HEADS[kind])
        layers.append(LayerEncoding(spectra, window))
    ids, shape = torch.zeros(2, 9, dtype=torch.long), (2, 4)
    columns = columns_of(ids, 2, None, None, last)
    together = masks_of(Layout(8, tuple(layers)), columns, Mask(), [sdpa] * 2, shape)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 9, 8, generator=draw) for heads in (4, 2, 2))
    for layer, positions, mask in zip(layers, columns.queries, together, strict=True):
        asked = q[:, :, -len(positions) :]
        single = replace(columns, queries=[positions])
        (alone,) = masks_of(Layout(8, (layer,)), single, Mask(), [sdpa], shape)
        assert torch.equal(sdpa(asked, k, v, mask), sdpa(asked, k, v, alone))


@pytest.mark.parametrize("order", permutations(["sdpa", "flash"]), ids="-".join)
def test_a_layer_has_what_its_own_backend_needs(order):
    """Layers with one mask may be computed by several backends."""
    layers = tuple(LayerEncoding((Spectrum(),)) for _ in order)
    columns = columns_of(torch.zeros(2, 4, dtype=torch.long), 2, None, None, None)
    mask = Mask(documents=torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]]))
    attends = [BACKENDS[name].attend for name in order]
    masks = dict(
        zip(order, masks_of(Layout(8, layers), columns, mask, attends, (2, 4)), strict=True)
    )
    assert masks["sdpa"].bounds is None
    assert masks["flash"].bounds.unique().tolist() == [0, 2, 4, 8]
