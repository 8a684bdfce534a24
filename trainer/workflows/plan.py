"""Requirements of a run: parameters, operations, memory, time, disk.

Nothing is trained, downloaded or written, and no GPU is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from trainer.common.errors import Problem, UserError
from trainer.common.processes import usual_threads
from trainer.common.words import counted
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.plan import BYTES_PER_TOKEN
from trainer.data.sources import estimated_bytes
from trainer.model.decoder import Decoder
from trainer.runs.arms import arms_of
from trainer.runs.config import MAIN, RunConfig
from trainer.runs.memory import GIB, gib
from trainer.runs.phases import Phase, kept_steps, phases_of, tokens_at
from trainer.runs.ranks import Ranks
from trainer.runs.starting_point import epochs_read
from trainer.training.callbacks.transitions import describe
from trainer.training.devices import dense_peak
from trainer.training.module import make_decoder
from trainer.training.rehearsal import Parts, step_memory
from trainer.training.speed import product_peak
from trainer.training.strategy import reduces_once_a_step
from trainer.workflows.costs import (
    STATE,
    evaluation_operations,
    in_trainings,
    training_operations,
)
from trainer.workflows.training_text import readings, tokenizer_of_weights

GB = 1e9


@dataclass(frozen=True)
class Gpu:
    """``name`` as :mod:`trainer.training.devices` has it; ``memory`` in bytes."""

    name: str
    memory: float


GPUS = {
    "a100_40gb": Gpu("A100-SXM4-40GB", 40 * GIB),
    "a100": Gpu("A100-SXM4-80GB", 80 * GIB),
    "h100": Gpu("H100 80GB HBM3", 80 * GIB),
    "h200": Gpu("H200", 141 * GIB),
}
CPU = "cpu"
"""This machine's CPU, among the devices whose time is estimated."""
USABLE = 0.9
"""Share of a GPU's memory that a step may take; the CUDA context, NCCL and what the allocator
leaves between blocks have the rest."""


@dataclass(frozen=True)
class PlanRequest:
    """A run on ``ranks`` GPUs, ``on_a_node`` of them on each node."""

    config: RunConfig
    ranks: int
    on_a_node: int
    gpu: str
    """A key of :data:`GPUS`."""
    mfu: float
    """Share of the GPU's dense peak that training reaches."""
    exact: bool = False
    """Whether memory is computed from all layers."""
    missing: tuple[Problem, ...] = ()
    """What is already known to be missing on this machine."""
    timed: tuple[str, ...] = ("a100", "h100", "h200", CPU)
    """Devices whose time is estimated: keys of :data:`GPUS`, and :data:`CPU`."""


@dataclass(frozen=True)
class Section:
    """A title, and rows of a name and a value."""

    title: str
    rows: list[tuple[str, str]]
    commands: tuple[str, ...] = ()
    """Commands that the rows announce, quoted for a shell."""


def plan(request: PlanRequest) -> Iterator[Section]:
    """Yield the sections of a plan, each as soon as it is known.

    Raises:
        UserError: the vocabulary size is unknown.
    """
    config, corpus = request.config, _corpus(request)
    vocab = config.model.vocab_size or _vocabulary(config, corpus)
    config = replace(config, model=replace(config.model, vocab_size=vocab))
    model = make_decoder(config, vocab)
    counts = parameters(model)
    yield Section("Parameters", [(name, f"{count:,}") for name, count in counts.items()])
    arms = arms_of(config, weights=not request.missing)
    controls = {name: arm for name, arm in arms.items() if name != MAIN}
    operations, evaluation = training_operations(arms), evaluation_operations(arms)
    total = sum(operations.values())
    estimates = estimated_tokens(config) if isinstance(corpus, UserError) else {}
    rows = [*_training(config, corpus, estimates, operations), *_evaluation(evaluation, total)]
    yield Section("Training", rows)
    yield Section("Memory of each GPU", list(_memory(request, arms, vocab)))
    yield Section(f"Time at {request.mfu:.0%} of the peak", list(_time(request, total, evaluation)))
    yield Section("Disk", list(_disk(config, controls, corpus, estimates, counts["in all"], vocab)))
    missing_text = corpus.problems if isinstance(corpus, UserError) else ()
    if missing := [*request.missing, *missing_text]:
        commands = dict.fromkeys(problem.command for problem in missing if problem.command)
        rows = [("", problem.sentences) for problem in missing]
        yield Section("Missing here", rows, tuple(commands))


def parameters(model: Decoder) -> dict[str, int]:
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


