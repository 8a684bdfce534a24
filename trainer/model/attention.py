"""Grouped-query attention with optional QK-norm; the positional encoding is passed in as data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.backends import Attend, Mask, sdpa
from trainer.model.cache import LayerCache
from trainer.model.config import ModelConfig
from trainer.positional.rotation import Groups, encode


class Linear(nn.Linear):
    """Linear layer that computes in the dtype of its input; gradients have the weights' dtype."""

    def reset_parameters(self) -> None:
        """Do nothing: :class:`~trainer.model.decoder.Decoder` draws the weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``[..., in_features]`` to ``[..., out_features]``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class RMSNorm(nn.RMSNorm):
    """RMS norm (Zhang and Sennrich 2019) that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., size]``."""
        # torch falls back from the fused kernel if the dtypes differ.
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Change of encoded queries and keys, ``[B, H, T, D]`` each."""


@dataclass(frozen=True)
class LayerPass:
    """Data that a block gets in one forward pass, besides its input.

    ``queries``, ``keys``: tables of the positions that are computed, and of all new tokens; if
    ``caches_plain_keys``, the cache stores unencoded keys, and ``keys`` are the tables of cached
    and new tokens together. ``qk_norm``: whether the query and key norms are enabled.
    ``intervene``: an evaluation's change. ``last``: number of last positions to compute; None: all.
    """

    queries: Groups
    keys: Groups
    mask: Mask
    cache: LayerCache | None = None
    qk_norm: bool = False
    caches_plain_keys: bool = False
    intervene: Change | None = None
    last: int | None = None


class Attention(nn.Module):
    """Causal attention over ``[B, T, hidden_size]``.

    If the configuration uses query and key norms at any time, they exist from the start, so that a
    drop adds no parameters to a run. While disabled they take part with weight zero. Every
    parameter then has a gradient, which sharded and replicated training need.

    ``observe``, if set, receives queries and keys ``[B, H, T, D]`` before and after their encoding.
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

        def norm(side: str, projection_size: int) -> RMSNorm | None:
            if config.qk_norm.when == "never" or config.qk_norm.targets not in ("both", side):
                return None
            size = self.head_dim if self.per_head_norm else projection_size
            return RMSNorm(size, config.rms_norm_eps)

        self.q_norm = norm("q", q_size)
        self.k_norm = norm("k", kv_size)

        self.attend: Attend = sdpa
        self.observe: Callable[..., None] | None = None

    def forward(self, x: Tensor, layer_pass: LayerPass) -> Tensor:
        """Compute attention of ``[B, T, hidden_size]``, or of its ``last`` positions only."""
        cache = layer_pass.cache
        q_norm = self.q_norm if layer_pass.qk_norm else None
        k_norm = self.k_norm if layer_pass.qk_norm else None
        x_queries = x if layer_pass.last is None else x[:, -layer_pass.last :]
        plain_q = self._heads(self.q_proj(x_queries), q_norm)
        plain_k = self._heads(self.k_proj(x), k_norm)
        v = self._heads(self.v_proj(x), None)
        if cache is not None and layer_pass.caches_plain_keys:
            plain_k, v = cache.append(plain_k, v)
        encoded_heads = sum(group.kv_heads for group in layer_pass.keys)
        if encoded_heads > plain_k.shape[1]:  # every query head encodes its own copy of its keys
            copies = encoded_heads // plain_k.shape[1]
            plain_k = plain_k.repeat_interleave(copies, dim=1)
            v = v.repeat_interleave(copies, dim=1)
        q = encode(plain_q, layer_pass.queries, tempered=True)
        k = encode(plain_k, layer_pass.keys)
        if layer_pass.intervene is not None:
            q, k = layer_pass.intervene(q, k)
        if self.observe is not None:
            self.observe(plain_q, plain_k, q, k)
        if cache is not None and not layer_pass.caches_plain_keys:
            k, v = cache.append(k, v)
        out = self.o_proj(self.attend(q, k, v, layer_pass.mask).transpose(1, 2).flatten(2))
        if not layer_pass.qk_norm:
            for norm in (self.q_norm, self.k_norm):
                if norm is not None:
                    out = out + 0 * norm.weight.sum()
        return out

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Reshape ``[B, T, H * D]`` to ``[B, H, T, D]``, normalized over head or projection."""
        if norm is not None and not self.per_head_norm:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.per_head_norm:
            x = norm(x)
        return x.transpose(1, 2)
