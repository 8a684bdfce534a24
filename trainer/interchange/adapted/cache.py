"""Our keys and values as transformers' cache, so that generation and evaluation need no other."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from trainer.model.cache import KVCache, LayerCache


class _Layer(CacheLayerMixin):
    """All tokens of a layer, windows or not: masks hide what a window does not see."""

    is_sliding = False

    def __init__(self, own: LayerCache) -> None:
        super().__init__()
        self.own = own
        self.keys, self.values, self.is_initialized = own.keys, own.values, True

    def lazy_initialization(self, *states: Tensor) -> None:
        """Nothing: there is room already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and return everything so far."""
        return self.own.append(key_states, value_states)

    def get_seq_length(self) -> int:
        """Tokens so far."""
        return self.own.length

    def get_mask_sizes(self, queries: int | Tensor) -> tuple[int, int]:
        """Keys once so many queries are appended, and the first of them."""
        new = queries.shape[0] if isinstance(queries, Tensor) else queries
        return self.own.length + new, 0

    def get_max_length(self) -> int:
        """None is known."""
        return -1

    get_max_cache_shape = get_max_length


def cache_name(module: nn.Module) -> str:
    """Return what a model or layer calls its key-value cache: ``cache`` from transformers 5.24 on,
    ``past_key_values`` before."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def as_transformers_cache(cache: KVCache) -> Cache:
    """A view: what transformers appends is in ``cache``."""
    return Cache(layers=[_Layer(layer) for layer in cache.layers])


def empty_cache(
    shapes: list[tuple[tuple[int, int], tuple[int, int]]],
    rows: int,
    capacity: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """Room for ``capacity`` tokens in each of ``rows``; ``shapes``: heads and channels of the keys
    and of the values of every layer, which differ where a model keeps compressed ones."""

    def zeros(heads: int, channels: int) -> Tensor:
        return torch.zeros(rows, heads, capacity, channels, dtype=dtype, device=device)

    return KVCache([LayerCache(zeros(*keys), zeros(*values)) for keys, values in shapes])
