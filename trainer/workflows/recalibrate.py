"""Recalibration of a trained model in one go: a speed test, five rules, training, evaluation.

docs/pretrained.md states the rules with their numbers, docs/guide.md where these come from.
"""

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from trainer.checkpoint import find_checkpoint, read_state
from trainer.common.errors import PreemptedError, UserError
from trainer.common.files import write_atomically
from trainer.common.processes import use_cores
from trainer.common.ranks import best_precision, device_type
from trainer.config import RunConfig
from trainer.evaluation.tasks import make_tasks
from trainer.interchange.pretrained import read_pretrained
from trainer.lightning.strategy import parallelize
from trainer.model.backends import cudnn_attention
from trainer.model.config import ModelConfig
from trainer.model.decoder import Decoder
from trainer.model.flops import forward_flops, training_flops
from trainer.positional.layout import Layout
from trainer.report.report import Report
from trainer.runs.directory import RECORD, is_published, open_run_directory, plain, read_record
from trainer.runs.models import find_model, read_run
from trainer.runs.parsing import parse
from trainer.runs.phases import Run
from trainer.training.setup import set_environment
from trainer.workflows.evaluate import held_out_of
from trainer.workflows.experiment import run_experiment
from trainer.workflows.plan import STATE_BYTES, activation_bytes, parameters
from trainer.workflows.text import open_corpus

log = logging.getLogger(__name__)

TRAINING = 0.7
"""Share for training of the time that checkpoints and the export leave."""
SHORTEST = 512
"""Tokens of the shortest sequence."""
LEAST_TOKENS, MOST_TOKENS = 512, 512 * 2048
"""Fewest and most tokens of a step (DroPE, App. D)."""
LEAST_WARMUP, MOST_WARMUP = 10, 500
"""Fewest and most steps of warm-up, otherwise a tenth of the steps."""
WINDOWS, NEEDLES = 4, 5
"""Windows and needles of a small evaluation at each length."""
KEYS = (
    "data.sequence_length",
    "trainer.batch_size",
    "trainer.micro_batch_size",
    "trainer.max_steps",
    "drop.schedule.warmup_steps",
    "optimizer.lr",
    "model.qk_norm.when",
    "drop.qk_norm_gain",
    "evaluation.tokens",
    "evaluation.training_length",
    "evaluation.methods",
    "evaluation.windows",
    "evaluation.needles.trials",
)
"""Keys that :func:`choose` may choose."""

EXPECTED = "papers report 95% of the scores after 5,000,000,000 (docs/guide.md)"
"""For models of up to 2B (DroPE, Fig. 10)."""


class Speed(NamedTuple):
    """Operations per second of training, forward and backward, and tokens of a forward pass."""

    operations: float
    pass_tokens: int


def shape_of(model: str) -> tuple[ModelConfig, Layout]:
    """Return the shape and the encoding of a model, without its weights; raise a UserError if there
    is no such model, or it has no rotation to drop."""
    start = read_pretrained(model) if is_published(model) else read_run(find_checkpoint(model))
    start.require_tokenizer()
    if not start.layout.rotates:
        raise UserError(f"MODEL: expected a model with RoPE, got {model!r}, which has none")
    return start.config, start.layout


