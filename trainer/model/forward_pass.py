"""Data of one forward pass: positions of its tokens, lengths, masks, tables and the cache.

The decoder builds a :class:`ForwardPass` once, and from it a :class:`LayerPass` for every block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.model.backends import Attend, Mask, prepared
from trainer.model.cache import KVCache, LayerCache
from trainer.model.config import ModelConfig
from trainer.positional.encodings import alibi_slopes
from trainer.positional.layout import Intervention, LayerEncoding, Layout
from trainer.positional.rotation import Groups, head_groups

if TYPE_CHECKING:
    from trainer.positional.intervention import Intervene


@dataclass(frozen=True)
class Encoding:
    """Tables of one layer's heads for tokens at ``positions``, ``[T]`` or ``[B, T]``."""

    groups: Groups
    positions: Tensor


@dataclass(frozen=True)
class LayerPass:
    """Data that a block gets in one forward pass, besides its input.

    ``queries``, ``keys``: encodings of the new tokens. If ``caches_plain_keys``, the cache stores
    unencoded keys, and ``keys`` encodes cached and new tokens together. ``qk_norm``: whether the
    query and key norms are enabled. ``copies_keys``: whether every query head has its own copy of
    its keys. ``last``: number of last positions to compute; None: all.
    """

    queries: Encoding
    keys: Encoding
    mask: Mask
    qk_norm: bool = False
    copies_keys: bool = False
    caches_plain_keys: bool = False
    cache: LayerCache | None = None
    intervention: Intervene | None = None
    last: int | None = None


@dataclass(frozen=True)
class ForwardPass:
    """Data of one forward pass over new tokens ``[B, T]`` after cached ones; see :meth:`over`.

    ``shape``: B, T. ``end``: tokens per row, cached ones included. ``positions``: ``[T]`` or
    ``[B, T]``, of the new tokens. ``lengths``: tokens of the whole sequence, for encodings that
    depend on it; one number per row if rows begin at different columns. ``mask``: the mask that
    all layers share, before their windows and biases. ``cache``, ``last``: as passed.
    """

    shape: tuple[int, int]
    end: int
    positions: Tensor
    lengths: int | list[int]
    mask: Mask
    cache: KVCache | None
    last: int | None

    @classmethod
    def over(
        cls,
        ids: Tensor,
        *,
        documents: Tensor | None = None,
        bounds: Tensor | None = None,
        longest: int | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> ForwardPass:
        """Describe a forward pass.

        Args:
            ids: ``[B, T]`` token ids.
            documents: ``[B, T]`` integers; attention stays within equal numbers.
            bounds: starts of the documents, see :func:`trainer.model.backends.bounds_of`. If needed
                and not given, computing them causes a host sync.
            longest: upper bound of the documents' lengths; None: T.
            positions: ``[T]`` or ``[B, T]``; default 0 .. T - 1, or onwards from the cache.
            cache: earlier tokens, extended in place.
            length: tokens of the whole sequence if more will follow; encodings that depend on the
                length use it.
            last: number of last positions to return; None: all. For other positions the last block
                computes only keys and values.
        """
        past = cache.length if cache else 0
        end = past + ids.shape[1]
        if positions is None:
            positions = torch.arange(past, end, device=ids.device)
        begins = None
        lengths: int | list[int] = length or end
        if cache and cache.begins:
            begins = torch.tensor(cache.begins, device=ids.device)
            lengths = [(length or end) - begin for begin in cache.begins]
            positions = positions - begins[:, None]
        mask = Mask(documents=documents, begins=begins, bounds=bounds, longest=longest)
        return cls((ids.shape[0], ids.shape[1]), end, positions, lengths, mask, cache, last)

    def layers(
        self, layout: Layout, config: ModelConfig, attends: Sequence[Attend], dtype: torch.dtype
    ) -> list[LayerPass]:
        """Return the data of every layer.

        ``attends``: their attention backends. ``dtype``: of the activations.
        """
        heads, cache = config.num_key_value_heads, self.cache
        copies = [len(layer.spectra) != heads for layer in layout.layers]
        plain = [
            cache is not None and (copies_keys or layer.frequencies_follow_length)
            for layer, copies_keys in zip(layout.layers, copies, strict=True)
        ]
        queries = self._encodings(layout, self.positions, dtype)
        all_keys = queries
        if cache is not None and cache.length and any(plain):
            # Some layers encode cached keys again in every forward pass.
            all_keys = self._encodings(layout, self._all_positions(), dtype)
        masks = self._masks(layout, config, attends)
        return [
            LayerPass(
                queries[index],
                all_keys[index] if plain[index] else queries[index],
                masks[index],
                layer.qk_norm,
                copies[index],
                plain[index],
                None if cache is None else cache.layers[index],
                None if layer.intervention is None else _intervene(layer.intervention),
                self.last if index == len(layout.layers) - 1 else None,
            )
            for index, layer in enumerate(layout.layers)
        ]

    def _encodings(self, layout: Layout, positions: Tensor, dtype: torch.dtype) -> list[Encoding]:
        groups = head_groups(layout, positions, self.lengths, dtype)
        return [Encoding(of_layer, positions) for of_layer in groups]

    def _all_positions(self) -> Tensor:
        """Return the positions of cached and new tokens, ``[end]`` or ``[B, end]``."""
        columns, begins = torch.arange(self.end, device=self.positions.device), self.mask.begins
        return columns if begins is None else columns - begins[:, None]

    def _masks(self, layout: Layout, config: ModelConfig, attends: Sequence[Attend]) -> list[Mask]:
        """Return the mask of every layer; equal ones share the backend's preparation."""
        device, (rows, tokens) = self.positions.device, self.shape
        queries = [tokens] * len(layout.layers)
        if self.last is not None:
            queries[-1] = min(self.last, tokens)
        distinct: dict[tuple[int | None, int, int], Mask] = {}
        masks = []
        for attend, layer, count in zip(attends, layout.layers, queries, strict=True):
            slope = bias_slopes(layer, config.num_attention_heads, device)
            window = layer.window if layer.window and layer.window < self.end else None
            key = window, id(slope), count
            if key not in distinct:
                mask = replace(self.mask, window=window, slopes=slope)
                distinct[key] = prepared(attend, mask, (rows, count), self.end, device)
            masks.append(distinct[key])
        return masks


def bias_slopes(layer: LayerEncoding, heads: int, device: torch.device) -> Tensor | None:
    """Return ALiBi's slopes ``[heads]``; None if no head of the layer has a bias."""
    biased = tuple(spectrum.alibi for spectrum in layer.spectra)
    return slopes_of(heads, biased, device) if any(biased) else None


@lru_cache
def slopes_of(heads: int, biased: tuple[bool, ...], device: torch.device) -> Tensor:
    """Return slopes ``[heads]``, 0 for key-value heads without bias; cached to avoid a sync."""
    slopes = torch.tensor(alibi_slopes(heads), device=device)
    return slopes * torch.tensor(biased, device=device).repeat_interleave(heads // len(biased))


def _intervene(intervention: Intervention) -> Intervene:
    from trainer.positional.intervention import Intervene  # slow import: the compiler

    return Intervene(intervention)
