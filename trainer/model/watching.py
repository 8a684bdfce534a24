"""Observation of a decoder's blocks; they run uncompiled meanwhile and stay compiled afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from trainer.model.block import Block


@contextmanager
def observed(blocks: Iterable[Block], on_layer: Callable[..., None]) -> Iterator[None]:
    """Call ``on_layer`` with each block's index, queries and keys before and after encoding."""
    layers = [block.self_attn for block in blocks]
    try:
        for index, attention in enumerate(layers):
            attention.observe = partial(on_layer, index)
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for attention in layers:
            attention.observe = None


@contextmanager
def feeding(blocks: Iterable[Block], on_input: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``on_input`` with each block's index and the input of its attention."""
    hooks = [
        block.input_layernorm.register_forward_hook(
            lambda _, __, out, index=index: on_input(index, out)
        )
        for index, block in enumerate(blocks)
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for hook in hooks:
            hook.remove()
