"""Our key-value cache behind the interface of transformers' cache."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from trainer.model.cache import KVCache, LayerCache


class _Layer(CacheLayerMixin):
    """All tokens of a layer, even with a sliding window: masks hide what the window excludes."""

    is_sliding = False

    def __init__(self, own: LayerCache) -> None:
        super().__init__()
        self.own = own
        self.keys, self.values, self.is_initialized = own.keys, own.values, True

    def lazy_initialization(self, *states: Tensor) -> None:
        """Do nothing: memory is allocated already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append; return all keys and values so far."""
        return self.own.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.own.length

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        """Return the number of keys after appending ``queries`` tokens, and the index of the first
        key."""
        new = queries.shape[0] if isinstance(queries, Tensor) else queries
        return self.own.length + new, 0

    def get_max_length(self) -> int:
        """Return None: transformers need not know the capacity."""
        return -1

    get_max_cache_shape = get_max_length


def cache_name(module: nn.Module) -> str:
    """Return the name of a model's or layer's cache argument.

    It is ``cache`` from transformers 5.24 on, ``past_key_values`` before.
    """
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def as_transformers_cache(cache: KVCache) -> Cache:
    """Return a view: what transformers appends goes to ``cache``."""
    return Cache(layers=[_Layer(layer) for layer in cache.layers])


def empty_cache(
    shapes: list[tuple[tuple[int, int], tuple[int, int]]],
    rows: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Allocate a cache for ``capacity`` tokens in each of ``rows``.

    ``shapes``: heads and channels of the keys and of the values of every layer, which differ in
    models that cache compressed ones.
    """

    def zeros(heads: int, channels: int) -> Tensor:
        return torch.zeros(rows, heads, capacity, channels, dtype=dtype, device=device)

    return KVCache([LayerCache(zeros(*keys), zeros(*values)) for keys, values in shapes])
