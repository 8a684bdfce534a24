"""Backends of causal attention: ``sdpa``, ``flash``, ``varlen``, ``flex``, ``eager``.

``auto`` may also choose ``flex_flash``.

All take queries ``[B, Hq, Tq, D]``, keys and values ``[B, Hkv, Tk, D]`` with Tk >= Tq, a
:class:`Mask` from :func:`prepared` and a :class:`Softmax`, and return ``[B, Hq, Tq, D]``. The last
query sees the last key. Only ``eager`` allocates a [Tq, Tk] tensor. If a kernel needs a mask, or
the softmax is one that no kernel computes, ``sdpa`` processes the queries in blocks. Single
queries, as in generation, use ``sdpa`` in all backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.common.errors import UserError
from trainer.model.masks import Mask, bias, bounds_of
from trainer.model.softmax import PLAIN, Softmax, capped, eager, recomputed

Attend = Callable[[Tensor, Tensor, Tensor, Mask, Softmax], Tensor]

QUERY_BLOCK = {"cpu": 128, "cuda": 512}
"""Queries per block of ``sdpa`` with a mask: small blocks compute fewer scores that the mask hides,
large ones keep a GPU busy."""
SCORES = 2**28
"""Limit on the scores of a block of queries, if they or ALiBi's biases are computed explicitly (in
float32)."""
VARIANTS = 64
"""Limit on the variants of FlexAttention that one process compiles."""

# torch prefers cuDNN's kernel on Hopper, which is wrong with some masks and makes a plan for every
# new length. It is off in this process, except within cudnn_attention(True).
torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Allow or forbid cuDNN's kernel in SDPA within this context."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax: Softmax = PLAIN) -> Tensor:
    """Compute torch's scaled_dot_product_attention, in blocks of queries if it needs a mask.

    With a window, each block reads only its window of the keys, so that time and memory are linear
    in the length. Sinks and soft-caps are computed explicitly, block by block.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    if softmax.is_plain:
        if Tq == 1:
            return _single_query(q, k, v, mask)
        if mask.is_plain and Tq == Tk:
            return _fused(q, k, v, is_causal=True)
        if mask.is_plain and q.device.type != "cpu":
            from torch.nn.attention.bias import causal_lower_right  # slow import: the compiler

            return _fused(q, k, v, attn_mask=causal_lower_right(Tq, Tk))  # CUDA kernels know it
    past, outputs = Tk - Tq, []
    block = QUERY_BLOCK.get(q.device.type, 512)
    if mask.slopes is not None or not softmax.is_plain:
        # Rows of a batch share biases, unless each has its own mask.
        share = softmax.is_plain and mask.documents is None and mask.begins is None
        rows = 1 if share else q.shape[0]
        block = max(16, min(block, SCORES // (rows * q.shape[1] * Tk)))
    for start in range(0, Tq, block):
        queries = range(past + start, past + min(start + block, Tq))
        first = 0 if mask.window is None else max(0, queries.start - mask.window + 1)
        keys = range(first, queries.stop)
        part = (
            q[:, :, start : start + block],
            k[:, :, first : keys.stop],
            v[:, :, first : keys.stop],
        )
        outputs.append(
            _fused(*part, attn_mask=bias(mask, queries, keys, q))
            if softmax.is_plain
            else recomputed(*part, mask, softmax, first)
        )
    return torch.cat(outputs, dim=2)


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call SDPA such that one of its fused kernels can be used."""
    shared = q.shape[1] // k.shape[1]
    # Flash is the only CUDA kernel that supports grouped keys (16 bits, no mask). Otherwise torch
    # silently takes the kernel that materializes all scores.
    needs_more = q.element_size() > 2 or "attn_mask" in options
    if shared > 1 and q.device.type != "cpu" and needs_more:
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=_share_keys(q, k), **options)


def _share_keys(q: Tensor, k: Tensor) -> bool:
    """Whether heads share keys.

    A function, because the compiler would treat the comparison as a symbol, not a bool, if the
    number of heads changes during a run.
    """
    if q.shape[1] != k.shape[1]:  # noqa: SIM103
        return True
    return False


def _single_query(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Compute attention for one query per head: heads that share keys become queries of one head.

    No kernel then copies keys for each head, which on a CPU costs more than the attention.
    """
    Tk, heads = k.shape[2], k.shape[1]
    first = 0 if mask.window is None else max(0, Tk - mask.window)
    scores = None
    if not replace(mask, window=None).is_plain:
        scores = bias(mask, range(Tk - 1, Tk), range(first, Tk), q)
        if mask.slopes is not None:
            scores = scores.squeeze(-2).unflatten(-2, (heads, -1))
    out = F.scaled_dot_product_attention(
        q.reshape(q.shape[0], heads, -1, q.shape[3]), k[:, :, first:], v[:, :, first:], scores
    )
    return out.reshape(q.shape)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax: Softmax = PLAIN) -> Tensor:
    """Call the flash-attn package (CUDA); documents use its variable-length kernel."""
    if q.shape[2] == 1 or mask.begins is not None:
        return sdpa(q, k, v, mask, softmax)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    window = (-1, -1) if mask.window is None else (mask.window - 1, 0)
    options = {
        "causal": True,
        "window_size": window,
        "alibi_slopes": mask.slopes,
        "deterministic": torch.are_deterministic_algorithms_enabled(),  # affects its backward
    }
    if softmax.softcap is not None:  # unsupported before version 2.6
        options["softcap"] = softmax.softcap
    if mask.documents is None:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attn_func(q, k, v, **options).transpose(1, 2)
    return _packed(flash_attn_varlen_func, q, k, v, mask, options)


def varlen(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax: Softmax = PLAIN) -> Tensor:
    """Call torch's variable-length kernel (CUDA, 16 bits) for documents; otherwise ``sdpa``."""
    if q.shape[2] == 1 or mask.documents is None or mask.begins is not None:
        return sdpa(q, k, v, mask, softmax)
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if mask.window is None else (mask.window - 1, 0)
    options = {"window_size": window, "enable_gqa": _share_keys(q, k)}
    return _packed(varlen_attn, q, k, v, mask, options)


def _packed(
    kernel: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    options: dict[str, Any],
) -> Tensor:
    """Call a kernel with all rows packed into one row of documents."""
    if q.shape[2] != k.shape[2]:
        raise UserError.at(
            "model.attention_backend",
            "document masks do not work with a KV cache in kernels of variable length; choose "
            "'sdpa'.",
        )
    B, T = q.shape[0], q.shape[2]
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    # Kernels allocate this length per document; reading the exact one would cause a host sync.
    longest = min(mask.longest or T, T)
    out = kernel(*flat, mask.bounds, mask.bounds, longest, longest, **options)
    return out.unflatten(0, (B, T)).transpose(1, 2)


def _compiled(name: str) -> Callable[..., Any]:
    """Compile a function of torch's FlexAttention, which uncompiled materializes all scores."""
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    whole = name == "flex_attention"  # in one graph, even after many shapes
    return function if torch.compiler.is_compiling() else _compiled_once(function, whole)


@lru_cache
def _compiled_once(function: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    from torch._dynamo import config

    compiled = torch.compile(function, fullgraph=whole)

    def call(*args: Any, **kwargs: Any) -> Any:
        # Every mask, dtype and number of heads needs a compilation: more than the default of eight.
        with config.patch(recompile_limit=VARIANTS):
            return compiled(*args, **kwargs)

    return call


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    softmax: Softmax = PLAIN,
    kernel: dict[str, Any] | None = None,
) -> Tensor:
    """Call torch's FlexAttention (GPU): any mask, ALiBi, soft-caps and sinks in one kernel.

    ``kernel``: FlexAttention's ``kernel_options``.
    """
    if q.shape[2] == 1 or mask.begins is not None:
        return sdpa(q, k, v, mask, softmax)
    past, slopes = k.shape[2] - q.shape[2], mask.slopes

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = capped(score, softmax.softcap)
        return score if slopes is None else score + slopes[h] * (j - i - past)

    options = {
        "score_mod": None if slopes is None and softmax.softcap is None else changed,
        "block_mask": mask.blocks,
        "enable_gqa": _share_keys(q, k),
        "kernel_options": kernel,
    }
    if softmax.sinks is None:
        return _compiled("flex_attention")(q, k, v, **options)
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = _compiled("flex_attention")(q, k, v, **options, return_aux=AuxRequest(lse=True))
    # A sink takes the share exp(sink) / (exp(sink) + the sum over keys) of each head's weights.
    share = (aux.lse - softmax.sinks.float()[:, None]).sigmoid()
    return out * share[..., None].to(out.dtype)


def flex_flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax: Softmax = PLAIN) -> Tensor:
    """FlexAttention by the kernels of FlashAttention-4 (Hopper and later); no sinks."""
    return flex(q, k, v, mask, softmax, {"BACKEND": "FLASH"})


