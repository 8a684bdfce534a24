"""Llama-style decoder whose positional encoding is data.

Modules are named as in Hugging Face's Llama, so that state dicts differ only by a prefix. The
decoder knows no encoding method. It holds a :class:`Layout`, computes the tables of each distinct
spectrum once per forward pass, and gives each block a :class:`LayerPass`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.attention import Attention, LayerPass, Linear, RMSNorm
from trainer.model.backends import BACKENDS, CAUSAL, Mask, Use, choose_backend
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.model.language_model import LanguageModel, OnLayer
from trainer.model.loss import linear_cross_entropy
from trainer.model.plan import columns_of, layer_passes
from trainer.positional.layout import Layout


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``[B, T, hidden_size]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, layer_pass: LayerPass) -> Tensor:
        """Transform ``[B, T, hidden_size]``; return the ``last`` positions if the pass says so."""
        mixed = self.self_attn(self.input_layernorm(x), layer_pass)
        if layer_pass.last is not None:
            x = x[:, -layer_pass.last :]
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(LanguageModel):
    """Decoder from token ids to hidden states, logits or a loss.

    ``layout`` is the present positional encoding; assign another one to change it.
    ``config.vocab_size`` must be set. Weights are drawn from ``seed``, but not on the meta device.
    """

    passes_are_independent = True
    compute_dtype: torch.dtype | None = None
    """Dtype of activations and products, residual stream included; None: the weights' dtype."""

    def __init__(self, config: ModelConfig, layout: Layout, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("config.vocab_size must be known when a decoder is built")
        self.config = config
        words = torch.empty(config.vocab_size, config.hidden_size)  # drawn below, not twice
        self.embed_tokens = nn.Embedding.from_pretrained(words, freeze=False)
        blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.layers = cast("list[Block]", blocks)
        self.attentions: list[Attention] = [block.self_attn for block in self.layers]
        self.layout = layout
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if not self.norm.weight.is_meta:
            self.fill(lambda name, empty: initial_value(config, name, empty.shape, seed))

    @property
    def layout(self) -> Layout:
        """Present positional encoding.

        Raises:
            ValueError: on assignment of a layout with norms that the model does not have.
        """
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        if self.config.qk_norm.when == "never" and any(layer.qk_norm for layer in layout.layers):
            raise ValueError("the layout turns QK-norm on, but the model has none")
        self._layout = layout

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    @property
    def head(self) -> Tensor:
        """Output weights ``[vocab, hidden_size]``; the embeddings if they are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @torch.no_grad()
    def fill(self, value_of: Callable[[str, Tensor], Tensor]) -> None:
        """Set every parameter to ``value_of(name, parameter)``."""
        for name, parameter in self.named_parameters():
            parameter.copy_(value_of(name, parameter))

    def use_backend(
        self,
        name: str,
        device: str,
        *,
        documents: bool = False,
        half: bool = True,
        length: int | None = None,
    ) -> str:
        """Set the backend that :func:`choose_backend` takes for a :class:`Use`; return its name."""
        windows = any(layer.window for layer in self.layout.layers)
        biased = any(spectrum.alibi for spectrum in self.layout.spectra)
        masked = documents or windows or biased
        use = Use(torch.device(device).type, masked, half, length, self.config.head_size)
        name = choose_backend(name, use)
        attend = BACKENDS[name].attend
        for attention in self.attentions:
            if attention.attend is not attend:  # compiled guards stay quick
                attention.attend = attend
        return name

    def hidden_states(
        self,
        ids: Tensor,
        *,
        mask: Mask = CAUSAL,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Compute normalized states ``[B, T, hidden_size]`` before the head, for ids ``[B, T]``.

        ``mask``: restrictions of all layers; its ``documents`` may be longer than what is read so
        far. Without its ``bounds``, some backends cause a host sync. See :class:`LanguageModel` for
        the other arguments. Before ``last``, the last block computes only keys and values.
        """
        x = self.embed_tokens(ids)
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        columns = columns_of(ids, len(self.layers), cache, length, last)
        attends = [attention.attend for attention in self.attentions]
        passes = layer_passes(self.config, self.layout, columns, mask, attends, x)
        for block, layer_pass in zip(self.layers, passes, strict=True):
            x = block(x, layer_pass)
        return self.norm(x)

    def logits(self, states: Tensor) -> Tensor:
        """Compute ``[..., vocab]`` from normalized states ``[..., hidden_size]``."""
        return F.linear(states, self.head.to(states.dtype))

    def loss(
        self, ids: Tensor, targets: Tensor, weights: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return the weighted mean cross-entropy in nats per token.

        See :func:`linear_cross_entropy`, and :meth:`hidden_states` for ``options``.
        """
        x = self.hidden_states(ids, **options)
        return linear_cross_entropy(x, self.head, targets, weights)

    def empty_cache(self, rows: int, capacity: int) -> KVCache:
        """See :class:`LanguageModel`."""
        shape = rows, self.config.num_key_value_heads, capacity, self.config.head_size
        # Zeros: in columns before a row begins, a weight of 0 times NaN would be NaN.
        dtype = self.compute_dtype or self.norm.weight.dtype
        zeros = partial(torch.zeros, shape, dtype=dtype, device=self.device)
        return KVCache([LayerCache(zeros(), zeros()) for _ in self.layers])

    @contextmanager
    def observed(self, on_layer: OnLayer) -> Iterator[None]:
        """Call ``on_layer`` for each layer, see :class:`LanguageModel`; blocks run uncompiled."""
        try:
            for index, attention in enumerate(self.attentions):
                attention.observe = partial(on_layer, index)
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for attention in self.attentions:
                attention.observe = None


def initial_value(config: ModelConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the whole initial tensor of one parameter on the CPU; see :class:`ModelConfig`.

    Each parameter has its own generator. Its values depend only on its name, its shape and the
    seed: not on other parameters, nor on the distribution over devices.
    """
    if len(shape) == 1:
        value = 0.0 if name.endswith("bias") else 1.0
        return torch.full(shape, value, device="cpu")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    whole = torch.empty(shape, device="cpu")  # as the generator, whatever the default device
    return whole.normal_(std=_initial_std(config, name, shape), generator=generator)


def _initial_std(config: ModelConfig, name: str, shape: torch.Size) -> float:
    """Return the standard deviation of the initial values of a matrix."""
    module = name.removesuffix(".weight")
    if config.initializer == "normal":
        std = 0.02
    elif module == "embed_tokens" and not config.tie_word_embeddings:
        std = 1.0
    else:
        # Tied embeddings, too, get the head's scale: PaLM (Chowdhery et al. 2022, section 5) draws
        # them with 1 and divides the logits by sqrt(hidden_size), which Llama's shape does not
        # have. As inputs their scale matters less, since every block normalizes its input.
        std = shape[1] ** -0.5
        if module == "lm_head":
            std *= 0.1
    if config.initializer_by_depth and module.endswith(("o_proj", "down_proj")):
        std /= math.sqrt(2 * config.num_hidden_layers)
    return std
