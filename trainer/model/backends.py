"""Ways to compute causal attention: ``sdpa``, ``flash``, ``flex``, ``eager``.

All take queries ``[B, Hq, Tq, D]`` and keys and values ``[B, Hkv, Tk, D]``, Tk >= Tq, the last
query seeing the last key, and return ``[B, Hq, Tq, D]``. A :class:`Mask` says what else a query may
not see. No backend but ``eager`` holds a [Tq, Tk] tensor: where a kernel needs a mask, ``sdpa``
goes through the queries in blocks. A single query, a step of generation, is ``sdpa``'s in all.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import UserError

QUERY_BLOCK = {"cpu": 128, "cuda": 512}
"""Queries that ``sdpa`` takes at once where it needs a mask: fewer compute less that the mask then
hides, more keep a GPU busy."""


@dataclass(frozen=True)
class Mask:
    """Restrictions beyond causality.

    ``window``: keys a query sees, itself included. ``documents``: ``[B, Tk]`` integers, a query
    sees keys of its own document. ``slopes``: ``[Hq]`` float32 of ALiBi. ``begins``: ``[B]``
    integers, the first key of each row.
    """

    window: int | None = None
    documents: Tensor | None = None
    slopes: Tensor | None = None
    begins: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but causality."""
        return all(getattr(self, field.name) is None for field in fields(self))


def _allowed(mask: Mask, queries: range, keys: range, device: torch.device) -> Tensor:
    """``[Tq, Tk]`` or ``[B, 1, Tq, Tk]`` booleans for absolute positions."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=device)
    allowed = j <= i
    if mask.window is not None:
        allowed &= j > i - mask.window
    if mask.documents is not None:
        query_documents = mask.documents[:, None, queries.start : queries.stop, None]
        allowed = allowed & (
            query_documents == mask.documents[:, None, None, keys.start : keys.stop]
        )
    if mask.begins is not None:
        allowed = allowed & (j >= mask.begins[:, None, None, None])
    return allowed


def _bias(mask: Mask, queries: range, keys: range, q: Tensor) -> Tensor:
    """What SDPA takes as ``attn_mask``: booleans, or with ALiBi a bias ``[.., Hq, Tq, Tk]``."""
    allowed = _allowed(mask, queries, keys, q.device)
    if mask.slopes is None:
        return allowed
    i = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=q.device)
    bias = mask.slopes[:, None, None] * (j - i)
    return bias.masked_fill(~allowed, -math.inf).to(q.dtype)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """torch's scaled_dot_product_attention, in blocks of queries where it needs a mask.

    With a window each block reads its window of the keys only, so time and memory are linear in the
    length.
    """
    Tq, Tk = q.shape[2], k.shape[2]
    if Tq == 1:
        return _single_query(q, k, v, mask)
    gqa = q.shape[1] != k.shape[1]
    if mask.is_plain and Tq == Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    past, outputs = Tk - Tq, []
    block = QUERY_BLOCK.get(q.device.type, 512)
    for start in range(0, Tq, block):
        queries = range(past + start, past + min(start + block, Tq))
        first = 0 if mask.window is None else max(0, queries.start - mask.window + 1)
        keys = range(first, queries.stop)
        outputs.append(
            F.scaled_dot_product_attention(
                q[:, :, start : start + block],
                k[:, :, first : keys.stop],
                v[:, :, first : keys.stop],
                attn_mask=_bias(mask, queries, keys, q),
                enable_gqa=gqa,
            )
        )
    return torch.cat(outputs, dim=2)


def _single_query(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """One query a head: the heads that share keys become queries of one head.

    No kernel then copies keys for each of them, which on a CPU costs more than the attention.
    """
    Tk, heads = k.shape[2], k.shape[1]
    first = 0 if mask.window is None else max(0, Tk - mask.window)
    bias = None
    if not replace(mask, window=None).is_plain:
        bias = _bias(mask, range(Tk - 1, Tk), range(first, Tk), q)
        if mask.slopes is not None:
            bias = bias.squeeze(-2).unflatten(-2, (heads, -1))
    out = F.scaled_dot_product_attention(
        q.reshape(q.shape[0], heads, -1, q.shape[3]), k[:, :, first:], v[:, :, first:], bias
    )
    return out.reshape(q.shape)


def probabilities(q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """Attention probabilities ``[B, Hq, Tq, Tk]`` in float32, written plainly."""
    Tq, Tk = q.shape[2], k.shape[2]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    bias = _bias(mask, range(Tk - Tq, Tk), range(Tk), scores)
    scores = scores + bias if mask.slopes is not None else scores.masked_fill(~bias, -math.inf)
    return scores.softmax(dim=-1)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The definition, for analyses and as the reference in tests."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return (probabilities(q, k, mask) @ v.float()).to(q.dtype)


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """The flash-attn package (CUDA); documents go through its variable-length kernel."""
    if q.shape[2] == 1 or mask.begins is not None:
        return sdpa(q, k, v, mask)
    from flash_attn import flash_attn_func, flash_attn_varlen_func

    window = (-1, -1) if mask.window is None else (mask.window - 1, 0)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options = {"causal": True, "window_size": window, "alibi_slopes": mask.slopes}
    if mask.documents is None:
        return flash_attn_func(q, k, v, **options).transpose(1, 2)
    if q.shape[1] != k.shape[1]:
        raise UserError("attention_backend=flash: document masks do not work with a KV cache.")
    B, T = mask.documents.shape
    # A document begins where its number changes and with every row.
    begins = F.pad(mask.documents.diff(dim=1).ne(0), (1, 0), value=True)
    starts = begins.flatten().nonzero().flatten()
    bounds = F.pad(starts, (0, 1), value=B * T).to(torch.int32)
    longest = int(bounds.diff().max())
    out = flash_attn_varlen_func(
        *(x.reshape(B * T, *x.shape[2:]) for x in (q, k, v)),
        bounds,
        bounds,
        longest,
        longest,
        **options,
    )
    return out.view(B, T, *out.shape[1:]).transpose(1, 2)


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """torch's FlexAttention (GPU): any mask and ALiBi in one fused kernel."""
    if q.shape[2] == 1 or mask.begins is not None:
        return sdpa(q, k, v, mask)
    from torch.nn.attention.flex_attention import create_block_mask

    Tq, Tk = q.shape[2], k.shape[2]
    past, documents, slopes = Tk - Tq, mask.documents, mask.slopes
    window = mask.window or Tk

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (j <= i + past) & (j > i + past - window)
        return seen if documents is None else seen & (documents[b, i + past] == documents[b, j])

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if slopes is None else score + slopes[h] * (j - i - past)

    batch = q.shape[0] if documents is not None else None
    block_mask = create_block_mask(allowed, batch, None, Tq, Tk, device=q.device)
    return _compiled_flex()(
        q,
        k,
        v,
        score_mod=biased if slopes is not None else None,
        block_mask=block_mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Mask], Tensor]] = {
    "sdpa": sdpa,
    "flash": flash,
    "flex": flex,
    "eager": eager,
}


