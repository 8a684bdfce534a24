"""Evaluation of checkpoints on their own, without the run that made them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from trainer.data.corpus import Corpus, prepare_corpus
from trainer.errors import UserError
from trainer.evaluation.table import Subject, evaluate
from trainer.report.figures import write_figures
from trainer.report.html import write_html
from trainer.report.observations import ROLES, observe
from trainer.report.results import Report
from trainer.runs.checkpoints import find_checkpoint, load_decoder, read_state
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import (
    describe_task,
    environment,
    label,
    reference_first,
    role,
)
from trainer.runs.directory import writable_problem
from trainer.runs.parsing import validated
from trainer.workflows.evaluation_request import EvaluationRequest


def evaluate_checkpoints(request: EvaluationRequest) -> tuple[Report, Path]:
    """Evaluate, write the report, and return it with its directory.

    A checkpoint brings its own model, layout, tokenizer and text source.

    Raises:
        UserError: a checkpoint cannot be read, or the checkpoints do not fit together.
    """
    assert request.checkpoint is not None
    torch.set_num_threads(request.threads or os.cpu_count() or 1)
    names = [request.checkpoint, *request.compare]
    paths = [find_checkpoint(name) for name in names]
    given = Path(request.checkpoint)
    output = Path(
        request.output or (given if given.is_dir() else paths[0].parent.parent) / "evaluation"
    )
    if problem := writable_problem(str(output), "output"):
        raise UserError(problem)
    abouts: list[dict[str, Any]] = [read_state(path) for path in paths]
    for name, about in zip(names, abouts, strict=True):
        if about["tokenizer"] != abouts[0]["tokenizer"]:
            raise UserError(f"compare: {name!r} has another tokenizer than {names[0]!r}.")
    # Only read, not checked: that would run the plugins a checkpoint names.
    configs = [validated(RunConfig, about["config"])[0] for about in abouts]
    config = configs[0]
    models = [load_decoder(path, about) for path, about in zip(paths, abouts, strict=True)]
    lengths = {model.layout.training_length for model in models}
    if len(lengths) > 1:
        raise UserError(f"compare: the checkpoints have different training lengths: {lengths}.")
    if problems := request.evaluation.problems(lengths.pop()):
        raise UserError(*problems)
    pretrained = config.model.from_pretrained is not None
    tokenizer = Tokenizer.from_str(abouts[0]["tokenizer"]) if pretrained else None
    corpus = prepare_corpus(config.data, config.tokenizer, tokenizer)
    _check_tokenizer(corpus, abouts[0]["tokenizer"], names[0])
    subjects = reference_first(
        [
            Subject(_role(c, a["step"]), _label(c, a["step"], path), model)
            for c, a, path, model in zip(configs, abouts, paths, models, strict=True)
        ]
    )
    measured = evaluate(subjects, corpus, config.data.needles, request.evaluation)
    report = Report(
        name=config.name,
        config={"evaluation": vars(request.evaluation)},
        environment=environment(corpus),
        table=tuple(measured.table),
        loss_by_position=tuple(measured.loss_by_position),
        observations=observe(
            measured.table,
            {key: name for key, name in measured.roles.items() if key in ROLES},
            temperature=measured.temperature,
        ),
        task=describe_task(config),
        temperature=measured.temperature,
    )
    write_html(report, write_figures(report, output / "figures"), output / "report.html")
    report.write(output / "report.json")
    return report, output


def _check_tokenizer(corpus: Corpus, expected: str, name: str) -> None:
    if corpus.tokenizer.to_str() != expected:
        raise UserError(
            f"checkpoint: {name!r} was trained with another tokenizer than its text source gives "
            "here (another version of Python, or changed files)."
        )


def _is_dropped(config: RunConfig, step: int) -> bool:
    return config.drop_step is not None and step > config.drop_step


def _role(config: RunConfig, step: int) -> str:
    """What the checkpoint is in comparisons: before its drop a run is what its encoding says."""
    return role(config, dropped=_is_dropped(config, step))


def _label(config: RunConfig, step: int, path: Path) -> str:
    name = label(config, dropped=_is_dropped(config, step))
    return name if step == config.trainer.max_steps else f"{name} ({path.name})"
