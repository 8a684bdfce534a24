"""Llama with a positional encoding for every layer and head.

Needs torch and transformers 5.5 or newer, nothing else. Shapes: B sequences, T new tokens, Tk keys,
H query heads, Hkv key-value heads, D channels per head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.cache_utils import Cache

Table = tuple[Tensor, Tensor, Tensor]
Tables = dict[tuple[int, int | None], Table]
"""By the number of a spectrum and the window of the layers that use it."""


class UnropeConfig(LlamaConfig):
    """Configuration of a Llama with a positional encoding for every layer and head.

    ``layout``: ``training_length`` in tokens, ``spectra``, a list of encodings, and ``layers``: for
    each layer ``groups`` (the number of an encoding, and how many neighbouring key-value heads have
    it), ``window`` (keys that a query sees, itself included, or null) and ``qk_norm``. An encoding
    has ``inv_freq`` (radians per token of its rotated pairs), ``rotary_scale`` (factor on rotated
    channels), ``temperature`` (see :func:`table`) and ``alibi``.
    ``alibi_slopes``: one for every query head, where an encoding has ``alibi``.
    ``qk_norm_kind``: ``per_head`` or ``full``; ``qk_norm_targets``: ``both``, ``q`` or ``k``.
    """

    model_type = "unrope"
    base_model_tp_plan = {}  # noqa: RUF012 - heads are not alike

    qkv_bias: bool = False
    qk_norm_kind: str = "per_head"
    qk_norm_targets: str = "both"
    layout: dict[str, Any] | None = None
    alibi_slopes: list[float] | None = None

    def validate_architecture(self) -> None:
        """Do nothing: the heads need not divide the width."""


def table(spectrum: dict[str, Any], window: int | None, trained: int, positions: Tensor) -> Table:
    """Cosines and sines ``[B, 1, T, pairs]`` and the factor on the queries ``[B, 1, T or 1, 1]``.

    With n the length of the sequence, which ends with its highest position, or for ``per`` =
    ``query`` the number of keys a query sees, at most ``window``, and C the training length
    ``trained``, the factor is scale * (1 + coefficient * ln s) ** exponent, s = max(n, R) / R with
    R the ``reference`` or C, or with ``steps`` 1 + floor(n / R).
    """
    device = positions.device
    exact = "cpu" if device.type == "mps" else device  # MPS has no float64
    positions = positions.to(exact, torch.float64)[:, None, :, None]
    length = positions.amax(dim=2, keepdim=True) + 1
    # Remove whole turns before rounding: a large float32 phase would be inexact.
    inv_freq = positions.new_tensor(spectrum["inv_freq"])
    phase = torch.remainder(positions * inv_freq, 2 * math.pi).float()
    scale = spectrum["rotary_scale"]
    temperature = spectrum["temperature"]
    seen = length
    if temperature["per"] == "query":
        seen = positions + 1 if window is None else (positions + 1).clamp(max=window)
    reference = temperature["reference"] or trained
    stretch = seen.clamp(min=reference) / reference
    if temperature["steps"]:
        stretch = 1 + (seen / reference).floor()
    tempered = 1 + temperature["coefficient"] * stretch.log()
    factor = temperature["scale"] * tempered ** temperature["exponent"]
    cos, sin = scale * phase.cos(), scale * phase.sin()
    return cos.to(device), sin.to(device), factor.float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair m of M, channels m and m + M; channels from 2 M on pass through."""
    pairs = cos.shape[-1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]], dim=-1)


