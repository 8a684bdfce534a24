"""Recalibration of a trained model in one go: five rules, training, evaluation and export.

The rules are those of docs/guide.md; docs/pretrained.md states them with their numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.common.errors import UserError
from trainer.common.files import write_atomically
from trainer.common.processes import usual_threads
from trainer.config import EvaluationRequest, ExportRequest, OptimizerConfig, RunConfig
from trainer.evaluation.results import Report
from trainer.interchange.export import check_destination
from trainer.interchange.hub import find_pretrained
from trainer.lightning.speed import Times, measure_step, product_peak
from trainer.model.config import ModelConfig
from trainer.model.flops import forward_flops, training_flops
from trainer.positional.layout import Layout
from trainer.runs.directory import open_run_directory
from trainer.runs.starting_point import starting_weights
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.experiment import run_experiment
from trainer.workflows.export import export_checkpoint

RECORD = "recalibrate.json"
"""File of a run directory with the chosen keys, so that a resumed run measures nothing again."""
TRAINING = 0.75
"""Share of the minutes that training takes; the evaluation has the rest."""
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
"""Tokens of a forward pass; on a GPU halved until a step fits."""
DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
"""Depths of the evaluated needles."""


@dataclass(frozen=True)
class Speed:
    """Measured speed of training.

    ``operations``: per second, forward and backward. ``update``: seconds of an update of the
    optimizer. ``pass_tokens``: tokens of a forward pass that fit. ``precision``: fp32 or bf16.
    """

    operations: float
    update: float
    pass_tokens: int
    precision: str


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


def measure(config: ModelConfig, layout: Layout, accelerator: str, threads: int | None) -> Speed:
    """Measure some steps of training with random weights on this machine.

    Raises:
        UserError: not even one sequence fits the GPU.
    """
    device: Literal["cpu", "cuda"] = "cpu"
    torch.set_num_threads(threads or usual_threads())
    if torch.cuda.is_available() and accelerator != "cpu":
        device, has_bf16 = "cuda", torch.cuda.is_bf16_supported(False)
    else:
        cores = torch.get_num_threads()
        has_bf16 = product_peak(cores, torch.bfloat16) > product_peak(cores)
    precision = "bf16" if has_bf16 else "fp32"
    tokens = PASS_TOKENS[device]
    while tokens >= 256:
        length = min(layout.training_length, tokens, 2048 if device == "cuda" else 512)
        rows = max(1, (tokens if device == "cuda" else 512) // length)
        try:
            times = _step(config, layout, (rows, length), device, precision)
        except torch.OutOfMemoryError:
            tokens //= 2
            continue
        operations = rows * training_flops(config, layout, length) / times.micro_batch
        return Speed(operations, times.update, tokens, precision)
    raise UserError("MODEL: expected a model of which a training step fits the GPU")


def _step(
    config: ModelConfig,
    layout: Layout,
    shape: tuple[int, int],
    device: Literal["cpu", "cuda"],
    precision: str,
) -> Times:
    return measure_step(
        config,
        layout,
        shape,
        device=device,
        precision=precision,
        optimizer=OptimizerConfig(),
        seconds=5.0,
    )


def choose(
    config: ModelConfig, layout: Layout, speed: Speed, minutes: float, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a run that recalibrates a model in this time.

    ``given``: values of keys that the user sets; the others follow from them.

    Raises:
        UserError: the minutes do not suffice for the warm-up.
    """
    values = dict[str, Any]()

    def pick(key: str, value: Any) -> Any:
        values[key] = given.get(key, value)
        return values[key]

    evaluates = given.get("evaluation.enabled", True)
    seconds, C = 60 * minutes * (TRAINING if evaluates else 1.0), layout.training_length

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
    a_step = batch * time(length) + speed.update
    steps = int(seconds / a_step)
    if (budget := given.get("trainer.max_tokens")) is not None:
        steps = max(1, budget // (batch * length))
    else:
        steps = pick("trainer.max_steps", steps)
    if "trainer.max_steps" not in given and budget is None and steps < 2 * WARMUP[0]:
        needed = minutes * 2 * WARMUP[0] * a_step / seconds
        raise UserError(f"minutes: expected at least {needed:.2g} for this model, got {minutes:g}")
    pick("drop.schedule.warmup_steps", min(max(steps // 10, WARMUP[0]), WARMUP[1], steps))
    # 4. The learning rate by size, and QK-norm by the rate.
    weights = config.block_weights + (config.vocab_size or 0) * config.hidden_size
    rate = pick("optimizer.lr", 3e-4 if weights <= LARGE else 1e-4)
    if not any(layer.qk_norm for layer in layout.layers):
        norm = pick("model.qk_norm.when", "never" if rate < NORMED_RATE else "after_drop")
        if norm != "never":
            pick("drop.qk_norm_gain", "matched")
    pick("trainer.precision", speed.precision)
    pick("trainer.checkpoint_minutes", max(minutes / 5, 0.1))
    pick("drop.effect_sequences", min(max(steps * batch // 20, 4), 64))
    # 5. As many sequences of 1, 2, 4 and 8 times the length as the rest of the time evaluates.
    if evaluates:
        lengths = pick("evaluation.tokens", [length, 2 * length, 4 * length, 8 * length])
        forward = sum(forward_flops(config, layout, n) for n in lengths) / speed.operations
        sequences = int((60 * minutes - seconds) / (5 * forward))  # five rows of the table
        trials = min(sequences // (2 * len(DEPTHS)), 8)
        pick("evaluation.training_length", C if max(lengths) > C else length)
        pick("evaluation.methods", ["none", "yarn", "dynamic_ntk", "temperature"])
        tasks = ["perplexity", "standard"] if trials and length >= SHORTEST else ["perplexity"]
        pick("evaluation.tasks", tasks)
        pick("evaluation.windows", min(max(sequences // 2, 2), 32))
        pick("evaluation.fit_windows", 2)
        pick("evaluation.needles.trials", max(trials, 1))
        pick("evaluation.needles.depths", DEPTHS)
    return values


def chosen(
    model: str, minutes: float, given: Mapping[str, Any], run_dir: Path, overwrite: bool
) -> dict[str, Any]:
    """Return the keys that a run in ``run_dir`` began with, or measure this machine and choose."""
    record = run_dir / RECORD
    if record.is_file() and not overwrite:
        values: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
        return {key: value for key, value in values.items() if key not in given}
    config, layout = shape_of(model)
    accelerator, threads = given.get("trainer.accelerator", "auto"), given.get("trainer.threads")
    speed = measure(config, layout, accelerator, threads)
    values = choose(config, layout, speed, minutes, given)
    return {key: value for key, value in values.items() if key not in given}


def recalibrate(
    config: RunConfig, values: Mapping[str, Any], model: str, to: Path
) -> tuple[Report, Path]:
    """Drop and recalibrate, evaluate beside the model as it was, and export; resume what is begun.

    ``values``: the chosen keys, which are recorded. ``to``: the directory of the export.

    Returns:
        The report and its directory: of the evaluation, or of the run if that is disabled.
    """
    run_dir = Path(config.run_dir)
    is_exported = (to / "config.json").is_file() and not config.overwrite
    if not is_exported and not to.is_relative_to(run_dir):
        check_destination(to)
    run = replace(config, evaluation=replace(config.evaluation, enabled=False))
    if config.overwrite or not (run_dir / "report.json").is_file():
        open_run_directory(run)
        write_atomically(run_dir / RECORD, json.dumps(dict(values), indent=2) + "\n")
    trained = run_experiment(replace(run, overwrite=False))
    assert trained is not None, "recalibrate uses one process"
    report, place = trained[0], run_dir
    if config.evaluation.enabled:
        before = model if source_of(model) == "from_run" else str(find_pretrained(model))
        asked = EvaluationRequest(
            checkpoint=config.run_dir,
            compare=[before],
            threads=config.trainer.threads,
            evaluation=config.evaluation,
        )
        evaluated = evaluate_lengths(asked)
        assert evaluated is not None
        report, place = evaluated
    if not is_exported:
        export_checkpoint(ExportRequest(config.run_dir, str(to), threads=config.trainer.threads))
    return report, place
