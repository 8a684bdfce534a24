"""Evaluation of checkpoints and published models, without their runs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trainer.common.errors import UserError
from trainer.evaluation.results import Report
from trainer.evaluation.store import all_fields, fingerprint
from trainer.report.pages import write_renderings
from trainer.runs.descriptions import reference_first
from trainer.runs.directory import check_writable, free_place
from trainer.runs.job_files import say_run_directory
from trainer.runs.models import find_candidate
from trainer.runs.origin import origin
from trainer.runs.ranks import join_evaluation
from trainer.workflows.measuring import Text, checked, measure_models, with_observations
from trainer.workflows.requests import EvaluationRequest
from trainer.workflows.subjects import held_out_corpus

log = logging.getLogger(__name__)


DEFAULT = "default"
"""The option of the group that a run ends with."""
_RESULT = "a result, of what the key holds"
NOT_ASKED = {
    "name": "a heading",
    **dict.fromkeys(("cells", "notes", "observations", "temperature", "timing"), _RESULT),
    "key_tokens": _RESULT,
    **dict.fromkeys(("arms", "drop", "reach", "milestones"), "of training, which is not reported"),
    "environment": "versions and devices change no more than rounding; text and models are taken",
    "made": "when and by which command; of what is taken",
}
"""Fields of a report in which two evaluations of the same may differ, with the reason."""


def evaluate_lengths(
    request: EvaluationRequest, name: str = DEFAULT, asks_for_statements: bool = False
) -> tuple[Report, Path] | None:
    """Measure every method on every model; write the report and return it with its directory.

    Several processes, started by torchrun or srun, share the work; all but the first return None.
    An existing report of other settings, text or checkpoints is kept, and the new one is written
    beside it.

    Args:
        request: models, methods, tasks and lengths.
        name: name of the evaluation and of its directory in the run.
        asks_for_statements: whether the user named that task, so that leaving it out is no answer.

    Raises:
        UserError: a checkpoint or text cannot be read, models do not fit together, a length does
            not fit a task or the text, or no method applies to any model.
    """
    share, threads = join_evaluation()
    torch.set_num_threads(request.threads or threads)
    # before reading checkpoints, which takes long for large models
    if request.output:
        check_writable(request.output, "output")
    first = find_candidate(str(request.checkpoint))
    others = [find_candidate(given, "compare") for given in request.compare]
    usual = Path("evaluation") if name == DEFAULT else Path("lengths", name)
    output = Path(request.output or first.home / usual)
    check_writable(str(output), "output")
    if not share.index:
        say_run_directory(output)
    length = request.evaluation.training_length
    first, *others = (one.with_training_length(length) for one in [first, *others])
    candidates = checked([first, *others])
    if problems := request.evaluation.problems(first.layout.training_length):
        raise UserError(*problems)
    text = Text(held_out_corpus(request.text, first), first)
    if asks_for_statements and not text.training_share:
        why = text.held_out.without_statements
        raise UserError.at("evaluation.tasks", f"leave out 'statements': {why}.")
    if name == DEFAULT:  # same order as a run's own table
        candidates = sorted(candidates, key=lambda candidate: reference_first(candidate.role))
    title = "Length evaluation" if first.run is None else first.run.name
    cells = output / "cells"
    report = measure_models(title, candidates, request.evaluation, text, cells, share=share)
    if share.index:
        return None
    models = {candidate.name: fingerprint(candidate.fingerprint) for candidate in candidates}
    report = replace(
        with_observations(report, candidates),
        made=origin(candidates),
        environment={**report.environment, "models": models},
    )
    place = free_place(output, lambda older: _is_same(report, older))
    if place != output:
        log.info("%s holds another evaluation, which stays; this one is in %s", output, place)
    log.info("Writing the report")
    write_renderings(report, place)
    report.write(place / "report.json")
    return report, place


def _is_same(report: Report, directory: Path) -> bool:
    """Whether the directory holds no report, or one of the same settings, text and checkpoints."""
    if not (directory / "report.json").exists():
        return True
    try:
        older = Report.read(directory / "report.json")
    except UserError:  # of an earlier version, or no report at all
        return False
    return _asked(older) == _asked(report)


def _asked(report: Report) -> dict[str, Any]:
    """Return all that an evaluation was asked for."""
    taken = {key: report.environment.get(key) for key in ("corpus", "models")}
    return {**all_fields(report, NOT_ASKED), **taken, "of": report.made.get("Of")}
