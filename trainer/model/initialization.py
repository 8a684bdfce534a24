"""Initial weights of a model."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from trainer.model.config import ModelConfig


def initial_value(config: ModelConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """Return the whole initial tensor of one parameter on the CPU; see :class:`ModelConfig`.

    Each parameter has its own generator. Its values depend only on its name, its shape and the
    seed: not on other parameters, nor on the distribution over devices.
    """
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith(("bias", "sinks")) else torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
    return torch.empty(shape).normal_(std=_std(config, name, shape), generator=generator)


def _std(config: ModelConfig, name: str, shape: torch.Size) -> float:
    module = name.removesuffix(".weight")
    if config.initializer == "normal":
        std = config.initializer_range
    elif module == "embed_tokens" and not config.tie_word_embeddings:
        std = 1.0
    else:
        # Tied embeddings, too, get the head's scale: PaLM (Chowdhery et al. 2022, section 5) draws
        # them with 1 and divides the logits by sqrt(hidden_size), which Llama's shape does not
        # have. As inputs their scale matters less, since every block normalizes its input.
        std = shape[1] ** -0.5
        if module == "lm_head":
            std *= 0.1
    if config.initializer_by_depth and module.endswith(("o_proj", "down_proj")):
        std /= math.sqrt(2 * config.num_hidden_layers)
    return std
