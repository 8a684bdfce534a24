"""Llama-style decoder whose positional encoding is data.

Module names are those of Hugging Face's Llama, so that state dicts differ only by a prefix. The
decoder knows no encoding method. It holds a :class:`Layout`, computes the tables of each distinct
spectrum once per forward pass, and passes each block the tables of its heads, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.attention import Encoding, RMSNorm, bias_slopes
from trainer.model.backend_choice import Choice, Needs, choose_backend
from trainer.model.backends import BACKENDS, prepared
from trainer.model.block import Block, Blocks
from trainer.model.cache import KVCache
from trainer.model.config import ModelConfig
from trainer.model.initialization import initial_value
from trainer.model.language_model import LanguageModel, OnLayer
from trainer.model.linear import Linear, packed_product, product_for
from trainer.model.loss import linear_cross_entropy, token_losses
from trainer.model.masks import Mask
from trainer.model.softmax import capped
from trainer.model.watching import feeding, observed
from trainer.positional.layout import Layout
from trainer.positional.rotation import head_groups


class Decoder(LanguageModel):
    """Decoder from token ids to hidden states, logits or a loss.

    ``layout`` is the present positional encoding; assign another one to change it (a drop, an
    extension method). ``config.vocab_size`` must be set. Weights are drawn from ``seed``, unless
    the decoder is created on torch's meta device.
    """

    compute_dtype: torch.dtype | None = None
    computes_on: str = "cpu"

    def __init__(self, config: ModelConfig, layout: Layout, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("config.vocab_size must be known when a decoder is built")
        self.config = config
        words = torch.empty(config.vocab_size, config.hidden_size)  # drawn below, not twice
        self.embed_tokens = nn.Embedding.from_pretrained(words, freeze=False)
        self.layers = Blocks(Block(config) for _ in range(config.num_hidden_layers))
        self.layout = layout
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.choose_products(self.norm.weight.device.type)
        if not self.norm.weight.is_meta:
            self.reset_parameters(seed)

    def _apply(self, *args: Any, **kwargs: Any) -> Decoder:
        """Apply ``function`` to all tensors, as torch does to change device or dtype."""
        super()._apply(*args, **kwargs)
        self.choose_products(self.norm.weight.device.type, self.compute_dtype)
        return self

    def choose_products(self, device: str, compute: torch.dtype | None = None) -> None:
        """Choose how matrices are multiplied.

        Args:
            device: "cpu" or "cuda"; that of the weights unless they are offloaded.
            compute: dtype of activations and products, including the residual stream; None: the
                dtype of the weights.
        """
        self.computes_on, self.compute_dtype = device, compute
        weights = self.norm.weight.dtype
        self._product = product_for(device, weights, compute or weights)
        for module in self.modules():
            if isinstance(module, Linear):
                module.product = self._product

    @contextmanager
    def packed(self) -> Iterator[None]:
        """On a CPU, use copies of the weights in the kernels' memory order within the block.

        Products with few rows are faster then. Weights must not change meanwhile.
        """
        linears = [module for module in self.layers.modules() if isinstance(module, Linear)]
        usual, compute = self._product, self.compute_dtype or self.norm.weight.dtype
        try:
            for linear in linears:
                linear.product = packed_product(linear.weight, compute)
            self._product = packed_product(self.head, compute)
            yield
        finally:
            for linear in linears:
                linear.product = usual
            self._product = usual

    @property
    def layout(self) -> Layout:
        """Present positional encoding.

        Raises:
            ValueError: on assignment of a layout for another shape, or with norms enabled that the
                model does not have.
        """
        return self._layout

    @layout.setter
    def layout(self, layout: Layout) -> None:
        depth, heads = self.config.num_hidden_layers, self.config.num_key_value_heads
        if len(layout.layers) != depth:
            raise ValueError(f"the layout has {len(layout.layers)} layers, the model {depth}")
        for layer in layout.layers:
            if len(layer.spectra) not in (heads, self.config.num_attention_heads):
                raise ValueError(
                    f"the layout has {len(layer.spectra)} key-value heads, the model {heads}"
                )
            if layer.qk_norm and self.config.qk_norm.when == "never":
                raise ValueError("the layout turns QK-norm on, but the model has none")
        self._layout = layout
        for block, layer in zip(self.layers, layout.layers, strict=True):
            block.self_attn.intervene_with(layer.intervention)
            block.self_attn.expands = len(layer.spectra) != heads
        self._keeps_plain_keys = [
            layer.frequencies_follow_length or len(layer.spectra) != heads
            for layer in layout.layers
        ]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    @property
    def head(self) -> Tensor:
        """Output weights ``[vocab, hidden_size]``; the embeddings if they are tied."""
        return (self.lm_head or self.embed_tokens).weight

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights again."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(self.config, name, parameter.shape, seed))

    def use_backend(
        self,
        name: str,
        device: str,
        *,
        documents: bool = False,
        half: bool = True,
        length: int | None = None,
    ) -> Choice:
        """Choose the attention backend for a device ("cpu", "cuda"); see :class:`Needs`.

        Raises:
            UserError: the backend cannot run here.
        """
        layers = self.layout.layers
        windows = any(layer.window for layer in layers)
        biased = any(spectrum.alibi for layer in layers for spectrum in layer.spectra)
        size = self.config.head_size
        needs = Needs(documents, windows, biased, half, length, size, self.config.softmax)
        choice = choose_backend(name, device, needs)
        for block in self.layers:
            block.self_attn.attend = BACKENDS[choice.name]
        return choice

    def hidden_states(
        self,
        ids: Tensor,
        *,
        documents: Tensor | None = None,
        bounds: Tensor | None = None,
        longest: int | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Compute normalized states before the head.

        Args:
            ids: ``[B, T]`` token ids.
            documents: ``[B, T]`` integers; attention stays within equal numbers.
            bounds: starts of the documents, see :func:`trainer.model.masks.bounds_of`. If needed
                and not given, computing them causes a host sync.
            longest: upper bound of the documents' lengths; None: T.
            positions: ``[T]`` or ``[B, T]``; default 0 .. T - 1, or onwards from the cache.
            cache: earlier tokens, extended in place.
            length: tokens of the whole sequence if more will follow; encodings that depend on the
                length use it.
            last: number of last positions to return; None: all. For other positions the last block
                computes only keys and values.

        Returns:
            ``[B, T, hidden_size]``, or the ``last`` positions only.
        """
        past = cache.length if cache else 0
        end, device = past + ids.shape[1], ids.device
        if positions is None:
            positions = torch.arange(past, end, device=device)
        lengths: int | list[int] = length or end
        begins = None
        if cache and cache.begins:
            begins = torch.tensor(cache.begins, device=device)
            lengths = [(length or end) - begin for begin in cache.begins]
            positions = positions - begins[:, None]
        layers = self.layout.layers
        encodings = self._encodings(positions, lengths)
        of_all_keys: list[Encoding | None] = [None] * len(layers)
        if cache and any(self._keeps_plain_keys):
            columns = torch.arange(end, device=device)
            places = columns if begins is None else columns - begins[:, None]
            of_all = self._encodings(places, lengths) if past else encodings
            of_all_keys = [
                encoding if plain else None
                for encoding, plain in zip(of_all, self._keeps_plain_keys, strict=True)
            ]
        common = Mask(documents=documents, begins=begins, bounds=bounds, longest=longest)
        masks = self._masks(common, (ids.shape[0], ids.shape[1]), end, device)
        x = self.embed_tokens(ids)
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        for index, (block, layer) in enumerate(zip(self.layers, layers, strict=True)):
            x = block(
                x,
                encodings[index],
                masks[index],
                layer.qk_norm,
                cache.layers[index] if cache else None,
                of_all_keys[index],
                last if block is self.layers[-1] else None,
            )
        return self.norm(x)

    def _masks(
        self, common: Mask, shape: tuple[int, int], keys: int, device: torch.device
    ) -> list[Mask]:
        """Return the mask of every layer; equal ones share the backend's preparation."""
        slopes = bias_slopes(self.layout, self.config.num_attention_heads, device)
        found: dict[tuple[int | None, int], Mask] = {}
        masks = []
        for block, layer, slope in zip(self.layers, self.layout.layers, slopes, strict=True):
            window = layer.window if layer.window and layer.window < keys else None
            key = window, id(slope)
            if key not in found:
                own = replace(common, window=window, slopes=slope)
                found[key] = prepared(block.self_attn.attend, own, shape, keys, device)
            masks.append(found[key])
        return masks

    def _encodings(self, positions: Tensor, lengths: int | list[int]) -> list[Encoding]:
        """Return the encoding of every layer for tokens at ``positions``."""
        return [Encoding(x, positions) for x in head_groups(self.layout, positions, lengths)]

    def logits(self, states: Tensor) -> Tensor:
        """Compute ``[..., vocab]`` from normalized states ``[..., hidden_size]``."""
        return capped(self._product(states, self.head, None), self.config.softmax.final_softcap)

    def loss(
        self,
        ids: Tensor,
        targets: Tensor,
        weights: Tensor | None = None,
        *,
        z_loss: float = 0.0,
        losses: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the weighted mean cross-entropy in nats per token.

        See :func:`linear_cross_entropy`, and :meth:`hidden_states` for ``options``.
        """
        x, softcap = self.hidden_states(ids, **options), self.config.softmax.final_softcap
        more: dict[str, Any] = {"softcap": softcap, "product": self._product}
        return linear_cross_entropy(
            x, self.head, targets, weights, z_loss=z_loss, losses=losses, **more
        )

    @torch.no_grad()
    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """See :class:`LanguageModel`."""
        softcap = self.config.softmax.final_softcap
        return token_losses(states, self.head, targets, self._product, softcap)

    def empty_cache(self, rows: int, capacity: int) -> KVCache:
        """See :class:`LanguageModel`."""
        weight = self.embed_tokens.weight
        dtype = self.compute_dtype or weight.dtype
        return KVCache.empty(self.config, rows, capacity, dtype, weight.device)

    def observed(self, on_layer: OnLayer) -> AbstractContextManager[None]:
        """See :class:`LanguageModel`."""
        return observed(self.layers, on_layer)

    def feeding(self, on_input: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """See :class:`LanguageModel`."""
        return feeding(self.layers, on_input)
