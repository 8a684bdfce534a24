"""Requirements of a run by formula: parameters, tokens, operations, memory, GPU-hours.

Nothing is trained, downloaded or written, and no GPU is needed.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from trainer.common.errors import UserError
from trainer.data.needles import WORDS
from trainer.model.config import ModelConfig
from trainer.model.flops import dense_peak, training_flops
from trainer.runs.phases import Phase, Run, layout_of_phase

GPUS = {"A100-SXM4-80GB": 79, "H100 80GB HBM3": 79, "H200": 139}
"""Memory in GiB of GPUs, by their names in :func:`trainer.model.flops.dense_peak`."""
GIB = 1 << 30
STATE_BYTES = 16
"""Bytes of a parameter while it trains: weight, gradient and AdamW's two moments in float32."""


def plan(run: Run, gpus: int, mfu: float) -> dict[str, dict[str, str]]:
    """Return names and values by title.

    ``gpus``: number of GPUs; ``mfu``: share of their dense peak that training reaches.
    """
    config = run.config
    phases = run.phases
    training = {"steps": f"{run.steps:,} of {phases[-1].tokens_per_step:,} tokens"}
    if config.phases:
        training = {phase.name: _in_words(phase) for phase in phases}
    # Names of phases have no spaces.
    training["all tokens"] = f"{phases.tokens:,}"
    drop = phases.drop_step
    if drop is not None:
        remaining = phases.tokens - phases.at(drop).tokens
        training["first drop"] = f"after step {drop:,}, then {remaining:,} tokens"
    operations = 0.0
    for name, each in run.runs.items():
        begin = drop if each.branch == "drop" else each.branch
        count = flops(each, begin or 0)
        training[f"operations of {name}"] = f"{count:.3g}"
        operations += count
    precision: Literal["fp32", "bf16"] = "fp32" if config.trainer.precision == "fp32" else "bf16"
    times = {}
    for name in GPUS:
        peak = dense_peak(name, precision)
        assert peak is not None
        hours = operations / (peak * mfu * 3600)
        rounded = f"{hours:,.0f}" if hours >= 1 else f"{hours:.2g}"
        times[f"{gpus} x {name}"] = f"{hours / gpus:,.3g} hours, {rounded} GPU-hours"
    counts = parameters(shape_of(run))
    strategy = config.strategy
    of_node = strategy.shard_size or min(gpus, 8)  # GPUs of a node
    shards = {"fsdp2": gpus, "hsdp": of_node}.get(strategy.name, 1)
    state = STATE_BYTES * counts["in all"] / shards
    size = 4 if config.trainer.precision == "fp32" else 2
    token_bytes = activation_bytes(config.model, size, strategy.activation_checkpointing)
    return {
        "Parameters": {name: f"{count:,}" for name, count in counts.items()},
        "Training": training,
        f"Memory of each of {gpus} GPUs, about": memory(run, state, token_bytes, gpus),
        "Longest sequence that fits, about": longest(state, token_bytes),
        f"Time at {mfu:.0%} of the peak": times,
    }


def _in_words(phase: Phase) -> str:
    """Describe the steps, the tokens and the change of a phase."""
    steps = phase.end - phase.start
    tokens = phase.tokens_at(phase.end) - phase.tokens
    text = f"{steps:,} steps of {phase.batch_size:,} x {phase.length:,}: {tokens:,} tokens"
    if phase.has_change:
        text += f", {phase.description}"
    return text


def shape_of(run: Run) -> ModelConfig:
    """Return the shape of a run's model; a tokenizer that is trained has its configured size, and
    the words of the needles."""
    model = run.config.model
    tokenizer = run.config.tokenizer
    if model.vocab_size is not None:
        return model
    if tokenizer.path is not None:
        raise UserError("model.vocab_size: expected it with tokenizer.path, which is not read here")
    return replace(model, vocab_size=tokenizer.vocab_size + len(WORDS))


