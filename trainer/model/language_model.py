"""What analyses, evaluations and generation ask of a model, whoever computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trainer.model.backend_choice import Choice
from trainer.model.cache import KVCache
from trainer.model.config import ModelConfig
from trainer.positional.layout import Layout

OnLayer = Callable[..., None]
"""Told the index of a layer and its queries and keys before and after their encoding,
``[B, H, T, D]`` each; by name ``scaling``, ``softcap`` and ``sinks``, where the softmax has others
than usual."""


class LanguageModel(nn.Module, ABC):
    """A causal language model whose queries and keys can be watched.

    ``config``: its shape. ``layout``: its positional encoding as it is now; assign another to
    change it.
    """

    config: ModelConfig
    layout: Layout
    prefill_chunk: int | None = None
    """Tokens of a longer sequence that :meth:`forward` and :meth:`token_losses` read at once, with
    the keys and values of those before; None: all. Activations then take memory for a chunk only.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which every model that is built knows."""
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where its weights are."""

    @property
    def computes_on(self) -> str:
        """The type of device it computes on, "cpu" or "cuda"."""
        return self.device.type

    @abstractmethod
    def use_backend(
        self,
        name: str,
        device: str,
        *,
        documents: bool = False,
        half: bool = True,
        many_lengths: bool = False,
    ) -> Choice:
        """Choose how attention is computed on a device ("cpu", "cuda")."""

    @abstractmethod
    def hidden_states(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """States ``[B, T, hidden_size]`` before the head, of ids ``[B, T]``.

        ``cache``: earlier tokens, extended in place. ``last``: how many of the last positions to
        return (None: all). ``length``: tokens in the whole sequence, where more will follow.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """``[..., vocab]`` of states ``[..., hidden_size]``."""

    @abstractmethod
    def losses(self, states: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy ``[...]`` of every target after states ``[..., hidden_size]``, float32
        nats, without gradient."""

    @abstractmethod
    def empty_cache(self, rows: int, capacity: int) -> KVCache:
        """Room for ``capacity`` tokens in each of ``rows``, of the type computed in."""

    @abstractmethod
    def observed(self, on_layer: OnLayer) -> AbstractContextManager[None]:
        """Within it, every forward pass calls ``on_layer`` for each layer, before its attention."""

    @abstractmethod
    def feeding(self, on_input: Callable[[int, Tensor], None]) -> AbstractContextManager[None]:
        """Within it, every forward pass calls ``on_input`` with the index of each layer and the
        states ``[B, T, hidden_size]`` that are fed into its attention."""

    def packed(self) -> AbstractContextManager[None]:
        """Within it weights do not change, and many small passes follow."""
        return nullcontext()

    @contextmanager
    def using(self, layout: Layout) -> Iterator[None]:
        """A context at whose end the model has its own layout again; ``layout`` comes first."""
        own = self.layout
        try:
            self.layout = layout
            yield
        finally:
            self.layout = own

    def forward(self, ids: Tensor, **options: Any) -> Tensor:
        """Logits ``[B, T, vocab]``, or of the ``last`` positions only; see
        :meth:`hidden_states`."""
        read = self.prefilled if self._is_long(ids) else self.hidden_states
        return self.logits(read(ids, **options))

    def token_losses(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of every token ``[B, T]``, without gradient."""
        with torch.no_grad():
            if not self._is_long(ids):
                return self.losses(self.hidden_states(ids), targets)
            # A chunk of states at a time, since those of all tokens would take memory again.
            begin, losses = 0, []
            for states in self._by_chunk(ids, self.empty_cache(*ids.shape), ids.shape[1], None):
                end = begin + states.shape[1]
                losses.append(self.losses(states, targets[:, begin:end]))
                begin = end
            return torch.cat(losses, dim=1)

    def prefilled(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """Return :meth:`hidden_states`, read a ``prefill_chunk`` at a time."""
        if not self._is_long(ids):
            return self.hidden_states(ids, cache=cache, length=length, last=last)
        cache = self.empty_cache(*ids.shape) if cache is None else cache
        length = length or cache.length + ids.shape[1]
        return torch.cat(list(self._by_chunk(ids, cache, length, last)), dim=1)

    def _is_long(self, ids: Tensor) -> bool:
        return self.prefill_chunk is not None and ids.shape[1] > self.prefill_chunk

    def _by_chunk(
        self, ids: Tensor, cache: KVCache, length: int, last: int | None
    ) -> Iterator[Tensor]:
        """Yield the states of a chunk after the other, those of the ``last`` positions only."""
        assert self.prefill_chunk is not None
        begin = 0
        for chunk in ids.split(self.prefill_chunk, dim=1):
            size, begin = chunk.shape[1], begin + chunk.shape[1]
            wanted = size if last is None else size - max(0, ids.shape[1] - last - begin + size)
            # One position at least goes through the last block, whose keys and values are kept.
            states = self.hidden_states(chunk, cache=cache, length=length, last=max(1, wanted))
            if wanted > 0:
                yield states
