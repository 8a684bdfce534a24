"""Requirements of a run by formula: parameters, tokens, operations, memory, GPU-hours.

Nothing is trained, downloaded or written, and no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from trainer.common.errors import UserError
from trainer.config import MAIN, RunConfig
from trainer.data.corpus import prepare_corpus
from trainer.lightning.devices import dense_peak
from trainer.lightning.phases import describe
from trainer.lightning.setup import make_decoder
from trainer.model.config import ModelConfig
from trainer.model.flops import training_flops
from trainer.runs.arms import arms_of, shard_size
from trainer.runs.phases import Phase, phases_of, tokens_at
from trainer.runs.starting_point import epochs_read
from trainer.workflows.training_text import tokenizer_of_weights

GPUS = {"a100": "A100-SXM4-80GB", "h100": "H100 80GB HBM3", "h200": "H200"}
"""Names of GPUs as :func:`trainer.lightning.devices.dense_peak` has them."""
ON_A_NODE = 8
"""GPUs of a node, among which ``hsdp`` shards by default."""
STATE = 16
"""Bytes of a parameter while it trains: weight, gradient and AdamW's two moments in float32."""
GIB = 1 << 30


@dataclass(frozen=True)
class PlanRequest:
    """A run on ``gpus`` GPUs; ``mfu``: share of their dense peak that training reaches."""

    config: RunConfig
    gpus: int
    mfu: float


@dataclass(frozen=True)
class Section:
    """A title, and rows of a name and a value."""

    title: str
    rows: list[tuple[str, str]]


def plan(request: PlanRequest) -> list[Section]:
    """Return the sections of a plan."""
    config = with_vocabulary(request.config)
    counts = parameters(make_decoder(config, 0))
    arms = arms_of(config, weights=False)
    begins = {MAIN: 0} | {
        name: (config.drop_step or 0) if branch == "drop" else branch or 0
        for name, changes in config.controls.items()
        for branch in (changes.get("branch"),)
    }
    operations = {name: flops(arm, begins[name]) for name, arm in arms.items()}
    rows = [
        *_training(config),
        *((f"operations of {name}", f"{count:.3g}") for name, count in operations.items()),
    ]
    return [
        Section("Parameters", [(name, f"{count:,}") for name, count in counts.items()]),
        Section("Training", rows),
        Section(f"Memory of each of {request.gpus} GPUs, about", _memory(config, request.gpus)),
        Section(f"Time at {request.mfu:.0%} of the peak", _time(request, sum(operations.values()))),
    ]


def with_vocabulary(config: RunConfig) -> RunConfig:
    """Return the run with its vocabulary: the model's, or the one of the tokenizer to be trained.

    Raises:
        UserError: it is that of a finished tokenizer, which is not read here.
    """
    vocabulary = config.model.vocab_size
    if vocabulary is None and config.tokenizer.path:
        raise UserError("model.vocab_size: expected a number, got null")
    vocabulary = vocabulary or config.tokenizer.vocab_size
    return replace(config, model=replace(config.model, vocab_size=vocabulary))


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


def _training(config: RunConfig) -> Iterator[tuple[str, str]]:
    steps, phases = config.trainer.max_steps, phases_of(config)
    if config.phases:
        for phase in phases:
            length, size = phase.config.data.sequence_length, phase.config.trainer.batch_size
            count, tokens = phase.end - phase.start, phase.tokens_at(phase.end) - phase.tokens
            change = f", {describe(phase)}" if phase.drop or phase.rescale else ""
            yield phase.name, f"{count:,} steps of {size:,} x {length:,}: {tokens:,} tokens{change}"
    else:
        yield "steps", f"{steps:,} of {config.tokens_per_step:,} tokens"
    yield "tokens", f"{tokens_at(config, steps):,}"
    if (drop := config.drop_step) is not None:
        remaining = tokens_at(config, steps) - tokens_at(config, drop)
        yield "drop", f"after step {drop:,}, then {remaining:,} tokens"
    yield from _texts(config, phases)


def _texts(config: RunConfig, phases: Sequence[Phase]) -> Iterator[tuple[str, str]]:
    """Yield how often each text is read; nothing if it is not prepared."""
    try:
        corpus = prepare_corpus(
            config.data, config.tokenizer, tokenizer_of_weights(config), alone=False
        )
    except (UserError, OSError):
        return
    times = epochs_read(corpus, phases)(config.trainer.max_steps)
    for part in corpus.parts:
        name = f"text {part.name}" if config.data.mixture else "text"
        yield name, f"{len(part.text.train):,} tokens, read {times[part.name]:.3g} times"


def _memory(config: RunConfig, gpus: int) -> list[tuple[str, str]]:
    """Return the rows of the phase with the largest micro-batch."""

    def micro_batch(phase: Phase) -> tuple[int, int]:
        run = phase.config.trainer
        return run.micro_batch_size or -(-run.batch_size // gpus), phase.config.data.sequence_length

    rows, length = max(map(micro_batch, phases_of(config)), key=lambda shape: shape[0] * shape[1])
    strategy, count = config.strategy, sum(p.numel() for p in make_decoder(config, 0).parameters())
    shards = shard_size(strategy, gpus, min(gpus, ON_A_NODE)) if "sdp" in strategy.name else 1
    size = 2 if config.trainer.precision == "bf16" else 4
    kept = activation_bytes(config.model, size, strategy.activation_checkpointing)
    sizes = {
        "weights, gradients, optimizer": STATE * count / shards,
        "activations": float(rows * length * kept),
    }
    if strategy.cpu_offload:
        sizes.pop("weights, gradients, optimizer")
    return [
        ("micro-batch", f"{rows:,} x {length:,} tokens, strategy {strategy.name}"),
        *((name, f"{number / GIB:,.1f} GiB") for name, number in sizes.items()),
        ("in all", f"{sum(sizes.values()) / GIB:,.1f} GiB"),
    ]


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


def _time(request: PlanRequest, total: float) -> list[tuple[str, str]]:
    products = request.config.trainer.products
    rows = []
    for name in GPUS.values():
        peak = dense_peak(name, products)
        assert peak is not None
        gpu_hours = total / (peak * request.mfu * 3600)
        rows.append(
            (
                f"{request.gpus} x {name}",
                f"{gpu_hours / request.gpus:,.3g} hours, {gpu_hours:,.0f} GPU-hours",
            )
        )
    return rows
