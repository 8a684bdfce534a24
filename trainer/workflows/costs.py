"""Operations of an experiment and its evaluation, and remarks on settings that waste time."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from trainer.common.errors import UserError
from trainer.common.processes import usual_threads
from trainer.common.words import duration
from trainer.evaluation.fitting import FitText
from trainer.evaluation.measurements import Perplexity
from trainer.evaluation.plan import Subject, plan_cells, total_work
from trainer.evaluation.results import STATEMENTS
from trainer.model.flops import training_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.runs.config import MAIN, RunConfig
from trainer.runs.descriptions import label
from trainer.runs.layouts import configured_layout, layouts_of_phases
from trainer.runs.phases import phases_of
from trainer.runs.ranks import Ranks, device_type
from trainer.training.devices import OPERATIONS, dense_peak
from trainer.training.module import make_decoder
from trainer.workflows.subjects import applicable

log = logging.getLogger(__name__)

STATE = 12
"""Bytes a parameter in a checkpoint: weights and two moments in float32."""
USUAL_MFU = 0.4
"""Share of a GPU's dense peak that training reaches, unless it is known better."""
USUAL_PEAK = 1e14
"""Operations per second of a GPU that is not in the table."""
LONG = 600.0
"""Seconds of training or evaluation below which a setting wastes little."""
LARGE = 100_000_000
"""Parameters from which on compiling pays for its minutes."""
SHORTEST_STEP = 0.01
"""Seconds of the step of a small model, which waits for its kernels to start."""
DISK = 1e9
"""Bytes per second at which a checkpoint is assumed to be written."""
MOST_WRITING, MOST_EVALUATION = 0.1, 0.2
"""Shares of the training that writing checkpoints and the evaluation may take unremarked."""


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


def training_operations(arms: Mapping[str, RunConfig]) -> dict[str, float]:
    """Return the operations of each arm from where it branches off; vocabularies must be known."""
    config = arms[MAIN]
    operations = {MAIN: flops(config)}
    for name, changes in config.controls.items():
        begin = changes.get("branch") or 0
        begin = config.drop_step or 0 if begin == "drop" else begin
        operations[name] = flops(arms[name], begin)
    return operations


def evaluation_operations(arms: Mapping[str, RunConfig]) -> float:
    """Return about how many operations the evaluation at the end takes; vocabularies must be known.

    Counts a forward pass over every sequence of every distinct cell and fit, as the evaluation
    does for its own estimate. Prompts that share a prefix count in full.

    Returns:
        0 without an evaluation, or if the configuration does not tell its methods.
    """
    config = arms[MAIN]
    wanted = config.evaluation
    if not wanted.enabled:
        return 0.0
    C = wanted.training_length or config.training_length
    tasks = [t for t in wanted.tasks if t != STATEMENTS or config.data.needles.share]
    wanted = replace(wanted.in_multiples(C), tasks=tasks)
    lengths = wanted.in_tokens(C)
    try:
        subjects = [
            Subject(name, name, arm.model, _last_layout(arm).with_training_length(C), _not_trained)
            for name, arm in arms.items()
        ]
        recipes, _ = applicable(subjects, wanted)
    except UserError:  # without its weights, a model's last encoding may be unknown
        return 0.0
    # One task with as many sequences as all together stands for them.
    empty = np.zeros((wanted.sequences, 0), np.int64)
    task = Perplexity(dict.fromkeys(lengths, empty), 0, C)
    return total_work(plan_cells(subjects, recipes, [task], lengths, FitText({}, 0, "")))


def _last_layout(arm: RunConfig) -> Layout:
    *_, last = layouts_of_phases(arm, configured_layout(arm))
    return last


def _not_trained() -> LanguageModel:
    raise RuntimeError("nothing is measured before training")


@dataclass(frozen=True)
class Device:
    """What remarks need of the devices of a run.

    ``speed``: operations per second of all ranks together. ``has_bf16``: whether they are GPUs with
    bf16 units.
    """

    is_gpu: bool
    has_bf16: bool
    speed: float