class UnropeAttention(nn.Module):
    """Causal attention with grouped queries, in place of ``LlamaAttention``."""

    def __init__(self, config: UnropeConfig, index: int) -> None:
        super().__init__()
        layout = config.layout or {}
        layer = layout["layers"][index]
        H = config.num_attention_heads
        Hkv = config.num_key_value_heads or H
        D = config.head_dim or 0
        self.index = index
        self.head_dim = D
        self.window = layer["window"]
        self.groups = layer["groups"]
        self.queries_per_key = H // Hkv
        biased: list[bool] = []
        for number, heads in self.groups:
            biased += [layout["spectra"][number]["alibi"]] * heads
        self.slopes = [
            slope * biased[head * Hkv // H] for head, slope in enumerate(config.alibi_slopes or [])
        ]
        self.q_proj = nn.Linear(config.hidden_size, H * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, Hkv * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, Hkv * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * D, config.hidden_size, bias=False)
        self.per_head_norm = config.qk_norm_kind == "per_head"

        def norm(side: str, heads: int) -> nn.Module | None:
            if not layer["qk_norm"] or config.qk_norm_targets not in ("both", side):
                return None
            size = D if self.per_head_norm else heads * D
            return nn.RMSNorm(size, eps=config.rms_norm_eps)

        self.q_norm, self.k_norm = norm("q", H), norm("k", Hkv)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tables,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """``[B, T, hidden_size]`` to the same, and None for the attention weights.

        ``cache``: the name of ``past_key_values`` from transformers 5.24 on.
        """
        cache = past_key_values if cache is None else cache
        q = self.heads(self.q_proj(hidden_states), self.q_norm)
        k = self.heads(self.k_proj(hidden_states), self.k_norm)
        v = self.heads(self.v_proj(hidden_states), None)
        q, k = self.encode(q, k, position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        mask = self.mask(q, k, attention_mask)
        is_causal = mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None

    def heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """``[B, T, heads * D]`` to ``[B, heads, T, D]``, normalised over a head or over all."""
        if norm is not None and not self.per_head_norm:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.per_head_norm:
            x = norm(x)
        return x.transpose(1, 2)

    def encode(self, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys and temper queries, each group of heads in its own way."""
        counts = [count for _, count in self.groups]
        queries = q.split([self.queries_per_key * count for count in counts], dim=1)
        keys = k.split(counts, dim=1)
        turned = []
        for (number, _), q_part, k_part in zip(self.groups, queries, keys, strict=True):
            cos, sin, factor = tables[number, self.window]
            tempered = rotate(q_part, cos, sin) * factor.to(q.dtype)
            turned.append((tempered, rotate(k_part, cos, sin)))
        queries, keys = zip(*turned, strict=True)
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    def mask(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return what a query may see: booleans, or with ALiBi a bias that falls with distance.

        Distances are between places in the cache, whose kind and length only ``mask`` knows: a
        query's own place is the last that it may see.

        ``mask``: of Llama, ``[B, 1, T, Tk]`` booleans or a bias; None: plain causal attention.
        """
        if self.window is None and not any(self.slopes):
            return mask
        T, Tk = q.shape[2], k.shape[2]
        keys = torch.arange(Tk, device=q.device)
        if mask is None:
            # scaled_dot_product_attention: one query sees all keys, several align with the first.
            first = Tk - 1 if T == 1 else 0
            own = keys[first : first + T, None]
            allowed = keys <= own
        else:
            allowed = mask if mask.dtype == torch.bool else mask == 0
            unseen = allowed.flip(-1).to(torch.uint8).argmax(dim=-1, keepdim=True)
            own = Tk - 1 - unseen
        if self.window is not None:
            allowed = allowed & (keys > own - self.window)
        # A padded query sees one key: a softmax over nothing is NaN.
        allowed = allowed | (keys == own)
        if not any(self.slopes):
            return allowed
        bias = torch.tensor(self.slopes, device=q.device)[:, None, None] * (keys - own)
        return bias.masked_fill(~allowed, -math.inf).to(q.dtype).expand(len(q), -1, -1, -1)


class UnropeTables(nn.Module):
    """Tables of all encodings, in place of ``LlamaRotaryEmbedding``."""

    def __init__(self, layout: dict[str, Any]) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor, position_ids: Tensor) -> Tables:
        """Return the tables at ``position_ids`` ``[B, T]``."""
        tables: Tables = {}
        for layer in self.layout["layers"]:
            for number, _ in layer["groups"]:
                key = number, layer["window"]
                if key not in tables:
                    spectrum = self.layout["spectra"][number]
                    trained = self.layout["training_length"]
                    tables[key] = table(spectrum, layer["window"], trained, position_ids)
        return tables


class UnropeModel(LlamaModel):
    """Token ids to normalised hidden states."""

    config_class = UnropeConfig
    _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__(config)
        self.rotary_emb: Any = UnropeTables(config.layout or {})
        for index, layer in enumerate(self.layers):
            layer.self_attn = UnropeAttention(config, index)
        self.post_init()


class UnropeForCausalLM(LlamaForCausalLM):
    """Token ids to logits, and a loss where there are labels."""

    config_class = UnropeConfig
    _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__(config)
        self.model = UnropeModel(config)
        self.post_init()
