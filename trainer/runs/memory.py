"""Estimates of needed and free memory, checked before an analysis starts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainer.model.config import ModelConfig


def needed_memory(config: ModelConfig, tokens: int, models: int = 1) -> int:
    """Bytes, roughly: float32 weights, the activations of one layer, and queries and keys of one
    layer before and after their encoding, with the copies in float64 that sums are made of."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_size
    q, k = config.num_attention_heads * d, config.num_key_value_heads * d
    layer = h * (2 * q + 2 * k) + 3 * h * i
    embeddings = config.vocab_size * h * (1 if config.tie_word_embeddings else 2)
    weights = 4 * (config.num_hidden_layers * layer + embeddings)
    a_token = 4 * (6 * h + 3 * i) + 56 * q + 32 * k
    return models * weights + tokens * a_token


def free_memory(device: str) -> int:
    """Bytes that can be had without swapping."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = dict(line.split(":", 1) for line in lines)
        return 1024 * int(values["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