def backend_problem(name: str, accelerator: str) -> str | None:
    """Why a backend cannot run on ``accelerator`` ("cpu", "cuda"), or None.

    A backend that is asked for and missing is an error, never replaced in silence.
    """
    if name == "flash" and importlib.util.find_spec("flash_attn") is None:
        return (
            "model.attention_backend: 'flash' needs the flash-attn package, which is not "
            "installed; pip install 'unrope[flash]', or choose 'auto' or 'sdpa'."
        )
    if name in ("flash", "flex") and accelerator != "cuda":
        return (
            f"model.attention_backend: {name!r} needs a GPU, but this run is on the CPU; "
            "choose 'auto' or 'sdpa'."
        )
    return None


def choose_backend(name: str, accelerator: str, masked: bool, half: bool = True) -> str:
    """The backend that ``auto`` stands for: flash on a GPU that has it, else flex for masks, sdpa.

    Args:
        name: as configured.
        accelerator: "cpu" or "cuda".
        masked: whether any layer has a window, document mask or ALiBi.
        half: whether attention computes in 16 bits, the only precision of flash-attn.

    Raises:
        UserError: the backend asked for cannot run here.
    """
    if name != "auto":
        if problem := backend_problem(name, accelerator):
            raise UserError(problem)
        return name
    if accelerator != "cuda":
        return "sdpa"
    if half and importlib.util.find_spec("flash_attn") is not None:
        return "flash"
    return "flex" if masked else "sdpa"
