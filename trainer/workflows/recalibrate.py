"""Recalibration of a trained model in one go: five rules, training, evaluation and export.

The rules are those of docs/guide.md; docs/pretrained.md states them with their numbers.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml

from trainer.checkpoint import find_checkpoint, read_state
from trainer.common.errors import PreemptedError, UserError
from trainer.common.files import write_atomically
from trainer.common.processes import usual_threads
from trainer.config import RunConfig
from trainer.evaluation.results import Report, is_known
from trainer.interchange.hub import find_pretrained
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops, training_flops
from trainer.positional.layout import Layout
from trainer.runs.directory import RECORD, open_run_directory, plain
from trainer.runs.parsing import parse
from trainer.runs.starting_point import starting_weights
from trainer.workflows.experiment import median_rate, run_experiment
from trainer.workflows.plan import STATE, activation_bytes
from trainer.workflows.training_text import open_corpus

log = logging.getLogger(__name__)

RECORD_OF_KEYS = "recalibrate.json"
"""File of a run directory with the chosen keys, so that a resumed run has the same."""
TRAINING, EVALUATION = 0.75, 0.2
"""Shares of the minutes after which training ends, and that the evaluation takes; the export has
the rest."""
SHORTEST, SEQUENCES = 512, 4096
"""Tokens of the shortest sequence; sequences of the whole context that must fit to use it."""
STEPS, BATCH_TOKENS = 1000, (512, 512 * 2048)
"""Steps that the batch is chosen for, and fewest and most tokens of a step (DroPE, App. D)."""
WARMUP = 10, 500
"""Fewest and most steps of warm-up, otherwise a tenth of the steps."""
LARGE, NORMED_RATE = 2e9, 1e-3
"""Parameters up to which 3e-4 is the learning rate (1e-4 above; DroPE, App. D), and the rate from
which on training needs QK-norm (DroPE, Table 11)."""
PASS_TOKENS = {"cpu": 2048, "cuda": 16384}
"""Most tokens of a forward pass."""
SHARE = 0.4
"""Share of the speed of matrix products that training is expected to reach, before it is known."""
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
"""Depths of the evaluated needles."""
ROWS, FITS = 5, 24
"""Rows of the table; windows that a fitted temperature reads at each length."""
TOKENS = 5_000_000_000
"""Tokens after which a recalibrated model of up to 2B has 95% of its scores (DroPE, Fig. 10)."""


class Speed(NamedTuple):
    """Operations per second of training, forward and backward, and tokens of a forward pass."""

    operations: float
    pass_tokens: int


def source_of(model: str) -> Literal["from_run", "from_pretrained"]:
    """Return the key of the group ``model`` that starts a run from these weights."""
    files = (Path(model) / name for name in ("config.yaml", "state.json"))
    return "from_run" if any(file.is_file() for file in files) else "from_pretrained"


def shape_of(model: str) -> tuple[ModelConfig, Layout]:
    """Return the shape and the encoding of a model; reads no weights.

    Raises:
        UserError: there is no such model, or it has no rotation to drop.
    """
    is_run = source_of(model) == "from_run"
    start = starting_weights(
        ModelConfig(from_run=model) if is_run else ModelConfig(from_pretrained=model)
    )
    assert start is not None
    start.require_tokenizer()
    if not start.layout.rotates:
        raise UserError(f"MODEL: expected a model with RoPE, got {model!r}, which has none")
    return start.config, start.layout


def estimate(config: ModelConfig, accelerator: str, threads: int | None) -> Speed:
    """Estimate the speed of training on this machine from that of a matrix product.

    Raises:
        UserError: not even 256 tokens fit the GPU.
    """
    torch.set_num_threads(threads or usual_threads())
    device = "cuda" if torch.cuda.is_available() and accelerator != "cpu" else "cpu"
    has_bf16 = device == "cuda" and torch.cuda.is_bf16_supported(False)
    tokens = PASS_TOKENS[device]
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        left = 0.8 * free - STATE * parameters_of(config)
        tokens = min(tokens, int(left / activation_bytes(config, 2 if has_bf16 else 4, "none")))
    if tokens < 256:
        raise UserError("MODEL: expected a model of which a training step fits the GPU")
    # On a GPU, products that take milliseconds: launches and the host sync take microseconds.
    size, products = (8192, 4) if device == "cuda" else (1024, 1)
    a = torch.ones(size, size, device=device, dtype=torch.bfloat16 if has_bf16 else torch.float32)
    times = []
    for _ in range(5):  # the first is the warm-up
        began = time.perf_counter()
        for _ in range(products):
            b = a @ a
        b[0, 0].item()  # a host sync
        times.append((time.perf_counter() - began) / products)
    return Speed(SHARE * 2 * size**3 / min(times), tokens)


def parameters_of(config: ModelConfig) -> int:
    """Return the number of weights in matrices, with one matrix of embeddings."""
    return config.block_weights + (config.vocab_size or 0) * config.hidden_size


def choose(
    config: ModelConfig,
    layout: Layout,
    speed: Speed,
    minutes: float,
    given: Mapping[str, Any],
    spent: float = 0.0,
) -> dict[str, Any]:
    """Return the keys of a run that recalibrates a model in this time.

    ``given``: values of keys that the user sets; the others follow from them. ``spent``: seconds of
    the minutes that have passed.

    Raises:
        UserError: the minutes do not suffice for the warm-up.
    """
    values = dict[str, Any]()

    def pick(key: str, value: Any) -> Any:
        values[key] = given.get(key, value)
        return values[key]

    evaluates = given.get("evaluation.enabled", True)
    share = TRAINING if evaluates else TRAINING + EVALUATION
    seconds, C = 60 * minutes * share - spent, layout.training_length

    def time(length: int) -> float:
        return training_flops(config, layout, length) / speed.operations

    # 1. Sequences as long as the context if enough of them fit the time and one fits the device.
    length = C
    while length // 2 >= SHORTEST and (
        length > max(speed.pass_tokens, SHORTEST) or seconds / time(length) < SEQUENCES
    ):
        length //= 2
    length = pick("data.sequence_length", length)
    # 2. A batch, a power of two, for about a thousand steps.
    low, high = BATCH_TOKENS
    tokens = min(max(seconds / time(length) * length / STEPS, low), high)
    batch = pick("trainer.batch_size", 1 << max(0, int(math.log2(max(1.0, tokens / length)))))
    fitting = max(1, speed.pass_tokens // length)
    pick(
        "trainer.micro_batch_size",
        next(n for n in range(batch, 0, -1) if batch % n == 0 and n <= fitting),
    )
    # 3. As many steps as the time allows.
    a_step = batch * time(length)
    steps = pick("trainer.max_steps", int(seconds / a_step))
    if "trainer.max_steps" not in given and steps < 2 * WARMUP[0]:
        needed = (spent + 2 * WARMUP[0] * a_step) / (60 * share)
        raise UserError(f"minutes: expected at least {needed:.2g} for this model, got {minutes:g}")
    pick("drop.schedule.warmup_steps", min(max(steps // 10, WARMUP[0]), WARMUP[1], steps))
    # 4. The learning rate by size, and QK-norm by the rate.
    rate = pick("optimizer.lr", 3e-4 if parameters_of(config) <= LARGE else 1e-4)
    if not any(layer.qk_norm for layer in layout.layers):
        norm = pick("model.qk_norm.when", "never" if rate < NORMED_RATE else "after_drop")
        if norm != "never":
            pick("drop.qk_norm_gain", "matched")
    pick("trainer.keep_checkpoints", 1)
    pick("trainer.checkpoint_minutes", max(minutes / 5, 0.1))
    pick("drop.effect_sequences", min(max(steps * batch // 20, 4), 64))
    if evaluates:
        rest = 60 * minutes * EVALUATION
        for key, value in evaluated(config, layout, speed.operations, rest, length).items():
            pick(key, value)
    return values


def evaluated(
    config: ModelConfig, layout: Layout, operations: float, seconds: float, length: int
) -> dict[str, Any]:
    """Return the keys of an evaluation in this time: as far beyond ``length``, to 8 C, and on as
    many windows and needles as it allows.

    ``operations``: per second of training, which a forward pass is taken to reach, too.
    """
    C = layout.training_length
    lengths = [length]
    while 4 * lengths[-1] < C:
        lengths.append(4 * lengths[-1])
    lengths += [n * C for n in (1, 2, 4, 8) if n * C > lengths[-1]]

    def time(rows: int) -> float:
        """Return the seconds of a number of windows of each length, and of fitting a
        temperature."""
        cost = {n: forward_flops(config, layout, n) / operations for n in lengths}
        return sum((rows + (FITS if n > C else 0)) * cost[n] for n in lengths)

    while len(lengths) > 1 and time(2 * ROWS) > seconds:
        lengths.pop()
    windows = int((seconds - time(0)) / (time(ROWS) - time(0)))
    trials = min(windows // (2 * len(DEPTHS)), 8)
    beyond = ["yarn", "dynamic_ntk", "temperature"] if lengths[-1] > C else []
    tasks = ["perplexity", "standard"] if trials and length >= SHORTEST else ["perplexity"]
    return {
        "evaluation.tokens": lengths,
        "evaluation.training_length": C,
        "evaluation.methods": ["none", *beyond],
        "evaluation.tasks": tasks,
        "evaluation.windows": min(max(windows // 2, 2), 32),
        "evaluation.fit_windows": 2,
        "evaluation.needles.trials": max(trials, 1),
        "evaluation.needles.depths": DEPTHS,
    }


def chosen(
    model: str,
    minutes: float,
    given: Mapping[str, Any],
    run_dir: Path,
    overwrite: bool,
    began: float,
) -> dict[str, Any]:
    """Return the keys that a run in ``run_dir`` began with, or choose them for this machine.

    ``began``: when the minutes began, in seconds since the epoch.
    """
    record = run_dir / RECORD_OF_KEYS
    if record.is_file() and not overwrite:
        values = json.loads(record.read_text(encoding="utf-8"))
    else:
        config, layout = shape_of(model)
        accelerator = given.get("trainer.accelerator", "auto")
        speed = estimate(config, accelerator, given.get("trainer.threads"))
        values = choose(config, layout, speed, minutes, given, time.time() - began)
    return {key: value for key, value in values.items() if key not in given}


def recalibrate(
    config: RunConfig, values: Mapping[str, Any], model: str, minutes: float, began: float
) -> Report:
    """Drop, recalibrate, and evaluate beside the model as it was; resume what is begun.

    The minutes are a deadline for chosen steps: after half of the time for training the run is
    planned again by its real speed, and at the end of this time it takes its last step.

    ``values``: the chosen keys, which are recorded. ``began``: when the minutes began.

    Raises:
        PreemptedError: the run was asked to stop.
    """
    is_resumed = Path(config.run_dir, "checkpoints").is_dir() and not config.overwrite
    if not is_resumed:
        corpus = open_corpus(config)
        longest = min(corpus.validation.longest, corpus.test.longest)
        fitting = [n for n in config.evaluation.tokens or () if n <= longest]
        config, values = _changed(config, values, {"evaluation.tokens": fitting})
    open_run_directory(config)
    config = replace(config, overwrite=False)
    _record(config, values)

    def train(config: RunConfig) -> Report:
        is_run = source_of(model) == "from_run"
        outcome = run_experiment(config, [model if is_run else str(find_pretrained(model))])
        assert outcome is not None, "recalibrate uses one process"
        return outcome[0]

    if config.trainer.max_time:
        return train(config)
    share = TRAINING if config.evaluation.enabled else TRAINING + EVALUATION
    start, end = time.time(), began + 60 * minutes * share
    for stop in (end,) if is_resumed else (start + (end - start) / 2, end):
        limit = str(timedelta(seconds=max(1, math.ceil(stop - time.time()))))
        try:
            return train(replace(config, trainer=replace(config.trainer, max_time=limit)))
        except PreemptedError as error:
            if time.time() < stop or "time limit" not in str(error):  # a signal, or a job's end
                raise
        changes = planned_again(config, model, end - time.time(), 60 * minutes * EVALUATION)
        config, values = _changed(config, values, changes)
        log.info("Planned again: %s steps", f"{config.trainer.max_steps:,}")
        _record(config, values)
    return train(config)


def planned_again(
    config: RunConfig, model: str, seconds: float, evaluation_seconds: float
) -> dict[str, Any]:
    """Return the steps and the evaluation that fit the rest of the time at the speed until now.

    ``seconds``: left for training; the run takes at least one more step, which ends it.
    """
    run_dir, length = Path(config.run_dir), config.data.sequence_length
    done = read_state(find_checkpoint(str(run_dir)), hashed=False)["step"]
    rate = median_rate(run_dir) or 0.0
    steps = done + max(1, int(seconds * rate / config.tokens_per_step))
    changes: dict[str, Any] = {"trainer.max_steps": steps}
    if config.evaluation.enabled and rate:
        shape, layout = shape_of(model)
        operations = rate / length * training_flops(shape, layout, length)
        changes |= evaluated(shape, layout, operations, evaluation_seconds, length)
        longest = max(config.evaluation.tokens or [length])
        changes["evaluation.tokens"] = [n for n in changes["evaluation.tokens"] if n <= longest]
    return changes


def _changed(
    config: RunConfig, values: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[RunConfig, dict[str, Any]]:
    """Return the run and its chosen keys with changes of chosen keys."""
    changes = {key: value for key, value in changes.items() if key in values}
    made = plain(config)
    for key, value in changes.items():
        *path, last = key.split(".")
        reduce(getitem, path, made)[last] = value
    return parse(RunConfig, made), {**values, **changes}


def _record(config: RunConfig, values: Mapping[str, Any]) -> None:
    """Write the configuration of a run that was planned again, and its chosen keys."""
    run_dir = Path(config.run_dir)
    write_atomically(run_dir / RECORD, yaml.safe_dump(plain(config), sort_keys=False))
    write_atomically(run_dir / RECORD_OF_KEYS, json.dumps(dict(values), indent=2) + "\n")


def verdict(report: Report) -> str:
    """Return in a sentence how much of the loss's rise at the drop recalibration won back."""
    tokens = f"{report.arms[0].tokens:,} tokens"
    expected = f"papers report 95% of the scores after {TOKENS:,} tokens (docs/guide.md)"
    drop = report.drop
    losses = (drop.loss_before, drop.loss_after, drop.loss_end) if drop else (None, None, None)
    before, after, end = (loss if is_known(loss) else math.nan for loss in losses)
    if math.isnan(end) or not after > before:
        return f"Recalibrated for {tokens}; {expected}."
    won = f"{(after - end) / (after - before):.0%} of the loss's rise of {after - before:.3g} nats"
    return f"Recalibration for {tokens} won back {won}; {expected}."