def parameters(config: ModelConfig) -> dict[str, int]:
    """Return the numbers of parameters of a decoder by part, from its shape."""
    h = config.hidden_size
    layers = config.num_hidden_layers
    q = config.num_attention_heads * config.head_size
    k = config.num_key_value_heads * config.head_size
    embeddings = (config.vocab_size or 0) * h
    head = 0 if config.tie_word_embeddings else embeddings
    attention = 2 * h * (q + k)
    if config.qkv_bias:
        attention += q + 2 * k
    if config.qk_norm.when != "never":
        is_full = config.qk_norm.kind == "full"
        for side, size in (("q", q), ("k", k)):
            if config.qk_norm.targets in ("both", side):
                attention += size if is_full else config.head_size
    mlp = 3 * h * config.intermediate_size
    norms = 2 * layers * h + h
    total = embeddings + head + layers * (attention + mlp) + norms
    return {
        "embeddings": embeddings,
        "head": head,
        "attention": layers * attention,
        "MLP": layers * mlp,
        "norms": norms,
        "in all": total,
        "without embeddings and head": total - embeddings - head,
    }


def flops(run: Run, begin: int = 0) -> float:
    """Return the operations of a run's steps from step ``begin``."""
    shape = shape_of(run)
    layout = run.layout
    total = 0.0
    for phase in run.phases:
        layout = layout_of_phase(run.config, phase, layout)
        steps = max(phase.end - max(phase.start, begin), 0)
        sequence_flops = training_flops(shape, layout, phase.length)
        total += steps * phase.batch_size * sequence_flops
    return total


def memory(run: Run, state: float, token_bytes: int, gpus: int) -> dict[str, str]:
    """Return the memory of a GPU by its use, in the phase with the largest micro-batch.

    ``state``: bytes of weights, gradients and optimizer state on a GPU. ``token_bytes``: bytes of a
    token's activations.
    """
    rows, length = max([(p.rows(gpus), p.length) for p in run.phases], key=math.prod)
    activations = rows * length * token_bytes
    return {
        "micro-batch": f"{rows:,} x {length:,} tokens, strategy {run.config.strategy.name}",
        "activations": f"{activations / GIB:,.1f} GiB",
        "weights, gradients, optimizer": f"{state / GIB:,.1f} GiB",
        "in all": f"{(activations + state) / GIB:,.1f} GiB",
    }


def longest(state: float, token_bytes: int) -> dict[str, str]:
    """Return for each kind of GPU the longest sequence that it trains, see :func:`memory`."""
    lengths = {}
    for name, size in GPUS.items():
        room = 0.8 * size * GIB - state  # a fifth for everything that is not counted
        tokens = int(room / token_bytes) // 1024 * 1024
        lengths[name] = f"{tokens:,} tokens" if tokens > 0 else "none"
    return lengths


def print_plan(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print the tables of a plan, by title."""
    for title, rows in tables.items():
        print(title)
        for name, value in rows.items():
            print(f"{name:32} {value}")
        print()


def activation_bytes(config: ModelConfig, size: int, recomputed: str) -> int:
    """Return about how many bytes of activations a token leaves for the backward pass.

    ``size``: bytes of a number in matrix products. ``recomputed``: as
    ``strategy.activation_checkpointing``. Counts a layer's inputs of norms and products, after
    Korthikanti et al. (2022, arXiv 2205.05198, Sec. 4.1) for a gated MLP and grouped heads, without
    stored attention probabilities.
    """
    h = config.hidden_size
    i = config.intermediate_size
    q = config.num_attention_heads * config.head_size
    k = config.num_key_value_heads * config.head_size
    layer_bytes = {
        "none": size * (5 * h + 4 * q + 3 * k + 4 * i),
        "selective": size * (3 * h + 2 * q + 2 * k + 2 * i),
        "full": size * h,
    }
    again = 0 if recomputed == "none" else layer_bytes["none"]
    return config.num_hidden_layers * layer_bytes[recomputed] + again