def remarks_on_costs(
    arms: Mapping[str, RunConfig],
    operations: Mapping[str, float],
    evaluation: float,
    device: Device,
) -> dict[str, str]:
    """Return the keys of settings that waste much time, each with a remark that names another.

    Args:
        arms: with known vocabularies.
        operations: of each arm, see :func:`training_operations`.
        evaluation: operations of the evaluation.
        device: where the arms train.
    """
    remarks: dict[str, str] = {}
    for name, arm in arms.items():
        seconds = operations[name] / device.speed
        if seconds > LONG:
            for key, text in _of_training(arm, flops(arm) / device.speed, device):
                remarks.setdefault(key, text)
    total = sum(operations.values())
    seconds = evaluation / device.speed
    if seconds > LONG and evaluation > MOST_EVALUATION * total:
        remarks["evaluation"] = (
            f"it takes about {in_trainings(evaluation, total)} the operations of the "
            f"training, {duration(seconds)}; fewer evaluation.lengths, evaluation.methods or "
            "evaluation.needles.trials take less"
        )
    return remarks


def in_trainings(evaluation: float, total: float) -> str:
    """Format the operations of an evaluation as ``0.12 times`` those of training."""
    return f"{evaluation / total:.2g} times"


def _of_training(arm: RunConfig, seconds: float, device: Device) -> Iterator[tuple[str, str]]:
    """Yield keys and remarks on an arm whose steps take ``seconds`` in all."""
    run, parameters = arm.trainer, sum(p.numel() for p in make_decoder(arm, 0).parameters())
    if device.has_bf16 and run.precision == "fp32":
        yield (
            "trainer.precision",
            f"{label(arm)} multiplies in fp32, and the bf16 peak of these GPUs is at least twice "
            "as high; trainer.precision=bf16 keeps float32 weights",
        )
    if device.is_gpu and not run.compile and parameters > LARGE:
        yield (
            "trainer.compile",
            f"{label(arm)} has {parameters:,} parameters and runs uncompiled; try "
            "trainer.compile=true, which takes minutes at the start",
        )
    step, size = max(seconds / run.max_steps, SHORTEST_STEP), STATE * parameters
    minutes = run.checkpoint_minutes or math.inf
    between, least = min(run.checkpoint_every * step, 60 * minutes), size / DISK / MOST_WRITING
    if between < least:
        settings = []
        if run.checkpoint_every * step < least:
            steps = 10 * math.ceil(least / step / 10)
            settings.append(f"trainer.checkpoint_every={steps}")
        if 60 * minutes < least:
            settings.append(f"trainer.checkpoint_minutes={math.ceil(least / 60)}")
        yield (
            "trainer.checkpoint_every",
            f"{label(arm)} writes {size / 1e9:.3g} GB about every {duration(between)}; at 1 GB/s "
            f"that takes {size / DISK / between:.0%} of the time, and {MOST_WRITING:.0%} with "
            f"{' '.join(settings)}",
        )


def say_costs(arms: Mapping[str, RunConfig], vocab: int, ranks: Ranks) -> None:
    """Warn of settings that waste much time on this machine.

    ``vocab``: tokens of the text, for models without a size of their own.
    """
    arms = {
        name: replace(arm, model=replace(arm.model, vocab_size=arm.model.vocab_size or vocab))
        for name, arm in arms.items()
    }
    run = arms[MAIN].trainer
    if device_type(arms[MAIN]) == "cuda":
        peak = dense_peak(torch.cuda.get_device_name(), run.products) or USUAL_PEAK
        speed = USUAL_MFU * peak * ranks.world_size
        device = Device(True, torch.cuda.is_bf16_supported(False), speed)
    else:
        device = Device(False, False, OPERATIONS * (run.threads or usual_threads()))
    operations = training_operations(arms)
    remarks = remarks_on_costs(arms, operations, evaluation_operations(arms), device)
    for key, text in remarks.items():
        log.warning("%s: %s", key, text)
