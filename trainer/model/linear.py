"""Matrix products of the model: torch's, but for float32 on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""The operator that torch's own compiler emits for a linear layer on a CPU."""


def _onednn_kernel(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


_onednn_product = torch.library.custom_op("unrope::onednn_product", _onednn_kernel, mutates_args=())


@_onednn_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    return (
        product(grad, weight.T) if ctx.needs_input_grad[0] else None,
        product(grad.flatten(0, -2).T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None,
    )


_onednn_product.register_autograd(
    _product_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


SMALL = 600_000
"""Multiplications below which a product takes less time than a call of oneDNN."""

_PACKED: dict[int, Tensor] = {}
# For one row oneDNN leaves float32 as it is; this order is good for 1 to 64.
_PACKED_FOR_ROWS = 8


@contextmanager
def packed(weights: Iterable[Tensor]) -> Iterator[None]:
    """Within, products with ``weights`` ``[out, in]`` read copies in the order of oneDNN's kernels.

    Products of few rows then take about two thirds of the time on a CPU. Weights that oneDNN does
    not multiply here stay as they are. They must not change meanwhile, and have no gradients.
    """
    kinds = {torch.float32}
    if HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        kinds.add(torch.bfloat16)
    copies = {
        id(weight): torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        for weight in weights
        if HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype in kinds
    }
    outer = dict(_PACKED)
    _PACKED.update(copies)
    try:
        yield
    finally:
        _PACKED.clear()
        _PACKED.update(outer)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` ``[..., in]`` and ``weight`` ``[out, in]``.

    On a CPU in float32 through oneDNN: MKL, which torch would take, keeps to its slow kernels on
    processors that are not Intel's. Small products are MKL's all the same, since calling oneDNN
    takes longer than they do. bfloat16 goes through oneDNN anyway.
    """
    if x.numel() * weight.shape[0] < SMALL and x.dtype == torch.float32:
        return F.linear(x, weight, bias)
    if _PACKED and x.dtype == weight.dtype and (copy := _PACKED.get(id(weight))) is not None:
        return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")
    if (
        HAS_ONEDNN
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
    ):
        # Calling a custom operator costs as much as a small product; only gradients need it.
        direct = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        out = (_onednn_kernel if direct else _onednn_product)(x, weight)
        return out if bias is None else out + bias
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """torch's, by :func:`product`; the decoder draws its weights."""

    def reset_parameters(self) -> None:
        """Left to :meth:`trainer.model.decoder.Decoder.reset_parameters`."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return product(x, self.weight, self.bias)
