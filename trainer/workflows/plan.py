"""Requirements of a run by formula: parameters, tokens, operations, memory, GPU-hours.

Nothing is trained, downloaded or written, and no GPU is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from trainer.config import RunConfig, StrategyConfig
from trainer.data.needles import WORDS
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.flops import dense_peak, training_flops
from trainer.runs.phases import Phase, Run

GPUS = {"A100-SXM4-80GB": 79, "H100 80GB HBM3": 79, "H200": 139}
"""Memory in GiB of GPUs, by their names in :func:`trainer.model.flops.dense_peak`."""
FREE = 0.2
"""Share of a GPU's memory that stays free for everything that is not counted."""
GIB = 1 << 30
ROUNDED = 1024
"""The longest sequence is rounded down to a multiple of this."""
ON_A_NODE = 8
"""GPUs of a node, among which ``hsdp`` shards by default."""
WIDTH = 100
"""Characters of a line on the terminal."""
STATE_BYTES = 16
"""Bytes of a parameter while it trains: weight, gradient and AdamW's two moments in float32."""


def plan(run: Run, gpus: int, mfu: float) -> dict[str, dict[str, str]]:
    """Return names and values by title.

    ``gpus``: number of GPUs; ``mfu``: share of their dense peak that training reaches.

    Raises:
        ValueError: the vocabulary is that of a finished tokenizer, which is not read here.
    """
    config, phases, model = run.config, run.phases, decoder(run)
    training = {"steps": f"{run.steps:,} of {phases.last.tokens_per_step:,} tokens"}
    if config.phases:
        training = {phase.name: _in_words(phase) for phase in phases}
    training["tokens"] = f"{phases.tokens:,}"
    drop = phases.drop_step
    if drop is not None:
        remaining = phases.tokens - phases.at(drop).tokens
        training["drop"] = f"after step {drop:,}, then {remaining:,} tokens"
    operations = 0.0
    for name, each in run.runs.items():
        begin = drop if each.branch == "drop" else each.branch
        count = flops(each, begin or 0)
        training[f"operations of {name}"] = f"{count:.3g}"
        operations += count
    times = {}
    for name in GPUS:
        peak = dense_peak(name, "fp32" if config.trainer.precision == "fp32" else "bf16")
        assert peak is not None
        hours = operations / (peak * mfu * 3600)
        times[f"{gpus} x {name}"] = f"{hours / gpus:,.3g} hours, {hours:,.0f} GPU-hours"
    counts = parameters(model)
    a_gpu = Requirements(
        state=state_bytes(config.strategy, counts["in all"], gpus),
        token=bytes_of_token(config),
    )
    return {
        "Parameters": {name: f"{count:,}" for name, count in counts.items()},
        "Training": training,
        f"Memory of each of {gpus} GPUs, about": memory(run, a_gpu, gpus),
        "Longest sequence that fits, about": longest(a_gpu),
        f"Time at {mfu:.0%} of the peak": times,
    }


class Requirements(NamedTuple):
    """Bytes on a GPU: of weights, gradients and optimizer state, and of a token's activations."""

    state: float
    token: int


def _in_words(phase: Phase) -> str:
    """Describe the steps, the tokens and the change of a phase."""
    tokens = phase.tokens_at(phase.end) - phase.tokens
    text = f"{phase.steps:,} steps of {phase.batch_size:,} x {phase.length:,}: {tokens:,} tokens"
    if phase.drop is not None or phase.rescale is not None:
        text += f", {phase.description}"
    return text


def decoder(run: Run) -> Decoder:
    """Return the decoder that a run begins with, without weights; a tokenizer that is trained has
    its configured size, and the words of the needles."""
    model, tokenizer = run.config.model, run.config.tokenizer
    trained = None if tokenizer.path else tokenizer.vocab_size + len(WORDS)
    with torch.device("meta"):
        return Decoder(replace(model, vocab_size=model.vocab_size or trained), run.layout)


