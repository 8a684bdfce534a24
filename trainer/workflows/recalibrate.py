"""Recalibration of a trained model in one go: choices, training, evaluation and export."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from trainer.common.errors import (
    Problem,
    UserError,
    collecting,
    raise_all,
    renaming,
)
from trainer.common.files import write_atomically
from trainer.common.formats import read_as
from trainer.common.processes import usual_threads
from trainer.common.words import counted, override_value
from trainer.data.corpus import Corpus
from trainer.data.files import find_files, kind_of, read_rows
from trainer.evaluation.method_config import ON_TEXT
from trainer.evaluation.results import Report
from trainer.interchange.export.directory import Exported, check_destination
from trainer.interchange.hub import find_pretrained
from trainer.model.config import ModelConfig
from trainer.model.flops import training_flops
from trainer.runs.arms import arms_of
from trainer.runs.config import RunConfig
from trainer.runs.directory import check_run_directory, check_writable, locked, open_run_directory
from trainer.runs.memory import weights_of
from trainer.runs.ranks import Ranks
from trainer.runs.starting_point import starting_weights
from trainer.runs.training_config import OptimizerConfig
from trainer.training.speed import Times, measure_step, multiplies_bf16_fast
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.experiment import corpus_problems, run_experiment, start_problems
from trainer.workflows.export import export_checkpoint
from trainer.workflows.plan import Section
from trainer.workflows.recipe import CPU_PASS, Facts, Recipe, Speed, choose
from trainer.workflows.requests import EvaluationRequest, ExportRequest
from trainer.workflows.training_text import open_corpus

log = logging.getLogger(__name__)

RECORD = "recalibrate.json"
"""File of a run directory with the request, the choices and their reasons."""
GPU_PASS = 16384
"""Tokens of a forward pass to begin with on a GPU; halved until a step fits."""
MEASURED = {"cpu": 512, "cuda": GPU_PASS}
"""Tokens of the micro-batch that is measured."""
MEASURED_LENGTH = {"cpu": 512, "cuda": 2048}
"""Tokens of a measured sequence, at most."""
LONGEST_MEASURING = 20.0
"""Seconds of measuring in one precision, at most; otherwise a hundredth of the time."""


@dataclass(frozen=True)
class Asked:
    """The command's own keys: the model as the user named it, the minutes, and the text files."""

    model: str
    minutes: float
    text: tuple[str, ...]


@dataclass(frozen=True)
class Recalibration:
    """A whole recalibration."""

    asked: Asked
    config: RunConfig
    """The run; its own evaluation is disabled."""
    recipe: Recipe
    evaluates: bool
    """Whether the evaluation in ``config`` follows the run."""
    to: Path
    """Directory of the export."""
    words: tuple[str, ...]
    """Command line of the run alone."""


@dataclass(frozen=True)
class Record:
    """Content of :data:`RECORD`."""

    asked: Asked
    recipe: Recipe
    exported: str | None
    """Directory of the export, once it is written."""
    format: int = 1


def asked_problems(asked: Asked) -> list[Problem]:
    """Check packages and text before the model is read."""
    extras = {"transformers": "transformers", "gguf": "gguf"}
    if not asked.model.endswith(".gguf"):
        del extras["gguf"]
    problems = []
    if missing := sorted(extra for extra, module in extras.items() if find_spec(module) is None):
        problems.append(
            Problem(
                "",
                f"recalibrate needs {' and '.join(missing)}; pip install -c requirements.lock "
                f"'unrope[{','.join(missing)}]'.",
            )
        )
    with collecting(problems):
        find_files(list(asked.text), "text") if asked.text else None
    return problems


def source_of(model: str) -> Literal["from_run", "from_pretrained"]:
    """Return the key of the group ``model`` that starts a run from these weights."""
    path = Path(model)
    is_run = (path / "config.yaml").is_file() or (path / "state.json").is_file()
    return "from_run" if is_run else "from_pretrained"


def facts_of(model: str) -> Facts:
    """Return what the rules need to know of a model; reads no weights.

    Raises:
        UserError: there is no such model, it is damaged, or it has no rotation to drop.
    """
    is_run = source_of(model) == "from_run"
    weights = ModelConfig(from_run=model) if is_run else ModelConfig(from_pretrained=model)
    with renaming(**dict.fromkeys(("model.from_pretrained", "model.from_run"), "MODEL")):
        start = starting_weights(weights)
    assert start is not None
    start.require_tokenizer()
    if not start.layout.rotates:
        raise UserError.at("MODEL", f"{model!r} has no RoPE, so there is nothing to drop.")
    return Facts(weights_of(start.config), start.config, start.layout)


