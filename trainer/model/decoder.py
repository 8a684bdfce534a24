"""A Llama-style decoder whose positions are data.

Module names are those of Hugging Face's Llama, so that a state dict differs by a prefix only. The
decoder knows no method: it holds a :class:`Layout`, computes each distinct spectrum's tables once a
forward pass and hands every block what its heads need, or nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.attention import Attention, RMSNorm
from trainer.model.backends import BACKENDS, Mask, choose_backend
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.linear import Linear
from trainer.model.loss import linear_cross_entropy, token_losses
from trainer.positional.alibi import alibi_slopes
from trainer.positional.layout import Layout
from trainer.positional.rotation import HeadGroup, head_groups


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, T, hidden_size]`` to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        groups: tuple[HeadGroup, ...],
        mask: Mask,
        qk_norm: bool,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """See :meth:`Attention.forward`."""
        x = x + self.self_attn(self.input_layernorm(x), groups, mask, qk_norm, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids to hidden states, logits or a loss.

    ``layout`` is the positional encoding as it is now; assign another to change it (a drop, an
    extension method). ``config.vocab_size`` must be set.
    """

    def __init__(self, config: ModelConfig, layout: Layout) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("config.vocab_size must be known when a decoder is built")
        self.config = config
        self.layout = layout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    @property
    def layout(self) -> Layout:
        """The positional encoding as it is now.

        Raises:
            ValueError: on assignment of a layout for another shape, or with norms on that the model
                does not have.
        """
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        depth, heads = self.config.num_hidden_layers, self.config.num_key_value_heads
        if len(layout.layers) != depth:
            raise ValueError(f"the layout has {len(layout.layers)} layers, the model {depth}")
        for layer in layout.layers:
            if len(layer.spectra) != heads:
                raise ValueError(
                    f"the layout has {len(layer.spectra)} key-value heads, the model {heads}"
                )
            if layer.qk_norm and self.config.qk_norm.when == "never":
                raise ValueError("the layout turns QK-norm on, but the model has none")
        self._layout = layout

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights anew from torch's global generator; see :class:`ModelConfig`."""
        fan_in = self.config.initializer == "fan_in"
        residual = 1 / math.sqrt(2 * self.config.num_hidden_layers)
        for name, module in self.named_modules():
            if isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0 if fan_in else self.config.initializer_range)
            elif isinstance(module, nn.Linear):
                if module is self.lm_head and self.config.tie_word_embeddings:
                    continue
                std = module.in_features**-0.5 if fan_in else self.config.initializer_range
                if name.endswith(("o_proj", "down_proj")):
                    std *= residual
                if fan_in and module is self.lm_head:
                    std *= 0.1
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    module.bias.zero_()

    def use_backend(self, name: str, *, documents: bool = False, half: bool = True) -> str:
        """Choose the attention backend for the device the weights are on; returns its name.

        ``documents``: whether batches will carry document masks; ``half``: whether attention will
        compute in 16 bits.

        Raises:
            UserError: the backend cannot run here.
        """
        masked = documents or any(
            layer.window or any(s.alibi for s in layer.spectra) for layer in self.layout.layers
        )
        chosen = choose_backend(name, self.norm.weight.device.type, masked, half)
        for block in self.layers:
            block.self_attn.attend = BACKENDS[chosen]
        return chosen

    def hidden_states(
        self,
        ids: Tensor,
        *,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Normalised states before the head.

        Args:
            ids: ``[B, T]`` token ids.
            documents: ``[B, T]`` integers; attention stays within equal numbers.
            positions: ``[T]`` or ``[B, T]``; default 0 .. T - 1, or onwards from the cache.
            cache: earlier tokens, extended in place.

        Returns:
            ``[B, T, hidden_size]``.
        """
        past = cache.length if cache else 0
        length = past + ids.shape[1]
        if positions is None:
            positions = torch.arange(past, length, device=ids.device)
        groups = head_groups(self.layout, positions, length)
        x = self.embed_tokens(ids)
        for index, (block, encoding) in enumerate(
            zip(self.layers, self.layout.layers, strict=True)
        ):
            mask = Mask(
                encoding.window if encoding.window and encoding.window < length else None,
                documents,
                self._slopes(index, ids.device),
            )
            layer_cache = cache.layers[index] if cache else None
            x = block(x, groups[index], mask, encoding.qk_norm, layer_cache)
        return self.norm(x)

    def forward(
        self,
        ids: Tensor,
        *,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Logits ``[B, T, vocab]``, or of the ``last`` positions only."""
        x = self.hidden_states(ids, documents=documents, positions=positions, cache=cache)
        return self.lm_head(x if last is None else x[:, -last:])

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Weighted mean cross-entropy, nats per token; see :func:`linear_cross_entropy`."""
        x = self.hidden_states(ids, documents=documents)
        return linear_cross_entropy(x, self.lm_head.weight, targets, weights, z_loss=z_loss)

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of every token ``[B, T]``, without gradient."""
        with torch.no_grad():
            return token_losses(self.hidden_states(ids), self.lm_head.weight, targets)

    def _slopes(self, index: int, device: torch.device) -> Tensor | None:
        spectra = self.layout.layers[index].spectra
        if not any(spectrum.alibi for spectrum in spectra):
            return None
        heads = self.config.num_attention_heads
        slopes = torch.tensor(alibi_slopes(heads), device=device)
        biased = torch.tensor([spectrum.alibi for spectrum in spectra], device=device)
        return slopes * biased.repeat_interleave(heads // len(spectra))
