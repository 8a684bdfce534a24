"""Llama-style decoder with a positional encoding for every layer and head.

Needs torch and transformers 5.0 or newer, nothing else. Shapes: B sequences, T new tokens, Tk keys,
H query heads, Hkv key-value heads, D channels per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_unrope import UnropeConfig
from .serving_unrope import follows_length, serving_problem

Table = tuple[Tensor, Tensor, Tensor]
Tables = dict[tuple[int, int | None], Table]
"""By the number of a spectrum and the window of the layers that use it."""

SERVERS = {"vllm": ("attention_instances",), "sglang": ("attention_instances", "forward_batch")}
"""Attention implementations that mask by themselves, and what they hand through the model."""
CACHE_POSITION = "cache_position"
"""Argument by which earlier versions of transformers tell a static cache where to write."""


def table(
    spectrum: dict[str, Any],
    inv_freq: Tensor,
    window: int | None,
    trained: int,
    positions: Tensor,
) -> Table:
    """Cosines and sines ``[B, 1, T, pairs]`` and the factor on the queries ``[B, 1, T or 1, 1]``.

    With n the length of the sequence, which ends with its highest position, or for ``per`` =
    ``query`` the number of keys a query sees, at most ``window``, and C the training length
    ``trained``, the factor is scale * (1 + coefficient * ln s) ** exponent, s = max(n, R) / R with
    R the ``reference`` or C, or with ``steps`` 1 + floor(n / R). Below s = max(n, C) / C. In
    sequences longer than ``long.length`` the frequencies are those of ``long``, each times kept +
    (1 - kept) * s ** -power of its ``stretch``, and the factor on rotated channels grows by
    attention * ln s, both with s = 1 + growth * (n / C - 1), C the ``reference`` of ``long`` or the
    training length.
    """
    positions = positions.double()[:, None, :, None]
    length = positions.amax(dim=2, keepdim=True) + 1
    scale = torch.full_like(length, spectrum["rotary_scale"])
    if (long := spectrum["long"]) is not None:
        slow, larger = inv_freq.new_tensor(long["inv_freq"]), scale
        if (stretch := long["stretch"]) is not None:
            begin = long.get("reference") or trained
            s = 1 + long["growth"] * ((length / begin).clamp(min=1) - 1)
            share_kept, power = (inv_freq.new_tensor(stretch[key]) for key in ("kept", "power"))
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
    reference = temperature.get("reference") or trained
    stretch = seen.clamp(min=reference) / reference
    if temperature.get("steps"):
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


@dataclass(frozen=True)
class Seen:
    """What restricts attention beyond causality, once for all layers.

    ``padding``: ``[B, Tk]``, False where a token is padding. ``segments``: ``[B, T]``, the number
    of the sequence that a token belongs to, where several sequences share a row.
    ``cache_position``: ``[T]``, where earlier versions of transformers write into the cache.
    """

    padding: Tensor | None = None
    segments: Tensor | None = None
    cache_position: Tensor | None = None


def check_arguments(config: UnropeConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a server's attention or a static cache.

    Raises:
        TypeError: for an argument that the model would otherwise ignore.
    """
    known = (*SERVERS.get(config._attn_implementation or "", ()), CACHE_POSITION)
    # None and False ask for nothing.
    unknown = [
        name
        for name, value in arguments.items()
        if not (name in known or value is None or value is False)
    ]
    if unknown:
        raise TypeError(
            f"the model does not know the argument {', '.join(unknown)}. Ignored, it could make "
            "the model compute something else than you asked for."
        )
    return {name: value for name, value in arguments.items() if name in known}


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """Return the key-value cache under either of its names: ``cache`` from transformers 5.24 on."""
    if past_key_values is not None and cache is not None:
        raise TypeError("give either past_key_values or cache, which are the same argument.")
    return cache if past_key_values is None else past_key_values


