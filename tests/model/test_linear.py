"""The product is torch's, whichever library computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.model import linear
from trainer.model.linear import Linear, onednn_product, packed_product, product_for


@pytest.fixture(autouse=True, scope="module", params=[0, linear.SMALL], ids=["large", "small"])
def small(request):
    """Tensors of tests are small; once they count as large."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "SMALL", request.param)
        yield


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 40))
def test_product_and_its_gradients_are_those_of_matmul(rows, fan_in, fan_out):
    torch.manual_seed(rows)
    x = torch.randn(2, rows, fan_in, requires_grad=True)
    weight = torch.randn(fan_out, fan_in, requires_grad=True)
    out = onednn_product(x, weight)
    upstream = torch.randn_like(out)
    got = (out, *torch.autograd.grad(out, (x, weight), upstream))
    a, b, g = (t.detach().double() for t in (x, weight, upstream))
    expected = (a @ b.T, g @ b, torch.einsum("bto,bti->oi", g, a))
    for result, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(result.double(), reference, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("processor", "capability", "slow"),
    [
        ("vendor_id : AuthenticAMD", "AVX512", True),
        ("vendor_id : AuthenticAMD", "AVX2", False),  # such as Zen 3
        ("vendor_id : GenuineIntel", "AVX512", False),
    ],
)
def test_mkl_is_slow_where_it_has_no_kernels_for_avx512(processor, capability, slow):
    assert linear._mkl_is_slow(processor, capability) is slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("available", [True, False])
@pytest.mark.parametrize("slow", [True, False], ids=["MKL is slow", "MKL is fast"])
def test_layer_is_torchs_layer(monkeypatch, dtype, available, slow):
    monkeypatch.setattr(linear, "HAS_ONEDNN", available)
    monkeypatch.setattr(linear, "MKL_IS_SLOW", slow)
    torch.manual_seed(0)
    ours, reference = Linear(8, 6).to(dtype), nn.Linear(8, 6).to(dtype)
    ours.product = product_for("cpu", dtype, dtype)
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    reference.load_state_dict(ours.state_dict())
    x = torch.randn(3, 4, 8, dtype=dtype)
    torch.testing.assert_close(ours(x), reference(x))
    better = available and slow and dtype is torch.float32
    assert ours.product is (onednn_product if better else nn.functional.linear)


def test_weights_of_another_type_are_cast_and_get_gradients_of_their_own():
    layer = Linear(8, 6)
    layer.product = product_for("cpu", torch.float32, torch.bfloat16)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 4, 8).bfloat16()
    out = layer(x)
    expected = nn.functional.linear(x, layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(out, expected)
    out.sum().backward()
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 8, 33])
def test_packed_weights_have_the_same_products(dtype, rows):
    torch.manual_seed(rows)
    weight = torch.randn(96, 64, dtype=dtype)
    bias, x = torch.randn(96, dtype=dtype), torch.randn(rows, 1, 64, dtype=dtype)
    packed = packed_product(weight, dtype)
    usual = product_for("cpu", dtype, dtype)
    assert (packed is not usual) == linear.HAS_ONEDNN or dtype is torch.bfloat16
    torch.testing.assert_close(packed(x, weight, bias), nn.functional.linear(x, weight, bias))


@torch.no_grad()
@pytest.mark.parametrize("available", [True, False])
def test_packed_weights_of_another_type_than_is_computed_in(monkeypatch, available):
    """Even if nothing can be packed, as on a GPU."""
    monkeypatch.setattr(linear, "HAS_ONEDNN", available)
    weight, x = torch.randn(96, 64), torch.randn(3, 64).bfloat16()
    packed = packed_product(weight, torch.bfloat16)
    expected = nn.functional.linear(x, weight.bfloat16())
    torch.testing.assert_close(packed(x, weight, None), expected)