def _training(
    config: RunConfig,
    corpus: Corpus | UserError,
    estimates: dict[str, int | None],
    operations: dict[str, float],
) -> Iterator[tuple[str, str]]:
    steps, phases = config.trainer.max_steps, phases_of(config)
    if config.phases:
        for phase in phases:
            length, size = phase.config.data.sequence_length, phase.config.trainer.batch_size
            count, tokens = phase.end - phase.start, phase.tokens_at(phase.end) - phase.tokens
            change = f", {describe(phase)}" if phase.drop or phase.rescale else ""
            change += _new_order(phase, corpus, phases)
            yield phase.name, f"{count:,} steps of {size:,} x {length:,}: {tokens:,} tokens{change}"
    else:
        yield "steps", f"{steps:,} of {config.tokens_per_step:,} tokens"
    yield "tokens", f"{tokens_at(config, steps):,}"
    if (drop := config.drop_step) is not None:
        remaining = tokens_at(config, steps) - tokens_at(config, drop)
        yield "drop", f"after step {drop:,}, then {remaining:,} tokens"
    if isinstance(corpus, Corpus):
        times = epochs_read(corpus, phases)(steps)
        for part in corpus.parts:
            held = f"{len(part.text.train):,} tokens"
            label = f"text {part.name}" if config.data.mixture else "text"
            yield label, f"{held}, read {times[part.name]:.3g} times"
    else:
        shares = _shares(phases)
        for name, (text, _) in config.data.texts.items():
            share, estimate = shares.get(name, 0), estimates[name]
            facts = [f"{100 * share:.3g}% of the samples"] if config.data.mixture else []
            if text.about:
                facts.append(text.about)
            if estimate:
                epochs = share * tokens_at(config, steps) / estimate
                facts.append(f"about {_rounded(estimate)} tokens by its size in bytes")
                facts.append(f"read about {_rounded(epochs)} times")
            if facts:
                yield f"text {name}" if config.data.mixture else "text", ", ".join(facts)
    for name, number in operations.items():
        yield f"operations of {config.name if name == MAIN else name}", f"{number:.3g}"


def _new_order(phase: Phase, corpus: Corpus | UserError, phases: Sequence[Phase]) -> str:
    """Return a clause if the phase begins another order of samples than the phase before it."""
    if not phase.order or phase.start > phase.order_start:
        return ""
    clause = ", in a new order"
    if isinstance(corpus, UserError):
        return clause
    times = epochs_read(corpus, phases)(phase.start)
    read = [f"{times[name]:.3g}" for name in phase.config.data.texts]
    return f"{clause} of text that was read {' and '.join(read)} times before"


def _evaluation(operations: float, training: float) -> Iterator[tuple[str, str]]:
    if operations:
        ratio = in_trainings(operations, training)
        yield "evaluation", f"{operations:.3g} operations, {ratio} those of the training"