def _block_mask(mask: Mask, rows: int, queries: int, keys: int, device: torch.device) -> Any:
    """Build FlexAttention's block mask: which blocks contain visible scores, and which ones."""
    past, documents, window = keys - queries, mask.documents, mask.window or keys

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (j <= i + past) & (j > i + past - window)
        return near if documents is None else near & (documents[b, i + past] == documents[b, j])

    rows_apart = rows if documents is not None else None
    return _compiled("create_block_mask")(seen, rows_apart, None, queries, keys, device=device)


def prepared(
    attend: Attend, mask: Mask, shape: tuple[int, int], keys: int, device: torch.device
) -> Mask:
    """Add to a mask what its backend needs, computed once for all layers that share it.

    ``shape``: rows of the batch, and queries per row. ``keys``: keys per row.
    """
    rows, queries = shape
    if queries == 1 or mask.begins is not None:
        return mask
    if attend in (flex, flex_flash):
        return replace(mask, blocks=_block_mask(mask, rows, queries, keys, device))
    if attend in (flash, varlen) and mask.documents is not None and mask.bounds is None:
        return replace(mask, bounds=bounds_of(mask.documents))
    return mask


BACKENDS: dict[str, Attend] = {
    "sdpa": sdpa,
    "flash": flash,
    "varlen": varlen,
    "flex": flex,
    "flex_flash": flex_flash,
    "eager": eager,
}