def measured(
    facts: Facts,
    minutes: float,
    accelerator: str,
    threads: int | None,
    precision: str | None = None,
) -> Speed:
    """Measure how fast this machine trains the model.

    ``minutes``: those of the recalibration, of which this takes a small share. ``accelerator``,
    ``threads``, ``precision``: the keys of ``trainer``, None if the user sets none.

    Raises:
        UserError: not even one sequence fits the GPU.
    """
    is_gpu = torch.cuda.is_available() and accelerator != "cpu"
    device: Literal["cpu", "cuda"] = "cuda" if is_gpu else "cpu"
    torch.set_num_threads(threads or usual_threads())
    if is_gpu:
        count = torch.cuda.device_count()
        name = torch.cuda.get_device_name() + (f" (one of {count})" if count > 1 else "")
    else:
        name = counted(torch.get_num_threads(), "CPU thread")
    if precision in ("fp32", "bf16"):
        precisions = [precision]
    elif is_gpu:
        precisions = ["bf16" if torch.cuda.is_bf16_supported(False) else "fp32"]
    else:
        is_fast = multiplies_bf16_fast(torch.get_num_threads())
        precisions = ["fp32", "bf16"] if is_fast else ["fp32"]
    length = min(facts.context, MEASURED_LENGTH[device])
    seconds = min(LONGEST_MEASURING, 0.6 * minutes)
    rows = max(1, MEASURED[device] // length)
    log.info("Measuring the speed of training on %s", name)
    times: dict[str, Times] = {}
    while not times:
        try:
            times = {
                dtype: measure_step(
                    facts.config,
                    facts.layout,
                    (rows, length),
                    device=device,
                    precision=dtype,
                    optimizer=OptimizerConfig(),
                    seconds=seconds,
                )
                for dtype in precisions
            }
        except torch.OutOfMemoryError:
            if rows * length <= 256:
                raise UserError.at(
                    "MODEL",
                    f"a training step does not fit {name}; train with strategy=fsdp2 on several "
                    "GPUs (docs/guide.md, section 4).",
                ) from None
            rows, length = (rows // 2, length) if rows > 1 else (1, length // 2)
    fastest = min(times, key=lambda name: times[name].micro_batch)
    best = times[fastest]
    operations = rows * training_flops(facts.config, facts.layout, length) / best.micro_batch
    fitting = rows * length if is_gpu else CPU_PASS
    return Speed(name, is_gpu, fastest, operations, best.update, fitting)


def recipe_for(
    asked: Asked,
    run_dir: Path,
    user_values: Mapping[str, Any],
    *,
    overwrite: bool,
    to: Path | None = None,
) -> Recipe:
    """Return the stored recipe of a run that was begun, or choose one.

    ``to``: where the user wants the export, if not in the run directory. It and the text are
    checked before the speed is measured, which takes long.

    Raises:
        UserError: the run was begun for another request, the export or the text is impossible, or
            the minutes do not suffice.
    """
    if not overwrite and (stored := read_record(run_dir)) is not None:
        differing = [
            Problem(
                "MODEL" if key == "model" else key,
                f"the run in {str(run_dir)!r} was begun with {old!r}, this command has {new!r}; "
                "choose another name=, or overwrite=true to start again.",
            )
            for key, new in _as_given(asked).items()
            if (old := _as_given(stored.asked)[key]) != new
        ]
        raise_all(differing)
        return stored.recipe
    if not overwrite and (run_dir / "config.yaml").exists():
        raise UserError.at(
            "run_dir",
            f"{str(run_dir)!r} holds a run that recalibrate did not begin; choose another name=, "
            "or overwrite=true.",
        )
    _check_before_measuring(asked, run_dir, to, overwrite)
    facts = facts_of(asked.model)
    accelerator = user_values.get("trainer.accelerator", "auto")
    threads, precision = (user_values.get(f"trainer.{key}") for key in ("threads", "precision"))
    speed = measured(facts, asked.minutes, accelerator, threads, precision)
    return choose(facts, speed, asked.minutes, user_values)


def _check_before_measuring(asked: Asked, run_dir: Path, to: Path | None, overwrite: bool) -> None:
    """Check that the export can be written, and that text files begin with text.

    Raises:
        UserError: with all that is wrong.
    """
    problems: list[Problem] = []
    if to is not None and not (overwrite and to.absolute().is_relative_to(run_dir.absolute())):
        with collecting(problems):
            check_destination(to)
            check_writable(str(to), "to")
    for file in find_files(list(asked.text), "text") if asked.text else []:
        if "://" not in file.path and kind_of(file.path)[0] == ".txt":
            with collecting(problems), renaming(**{"data.files": "text"}):
                next(read_rows(file.path, ""))
    raise_all(problems)


def _as_given(asked: Asked) -> dict[str, Any]:
    """Return the keys of a request as a user writes them: a list of text files, or one name."""
    files = asked.text
    return {**asdict(asked), "text": files[0] if len(files) == 1 else list(files)}


def read_record(run_dir: Path) -> Record | None:
    """Return the record of a run directory, or None.

    Raises:
        UserError: it is damaged.
    """
    path = run_dir / RECORD
    if not path.is_file():
        return None
    try:
        return read_as(path, Record)
    except ValueError:
        raise UserError.at(
            "run_dir", f"{str(path)!r} is damaged; overwrite=true starts again."
        ) from None


def write_record(request: Recalibration, exported: bool) -> None:
    """Write the request, the choices and whether the export is done into the run directory."""
    record = Record(request.asked, request.recipe, str(request.to) if exported else None)
    path = Path(request.config.run_dir) / RECORD
    write_atomically(path, json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n")


def is_exported(request: Recalibration) -> bool:
    """Whether an earlier call of the same command wrote the export."""
    record = None if request.config.overwrite else read_record(Path(request.config.run_dir))
    done = record is not None and record.exported == str(request.to)
    return done and (request.to / "config.json").is_file()


def section(request: Recalibration) -> Section:
    """Return the choices with their reasons, the tokens and the expected time."""
    recipe = request.recipe
    rows = [
        (word, choice.why)
        for choice in recipe.choices
        if (word := f"{choice.key}={override_value(choice.value)}") in request.words
    ]
    minutes = recipe.seconds / 60
    rows.append(("tokens", f"{recipe.tokens:,} in {counted(recipe.steps, 'step')}"))
    rows.append(("expected minutes", f"{minutes:.2g} of recalibration"))
    if request.evaluates:
        rows.append(("", f"{recipe.evaluation_seconds / 60:.2g} of evaluation"))
    return Section(f"Chosen for {request.asked.model} and {request.asked.minutes:g} minutes", rows)


def prepare(request: Recalibration) -> Corpus:
    """Check everything that is left to do, and prepare the text.

    Raises:
        UserError: with all that is wrong; nothing is written then, except prepared text.
    """
    config = request.config
    inside = request.to.absolute().is_relative_to(Path(config.run_dir).absolute())
    if not is_exported(request) and not (config.overwrite and inside):
        check_destination(request.to)
    check_run_directory(config, is_finished(config))
    trains = not is_finished(config)
    configs = arms_of(config)
    with renaming(**({"data.files": "text"} if request.asked.text else {})):
        if trains:
            raise_all(start_problems(configs, Ranks()))
        corpus = open_corpus(config)
        if trains:
            raise_all(corpus_problems(configs, corpus))
    lengths_that_fit(request, corpus)
    return corpus


def lengths_that_fit(request: Recalibration, corpus: Corpus) -> list[int]:
    """Return the evaluated lengths, in tokens, that the held-out text has.

    The test split needs them, and the validation split too if a method is fitted on it.

    Raises:
        UserError: it has none of them.
    """
    config, splits = request.config, {"data.test": corpus.test}
    if not {*config.evaluation.parts}.isdisjoint(ON_TEXT):
        splits["data.validation"] = corpus.validation
    held_out = min(split.longest for split in splits.values())
    lengths = config.evaluation.in_tokens(config.training_length)
    fitting = [length for length in lengths if length <= held_out]
    if request.evaluates and not fitting:
        raise UserError.at(
            "text",
            f"{held_out:,} tokens of it are held out ({', '.join(splits)}), fewer than the "
            f"shortest evaluated length of {min(lengths):,}; give more text, or "
            "evaluation.enabled=false.",
        )
    return fitting


def train(request: Recalibration) -> tuple[Report, bool] | None:
    """Record the choices in the run directory, then drop and recalibrate, or resume.

    A finished run stays unchanged.

    Returns:
        As :func:`run_experiment`.

    Raises:
        UserError: the directory holds something else.
        PreemptedError: the run was asked to stop.
    """
    config = request.config
    if not is_finished(config):
        _open(request)
    chosen = [choice.key for choice in request.recipe.choices]
    return run_experiment(replace(config, overwrite=False), chosen)


def _open(request: Recalibration) -> None:
    """Open the run directory, and record the choices there."""
    done = is_exported(request)
    with locked(Path(request.config.run_dir)):
        open_run_directory(request.config)
        write_record(request, exported=done)


def is_finished(config: RunConfig) -> bool:
    """Whether the run has its report already."""
    return (Path(config.run_dir) / "report.json").exists() and not config.overwrite


def evaluate(request: Recalibration, corpus: Corpus) -> tuple[Report, Path] | None:
    """Measure the recalibrated model, with and without a temperature, and the model as it was, with
    its extensions."""
    config, model = request.config, request.asked.model
    before = model if source_of(model) == "from_run" else str(find_pretrained(model))
    fitting = lengths_that_fit(request, corpus)
    if left_out := set(config.evaluation.in_tokens(config.training_length)) - {*fitting}:
        log.info("%s left out: the held-out text is shorter", counted(len(left_out), "length"))
    asked = EvaluationRequest(
        checkpoint=config.run_dir,
        compare=[before],
        threads=config.trainer.threads,
        evaluation=replace(config.evaluation, tokens=fitting),
    )
    return evaluate_lengths(asked)


def export(request: Recalibration) -> Exported | None:
    """Write the directory for transformers, once; None if an earlier call has."""
    if is_exported(request):
        return None
    asked = ExportRequest(
        request.config.run_dir, str(request.to), threads=request.config.trainer.threads
    )
    exported = export_checkpoint(asked)
    write_record(request, exported=True)
    return exported
