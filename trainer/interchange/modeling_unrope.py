"""Llama-style decoder with a positional encoding for every layer and head.

Needs torch and transformers 5.0 or newer, nothing else. Shapes: B sequences, T new tokens, Tk keys,
H query heads, Hkv key-value heads, D channels per head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

Table = tuple[Tensor, Tensor, Tensor]
Tables = dict[tuple[int, int | None], Table]
"""By the number of a spectrum and the window of the layers that use it."""


class UnropeConfig(PreTrainedConfig):
    """Configuration of a Llama-style decoder with a positional encoding for every layer and head.

    ``layout``: ``training_length`` in tokens, ``spectra``, a list of encodings, and ``layers``: for
    each layer ``groups`` (the number of an encoding, and how many neighbouring key-value heads have
    it), ``window`` (keys that a query sees, itself included, or null) and ``qk_norm``. An encoding
    has ``inv_freq`` (radians per token of its rotated pairs), ``rotary_scale``, ``temperature``,
    ``alibi`` and ``long``; :func:`table` says what they do.
    ``alibi_slopes``: one for every query head, where an encoding has ``alibi``.
    ``qk_norm_kind``: ``per_head`` or ``full``; ``qk_norm_targets``: ``both``, ``q`` or ``k``.
    """

    model_type = "unrope"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 - as the base class has it

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_hidden_layers: int = 30
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49152
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    qkv_bias: bool = False
    qk_norm_kind: str = "per_head"
    qk_norm_targets: str = "both"
    layout: dict[str, Any] | None = None
    alibi_slopes: list[float] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


def table(spectrum: dict[str, Any], window: int | None, trained: int, positions: Tensor) -> Table:
    """Cosines and sines ``[B, 1, T, pairs]`` and the factor on the queries ``[B, 1, T or 1, 1]``.

    With n the length of the sequence, which ends with its highest position, or for ``per`` =
    ``query`` the number of keys a query sees, at most ``window``, and C the training length
    ``trained``, the factor is scale * (1 + coefficient * ln s) ** exponent, s = max(n, R) / R with
    R the ``reference`` or C, or with ``steps`` 1 + floor(n / R). Below s = max(n, C) / C. In
    sequences longer than ``long.length`` the frequencies are those of ``long``, each times kept +
    (1 - kept) * s ** -power of its ``stretch``, and the factor on rotated channels grows by
    attention * ln s, both with s = 1 + growth * (n / C - 1), C the ``reference`` of ``long``.
    """
    positions = positions.double()[:, None, :, None]
    length = positions.amax(dim=2, keepdim=True) + 1
    inv_freq = positions.new_tensor(spectrum["inv_freq"])
    scale = torch.full_like(length, spectrum["rotary_scale"])
    if (long := spectrum["long"]) is not None:
        slow, larger = positions.new_tensor(long["inv_freq"]), scale
        if (stretch := long["stretch"]) is not None:
            s = 1 + long["growth"] * ((length / long["reference"]).clamp(min=1) - 1)
            share_kept, power = (positions.new_tensor(stretch[key]) for key in ("kept", "power"))
            slow = slow * (share_kept + (1 - share_kept) * s**-power)
            larger = scale + stretch["attention"] * s.log()
        inv_freq = torch.where(length > long["length"], slow, inv_freq)
        scale = torch.where(length > long["length"], larger, scale)
    # Remove whole turns before rounding: a large float32 phase would be inexact.
    phase = torch.remainder(positions * inv_freq, 2 * math.pi).float()
    scale, temperature = scale.float(), spectrum["temperature"]
    seen = length
    if temperature["per"] == "query":
        seen = positions + 1 if window is None else (positions + 1).clamp(max=window)
    reference = temperature["reference"] or trained
    stretch = seen.clamp(min=reference) / reference
    if temperature["steps"]:
        stretch = 1 + (seen / reference).floor()
    tempered = 1 + temperature["coefficient"] * stretch.log()
    factor = temperature["scale"] * tempered ** temperature["exponent"]
    return scale * phase.cos(), scale * phase.sin(), factor.float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair m of M, channels m and m + M; channels from 2 M on pass through."""
    pairs = cos.shape[-1]
    a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * pairs :]], dim=-1)


