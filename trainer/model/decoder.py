"""A Llama-style decoder whose positions are data.

Module names are those of Hugging Face's Llama, so that a state dict differs by a prefix only. The
decoder knows no method: it holds a :class:`Layout`, computes each distinct spectrum's tables once a
forward pass and hands every block what its heads need, or nothing.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.attention import Attention, RMSNorm
from trainer.model.backends import BACKENDS, Mask, choose_backend
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.linear import Linear, product
from trainer.model.loss import linear_cross_entropy, token_losses
from trainer.model.ragged import ragged_head_groups
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
        last: int | None = None,
    ) -> Tensor:
        """See :meth:`Attention.forward`."""
        mixed = self.self_attn(self.input_layernorm(x), groups, mask, qk_norm, cache, last)
        x = (x if last is None else x[:, -last:]) + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids to hidden states, logits or a loss.

    ``layout`` is the positional encoding as it is now; assign another to change it (a drop, an
    extension method). ``config.vocab_size`` must be set. Weights are drawn from ``seed``, unless
    the decoder is made on torch's meta device.
    """

    def __init__(self, config: ModelConfig, layout: Layout, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("config.vocab_size must be known when a decoder is built")
        self.config = config
        self.layout = layout
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if not self.norm.weight.is_meta:
            self.reset_parameters(seed)

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

    @property
    def head(self) -> Tensor:
        """``[vocab, hidden_size]``, the embeddings where they are tied."""
        return (self.lm_head or self.embed_tokens).weight

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.initial_value(name, seed))

    def initial_value(self, name: str, seed: int) -> Tensor:
        """The whole initial tensor of one parameter on the CPU; see :class:`ModelConfig`.

        Each parameter has a generator of its own, so that its values depend on nothing but its
        name, its shape and the seed: not on other parameters, nor on how a run is spread.
        """
        shape = self.get_parameter(name).shape
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
        return torch.empty(shape).normal_(std=self._initial_std(name), generator=generator)

    def _initial_std(self, name: str) -> float:
        module = name.removesuffix(".weight")
        if self.config.initializer == "normal":
            std = self.config.initializer_range
        elif module == "embed_tokens":
            std = 1.0
        else:
            std = self.get_parameter(name).shape[1] ** -0.5
            if module == "lm_head":
                std *= 0.1
        if module.endswith(("o_proj", "down_proj")):
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        return std

    def use_backend(
        self, name: str, device: str, *, documents: bool = False, half: bool = True
    ) -> str:
        """Choose the attention backend for a device ("cpu", "cuda"); returns its name.

        ``documents``: whether batches will carry document masks; ``half``: whether attention will
        compute in 16 bits.

        Raises:
            UserError: the backend cannot run here.
        """
        masked = documents or any(
            layer.window or any(s.alibi for s in layer.spectra) for layer in self.layout.layers
        )
        chosen = choose_backend(name, device, masked, half)
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
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Normalised states before the head.

        Args:
            ids: ``[B, T]`` token ids.
            documents: ``[B, T]`` integers; attention stays within equal numbers.
            positions: ``[T]`` or ``[B, T]``; default 0 .. T - 1, or onwards from the cache.
            cache: earlier tokens, extended in place.
            length: tokens in the whole sequence, where this is a part of it and more will follow;
                positional encodings that depend on the length are those for it.
            last: how many of the last positions to return; None: all. The last block computes
                nothing but keys and values for the others.

        Returns:
            ``[B, T, hidden_size]``, or of the ``last`` positions only.
        """
        past = cache.length if cache else 0
        end = past + ids.shape[1]
        begins = None
        if positions is None:
            positions = torch.arange(past, end, device=ids.device)
        if cache and cache.begins:
            begins = torch.tensor(cache.begins, device=ids.device)
            lengths = [(length or end) - begin for begin in cache.begins]
            groups = ragged_head_groups(self.layout, positions - begins[:, None], lengths)
        else:
            groups = head_groups(self.layout, positions, length or end)
        x = self.embed_tokens(ids)
        for index, (block, encoding) in enumerate(
            zip(self.layers, self.layout.layers, strict=True)
        ):
            mask = Mask(
                encoding.window if encoding.window and encoding.window < end else None,
                documents,
                self._slopes(index, ids.device),
                begins,
            )
            layer_cache = cache.layers[index] if cache else None
            of_block = last if block is self.layers[-1] else None
            x = block(x, groups[index], mask, encoding.qk_norm, layer_cache, of_block)
        return self.norm(x)

    def forward(
        self,
        ids: Tensor,
        *,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Logits ``[B, T, vocab]``, or of the ``last`` positions only."""
        x = self.hidden_states(
            ids, documents=documents, positions=positions, cache=cache, length=length, last=last
        )
        return product(x, self.head)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        z_loss: float = 0.0,
        losses: Tensor | None = None,
    ) -> Tensor:
        """Weighted mean cross-entropy, nats per token; see :func:`linear_cross_entropy`."""
        x = self.hidden_states(ids, documents=documents)
        return linear_cross_entropy(x, self.head, targets, weights, z_loss=z_loss, losses=losses)

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of every token ``[B, T]``, without gradient."""
        with torch.no_grad():
            return token_losses(self.hidden_states(ids), self.head, targets)

    def _slopes(self, index: int, device: torch.device) -> Tensor | None:
        biased = tuple(spectrum.alibi for spectrum in self.layout.layers[index].spectra)
        if not any(biased):
            return None
        return _biased_slopes(self.config.num_attention_heads, biased, device)


@lru_cache
def _biased_slopes(heads: int, biased: tuple[bool, ...], device: torch.device) -> Tensor:
    """``[heads]``, 0 where the key-value head has no bias; kept, since copying to a GPU waits."""
    slopes = torch.tensor(alibi_slopes(heads), device=device)
    return slopes * torch.tensor(biased, device=device).repeat_interleave(heads // len(biased))