def measure_speed(
    config: ModelConfig, layout: Layout, accelerator: str, threads: int | None
) -> Speed:
    """Time the fastest of three training steps of a model of this shape on random tokens; raise a
    UserError if the GPU's memory does not suffice."""
    use_cores(threads)
    device = device_type(accelerator)
    half = best_precision(device) == "bf16"
    tokens = 2048
    read = SHORTEST
    if device == "cuda":
        free = 0.8 * torch.cuda.mem_get_info()[0] - STATE_BYTES * parameters(config)["in all"]
        size = 2 if half else 4
        tokens = min(16384, int(free / activation_bytes(config, size, "none")))
        if tokens < SHORTEST:
            raise UserError("MODEL: its training needs more memory than the GPU has")
        read = tokens
    length = min(layout.training_length, read)
    with torch.device("meta"):
        model = Decoder(config, layout)
    parallelize(model, torch.device(device), half=half, compile=device == "cuda")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    backend = model.use_backend("auto", device, half=half, length=length)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(model.vocab_size, (read // length, length), device=device)
    seconds = math.inf
    for _ in range(3):
        began = time.perf_counter()
        with cudnn_attention(backend == "cudnn"):  # as in a run
            model.loss(ids, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.norm.weight[0].item()  # a host sync
        seconds = min(seconds, time.perf_counter() - began)
    return Speed(len(ids) * training_flops(config, layout, length) / seconds, tokens)


def choose(
    config: ModelConfig, layout: Layout, speed: Speed, minutes: float, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Choose the keys of a run that recalibrates a model in this time, except the given ones.

    ``given``: values of keys that the user sets; the others follow from them. Raise a UserError if
    the minutes do not suffice for twice the shortest warm-up.
    """
    values: dict[str, Any] = {}

    def pick(key: str, value: Any) -> Any:
        if key in given:
            return given[key]
        values[key] = value
        return value

    def seconds_of(length: int) -> float:
        return training_flops(config, layout, length) / speed.operations

    C = layout.training_length
    # A parameter takes 2.5e-7 s to be written, hashed, read and exported.
    left = 60 * minutes - 2.5e-7 * parameters(config)["in all"]
    seconds = left * TRAINING
    # 1. Sequences as long as the context if 4096 of them fit the time and one fits the device.
    length = C
    while length // 2 >= SHORTEST and (
        length > max(speed.pass_tokens, SHORTEST) or seconds / seconds_of(length) < 4096
    ):
        length //= 2
    length = pick("data.sequence_length", length)
    # 2. A batch, a power of two, for about a thousand steps.
    tokens = min(max(seconds / seconds_of(length) * length / 1000, LEAST_TOKENS), MOST_TOKENS)
    batch = pick("trainer.batch_size", 1 << max(0, int(math.log2(max(1.0, tokens / length)))))
    fitting = max(1, speed.pass_tokens // length)
    micro = next(n for n in range(batch, 0, -1) if batch % n == 0 and n <= fitting)
    pick("trainer.micro_batch_size", micro)
    # 3. As many steps as the time allows.
    step_seconds = batch * seconds_of(length)
    # The drop's effect is measured on 8 sequences: before it, after it, and at the end.
    probes = 3 * 8 * forward_flops(config, layout, length) / speed.operations
    steps = pick("trainer.max_steps", int((seconds - probes) / step_seconds))
    if "trainer.max_steps" not in given and steps < 2 * LEAST_WARMUP:
        missing = (2 * LEAST_WARMUP * step_seconds + probes - seconds) / (60 * TRAINING)
        raise UserError(f"minutes: expected {missing:.4g} more for this model")
    pick("drop.schedule.warmup_steps", min(max(steps // 10, LEAST_WARMUP), MOST_WARMUP, steps))
    # 4. The learning rate by size (DroPE, App. D), and QK-norm by the rate (Table 11).
    usual_rate = 3e-4 if parameters(config)["in all"] <= 2e9 else 1e-4
    rate = pick("optimizer.lr", usual_rate)
    if not any(layer.qk_norm for layer in layout.layers):
        norm = pick("model.qk_norm.when", "after_drop" if rate >= 1e-3 else "never")
        if norm != "never":
            pick("drop.qk_norm_gain", "matched")
    # 5. An evaluation in 0.18 of the time, beside training's 0.7.
    rest = left * 0.18 * speed.operations
    for key, value in evaluated(config, layout, rest, length).items():
        pick(key, value)
    return values


def evaluated(
    config: ModelConfig, layout: Layout, operations: float, length: int
) -> dict[str, Any]:
    """Return the keys of an evaluation that takes about so many operations: as far beyond
    ``length``, to 8 C, and then on as many windows and needles as they allow."""
    C = layout.training_length
    lengths = [length]
    while 4 * lengths[-1] < C:
        lengths.append(4 * lengths[-1])
    lengths += [n * C for n in (1, 2, 4, 8) if n * C > lengths[-1]]

    def cost() -> float:
        """Return the operations of a small evaluation: of two models, and of three methods on one
        of them beyond C."""
        tables = 5 if lengths[-1] > C else 2
        texts = tables * (WINDOWS + NEEDLES)
        fit = 24  # windows that a fitted temperature reads at each length beyond C
        total = sum(texts * forward_flops(config, layout, n) for n in lengths)
        return total + sum(fit * forward_flops(config, layout, n) for n in lengths if n > C)

    while len(lengths) > 1 and cost() > operations:
        lengths.pop()
    times = int(min(max(operations / cost(), 1), 8))
    methods = ["none"]
    if lengths[-1] > C:
        methods += ["yarn", "dynamic_ntk", "temperature"]
    return {
        "evaluation.tokens": lengths,
        "evaluation.training_length": C,
        "evaluation.methods": methods,
        "evaluation.windows": times * WINDOWS,
        "evaluation.needles.trials": times,
    }


def chosen_keys(
    model: str, minutes: float, given: Mapping[str, Any], began: float, record: Path | None
) -> dict[str, Any]:
    """Choose the keys of a run for this machine, or return those of a run that has begun.

    ``began``: when the minutes began, in seconds since the epoch. ``record``: the configuration of
    the run that has begun.
    """
    if record is not None:
        saved = read_record(record.parent)
        return {k: reduce(getitem, k.split("."), saved) for k in KEYS if k not in given}
    shape = shape_of(model)
    accelerator = given.get("trainer.accelerator", "auto")
    set_environment(accelerator)  # torch reads it once, in the speed test
    speed = measure_speed(*shape, accelerator, given.get("trainer.threads"))
    left = minutes - (time.time() - began) / 60
    return choose(*shape, speed, left, given)


def recalibrate(
    run: Run, values: Mapping[str, Any], model: str, minutes: float, began: float
) -> Report:
    """Print the chosen keys, drop, recalibrate, and evaluate beside the model as it was; resume
    what is begun.

    Training ends after 3/4 of the minutes: the rest is for evaluation and export. A run that is
    slower than its speed test then has the steps that it has taken, and one more.

    ``values``: the chosen keys. ``began``: when the minutes began, in seconds since the epoch.

    Raises:
        PreemptedError: the run was asked to stop.
    """
    config = run.config
    is_resumed = (run.directory / "checkpoints").is_dir() and not config.overwrite
    if not is_resumed:
        corpus = open_corpus(run)
        before = find_model(model, config.evaluation.training_length)
        C = before.training_length
        lengths = config.evaluation.tokens or [round(C * x) for x in config.evaluation.lengths]
        if "evaluation.tokens" in values:
            longest = min(corpus.validation.longest, corpus.test.longest)
            lengths = [length for length in lengths if length <= longest]
            config = replace(config, evaluation=replace(config.evaluation, tokens=lengths))
            values = {**values, "evaluation.tokens": lengths}
        make_tasks(held_out_of(corpus, before), config.evaluation, lengths, C)
    for key, value in values.items():
        print(f"{key}={json.dumps(value, separators=(',', ':'))}")
    open_run_directory(config)
    config = replace(config, overwrite=False)

    def train(config: RunConfig) -> Report:
        report = run_experiment(parse(plain(config)), [model])
        assert report is not None, "recalibrate uses one process"
        return report

    trainer = config.trainer
    if not trainer.max_time:
        seconds = max(1, math.ceil(began + 60 * minutes * 0.75 - time.time()))
        limit = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        try:
            return train(replace(config, trainer=replace(trainer, max_time=limit)))
        except PreemptedError as stop:
            if stop.reason != "time limit":
                raise
        steps = read_state(find_checkpoint(config.run_dir))["step"] + 1
        log.info(
            "The time for training is over: %s of %s steps", f"{steps:,}", f"{trainer.max_steps:,}"
        )
        config = replace(config, trainer=replace(trainer, max_steps=steps))
        record = yaml.safe_dump(plain(config), sort_keys=False)
        write_atomically(run.directory / RECORD, record)
    return train(config)
