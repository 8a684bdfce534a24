"""Matrix products of the model: torch's, or faster ones on some CPUs.

:func:`product_for` chooses once, when a model is put on a device.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""``x @ weight.T + bias`` of ``x`` ``[..., in]``, ``weight`` ``[out, in]``, ``bias`` ``[out]`` or
None."""

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""The operator that torch's own compiler emits for a linear layer on a CPU."""

HAS_FAST_BF16 = HAS_ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this CPU multiplies bfloat16 with oneDNN; torch's other product is much slower than its
float32 one."""


def _mkl_is_slow(processor: str, capability: str) -> bool:
    """Whether MKL is slower than oneDNN: it has AVX-512 kernels for Intel's processors only.

    On an AMD processor without AVX-512 (Zen 3) a product with its gradients takes MKL 0.5 to 1.06
    of oneDNN's time, for 512 to 8,192 rows and 64 to 8,192 columns.
    """
    return capability == "AVX512" and "GenuineIntel" not in processor


def _processor() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()  # on Windows


MKL_IS_SLOW = torch.backends.mkl.is_available() and _mkl_is_slow(
    _processor(), torch.backends.cpu.get_cpu_capability()
)
"""On this machine."""

SMALL = 600_000
"""Multiplications below which MKL computes a product in less time than a call of oneDNN takes."""

# oneDNN does not repack float32 for one row; the order for this many rows is good for 1 to 64.
_PACKED_FOR_ROWS = 8

MANY_ROWS = 128
"""Rows from which on MKL, where it is fast, is as fast as packed weights, or up to a third faster
(measured on an Intel Xeon)."""


def product_for(device: str, weights: torch.dtype, compute: torch.dtype) -> Product:
    """Return the product of inputs of dtype ``compute`` with ``weights`` on a device ("cpu",
    "cuda")."""
    if weights != compute:
        return casting_product
    if device == "cpu" and weights == torch.float32 and HAS_ONEDNN and MKL_IS_SLOW:
        return onednn_product
    return F.linear


def casting_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in the dtype of ``x``; gradients of the weights have the weights' dtype."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def packed_product(weight: Tensor, compute: torch.dtype) -> Product:
    """Return a product with a copy of ``weight`` in the memory order of oneDNN's kernels.

    Products with few rows then take about two thirds of the time on a CPU. The weight must not
    change meanwhile, and gets no gradient. If oneDNN does not support such weights, returns the
    usual product.
    """
    kinds = {torch.float32, torch.bfloat16} if HAS_FAST_BF16 else {torch.float32}
    if not HAS_ONEDNN or weight.device.type != "cpu" or compute not in kinds:
        return product_for(weight.device.type, weight.dtype, compute)
    copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(compute), _PACKED_FOR_ROWS)
    usual = product_for("cpu", weight.dtype, compute)
    return partial(_multiply_packed, copy, MANY_ROWS if usual is F.linear else math.inf)


def _multiply_packed(
    copy: Tensor, most: float, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    many = x.dtype == torch.float32 and x.numel() > most * x.shape[-1]
    if many or _is_small(x, weight):
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.to(x.dtype)
    return torch.ops.mkldnn._linear_pointwise(x, copy, bias, "none", [], "")


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply in float32 with oneDNN, about twice as fast as MKL where :data:`MKL_IS_SLOW`.

    Small products use MKL, because calling oneDNN takes longer than computing them.
    """
    if _is_small(x, weight):
        return F.linear(x, weight, bias)
    # A custom operator costs as much as a small product and only gradients need it.
    direct = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    out = (_onednn_kernel if direct else _onednn_operator)(x, weight)
    return out if bias is None else out + bias


def _is_small(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == torch.float32 and x.numel() * weight.shape[0] < SMALL


def _onednn_kernel(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


_onednn_operator = torch.library.custom_op(
    "unrope::onednn_product", _onednn_kernel, mutates_args=()
)


@_onednn_operator.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    return (
        onednn_product(grad, weight.T) if ctx.needs_input_grad[0] else None,
        onednn_product(grad.flatten(0, -2).T, x.flatten(0, -2).T)
        if ctx.needs_input_grad[1]
        else None,
    )


_onednn_operator.register_autograd(
    _product_backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class Linear(nn.Linear):
    """torch's linear layer with the ``product`` that the decoder chose."""

    product: Product = staticmethod(F.linear)

    def reset_parameters(self) -> None:
        """Do nothing: :meth:`trainer.model.decoder.Decoder.reset_parameters` draws the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``[..., in_features]`` to ``[..., out_features]``."""
        return self.product(x, self.weight, self.bias)
