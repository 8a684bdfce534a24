"""Requirements of a run by formula: parameters, tokens, operations, memory, GPU-hours.

Nothing is trained, downloaded or written, and no GPU is needed.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from trainer.config import MAIN, RunConfig
from trainer.model.config import ModelConfig
from trainer.model.flops import dense_peak, training_flops
from trainer.runs.parsing import runs_of
from trainer.runs.phases import Phase, drop_step, phase_at, phases_of
from trainer.training.setup import make_decoder

GPUS = "A100-SXM4-80GB", "H100 80GB HBM3", "H200"
"""Names of GPUs as :func:`trainer.model.flops.dense_peak` has them."""
ON_A_NODE = 8
"""GPUs of a node, among which ``hsdp`` shards by default."""
STATE = 16
"""Bytes of a parameter while it trains: weight, gradient and AdamW's two moments in float32."""


def plan(config: RunConfig, gpus: int, mfu: float) -> dict[str, dict[str, str]]:
    """Return names and values by title.

    ``gpus``: number of GPUs; ``mfu``: share of their dense peak that training reaches.

    Raises:
        ValueError: the vocabulary is that of a finished tokenizer, which is not read here.
    """
    trained = None if config.tokenizer.path else config.tokenizer.vocab_size
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
        branch = config.controls[name].get("branch") if name != MAIN else None
        count = flops(run, drop or 0 if branch == "drop" else branch or 0)
        training[f"operations of {name}"] = f"{count:.3g}"
        operations += count
    times = {}
    for name in GPUS:
        peak = dense_peak(name, "fp32" if config.trainer.precision == "fp32" else "bf16")
        assert peak is not None
        hours = operations / (peak * mfu * 3600)
        times[f"{gpus} x {name}"] = f"{hours / gpus:,.3g} hours, {hours:,.0f} GPU-hours"
    counts = parameters(make_decoder(config, 0))
    return {
        "Parameters": {name: f"{count:,}" for name, count in counts.items()},
        "Training": training,
        f"Memory of each of {gpus} GPUs, about": memory(config, gpus),
        f"Time at {mfu:.0%} of the peak": times,
    }


def _in_words(phase: Phase) -> str:
    length, size = phase.config.data.sequence_length, phase.config.trainer.batch_size
    steps, tokens = phase.end - phase.start, phase.tokens_at(phase.end) - phase.tokens
    change = f", {phase.description}" if phase.settings.drop or phase.settings.rescale else ""
    return f"{steps:,} steps of {size:,} x {length:,}: {tokens:,} tokens{change}"


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
    model = make_decoder(config, 0)
    return float(
        sum(
            training_flops(model.config, model.layout, phase.config.data.sequence_length)
            * phase.config.trainer.batch_size
            * (phase.end - max(phase.start, begin))
            for phase in phases_of(config)
            if phase.end > begin
        )
    )


def memory(config: RunConfig, gpus: int) -> dict[str, str]:
    """Return the memory of a GPU by its use, in the phase with the largest micro-batch."""

    def micro_batch(phase: Phase) -> tuple[int, int]:
        run = phase.config.trainer
        return run.micro_batch_size or -(-run.batch_size // gpus), phase.config.data.sequence_length

    rows, length = max(map(micro_batch, phases_of(config)), key=lambda shape: shape[0] * shape[1])
    strategy, count = config.strategy, sum(p.numel() for p in make_decoder(config, 0).parameters())
    of_node = strategy.shard_size or min(gpus, ON_A_NODE)
    shards = {"fsdp2": gpus, "hsdp": of_node}.get(strategy.name, 1)
    size = 4 if config.trainer.precision == "fp32" else 2
    kept = activation_bytes(config.model, size, strategy.activation_checkpointing)
    activations, state = rows * length * kept / (1 << 30), STATE * count / shards / (1 << 30)
    return {
        "micro-batch": f"{rows:,} x {length:,} tokens, strategy {strategy.name}",
        "activations": f"{activations:,.1f} GiB",
        "weights, gradients, optimizer": f"{state:,.1f} GiB",
        "in all": f"{activations + state:,.1f} GiB",
    }


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
