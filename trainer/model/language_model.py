"""Interface of a model for analyses, evaluations and generation, whoever implements it."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.model.cache import KVCache
from trainer.model.config import ModelConfig
from trainer.model.loss import chunk_size
from trainer.model.threads import side_by_side
from trainer.positional.layout import Layout

OnLayer = Callable[..., None]
"""Receives the index of a layer and its queries and keys before and after their encoding,
``[B, H, T, D]`` each; models of transformers also give ``scaling``, ``softcap`` and ``sinks``."""

IN_CACHE = 2**18
"""Elements of a layer's input that fit in a core's cache while the layer uses them."""


class LanguageModel(nn.Module, ABC):
    """Causal language model whose queries and keys can be observed.

    ``config``: its shape. ``layout``: its present positional encoding; assign another one to change
    it. ``attentions``: the attention module of every layer.
    """

    config: ModelConfig
    layout: Layout
    attentions: Sequence[nn.Module]
    prefill_chunk: int | None = None
    """Tokens that :meth:`forward` and :meth:`token_losses` read in one pass; None: all.

    A longer sequence is read in chunks, each with the keys and values of the chunks before it.
    Activations then take memory for one chunk. Chunks have no backward pass.
    """

    context: int | None = None
    """Number of last tokens of a sequence that a task lets it read; None: all."""

    passes_are_independent: bool = False
    """Whether several threads may call :meth:`hidden_states` and :meth:`logits` at a time."""

    end_tokens: frozenset[int] = frozenset()
    """Ids of the tokens with which it ends an answer; empty: their names tell."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; known for every model that is built."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of its weights."""

    @abstractmethod
    def hidden_states(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Compute states ``[B, T, hidden_size]`` before the head, for ids ``[B, T]``.

        ``cache``: earlier tokens, extended in place. ``length``: tokens of the whole sequence if
        more will follow; encodings that depend on the length use it. ``last``: number of last
        positions to return; None: all.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Compute ``[..., vocab]`` from states ``[..., hidden_size]``."""

    @abstractmethod
    def empty_cache(self, rows: int, capacity: int) -> KVCache:
        """Allocate a cache for ``capacity`` tokens in each of ``rows``, in the compute dtype."""

    @abstractmethod
    def observed(self, on_layer: OnLayer) -> AbstractContextManager[None]:
        """Call ``on_layer`` before the attention of each layer in passes within the block."""

    @contextmanager
    def before_attention(self, hook: Callable[..., Any]) -> Iterator[None]:
        """Call ``hook`` with the index, module, arguments and options of each attention within the
        block, before it runs; it may return other arguments and options."""
        hooks = [
            module.register_forward_pre_hook(partial(hook, index), with_kwargs=True)
            for index, module in enumerate(self.attentions)
        ]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    @contextmanager
    def using(self, layout: Layout, context: int | None = None) -> Iterator[None]:
        """Use ``layout`` and ``context`` within the block, then restore the previous ones."""
        previous = self.layout, self.context
        try:
            self.layout, self.context = layout, context
            yield
        finally:
            self.layout, self.context = previous

    def in_passes(self, read: Callable[[slice], Tensor], ids: Tensor, batch_tokens: int) -> Tensor:
        """Concatenate ``read(part)`` of all parts of the rows of ids ``[B, T]``.

        ``read`` makes a forward pass of at least one row, and otherwise at most ``batch_tokens``
        tokens. On a CPU it must also fit in a core's cache, since a larger one is bound by memory
        bandwidth; passes that fit are computed side by side.
        """
        rows, length = ids.shape
        in_cache = IN_CACHE // self.config.hidden_size
        if self.device.type == "cpu":
            batch_tokens = min(batch_tokens, in_cache)
        size = max(1, batch_tokens // length)
        workers = 1
        if self.device.type == "cpu" and self.passes_are_independent and length <= in_cache:
            passes = math.ceil(rows / size)
            workers = min(torch.get_num_threads(), passes)
            size = math.ceil(rows / (workers * math.ceil(passes / workers)))
        parts = [slice(first, first + size) for first in range(0, rows, size)]
        return torch.cat(side_by_side(read, parts, workers))

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Return logits ``[B, T, vocab]``, or of the ``last`` positions only; see
        :meth:`hidden_states`."""
        return self.logits(self.prefilled(ids, **options))

    @torch.no_grad()
    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Return each target's cross-entropy ``[...]``, float32 nats, without gradient.

        The targets follow the states ``[..., hidden_size]``. Logits are computed in chunks.
        """
        size = chunk_size(self.vocab_size, states.device)
        chunks = zip(states.flatten(0, -2).split(size), targets.flatten().split(size), strict=True)
        losses = []
        for x, y in chunks:
            losses.append(F.cross_entropy(self.logits(x).float(), y, reduction="none"))
        return torch.cat(losses).view(targets.shape)

    @torch.no_grad()
    def token_losses(self, ids: Tensor, targets: Tensor, **options: Any) -> Tensor:
        """Return each token's cross-entropy ``[B, T]``, or of the ``last`` targets only, without
        gradient; see :meth:`forward`."""
        targets = targets[:, -(options.get("last") or 0) :]
        losses = []
        # Chunk by chunk: storing all states would need memory again.
        for states in self._by_chunk(ids, **options):
            chunk, targets = targets.tensor_split([states.shape[1]], dim=1)
            losses.append(self.losses(states, chunk))
        return torch.cat(losses, dim=1)

    def prefilled(self, ids: Tensor, **options: Any) -> Tensor:
        """Return :meth:`hidden_states`, read a ``prefill_chunk`` at a time."""
        states = list(self._by_chunk(ids, **options))
        return states[0] if len(states) == 1 else torch.cat(states, dim=1)

    def _by_chunk(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
        **options: Any,
    ) -> Iterator[Tensor]:
        """Yield the states of the ``last`` positions, one chunk after the other."""
        if self.prefill_chunk is None or ids.shape[1] <= self.prefill_chunk:
            yield self.hidden_states(ids, cache=cache, length=length, last=last, **options)
            return
        tokens = ids.shape[1]
        unwanted = 0 if last is None else tokens - last
        cache = self.empty_cache(*ids.shape) if cache is None else cache
        length = length or cache.length + tokens
        for chunk in ids.split(self.prefill_chunk, dim=1):
            wanted = chunk.shape[1] - max(0, unwanted)
            unwanted -= chunk.shape[1]
            # The last block needs at least one position, because it stores keys and values.
            computed = max(1, wanted)
            states = self.hidden_states(chunk, cache=cache, length=length, last=computed, **options)
            if wanted > 0:
                yield states
