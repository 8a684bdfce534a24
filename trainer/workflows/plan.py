"""Requirements of a run by formula: parameters, tokens, operations, memory, GPU-hours.

Nothing is trained, downloaded or written, and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from trainer.config import RunConfig
from trainer.data.needles import WORDS
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.flops import dense_peak, training_flops
from trainer.runs.parsing import runs_of
from trainer.runs.phases import Phase, configured_layout, drop_step, phase_at, phases_of

GPUS = {"A100-SXM4-80GB": 79, "H100 80GB HBM3": 79, "H200": 139}
"""Memory in GiB of GPUs, by their names in :func:`trainer.model.flops.dense_peak`."""
FREE = 0.2
"""Share of a GPU's memory that stays free for everything that is not counted."""
ROUNDED = 1024
"""The longest sequence is rounded down to a multiple of this."""
ON_A_NODE = 8
"""GPUs of a node, among which ``hsdp`` shards by default."""
WIDTH = 100
"""Characters of a line on the terminal."""
STATE_BYTES = 16
"""Bytes of a parameter while it trains: weight, gradient and AdamW's two moments in float32."""


def plan(config: RunConfig, gpus: int, mfu: float) -> dict[str, dict[str, str]]:
    """Return names and values by title.

    ``gpus``: number of GPUs; ``mfu``: share of their dense peak that training reaches.

    Raises:
        ValueError: the vocabulary is that of a finished tokenizer, which is not read here.
    """
    trained = None if config.tokenizer.path else config.tokenizer.vocab_size + len(WORDS)
    shape = replace(config.model, vocab_size=config.model.vocab_size or trained)
    config = replace(config, model=shape)
    steps, phases, drop = config.trainer.max_steps, phases_of(config), drop_step(config)
    training = {"steps": f"{steps:,} of {config.tokens_per_step:,} tokens"}
    if config.phases:
        training = {phase.name: _in_words(phase) for phase in phases}
    tokens = phases[-1].tokens_at(steps)
    training["tokens"] = f"{tokens:,}"
    if drop is not None:
        remaining = tokens - phase_at(phases, drop).tokens
        training["drop"] = f"after step {drop:,}, then {remaining:,} tokens"
    operations = 0.0
    for name, run in runs_of(config).items():
        branch = config.controls.get(name, {}).get("branch")
        begin = drop if branch == "drop" else branch
        count = flops(run, begin or 0)
        training[f"operations of {name}"] = f"{count:.3g}"
        operations += count
    times = {}
    for name in GPUS:
        peak = dense_peak(name, "fp32" if config.trainer.precision == "fp32" else "bf16")
        assert peak is not None
        hours = operations / (peak * mfu * 3600)
        times[f"{gpus} x {name}"] = f"{hours / gpus:,.3g} hours, {hours:,.0f} GPU-hours"
    counts = parameters(decoder(config))
    return {
        "Parameters": {name: f"{count:,}" for name, count in counts.items()},
        "Training": training,
        f"Memory of each of {gpus} GPUs, about": memory(config, gpus),
        "Longest sequence that fits, about": longest(config, gpus),
        f"Time at {mfu:.0%} of the peak": times,
    }


def _in_words(phase: Phase) -> str:
    length, size = phase.config.data.sequence_length, phase.config.trainer.batch_size
    steps, tokens = phase.end - phase.start, phase.tokens_at(phase.end) - phase.tokens
    change = f", {phase.description}" if phase.settings.drop or phase.settings.rescale else ""
    return f"{steps:,} steps of {size:,} x {length:,}: {tokens:,} tokens{change}"


def decoder(config: RunConfig) -> Decoder:
    """Return the decoder that a run begins with, without weights; its vocabulary must be known."""
    with torch.device("meta"):
        return Decoder(config.model, configured_layout(config))


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


def flops(config: RunConfig, begin: int = 0) -> float:
    """Return the operations of a run's steps from step ``begin``; its vocabulary must be known."""
    model, total = decoder(config), 0.0
    for phase in phases_of(config):
        steps = max(phase.end - max(phase.start, begin), 0)
        length, sequences = phase.config.data.sequence_length, phase.config.trainer.batch_size
        total += steps * sequences * training_flops(model.config, model.layout, length)
    return total


def memory(config: RunConfig, gpus: int) -> dict[str, str]:
    """Return the memory of a GPU by its use, in the phase with the largest micro-batch."""

    def micro_batch(phase: Phase) -> tuple[int, int]:
        run = phase.config.trainer
        return run.micro_batch_size or -(-run.batch_size // gpus), phase.config.data.sequence_length

    rows, length = max(map(micro_batch, phases_of(config)), key=lambda shape: shape[0] * shape[1])
    activations = rows * length * bytes_of_token(config) / (1 << 30)
    state = state_bytes(config, gpus) / (1 << 30)
    return {
        "micro-batch": f"{rows:,} x {length:,} tokens, strategy {config.strategy.name}",
        "activations": f"{activations:,.1f} GiB",
        "weights, gradients, optimizer": f"{state:,.1f} GiB",
        "in all": f"{activations + state:,.1f} GiB",
    }


def longest(config: RunConfig, gpus: int) -> dict[str, str]:
    """Return for each kind of GPU the longest sequence that it trains, one at a time."""
    lengths = {}
    for name, memory in GPUS.items():
        room = (1 - FREE) * memory * (1 << 30) - state_bytes(config, gpus)
        tokens = int(room / bytes_of_token(config)) // ROUNDED * ROUNDED
        lengths[name] = f"{tokens:,} tokens" if tokens > 0 else "none"
    return lengths


def state_bytes(config: RunConfig, gpus: int) -> float:
    """Return the bytes of weights, gradients and optimizer state on each GPU."""
    strategy = config.strategy
    of_node = strategy.shard_size or min(gpus, ON_A_NODE)
    shards = {"fsdp2": gpus, "hsdp": of_node}.get(strategy.name, 1)
    return STATE_BYTES * sum(p.numel() for p in decoder(config).parameters()) / shards


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
