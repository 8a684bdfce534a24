"""Queries and keys of every layer from one forward pass, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.model.language_model import LanguageModel
from trainer.positional.layout import LayerEncoding, Layout


@dataclass(frozen=True)
class Heads:
    """Queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, T, D]`` of one layer, float32.

    ``q``, ``k``: before the encoding, after QK-norm if the layer has it; ``rotated_q``,
    ``rotated_k``: as the scores use them, temperature and gains included. ``encoding``: the layer's
    encoding, in a model of ``training_length`` C. Query head h reads key-value head h // (Hq /
    Hkv); in a layer with a spectrum for every query head, Hkv equals Hq.

    A score is ``scaling`` q k (None: q k / sqrt(D)); with a ``softcap`` c (Gemma 2) it is c
    tanh(score / c). ``sinks`` ``[Hq]``: logits of learned sinks, which the softmax adds to the
    scores; None without them.
    """

    layer: int
    encoding: LayerEncoding
    q: Tensor
    k: Tensor
    rotated_q: Tensor
    rotated_k: Tensor
    training_length: int
    scaling: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of_layer(
        cls,
        layout: Layout,
        layer: int,
        *tensors: Tensor,
        sinks: Tensor | None = None,
        **scores: Any,
    ) -> Heads:
        """Return what the observer of a layer gets in a model of this layout."""
        q, k, rotated_q, rotated_k = (x.detach().float() for x in tensors)
        return cls(
            *(layer, layout.layers[layer], q, k, rotated_q, rotated_k, layout.training_length),
            sinks=None if sinks is None else sinks.detach().float(),
            **scores,
        )

    @property
    def scale(self) -> float:
        """Factor on the dot product of a query and a key."""
        return self.q.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    @property
    def queries_per_key(self) -> int:
        """Number of query heads that read one key-value head."""
        return self.q.shape[1] // self.k.shape[1]

    def capped(self, scores: Tensor) -> Tensor:
        """Bound scaled scores by the soft-cap, if there is one."""
        return scores if self.softcap is None else self.softcap * (scores / self.softcap).tanh()


@dataclass(frozen=True)
class NeedlePrompt:
    """Prompts ``ids`` ``[B, T]`` that state a fact at ``needle`` and end with a question of
    ``question`` tokens about it."""

    ids: Tensor
    needle: slice
    question: int = 1


@torch.no_grad()
def capture(model: LanguageModel, ids: Tensor, on_layer: Callable[[Heads], None]) -> Tensor:
    """Read ``ids`` ``[B, T]``, call ``on_layer`` for each layer before its attention, and return
    the normalised states ``[B, T, hidden_size]``.

    Tensors that ``on_layer`` does not keep are freed before the next layer.
    """

    def observe(layer: int, *tensors: Tensor, **scores: Any) -> None:
        on_layer(Heads.of_layer(model.layout, layer, *tensors, **scores))

    with model.observed(observe):
        return model.hidden_states(ids.to(model.device))
