"""Estimates of required and available memory, checked before anything heavy starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trainer.common.errors import Problem, listed
from trainer.common.words import remedy
from trainer.config import EvaluationConfig, RunConfig
from trainer.evaluation.passes import IN_CACHE, Dtype, precision_of, prefill_chunk
from trainer.evaluation.results import PERPLEXITY, STATEMENTS
from trainer.model.config import ModelConfig
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
    """Return lower bounds for an evaluation's bytes of weights, of keys and values, and of
    activations.

    ``tokens``: length of the longest sequences, prompt and answer together. ``chunk``: tokens of a
    sequence in one forward pass (None: all). ``device``: "cpu" or "cuda".
    """
    size = 2 if dtype == "bf16" else 4
    rows = max(1, evaluation.batch_tokens // tokens)
    q, k = config.num_attention_heads * config.head_size, config.num_key_value_heads
    k *= config.head_size
    in_chunks = chunk is not None and chunk < tokens
    answers = not {*evaluation.tasks} <= {PERPLEXITY, STATEMENTS}
    cached = cache_memory(config, rows, tokens, size) if in_chunks or answers else 0
    # Residual stream and its norm, the MLP's three products, queries, keys and values.
    a_token = 4 * config.hidden_size + 3 * config.intermediate_size + 2 * (q + 2 * k)
    rows_at_once = rows
    if device == "cpu":
        rows_at_once = min(rows, max(1, IN_CACHE // config.hidden_size // tokens))
    at_once = rows_at_once * min(tokens, chunk or tokens)
    # After the first chunk, kernels need one layer's keys and values for every query head.
    copies = 2 * rows * tokens * q if in_chunks and q != k else 0
    return size * weights_of(config), cached, size * (at_once * a_token + copies)


@dataclass(frozen=True)
class HeadFit:
    """Fit of a temperature per head: tokens of its longest text, and the first tempered layer."""

    tokens: int
    first_layer: int


def fit_memory(config: ModelConfig, fit: HeadFit, dtype: Dtype) -> tuple[int, int]:
    """Return lower bounds for a fit's bytes of weights and of activations.

    The backward pass needs the activations of one text from the first tempered layer on. The
    weights are frozen, so that products with them keep no input.
    """
    size = 2 if dtype == "bf16" else 4
    q, k = config.num_attention_heads * config.head_size, config.num_key_value_heads
    k *= config.head_size
    # Inputs of two norms; queries before and after their scale, keys, values and attention's
    # output; the MLP's two products and their activation.
    a_token = 2 * config.hidden_size + 3 * q + 2 * k + 3 * config.intermediate_size
    layers = config.num_hidden_layers - fit.first_layer
    return size * weights_of(config), size * fit.tokens * layers * a_token


def choice_memory(config: ModelConfig, tokens: int, dtype: Dtype) -> tuple[int, int]:
    """Return lower bounds for the bytes of weights and of activations of a choice of heads or
    pairs on a text of ``tokens``.

    Queries and keys are captured from one pass over the whole text, in float32.
    """
    size = 2 if dtype == "bf16" else 4
    q, k = config.num_attention_heads * config.head_size, config.num_key_value_heads
    k *= config.head_size
    # Beside the residual stream and its norm, either queries and keys before and after their
    # encoding, and values, or the MLP's three products.
    captured = size * (2 * q + 3 * k) + (8 * (q + k) if size < 4 else 0)
    a_token = 2 * size * config.hidden_size + max(captured, 3 * size * config.intermediate_size)
    return size * weights_of(config), tokens * a_token


@listed
def evaluation_problems(
    shapes: Mapping[str, ModelConfig],
    longest: int,
    evaluation: EvaluationConfig,
    device: str,
    processes: int = 1,
    head_fits: Mapping[str, HeadFit] | None = None,
    choices: Mapping[str, int] | None = None,
) -> Iterator[Problem]:
    """Check that evaluating each model fits the free memory; otherwise name a change that would.

    ``shapes``, ``head_fits``, ``choices``: shapes of the models, fits of a temperature per head,
    and tokens of the longest text on which heads or pairs are chosen, by name. ``longest``: tokens
    of the longest sequences. ``device``: "cpu" or "cuda". ``processes``: their number; they share
    the memory of a CPU, and each has its own GPU.
    """
    if device == "cuda":
        torch.cuda.empty_cache()  # left by training
    free = free_memory(device) // (processes if device == "cpu" else 1)
    dtype = precision_of(evaluation.dtype, device)
    chunk = prefill_chunk(evaluation.prefill_chunk, device)
    for name, shape in shapes.items():
        needed = partial(evaluation_memory, shape, evaluation=evaluation, device=device)
        sizes = needed(longest, chunk=chunk, dtype=dtype)
        if sum(sizes) > free:
            parts = zip(("weights", "keys and values", "activations"), sizes, strict=True)
            held = ", ".join(f"{part} {gib(size)}" for part, size in parts if size)
            yield Problem(
                "evaluation.lengths",
                f"{longest:,} tokens of {name} need at least {gib(sum(sizes))} ({held}), and "
                f"{gib(free)} are free; {_smallest_change(needed, longest, chunk, dtype, free)}.",
            )
            continue
        if head_fits and name in head_fits:
            fit = head_fits[name]
            yield from _method_problems(
                f"temperature_per_head is fitted on {fit.tokens:,} tokens of {name}",
                fit_memory(shape, fit, dtype),
                free,
                "choose shorter ones for the fit (evaluation.temperature.lengths), or leave the "
                "method out",
            )
        if choices and name in choices:
            yield from _method_problems(
                f"dope or weighted_rope reads {choices[name]:,} tokens of {name} in one pass",
                choice_memory(shape, choices[name], dtype),
                free,
                "choose on shorter texts (evaluation.choice.length), or leave the method out",
            )


def _method_problems(
    reads: str, sizes: tuple[int, int], free: int, remedy: str
) -> Iterator[Problem]:
    """Check that what a method reads fits into ``free`` bytes; ``sizes``: of weights and of
    activations."""
    weights, activations = sizes
    if weights + activations > free:
        yield Problem(
            "evaluation.methods",
            f"{reads} and needs at least {gib(weights + activations)} (weights {gib(weights)}, "
            f"activations {gib(activations)}), and {gib(free)} are free; {remedy}.",
        )


def _smallest_change(
    needed: Callable[..., tuple[int, int, int]],
    longest: int,
    chunk: int | None,
    dtype: Dtype,
    free: int,
) -> str:
    """Return the smallest change with which an evaluation fits into ``free`` bytes.

    ``needed``: :func:`evaluation_memory` of the model, from ``tokens``, ``chunk`` and ``dtype``.
    """
    chunks = [c for c in CHUNKS if c < (chunk or longest)]
    half: Dtype = "bf16"
    for other_dtype in dict.fromkeys((dtype, half)):
        for other_chunk in (chunk, *chunks):
            if (size := sum(needed(longest, chunk=other_chunk, dtype=other_dtype))) <= free:
                words = [f"evaluation.dtype={other_dtype}"] if other_dtype != dtype else []
                words += [f"evaluation.prefill_chunk={other_chunk}"] * (other_chunk != chunk)
                return f"{' '.join(words)} needs {gib(size)}"
    tokens = longest
    while tokens and sum(needed(tokens, chunk=chunk, dtype=dtype)) > free:
        tokens = tokens * 7 // 8
    if tokens:
        return f"choose lengths of up to {tokens:,} tokens, or a device with more memory"
    return "choose a smaller model, or a device with more memory"


def memory_problems(config: RunConfig, ranks: int) -> list[Problem]:
    """Return a problem per requirement that exceeds this machine's memory.

    ``ranks``: processes of the run. The estimates are lower bounds.
    """
    model, run, length = config.model, config.trainer, config.data.sequence_length
    device, problems = device_type(config), list[Problem]()
    vocab = model.vocab_size or config.tokenizer.vocab_size
    shape = ModelConfig(**{**vars(model), "vocab_size": vocab})
    shards = ranks if config.strategy.name in ("fsdp2", "hsdp") else 1
    # Weights, gradients, and one moment of AdamW or the momentum of Muon, unless on the CPU.
    state = 0 if config.strategy.cpu_offload else 12 * weights_of(shape) // shards
    free = free_memory(device)
    if state > free:
        reason = (
            f"{weights_of(shape):,} weights with gradients and optimizer need at least "
            f"{gib(state)}, and {gib(free)} are free; choose a smaller model, or more devices."
        )
        problems.append(Problem("model", reason, remedy("memory")))
    micro = run.micro_batch_size or run.batch_size // ranks
    copies = 1 if config.strategy.activation_checkpointing == "full" else 4
    activations = 2 * micro * length * model.hidden_size * model.num_hidden_layers * copies
    if not problems and state + activations > free:
        reason = (
            f"{micro} sequences of {length} tokens need at least {gib(activations)} of "
            f"activations, and {gib(free)} are free; choose fewer or shorter ones."
        )
        problems.append(Problem("trainer.micro_batch_size", reason, remedy("memory")))
    if config.evaluation.enabled and not problems:
        # Training's memory is free by then.
        longest = max(config.evaluation.in_tokens(config.training_length))
        problems += evaluation_problems(
            {"the model": shape}, longest, config.evaluation, device, ranks
        )
    return problems + _held_text_problems(config)


def _held_text_problems(config: RunConfig) -> list[Problem]:
    """Check the windows of held-out text that are in memory together: 8 bytes a token, and five
    such numbers a token for a batch with its weights."""
    length, evaluation, monitor = config.data.sequence_length, config.evaluation, config.monitor
    tokens_of = {}
    if config.drop_step is not None:
        tokens_of["drop.effect_sequences"] = 5 * config.drop.effect_sequences * length
    if evaluation.enabled and PERPLEXITY in evaluation.tasks:
        tokens = sum(evaluation.in_tokens(config.training_length))
        tokens_of["evaluation.windows"] = evaluation.windows * tokens
    if monitor.lengths_every is not None:
        tokens_of["monitor.windows"] = (
            monitor.windows * config.training_length * sum(monitor.lengths)
        )
    free = free_memory("cpu")
    return [
        Problem(
            key,
            f"held-out text of {gib(8 * tokens)} at once, and {gib(free)} are free; choose less.",
        )
        for key, tokens in tokens_of.items()
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