def parameters(model: nn.Module) -> dict[str, int]:
    """Return the numbers of parameters by part."""
    parts = {
        "embeddings": "embed_tokens",
        "head": "lm_head",
        "attention": "self_attn",
        "MLP": "mlp",
    }
    counts = {
        part: sum(p.numel() for name, p in model.named_parameters() if module in name)
        for part, module in parts.items()
    }
    total = sum(p.numel() for p in model.parameters())
    return counts | {
        "norms": total - sum(counts.values()),
        "in all": total,
        "without embeddings and head": total - counts["embeddings"] - counts["head"],
    }


def flops(run: Run, begin: int = 0) -> float:
    """Return the operations of a run's steps from step ``begin``."""
    model, total = decoder(run), 0.0
    for phase in run.phases:
        steps = max(phase.end - max(phase.start, begin), 0)
        a_sequence = training_flops(model.config, model.layout, phase.length)
        total += steps * phase.batch_size * a_sequence
    return total


def memory(run: Run, a_gpu: Requirements, gpus: int) -> dict[str, str]:
    """Return the memory of a GPU by its use, in the phase with the largest micro-batch."""

    def micro_batch(phase: Phase) -> tuple[int, int]:
        return phase.micro_batch_size or math.ceil(phase.batch_size / gpus), phase.length

    rows, length = max(map(micro_batch, run.phases), key=math.prod)
    activations, state = rows * length * a_gpu.token / GIB, a_gpu.state / GIB
    return {
        "micro-batch": f"{rows:,} x {length:,} tokens, strategy {run.config.strategy.name}",
        "activations": f"{activations:,.1f} GiB",
        "weights, gradients, optimizer": f"{state:,.1f} GiB",
        "in all": f"{activations + state:,.1f} GiB",
    }


def longest(a_gpu: Requirements) -> dict[str, str]:
    """Return for each kind of GPU the longest sequence that it trains, one at a time."""
    lengths = {}
    for name, memory in GPUS.items():
        room = (1 - FREE) * memory * GIB - a_gpu.state
        tokens = int(room / a_gpu.token) // ROUNDED * ROUNDED
        lengths[name] = f"{tokens:,} tokens" if tokens > 0 else "none"
    return lengths


def state_bytes(strategy: StrategyConfig, parameters: int, gpus: int) -> float:
    """Return the bytes of weights, gradients and optimizer state on each GPU."""
    of_node = strategy.shard_size or min(gpus, ON_A_NODE)
    shards = {"fsdp2": gpus, "hsdp": of_node}.get(strategy.name, 1)
    return STATE_BYTES * parameters / shards


def bytes_of_token(config: RunConfig) -> int:
    """Return about how many bytes of activations a token of the run takes on a GPU."""
    size = 4 if config.trainer.precision == "fp32" else 2
    return activation_bytes(config.model, size, config.strategy.activation_checkpointing)


def print_plan(tables: Mapping[str, Mapping[str, str]]) -> None:
    """Print the tables of a plan, by title."""
    out = Console(highlight=False, markup=False)
    out.width = min(WIDTH, out.width) if out.is_terminal else WIDTH
    for title, rows in tables.items():
        table = Table(title, "", box=None, width=WIDTH, title_justify="left")
        table.columns[0].min_width = 32
        table.columns[1].ratio = 1
        for row in rows.items():
            table.add_row(*map(Text, row))
        out.print(table)
        out.print()


def activation_bytes(config: ModelConfig, size: int, recomputed: str) -> int:
    """Return about how many bytes of activations a token leaves for the backward pass.

    ``size``: bytes of a number in matrix products. ``recomputed``: as
    ``strategy.activation_checkpointing``. Counts a layer's inputs of norms and products, after
    Korthikanti et al. (2022, arXiv 2205.05198, Sec. 4.1) for a gated MLP and grouped heads, without
    stored attention probabilities.
    """
    h, i = config.hidden_size, config.intermediate_size
    q, k = config.num_attention_heads * config.head_size, config.num_key_value_heads
    k *= config.head_size
    a_layer = {
        "none": size * (5 * h + 4 * q + 3 * k + 4 * i),
        "selective": size * (3 * h + 2 * q + 2 * k + 2 * i),
        "full": size * h,
    }
    again = 0 if recomputed == "none" else a_layer["none"]
    return config.num_hidden_layers * a_layer[recomputed] + again
