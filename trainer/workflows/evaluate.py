"""Evaluation of finished models: cells measured by the engine, and a report made of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from trainer.common.errors import UserError
from trainer.common.ranks import Ranks
from trainer.config import STATEMENTS, EvaluationConfig, EvaluationRequest
from trainer.data.corpus import Corpus
from trainer.data.tokenizer import same_tokens
from trainer.evaluation.engine import Subject, measure_cells, plan_cells
from trainer.evaluation.fitting import FitText
from trainer.evaluation.loss import unigram_loss
from trainer.evaluation.measurements import Measurement
from trainer.evaluation.methods import Recipe, applicable
from trainer.evaluation.passes import PREFILL, precision_of
from trainer.evaluation.results import AS_IS, MEAN, Arm, Report, Row
from trainer.evaluation.rows import all_rows, averaged
from trainer.evaluation.store import Store
from trainer.evaluation.tasks import HeldOut, check_prompts, make_tasks
from trainer.report.claims import ROLES, Evidence, observe
from trainer.report.pages import write_renderings
from trainer.runs.descriptions import (
    describe_task,
    environment,
    reference_first,
    without_home,
)
from trainer.runs.models import Candidate, distinct, find_candidate, origin
from trainer.runs.parsing import check_evaluation
from trainer.runs.ranks import join_evaluation
from trainer.workflows.subjects import (
    held_out_corpus,
    multiplied_in,
    subject_of,
)
from trainer.workflows.text import fit_text

log = logging.getLogger(__name__)


DEFAULT = "default"
"""The option of the group that a run ends with."""


def evaluate_lengths(request: EvaluationRequest, name: str = DEFAULT) -> tuple[Report, Path] | None:
    """Measure every method on every model; write the report and return it with its directory.

    Several processes, started by torchrun or srun, share the work; all but the first return None.
    The report takes the place of an older one, whose cells stay.

    ``name``: name of the evaluation and of its directory in the run.

    Raises:
        UserError: a checkpoint or text cannot be read, models do not fit together, a length does
            not fit a task or the text, or no method applies to any model.
    """
    ranks, threads = join_evaluation()
    torch.set_num_threads(threads)
    first = find_candidate(str(request.checkpoint))
    others = [find_candidate(path) for path in request.compare]
    usual = Path("evaluation") if name == DEFAULT else Path("lengths", name)
    output = Path(request.output or first.home / usual)
    output.mkdir(parents=True, exist_ok=True)
    evaluation = request.evaluation
    length = evaluation.training_length
    first, *others = (c.with_training_length(length) for c in [first, *others])
    candidates = fitting_together([first, *others])
    check_evaluation(evaluation, first.layout.training_length)
    text = held_out_of(held_out_corpus(request.text, first), first)
    if name == DEFAULT:  # same order as a run's own table
        candidates = sorted(candidates, key=lambda candidate: reference_first(candidate.role))
    title = "Length evaluation" if first.run is None else first.run.name
    cells = output / "cells"
    report = measure_models(title, candidates, evaluation, text, cells, ranks=ranks)
    if ranks.rank:
        return None
    report = replace(with_observations(report, candidates), made=origin(candidates))
    write_renderings(report, output)
    report.write(output)
    return report, output


def held_out_of(corpus: Corpus, first: Candidate) -> HeldOut:
    """Return the test split, in the tokens of the first model, for tasks and fits."""
    share = None if first.run is None else first.run.data.needles.share
    return HeldOut(corpus, corpus.test, first.bos_token, share)


def prepared(
    subjects: Sequence[Subject], config: EvaluationConfig, text: HeldOut
) -> tuple[dict[str, list[Recipe]], list[Measurement], FitText, list[str], list[str]]:
    """Return the methods of each model, the tasks, text for fits, and notes on methods and tasks.

    ``config``: with lengths in multiples of the training length.

    Raises:
        UserError: the text is too short, a prompt does not fit a length, or no method applies to
            any model.
    """
    C = subjects[0].layout.training_length
    lengths = config.in_tokens(C)
    recipes, notes = applicable(subjects, config)
    tasks, task_notes = make_tasks(text, config, lengths, C)
    check_prompts(tasks, lengths)
    used = [recipe for applied in recipes.values() for recipe in applied]
    fit = fit_text(text.corpus, text.bos_token, config, used, lengths, C)
    return recipes, tasks, fit, notes, task_notes


def measure_models(
    name: str,
    candidates: Sequence[Candidate],
    config: EvaluationConfig,
    text: HeldOut,
    cells: Path,
    accelerator: str = "auto",
    ranks: Ranks = Ranks(),  # noqa: B008
) -> Report:
    """Measure every method on every model; return a report without anything about training.

    Cells that are stored in ``cells``, by an interrupted evaluation or for another table, are not
    measured again.

    ``candidates``: as :func:`fitting_together` returns them. ``text``: in the first one's tokens.
    ``cells``: directory of finished cells. ``accelerator``: cpu, or a GPU if there is one.
    ``ranks``: this process among those that share the work; only the first one returns results.

    Raises:
        UserError: a checkpoint or text cannot be read, a length does not fit a task or the text,
            or no method applies to any model.
    """
    device = "cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    dtype = precision_of(config.dtype, device)
    subject = partial(subject_of, dtype=dtype, device=device, chunk=PREFILL)
    subjects = [subject(candidate) for candidate in candidates]
    C = subjects[0].layout.training_length
    lengths = config.in_tokens(C)
    config = replace(config.in_multiples(C), dtype=dtype)
    recipes, tasks, fit, notes, task_notes = prepared(subjects, config, text)
    for note in task_notes if ranks.is_rank_zero else ():
        log.warning("%s", note)
    plans = plan_cells(subjects, recipes, tasks, lengths, fit, config.batch_tokens)
    measured = measure_cells(
        plans, fit, Store(cells), config.batch_tokens, ranks.rank, ranks.world_size
    )
    if ranks.rank:
        return unmeasured(name, C, text.corpus)
    titles = {recipe.key: recipe.title for applied in recipes.values() for recipe in applied}
    task_titles = {task.key: task.title for task in tasks}
    if mean_of := averaged(measured.trials):
        task_titles[MEAN] = f"Mean over {', '.join(task_titles[key] for key in mean_of)}"
    longest = max(candidate.longest_context for candidate in candidates)
    coefficients = {
        f"{name} + {titles['temperature']}": coefficient
        for name, coefficient in measured.temperature.items()
    }
    corpus = text.corpus
    rows = all_rows(measured.rows, measured.trials, run=name, seed=config.needles.seed)
    return Report(
        name=name,
        training_length=C,
        rows=rows.assign(reach=rows["model"].map({c.name: c.layout.longest for c in candidates})),
        trials=measured.trials,
        longest_context=None if longest == C else longest,
        unigram_loss=unigram_loss(
            corpus.test, corpus.validation, 1 + max(corpus.tokenizer.get_vocab().values())
        ),
        methods={key: titles[key] for key in config.names if key in titles},
        tasks=task_titles,
        notes=(*notes, *task_notes, *measured.notes),
        config={"evaluation": without_home(json.loads(json.dumps(asdict(config))))},
        environment={
            **environment(corpus),
            "precision": multiplied_in(dtype, device),
        },
        task=describe_task(text.training_share or 0.0, config.needles.needles)
        if any(task.key == STATEMENTS for task in tasks)
        else {},
        temperature=coefficients,
    )


def unmeasured(name: str, training_length: int, corpus: Corpus) -> Report:
    """Return a report without rows."""
    return Report(name, training_length, {}, environment(corpus))


def with_observations(
    report: Report, candidates: Sequence[Candidate], arms: Mapping[str, Arm] | None = None
) -> Report:
    """Return the report with the papers' observations judged; ``arms``: by names of models."""
    measured = dict.fromkeys(zip(report.rows.model, report.rows.method, strict=True))
    roles: dict[str, Row] = {}
    trained: dict[str, Arm] = {}
    for candidate in candidates:
        role, name = candidate.role or "", candidate.name
        for model, method in measured:
            key = role if method == AS_IS else f"{role}_{method}"
            if model == name and key in ROLES:
                roles.setdefault(key, (model, method))
        if role in ROLES and arms and name in arms:
            trained.setdefault(role, arms[name])
    texts = [candidate.run and candidate.run.data for candidate in candidates if candidate.role]
    one_text = all(text == texts[0] for text in texts)
    return replace(report, observations=observe(Evidence(report, roles, trained, one_text)))


def fitting_together(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Check that the models fit together; return them under distinct names."""
    first = candidates[0]
    for candidate in candidates:
        if not same_tokens(candidate.tokenizer, first.tokenizer):
            raise UserError(
                f"compare: {candidate.reference!r} has another tokenizer than the first."
            )
        if candidate.layout.training_length != first.layout.training_length:
            raise UserError(
                f"compare: {candidate.reference!r} has a training length of "
                f"{candidate.layout.training_length} tokens, the first one of "
                f"{first.layout.training_length}; "
                "evaluation.training_length=N counts the lengths of all models from one.",
            )
    return distinct(candidates)
