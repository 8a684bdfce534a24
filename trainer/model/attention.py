"""Grouped-query attention with optional QK-norm; positions come in as data."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.backends import BACKENDS, Mask
from trainer.model.cache import LayerCache
from trainer.model.config import ModelConfig
from trainer.model.linear import Linear
from trainer.model.ragged import ragged_head_groups
from trainer.positional.layout import Layout
from trainer.positional.rotation import HeadGroup, Late, encode, encode_keys, head_groups

Observer = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Told the queries and keys before their encoding and after it, ``[B, H, T, D]`` each."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[..., size]``, in the type that autocast wants next where it is on.

        Several products read the result; each would cast it anew.
        """
        # Of one type with x, or torch leaves its fused kernel.
        out = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        kind = x.device.type
        return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


class Attention(nn.Module):
    """Causal attention over ``[B, T, hidden_size]``.

    The query and key norms exist from the start where the configuration has them at any time, so
    that a drop adds no parameters to a run. While they are off they take part with weight zero:
    every parameter then has a gradient, which sharded and replicated training need. ``observe``,
    where it is set, reads the queries and keys of every forward pass.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        self.per_head_norm = config.qk_norm.kind == "per_head"

        def norm(side: str, size: int) -> RMSNorm | None:
            if config.qk_norm.when == "never" or config.qk_norm.targets not in ("both", side):
                return None
            return RMSNorm(self.head_dim if self.per_head_norm else size, config.rms_norm_eps)

        self.q_norm = norm("q", q_size)
        self.k_norm = norm("k", kv_size)
        self.attend = BACKENDS["sdpa"]
        self.observe: Observer | None = None

    def forward(
        self,
        x: Tensor,
        groups: tuple[HeadGroup, ...],
        mask: Mask,
        qk_norm: bool,
        cache: LayerCache | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: ``[B, T, hidden_size]``.
            groups: rotation and temperature of the heads.
            mask: what a query may not see beyond causality.
            qk_norm: whether the query and key norms are on.
            cache: keys and values of earlier tokens, extended in place. Where frequencies change
                with the length, all keys are encoded with those of the length now, as tokens at the
                cache's columns.
            last: how many of the last positions to compute; None: all.
        """
        q = self._heads(self.q_proj(x), self.q_norm if qk_norm else None)
        k = self._heads(self.k_proj(x), self.k_norm if qk_norm else None)
        v = self._heads(self.v_proj(x), None)
        plain_q, plain_k = q, k
        q, k = encode(q, k, groups)
        if self.observe is not None:
            self.observe(plain_q, plain_k, q, k)
        if cache is not None and (late := groups[0].late) is not None:
            first = not cache.length
            plain_k, v = cache.append(plain_k, v)
            k = k if first else _encoded_again(plain_k, late, cache.begins)
        elif cache is not None:
            k, v = cache.append(k, v)
        if last is not None:
            q = q[:, :, -last:]
        out = self.o_proj(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))
        if not qk_norm:
            for norm in (self.q_norm, self.k_norm):
                if norm is not None:
                    out = out + 0 * norm.weight.sum()
        return out

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """``[B, T, H * D]`` to ``[B, H, T, D]``, normalised over the head or the projection."""
        if norm is not None and not self.per_head_norm:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.per_head_norm:
            x = norm(x)
        return x.transpose(1, 2)


def _encoded_again(k: Tensor, late: Late, begins: tuple[int, ...]) -> Tensor:
    """Keys ``[B, Hkv, T, D]`` of all tokens so far, in rows that begin in these columns."""
    if not late.groups:
        layout = Layout((late.layer,))
        columns = torch.arange(k.shape[2], device=k.device)
        if begins:
            positions = columns - torch.tensor(begins, device=k.device)[:, None]
            lengths = [late.length + begins[0] - begin for begin in begins]
            (late.groups,) = ragged_head_groups(layout, positions, lengths)
        else:
            (late.groups,) = head_groups(layout, columns, late.length)
    return encode_keys(k, late.groups)
