"""Queries and keys of every layer from one forward pass, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trainer.model.decoder import Decoder
from trainer.positional.layout import LayerEncoding


@dataclass(frozen=True)
class Heads:
    """Queries ``[B, Hq, T, D]`` and keys ``[B, Hkv, T, D]`` of one layer, float32.

    ``q``, ``k``: before the encoding, after QK-norm where the layer has it; ``rotated_q``,
    ``rotated_k``: as they meet in the scores, temperature and gains included. ``encoding``: what
    happened between, in a model of ``training_length`` C. Query head h reads key-value head
    h // (Hq / Hkv); in a layer with a spectrum for every query head Hkv is Hq.
    """

    layer: int
    encoding: LayerEncoding
    q: Tensor
    k: Tensor
    rotated_q: Tensor
    rotated_k: Tensor
    training_length: int

    @property
    def queries_per_key(self) -> int:
        """Query heads that read one key-value head."""
        return self.q.shape[1] // self.k.shape[1]


@contextmanager
def observing(model: Decoder, on_layer: Callable[[Heads], None]) -> Iterator[None]:
    """Within it, every forward pass calls ``on_layer`` for each layer, before its attention.

    What ``on_layer`` does not keep is freed before the next layer. Blocks run uncompiled meanwhile,
    and nothing that was compiled is lost.
    """

    def observe(index: int, *tensors: Tensor) -> None:
        q, k, rotated_q, rotated_k = (x.detach().float() for x in tensors)
        C, encoding = model.layout.training_length, model.layout.layers[index]
        on_layer(Heads(index, encoding, q, k, rotated_q, rotated_k, C))

    blocks = [block.self_attn for block in model.layers]
    try:
        for index, attention in enumerate(blocks):
            attention.observe = partial(observe, index)
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for attention in blocks:
            attention.observe = None


@torch.no_grad()
def capture(model: Decoder, ids: Tensor, on_layer: Callable[[Heads], None]) -> Tensor:
    """Read ``ids`` ``[B, T]``, and return the normalised states ``[B, T, hidden_size]``."""
    with observing(model, on_layer):
        return model.hidden_states(ids.to(model.norm.weight.device))
