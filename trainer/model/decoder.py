"""A Llama-style decoder whose positions are data.

Module names are those of Hugging Face's Llama, so that a state dict differs by a prefix only. The
decoder knows no method: it holds a :class:`Layout`, computes each distinct spectrum's tables once a
forward pass and hands every block what its heads need, or nothing.
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
    """Token ids to hidden states, logits or a loss.

    ``layout`` is the positional encoding as it is now; assign another to change it (a drop, an
    extension method). ``config.vocab_size`` must be set. Weights are drawn from ``seed``, unless
    the decoder is made on torch's meta device.
    """

    compute_dtype: torch.dtype | None = None
    computes_on: str = "cpu"

    def __init__(self, config: ModelConfig, layout: Layout, seed: int = 0) -> None:
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("config.vocab_size must be known when a decoder is built")
        self.config = config
        words = torch.empty(config.vocab_size, config.hidden_size)  # drawn below, and not here too
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
        """What torch calls to put a module on a device or into another type."""
        super()._apply(*args, **kwargs)
        self.choose_products(self.norm.weight.device.type, self.compute_dtype)
        return self

    def choose_products(self, device: str, compute: torch.dtype | None = None) -> None:
        """Choose how matrices are multiplied.

        Args:
            device: "cpu" or "cuda", that of the weights unless they are offloaded.
            compute: the type of activations and products, the residual stream among them; None:
                that of the weights.
        """
        self.computes_on, self.compute_dtype = device, compute
        weights = self.norm.weight.dtype
        self._product = product_for(device, weights, compute or weights)
        for module in self.modules():
            if isinstance(module, Linear):
                module.product = self._product

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Within it, a CPU reads copies of the weights in the order of its kernels.

        Products of few rows are faster then. Weights must not change meanwhile.
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
        """Where the weights are."""
        return self.norm.weight.device

    @property
    def head(self) -> Tensor:
        """``[vocab, hidden_size]``, the embeddings where they are tied."""
        return (self.lm_head or self.embed_tokens).weight

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw all weights anew."""
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
        """Normalised states before the head.

        Args:
            ids: ``[B, T]`` token ids.
            documents: ``[B, T]`` integers; attention stays within equal numbers.
            bounds: where the documents begin, see :func:`trainer.model.masks.bounds_of`; found
                where it is needed and not given, which waits for the device.
            longest: no document has more tokens; None: than T.
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
        """Of every layer; those that have the same share what their backend makes of it."""
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
        """Of every layer, for tokens at ``positions``."""
        return [Encoding(x, positions) for x in head_groups(self.layout, positions, lengths)]

    def logits(self, states: Tensor) -> Tensor:
        """``[..., vocab]`` of normalised states ``[..., hidden_size]``."""
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
        """Weighted mean cross-entropy, nats per token; see :func:`linear_cross_entropy`, and for
        ``options`` :meth:`hidden_states`."""
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
