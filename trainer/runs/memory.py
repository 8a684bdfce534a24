"""Estimates of needed and free memory, checked before anything heavy starts."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from trainer.common.errors import Problem
from trainer.model.config import ModelConfig
from trainer.report.results import PERPLEXITY
from trainer.runs.config import RunConfig
from trainer.runs.ranks import device_type

GIB = 1 << 30


def weights_of(config: ModelConfig) -> int:
    """Weights of the matrices; ``vocab_size`` must be set."""
    assert config.vocab_size is not None
    outside = config.vocab_size * config.hidden_size
    return config.block_weights + outside * (1 if config.tie_word_embeddings else 2)


def needed_memory(config: ModelConfig, tokens: int, models: int = 1) -> int:
    """Bytes, roughly: float32 weights, the activations of one layer, and queries and keys of one
    layer before and after their encoding, with the copies in float64 that sums are made of."""
    h, i, d = config.hidden_size, config.intermediate_size, config.head_size
    q, k = config.num_attention_heads * d, config.num_key_value_heads * d
    a_token = 4 * (6 * h + 3 * i) + 56 * q + 32 * k
    return 4 * models * weights_of(config) + tokens * a_token


def cache_memory(config: ModelConfig, rows: int, tokens: int) -> int:
    """Bytes of the float32 keys and values of ``rows`` sequences of ``tokens``."""
    a_token = 8 * config.num_key_value_heads * config.head_size
    return config.num_hidden_layers * rows * tokens * a_token


def memory_problems(config: RunConfig, ranks: int) -> list[Problem]:
    """What cannot fit into the memory of this machine, one sentence each; ``ranks``: processes of
    the run. Estimates are of the least that is needed."""
    model, run, length = config.model, config.trainer, config.data.sequence_length
    device, found = device_type(config), []
    vocab = model.vocab_size or config.tokenizer.vocab_size
    shape = ModelConfig(**{**vars(model), "vocab_size": vocab})
    shards = ranks if config.strategy.name in ("fsdp2", "hsdp") else 1
    # Weights, gradients, and a moment of AdamW or the momentum of Muon.
    state, free = 12 * weights_of(shape) // shards, free_memory(device)
    if state > free and not config.strategy.cpu_offload:
        found.append(
            Problem(
                "model",
                f"{weights_of(shape):,} weights with gradients and optimizer need at least "
                f"{gib(state)}, and {gib(free)} are free; choose a smaller model, or more devices.",
            )
        )
    micro = run.micro_batch_size or run.batch_size // ranks
    kept = 1 if config.strategy.activation_checkpointing == "full" else 4
    activations = 2 * micro * length * model.hidden_size * model.num_hidden_layers * kept
    if not found and state + activations > free:
        found.append(
            Problem(
                "trainer.micro_batch_size",
                f"{micro} sequences of {length} tokens need at least {gib(activations)} of "
                f"activations, and {gib(free)} are free; choose fewer or shorter ones.",
            )
        )
    return found + _held_text_problems(config)


def _held_text_problems(config: RunConfig) -> list[Problem]:
    """Windows of held-out text that are held at once, 8 bytes a token; a batch with its weights has
    five such numbers a token."""
    length, evaluation, monitor = config.data.sequence_length, config.evaluation, config.monitor
    held = {}
    if config.drop_step is not None:
        held["drop.effect_sequences"] = 5 * config.drop.effect_sequences * length
    if evaluation.enabled and PERPLEXITY in evaluation.tasks:
        held["evaluation.windows"] = round(evaluation.windows * length * sum(evaluation.lengths))
    if monitor.lengths_every is not None:
        held["monitor.windows"] = monitor.windows * length * sum(monitor.lengths)
    free = free_memory("cpu")
    return [
        Problem(
            key,
            f"held-out text of {gib(8 * tokens)} at once, and {gib(free)} are free; choose less.",
        )
        for key, tokens in held.items()
        if 8 * tokens > free
    ]


def gib(size: float) -> str:
    """``1.5 GiB`` for so many bytes; less than a tenth of one in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size * 1024 / GIB:,.1f} MiB"


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
