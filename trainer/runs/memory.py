"""Estimates of required and available memory, checked before anything heavy starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.common.errors import Problem
from trainer.common.words import remedy
from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.passes import IN_CACHE, Dtype, precision_of, prefill_chunk
from trainer.evaluation.results import KEY_TOKENS, PERPLEXITY, STATEMENTS
from trainer.model.config import ModelConfig
from trainer.runs.config import RunConfig
from trainer.runs.ranks import device_type

GIB = 1 << 30
CHUNKS = (8192, 2048)
"""Values of ``evaluation.prefill_chunk`` to suggest."""


def weights_of(config: ModelConfig) -> int:
    """Return the number of weights in matrices; ``vocab_size`` must be set."""
    assert config.vocab_size is not None
    outside = config.vocab_size * config.hidden_size
    return config.block_weights + outside * (1 if config.tie_word_embeddings else 2)


def needed_memory(config: ModelConfig, tokens: int, models: int = 1) -> int:
    """Estimate the bytes that an analysis needs.

    Counts float32 weights, the activations of one layer, and its queries and keys before and after
    their encoding, with the float64 copies used for sums.
    """
    h, i, d = config.hidden_size, config.intermediate_size, config.head_size
    q, k = config.num_attention_heads * d, config.num_key_value_heads * d
    a_token = 4 * (6 * h + 3 * i) + 56 * q + 32 * k
    return 4 * models * weights_of(config) + tokens * a_token


def cache_memory(config: ModelConfig, rows: int, tokens: int, size: int = 4) -> int:
    """Return the bytes of the keys and values of ``rows`` sequences of ``tokens``.

    ``size``: bytes per number.
    """
    a_token = 2 * size * config.num_key_value_heads * config.head_size
    return config.num_hidden_layers * rows * tokens * a_token


def evaluation_memory(
    config: ModelConfig,
    tokens: int,
    evaluation: EvaluationConfig,
    chunk: int | None,
    dtype: Dtype,
    device: str,
) -> tuple[int, int, int]:
    """Return the bytes of weights, of keys and values, and of activations that an evaluation needs
    at least where sequences have ``tokens``.

    Args:
        config: the shape of the model.
        tokens: of the longest sequences, prompt and answer together.
        evaluation: its tasks, and how much is read at once.
        chunk: tokens of a sequence that are read at once (None: all).
        dtype: ``fp32`` or ``bf16``.
        device: "cpu" or "cuda".
    """
    size = 2 if dtype == "bf16" else 4
    rows = max(1, evaluation.batch_tokens // tokens)
    q, k = config.num_attention_heads * config.head_size, config.num_key_value_heads
    k *= config.head_size
    in_chunks = chunk is not None and chunk < tokens
    answers = not {*evaluation.tasks} <= {PERPLEXITY, KEY_TOKENS, STATEMENTS}
    kept = cache_memory(config, rows, tokens, size) if in_chunks or answers else 0
    # Residual stream and its norm, the MLP's three products, queries, keys and values.
    a_token = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * (q + 2 * k)
    together = (
        rows if device == "cuda" else min(rows, max(1, IN_CACHE // config.hidden_size // tokens))
    )
    at_once = together * min(tokens, chunk or tokens)
    # After the first chunk, kernels need one layer's keys and values for every query head.
    copies = 2 * rows * tokens * q if in_chunks and q != k else 0
    return size * weights_of(config), kept, size * (at_once * a_token + copies)


def evaluation_problems(
    shapes: Mapping[str, ModelConfig],
    longest: int,
    evaluation: EvaluationConfig,
    device: str,
    processes: int = 1,
) -> list[Problem]:
    """Return a problem for each model whose evaluation does not fit the free memory, with what
    would make it fit.

    Args:
        shapes: of the models, by their names.
        longest: tokens of the longest sequences.
        evaluation: what is asked for.
        device: "cpu" or "cuda".
        processes: which share the memory of a CPU; each has a GPU of its own.
    """
    if device == "cuda":
        torch.cuda.empty_cache()  # what training has left
    free = free_memory(device) // (processes if device == "cpu" else 1)
    dtype = precision_of(evaluation.dtype, device)
    chunk = prefill_chunk(evaluation.prefill_chunk, device)
    found = []
    for name, shape in shapes.items():
        about = evaluation, chunk, dtype, device
        weights, kept, activations = evaluation_memory(shape, longest, *about)
        if weights + kept + activations <= free:
            continue
        parts = {"weights": weights, "keys and values": kept, "activations": activations}
        held = ", ".join(f"{what} {gib(size)}" for what, size in parts.items() if size)
        found.append(
            Problem(
                "evaluation.lengths",
                f"{longest:,} tokens of {name} need at least "
                f"{gib(weights + kept + activations)} ({held}), and {gib(free)} are free; "
                f"{_remedy(shape, longest, *about, free)}.",
            )
        )
    return found


def _remedy(
    shape: ModelConfig,
    longest: int,
    evaluation: EvaluationConfig,
    chunk: int | None,
    dtype: Dtype,
    device: str,
    free: int,
) -> str:
    """Return the smallest change with which an evaluation fits into ``free`` bytes."""

    def needed(tokens: int, chunk: int | None, dtype: Dtype) -> int:
        return sum(evaluation_memory(shape, tokens, evaluation, chunk, dtype, device))

    chunks = [c for c in CHUNKS if c < (chunk or longest)]
    half: Dtype = "bf16"
    for other_dtype in dict.fromkeys((dtype, half)):
        for other_chunk in (chunk, *chunks):
            if (size := needed(longest, other_chunk, other_dtype)) <= free:
                words = [f"evaluation.dtype={other_dtype}"] if other_dtype != dtype else []
                words += [f"evaluation.prefill_chunk={other_chunk}"] * (other_chunk != chunk)
                return f"{' '.join(words)} needs {gib(size)}"
    tokens = longest
    while tokens and needed(tokens, chunk, dtype) > free:
        tokens = tokens * 7 // 8
    if tokens:
        return f"choose lengths of up to {tokens:,} tokens, or a device with more memory"
    return "choose a smaller model, or a device with more memory"


def memory_problems(config: RunConfig, ranks: int) -> list[Problem]:
    """Return a problem per requirement that exceeds this machine's memory.

    ``ranks``: processes of the run. The estimates are lower bounds.
    """
    model, run, length = config.model, config.trainer, config.data.sequence_length
    device, found = device_type(config), []
    vocab = model.vocab_size or config.tokenizer.vocab_size
    shape = ModelConfig(**{**vars(model), "vocab_size": vocab})
    shards = ranks if config.strategy.name in ("fsdp2", "hsdp") else 1
    # Weights, gradients, and one moment of AdamW or the momentum of Muon.
    state, free = 12 * weights_of(shape) // shards, free_memory(device)
    if state > free and not config.strategy.cpu_offload:
        found.append(
            Problem(
                "model",
                f"{weights_of(shape):,} weights with gradients and optimizer need at least "
                f"{gib(state)}, and {gib(free)} are free; choose a smaller model, or more devices.",
                remedy("memory"),
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
                remedy("memory"),
            )
        )
    if config.evaluation.enabled and not found:
        # Training's memory is free by then.
        longest = max(config.evaluation.in_tokens(config.training_length))
        of_cpu = ranks if device == "cpu" else 1
        found += evaluation_problems(
            {"the model": shape}, longest, config.evaluation, device, of_cpu
        )
    return found + _held_text_problems(config)


def _held_text_problems(config: RunConfig) -> list[Problem]:
    """Windows of held-out text that are held at once, 8 bytes a token; a batch with its weights has
    five such numbers a token."""
    length, evaluation, monitor = config.data.sequence_length, config.evaluation, config.monitor
    held = {}
    if config.drop_step is not None:
        held["drop.effect_sequences"] = 5 * config.drop.effect_sequences * length
    if evaluation.enabled and {PERPLEXITY, KEY_TOKENS} & {*evaluation.tasks}:
        tokens = sum(evaluation.in_tokens(config.training_length))
        held["evaluation.windows"] = evaluation.windows * tokens
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
    """Format a byte count as ``1.5 GiB``, or in MiB below a tenth of one GiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size * 1024 / GIB:,.1f} MiB"


def free_memory(device: str) -> int:
    """Return the bytes that can be allocated without swapping."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        values = dict(line.split(":", 1) for line in lines)
        return 1024 * int(values["MemAvailable"].split()[0])
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