def estimated_tokens(config: RunConfig) -> dict[str, int | None]:
    """Estimate the tokens of each text that is not prepared yet from the bytes of its files.

    Returns:
        None for a text of unknown size.
    """
    estimates: dict[str, int | None] = {}
    for name, (text, _) in config.data.texts.items():
        try:
            size = None if text.prepared else estimated_bytes(text)
        except UserError:  # files are missing, which the plan lists
            size = None
        estimates[name] = size and max(size // BYTES_PER_TOKEN, 1)
    return estimates


def _shares(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the share of each text in the samples of all phases."""
    samples: dict[str, float] = {}
    for phase in phases:
        texts = phase.config.data.texts
        read = (phase.end - phase.start) * phase.config.trainer.batch_size
        whole = sum(weight for _, weight in texts.values())
        for name, (_, weight) in texts.items():
            samples[name] = samples.get(name, 0.0) + read * weight / whole
    total = sum(samples.values())
    return {name: count / total for name, count in samples.items()}


def _memory(
    request: PlanRequest, arms: Mapping[str, RunConfig], vocab: int
) -> Iterator[tuple[str, str]]:
    """Yield the rows of the arm and phase that take most."""
    gpu, ranks, local = GPUS[request.gpu], request.ranks, request.on_a_node
    sizes: dict[str, tuple[str, Phase]] = {}
    for arm, run in arms.items():
        phase = max(phases_of(run), key=lambda phase: _load(phase.config, ranks))
        sizes.setdefault(_decides_memory(phase.config), (arm, phase))
    measured = []
    for arm, phase in sizes.values():
        model = make_decoder(phase.config, vocab)
        parts = _parts(phase.config, ranks, local, gpu, model, request.exact)
        measured.append((_on_gpu(phase.config, parts), arm, phase, model, parts))
    total, arm, phase, model, parts = max(measured, key=lambda row: row[0])
    config = phase.config
    yield "GPUs", f"{ranks}, strategy {config.strategy.name}"
    if arm != MAIN:
        yield "control", arm
    if arms[arm].phases:
        yield "phase", phase.name
    rows = _rows(config, ranks)
    times = config.trainer.accumulation(ranks)
    yield "micro-batch", f"{rows} x {config.data.sequence_length:,} tokens, {times} a step"
    away = OFFLOADED if config.strategy.cpu_offload else ()
    for name, size in parts.items():
        if size:  # at the peak in the loss there may be no gradients yet
            yield name, f"{gib(size)}{' of the CPU' if name in away else ''}"
    room = USABLE * gpu.memory
    yield "in all", f"{gib(total)} of {gpu.memory / GIB:.0f} GiB at the peak, uncompiled"
    if total > room:
        yield "does not fit", _way_out(config, ranks, local, gpu, model)


def _decides_memory(config: RunConfig) -> str:
    """Return what :func:`step_memory` depends on, so that arms alike in it are measured once."""
    run = config.trainer
    batches = config.data.sequence_length, run.batch_size, run.micro_batch_size
    return repr((config.model, config.strategy, config.optimizer.name, run.precision, *batches))


def _rows(config: RunConfig, ranks: int) -> int:
    """Return the sequences of a rank's micro-batch."""
    return config.trainer.micro_batch_size or config.trainer.batch_size // ranks


def _load(config: RunConfig, ranks: int) -> tuple[int, int]:
    """Return the tokens of a rank's micro-batch, and the number of micro-batches per step."""
    rows = _rows(config, ranks)
    return rows * config.data.sequence_length, config.trainer.accumulation(ranks)


OFFLOADED = "parameters", "optimizer"
"""Parts that ``strategy.cpu_offload`` keeps on the CPU. Reduced gradients go there too, but count
on the GPU."""


def _on_gpu(config: RunConfig, parts: Parts) -> int:
    away = OFFLOADED if config.strategy.cpu_offload else ()
    return sum(size for name, size in parts.items() if name not in away)


def _parts(
    config: RunConfig, ranks: int, local: int, gpu: Gpu, model: nn.Module, exact: bool
) -> Parts:
    kind = config.strategy.reduce_gradients
    once = reduces_once_a_step(model, kind, int(gpu.memory))
    strategy = replace(config.strategy, reduce_gradients="step" if once else "micro_batch")
    run = config.trainer
    if config.strategy.name == "ddp":  # every rank holds a whole copy
        strategy = replace(strategy, name="single")
        run = replace(run, batch_size=run.batch_size // ranks)
        ranks = local = 1
    config = replace(config, strategy=strategy, trainer=run)
    return step_memory(config, Ranks(0, ranks, 0, local), exact)


def _way_out(config: RunConfig, ranks: int, local: int, gpu: Gpu, model: nn.Module) -> str:
    """Return the first change after which the run fits, cheapest in time first."""
    rows = _rows(config, ranks)
    sharded: tuple[Literal["fsdp2"], ...] = ("fsdp2",) if ranks > 1 else ()
    changes = itertools.product(
        dict.fromkeys([config.strategy.name, *sharded]),
        ("none", "selective", "full"),
        [n for n in dict.fromkeys((rows, rows // 2, rows // 4, 1)) if n and rows % n == 0],
    )
    for name, recomputed, fewer in changes:
        strategy = replace(config.strategy, name=name, activation_checkpointing=recomputed)
        run = replace(config.trainer, micro_batch_size=fewer)
        changed = replace(config, strategy=strategy, trainer=run)
        size = _on_gpu(changed, _parts(changed, ranks, local, gpu, model, False))
        if size <= USABLE * gpu.memory:
            return (
                f"strategy={name} strategy.activation_checkpointing={recomputed} "
                f"trainer.micro_batch_size={fewer} takes {gib(size)}"
            )
    return "nor does anything with shards, recomputation and one sequence at a time; more GPUs"


def _time(request: PlanRequest, total: float, evaluation: float) -> Iterator[tuple[str, str]]:
    """Yield a row for each device."""
    config, run = request.config, request.config.trainer

    def hours(operations: float, peak: float) -> float:
        return operations / (peak * request.mfu * 3600)

    def measuring(peak: float) -> str:
        return f"; evaluation {_hours(hours(evaluation, peak))}" if evaluation else ""

    # A GPU evaluates in bf16 by default.
    in_fp32 = config.evaluation.dtype == "fp32"
    evaluated_in = replace(run, precision="fp32" if in_fp32 else "bf16").products
    for gpu in (GPUS[key] for key in request.timed if key != CPU):
        peak, other = dense_peak(gpu.name, run.products), dense_peak(gpu.name, evaluated_in)
        if peak is not None and other is not None:
            each = _hours(hours(total, peak) / request.ranks)
            text = f"{each}, {_gpu_hours(hours(total, peak))}{measuring(other * request.ranks)}"
            yield f"{request.ranks} x {gpu.name}", text
    if CPU not in request.timed:
        return
    threads = run.threads or usual_threads()
    peak = product_peak(threads)
    # bf16 is faster on some CPUs, and slower on others: see recalibrate, which compares them.
    yield (
        f"this CPU, {counted(threads, 'thread')}",
        f"{_hours(hours(total, peak))}{measuring(peak)}; its peak is {peak / 1e9:,.0f} GFLOP/s "
        "(fp32, measured)",
    )


def _disk(
    config: RunConfig,
    controls: dict[str, RunConfig],
    corpus: Corpus | UserError,
    estimates: dict[str, int | None],
    count: int,
    vocab: int,
) -> Iterator[tuple[str, str]]:
    size, number = STATE * count, _checkpoints(config)
    yield "a checkpoint", _gb(size)
    yield "checkpoints kept", f"{number}, and one that is written: {_gb((number + 1) * size)}"
    if controls:
        numbers = {name: _checkpoints(control) for name, control in controls.items()}
        size = STATE * sum(
            numbers[name] * parameters(make_decoder(control, vocab))["in all"]
            for name, control in controls.items()
        )
        yield "those of controls", f"{sum(numbers.values())}: {_gb(size)}"
    width = 2 if vocab <= 1 << 16 else 4
    known = [tokens for tokens in estimates.values() if tokens]
    if isinstance(corpus, Corpus):
        label, tokens = "text, prepared", sum(len(part.text.train) for part in corpus.parts)
    elif len(known) == len(estimates):
        label, tokens = "text, prepared", sum(known)
    else:
        label, tokens = "text, read once", tokens_at(config, config.trainer.max_steps)
    about = "about " if known and label == "text, prepared" else ""
    yield label, f"{about}{_gb(tokens * width)} of {width} bytes a token"


def _checkpoints(config: RunConfig) -> int:
    """Return the largest number of checkpoints that a finished run keeps."""
    run = config.trainer
    number = run.keep_checkpoints + run.keep_best + (config.drop_step is not None)
    number += len(kept_steps(config))
    return number + (run.max_steps // run.keep_every if run.keep_every else 0)


def _gb(size: float) -> str:
    if size < GB / 10_000:
        return f"{size * 1e6 / GB:,.1f} kB"
    return f"{size / GB:,.1f} GB" if size >= GB / 10 else f"{size * 1000 / GB:,.1f} MB"


def _hours(hours: float) -> str:
    if hours < 1 / 60:
        return "under a minute"
    if hours >= 1000 * 24:
        return f"{_rounded(hours / (365 * 24))} years"
    if hours >= 100:
        return f"{_rounded(hours / 24)} days"
    return f"{hours:,.1f} hours" if hours >= 0.1 else f"{60 * hours:,.1f} minutes"


def _rounded(number: float) -> str:
    """Format a number with three significant digits: ``1,710``."""
    digits = float(f"{number:.3g}")
    return f"{digits:,.0f}" if digits >= 100 else f"{digits:g}"


def _gpu_hours(hours: float) -> str:
    return f"{hours:,.0f} GPU-hours" if hours >= 1 else "under one GPU-hour"


def _corpus(request: PlanRequest) -> Corpus | UserError:
    """Return the prepared text, or the error that explains its absence."""
    config = request.config
    try:
        tokenizer = None if request.missing else tokenizer_of_weights(config)
        for data in readings(config):
            corpus = prepare_corpus(data, config.tokenizer, tokenizer, alone=False)
        return corpus
    except UserError as error:
        return error


def _vocabulary(config: RunConfig, corpus: Corpus | UserError) -> int:
    if isinstance(corpus, Corpus):
        return corpus.tokenizer.get_vocab_size()
    if config.tokenizer.path is None:
        return config.tokenizer.vocab_size
    raise UserError.at(
        "model.vocab_size",
        "not known before the text is prepared; give it, such as model.vocab_size=49152.",
    )
