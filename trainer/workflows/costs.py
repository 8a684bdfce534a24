"""Operations of an experiment and its evaluation, and remarks on settings that waste time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from trainer.common.errors import UserError
from trainer.evaluation.fitting import FitText
from trainer.evaluation.measurements import Perplexity
from trainer.evaluation.plan import Subject, plan_cells, total_work
from trainer.evaluation.results import STATEMENTS
from trainer.model.flops import training_flops
from trainer.model.language_model import LanguageModel
from trainer.positional.layout import Layout
from trainer.runs.config import MAIN, RunConfig
from trainer.runs.layouts import configured_layout, layouts_of_phases
from trainer.runs.phases import phases_of
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


def in_trainings(evaluation: float, total: float) -> str:
    """Format the operations of an evaluation as ``0.12 times`` those of training."""
    return f"{evaluation / total:.2g} times"