class UnropeAttention(torch.nn.Module):  # spelt so that set_attn_implementation accepts the model
    """Causal attention with grouped queries."""

    is_causal = True

    def __init__(self, config: UnropeConfig, index: int) -> None:
        super().__init__()
        layout = config.layout or {}
        layer, spectra = layout["layers"][index], layout["spectra"]
        H, Hkv, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config = config
        self.layer_idx, self.head_dim, self.window = index, D, layer["window"]
        self.num_key_value_groups, self.scaling = H // Hkv, D**-0.5
        self.groups = layer["groups"]
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
        self,
        hidden_states: Tensor,
        tables: Tables,
        seen: Seen,
        cache: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """``[B, T, hidden_size]`` to the same; ``kwargs``: what a server's attention takes."""
        q = self.heads(self.q_proj(hidden_states), self.q_norm)
        k = self.heads(self.k_proj(hidden_states), self.k_norm)
        v = self.heads(self.v_proj(hidden_states), None)
        q, k = self.encode(q, k, tables)
        past = 0
        if cache is not None:
            past = cache.get_seq_length(self.layer_idx) + 0  # a copy: static caches count in place
            where = seen.cache_position
            options = () if where is None else ({CACHE_POSITION: where},)
            k, v = cache.update(k, v, self.layer_idx, *options)
        name = self.config._attn_implementation or "eager"
        if name in SERVERS:  # a server makes its own masks
            out = ALL_ATTENTION_FUNCTIONS[name](
                self, q, k, v, None, scaling=self.scaling, **kwargs
            )[0]
        else:
            mask = self.mask(q, past, k.shape[2], seen)
            if name == "eager":
                out = self.written_out(q, k, v, mask).transpose(1, 2)
            else:
                out = ALL_ATTENTION_FUNCTIONS[name](self, q, k, v, mask, scaling=self.scaling)[0]
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1))

    def written_out(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attention ``[B, H, T, D]`` with float32 scores."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for x in (k, v))
        scores = q.float() @ k.mT * self.scaling
        T, keys = scores.shape[2:]
        if mask is None:
            mask = torch.ones(T, keys, dtype=torch.bool, device=q.device).tril(keys - T)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -math.inf)
        scores = scores + mask
        return (scores.softmax(dim=-1)[..., :keys] @ v).to(q.dtype)

    def heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        """``[B, T, heads * D]`` to ``[B, heads, T, D]``, normalised over a head or over all."""
        if norm is not None and not self.per_head_norm:
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.per_head_norm:
            x = norm(x)
        return x.transpose(1, 2)

    def encode(self, q: Tensor, k: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys and temper queries, each group of heads in its own way.

        Raises:
            ValueError: tensor parallelism left a part of heads that differ.
        """
        counts = [count for _, count in self.groups]
        if k.shape[1] != sum(counts) and len(counts) > 1:
            raise ValueError(
                f"layer {self.layer_idx} has heads with encodings or scales of their own, which "
                "tensor parallelism would cut; load the model on one device."
            )
        if len(counts) == 1:  # also where tensor parallelism left a part of the heads
            cos, sin, factor = tables[self.groups[0][0], self.window]
            return rotate(q, cos, sin) * factor.to(q.dtype), rotate(k, cos, sin)
        queries = q.split([self.num_key_value_groups * count for count in counts], dim=1)
        keys = k.split(counts, dim=1)
        turned = []
        for (number, _), q_part, k_part in zip(self.groups, queries, keys, strict=True):
            cos, sin, factor = tables[number, self.window]
            tempered = rotate(q_part, cos, sin) * factor.to(q.dtype)
            turned.append((tempered, rotate(k_part, cos, sin)))
        queries, keys = zip(*turned, strict=True)
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    def mask(self, q: Tensor, past: int, keys: int, seen: Seen) -> Tensor | None:
        """Return what a query may see: booleans, or with ALiBi a bias that falls with distance.

        None stands for plain causal attention, or for a single query that sees every key.
        """
        T, padding, segments = q.shape[2], seen.padding, seen.segments
        alone = padding is None and segments is None
        plain = self.window is None and alone and not any(self.slopes)
        if plain and past + T == keys and T in (1, keys):
            return None
        # A cache of a sliding window holds the last keys only; a static one more than there are.
        first = max(0, past + T - keys)
        i = torch.arange(past, past + T, device=q.device)[:, None]
        j = torch.arange(first, first + keys, device=q.device)
        allowed = j <= i
        if self.window is not None:
            allowed = allowed & (j > i - self.window)
        if padding is not None:
            # A padded query sees itself: a softmax over nothing is NaN.
            visible = padding[:, first : first + keys]
            visible = F.pad(visible, (0, keys - visible.shape[1]), value=False)
            allowed = allowed & visible[:, None, None] | (i == j)
        if segments is not None:  # there is no cache, so that these are the keys too
            allowed = allowed & (segments[:, None, :, None] == segments[:, None, None, :])
        if not any(self.slopes):
            return allowed.expand(len(q), 1, T, keys)
        bias = torch.tensor(self.slopes, device=q.device)[:, None, None] * (j - i)
        precise = torch.promote_types(q.dtype, torch.float32)  # CUDA's kernels refuse it
        kind = precise if q.device.type == "cpu" else q.dtype
        bias = bias.masked_fill(~allowed, -math.inf).to(kind)
        return bias.expand(len(q), -1, T, keys)


class UnropeMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden_size]`` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class UnropeBlock(GradientCheckpointingLayer):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: UnropeConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = UnropeAttention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = UnropeMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        tables: Tables,
        seen: Seen,
        cache: Cache | None,
        **kwargs: Any,
    ) -> Tensor:
        """See :meth:`UnropeAttention.forward`."""
        x = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(x, tables, seen, cache, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class UnropePreTrainedModel(PreTrainedModel):
    """Base class of both models."""

    config: UnropeConfig
    config_class = UnropeConfig
    base_model_prefix = "model"
    _no_split_modules: Any = ("UnropeBlock",)
    _skip_keys_device_placement: Any = ("past_key_values", "cache")
    _supports_sdpa = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def makes_cache(self, use_cache: bool | None) -> bool:
        """Return whether a forward pass without a cache makes one; training does not."""
        if self.training and (use_cache is None or self.is_gradient_checkpointing):
            return False
        return self.config.use_cache if use_cache is None else use_cache

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None = None, **others: Any
    ) -> Tensor | None:
        """Return the mask as it is: ``generate`` makes one of four axes for static caches."""
        return attention_mask


class UnropeModel(UnropePreTrainedModel):
    """Token ids to normalised hidden states.

    Raises:
        ValueError: the attention implementation is a server's that cannot compute this model.
    """

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__(config)
        name, problem = config._attn_implementation, serving_problem(config.to_dict())
        if name in SERVERS and problem:
            raise ValueError(f"the attention of {name!r} cannot compute this model: {problem}.")
        self.spectra: list[dict[str, Any]] = (config.layout or {})["spectra"]
        layers = (config.layout or {})["layers"]
        self.encodings = {(n, layer["window"]) for layer in layers for n, _ in layer["groups"]}
        self._frequencies: dict[torch.device, list[Tensor]] = {}
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(UnropeBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Arguments are those of every decoder in transformers; masks are ``[B, Tk]``.

        Positions, and with them lengths, count the tokens that the mask keeps, wherever the padding
        stands; without a mask padding counts as text. Without a mask and a cache, positions that
        begin anew within a row begin another sequence, which does not see the one before.

        Raises:
            TypeError: for an argument that this model does not know.
            ValueError: for a mask of more than two axes, and for several sequences in a row where
                the encoding follows the length of each.
        """
        passed = check_arguments(self.config, kwargs)
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError(f"attention_mask: expected [B, Tk], got {[*attention_mask.shape]}.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        cache = one_cache(past_key_values, cache)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if cache is None and self.makes_cache(use_cache):
            cache = DynamicCache(config=self.config)
        # Looked at only where positions are the caller's: it is a host sync.
        packs = position_ids is not None and attention_mask is None
        padding = None if attention_mask is None else attention_mask.bool()
        if padding is not None and padding.all():
            padding = None
        if position_ids is None and padding is not None:
            position_ids = (padding.cumsum(dim=1) - 1).clamp(min=0)[:, -x.shape[1] :]
        elif position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        where = passed.pop(CACHE_POSITION, None)
        seen = Seen(padding, self.segments(position_ids, cache) if packs else None, where)
        trained = (self.config.layout or {})["training_length"]
        frequencies = self.frequencies(x.device)
        tables = {
            (number, window): table(
                self.spectra[number], frequencies[number], window, trained, position_ids
            )
            for number, window in self.encodings
        }
        states: list[Tensor] = []
        for block in self.layers:
            if output_hidden_states:
                states.append(x)
            x = block(x, tables, seen, cache, **passed)
        x = self.norm(x)
        shown = (*states, x) if output_hidden_states else None
        # Positional: transformers 5.24 renamed the second field from past_key_values to cache.
        outputs = BaseModelOutputWithPast(x, cache, shown)
        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return outputs.to_tuple() if as_tuple else outputs

    def segments(self, position_ids: Tensor, cache: Cache | None) -> Tensor | None:
        """Return the number of each token's sequence ``[B, T]``, or None for one in every row.

        Raises:
            ValueError: there are several, and the encoding follows the length of each.
        """
        begun = cache is not None and cache.get_seq_length() > 0
        if begun or self.config._attn_implementation in SERVERS:
            return None
        begins = position_ids.diff(dim=1) != 1
        if not begins.any():
            return None
        if follows_length(self.spectra):
            raise ValueError(
                "position_ids: they begin anew within a row, and this model's encoding follows the "
                "length of each sequence; give every sequence a row of its own."
            )
        return F.pad(begins.cumsum(dim=1), (1, 0))

    def frequencies(self, device: torch.device) -> list[Tensor]:
        """Return the frequencies of every spectrum, float64, kept on the device."""
        if device not in self._frequencies:
            self._frequencies[device] = [
                torch.tensor(spectrum["inv_freq"], dtype=torch.float64, device=device)
                for spectrum in self.spectra
            ]
        return self._frequencies[device]


class UnropeForCausalLM(UnropePreTrainedModel, GenerationMixin):
    """Token ids to logits, and a loss where there are labels."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: UnropeConfig) -> None:
        super().__init__(config)
        self.model = UnropeModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits ``[B, T, vocab]`` and with ``labels`` the loss.

        ``logits_to_keep``: number of last positions to return, 0 for all, or their indices.
        ``num_items_in_batch``: what the sum of losses is divided by, in place of their number.

        Raises:
            TypeError: for an argument that this model does not know.
        """
        passed = check_arguments(self.config, kwargs)
        cache = one_cache(past_key_values, cache)
        if cache is None and self.makes_cache(use_cache):
            cache = DynamicCache(config=self.config)
        states = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **passed,
        )
        last = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states.last_hidden_state[:, last])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits,
                labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        outputs = CausalLMOutputWithPast(loss, logits, cache, states.hidden_states)
        as_tuple = not (self.config.return_dict if return_dict is None else return_dict)
        return outputs.to_tuple() if as_tuple else outputs