class UnropeAttention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, config: UnropeConfig, index: int) -> None:
        super().__init__()
        layout = config.layout or {}
        layer, spectra = layout["layers"][index], layout["spectra"]
        H, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.index, self.head_dim, self.window = index, D, layer["window"]
        self.groups, self.queries_per_key = layer["groups"], H // Hkv
        biased = [spectra[number]["alibi"] for number, heads in self.groups for _ in range(heads)]
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
            return nn.RMSNorm(D if self.per_head_norm else heads * D, eps=config.rms_norm_eps)

        self.q_norm, self.k_norm = norm("q", H), norm("k", Hkv)

    def forward(
        self, x: Tensor, tables: Tables, padding: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """``[B, T, hidden_size]`` to the same."""
        q = self.heads(self.q_proj(x), self.q_norm)
        k = self.heads(self.k_proj(x), self.k_norm)
        v = self.heads(self.v_proj(x), None)
        q, k = self.encode(q, k, tables)
        past = 0
        if cache is not None:
            past = cache.get_seq_length(self.index)
            k, v = cache.update(k, v, self.index)
        mask = self.mask(q, past, padding)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None and past == 0, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))

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
        turned = []
        for (number, _), q_part, k_part in zip(
            self.groups, queries, k.split(counts, 1), strict=True
        ):
            cos, sin, factor = tables[number, self.window]
            tempered = rotate(q_part, cos, sin) * factor.to(q.dtype)
            turned.append((tempered, rotate(k_part, cos, sin)))
        queries, keys = zip(*turned, strict=True)
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    def mask(self, q: Tensor, past: int, padding: Tensor | None) -> Tensor | None:
        """Return what a query may see: booleans, or with ALiBi a bias that falls with distance.

        None stands for plain causal attention, or for a single query that sees every key.
        """
        T = q.shape[2]
        plain = self.window is None and padding is None and not any(self.slopes)
        if plain and (past == 0 or T == 1):
            return None
        i = torch.arange(past, past + T, device=q.device)[:, None]
        j = torch.arange(past + T, device=q.device)
        allowed = j <= i
        if self.window is not None:
            allowed = allowed & (j > i - self.window)
        if padding is not None:
            # A padded query sees itself: a softmax over nothing is NaN.
            allowed = allowed & padding[:, None, None] | (i == j)
        if not any(self.slopes):
            return allowed
        bias = torch.tensor(self.slopes, device=q.device)[:, None, None] * (j - i)
        return bias.masked_fill(~allowed, -math.inf).to(q.dtype).expand(len(q), -1, -1, -1)


class UnropeBlock(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    def __init__(self, config: UnropeConfig, index: int) -> None:
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        self.input_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.self_attn = UnropeAttention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(size, width, bias=False),
                "up_proj": nn.Linear(size, width, bias=False),
                "down_proj": nn.Linear(width, size, bias=False),
            }
        )

    def forward(self, x: Tensor, *passed: Any) -> Tensor:
        """See :meth:`UnropeAttention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), *passed)
        y, mlp = self.post_attention_layernorm(x), self.mlp
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))


class UnropePreTrainedModel(PreTrainedModel):
    """Base class of both models."""

    config: UnropeConfig
    config_class = UnropeConfig
    base_model_prefix = "model"
    _no_split_modules: Any = ("UnropeBlock",)
    _supports_sdpa = True


class UnropeModel(UnropePreTrainedModel):
    """Token ids to normalised hidden states."""

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(UnropeBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return states ``[B, T, hidden_size]``; ``attention_mask``: ``[B, Tk]``.

        Positions, and with them lengths, count the tokens that the mask keeps; without a mask
        padding counts as text.
        """
        x = self.embed_tokens(input_ids)
        padding = None if attention_mask is None else attention_mask.bool()
        if padding is not None and padding.all():
            padding = None
        if position_ids is None and padding is not None:
            position_ids = (padding.cumsum(dim=1) - 1).clamp(min=0)[:, -x.shape[1] :]
        elif position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        layout = self.config.layout or {}
        kinds = {(n, layer["window"]) for layer in layout["layers"] for n, _ in layer["groups"]}
        tables = {
            (number, window): table(
                layout["spectra"][number], window, layout["training_length"], position_ids
            )
            for number, window in kinds
        }
        for block in self.layers:
            x = block(x, tables, padding, cache)
        return self.norm(x)


class UnropeForCausalLM(UnropePreTrainedModel, GenerationMixin):
    """Token ids to logits, and a loss where there are labels."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__(config)
        self.model = UnropeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None = None, **others: Any
    ) -> Tensor | None:
        """Return the mask as it is, ``[B, Tk]``."""
        return attention_mask

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast:
        """Return logits ``[B, T, vocab]`` and with ``labels`` the loss.

        ``cache``: the name of ``past_key_values`` from transformers 5.24 on. ``logits_to_keep``:
        number of last positions to return, 0 for all, or their indices.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and (use_cache or (use_cache is None and not self.training)):
            cache = DynamicCache()
        states = self.model(input_ids, attention_mask, position_ids, cache)
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        # Positional: transformers 5.24 renamed the third field from past_key_values to cache.
        return CausalLMOutputWithPast(loss, logits, cache)
