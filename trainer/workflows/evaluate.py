"""Length evaluation of checkpoints and published models, without the runs that made them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import defaultdict
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trainer.data.corpus import split_documents
from trainer.data.needles import NeedleVocabulary
from trainer.data.sources import read_documents
from trainer.errors import UserError
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.lengths.config import (
    LONGBENCH,
    MANY_SHOT,
    METHODS,
    RULER,
    STATEMENTS,
    LengthConfig,
)
from trainer.evaluation.lengths.fitting import FitText
from trainer.evaluation.lengths.methods import Recipe, recipe
from trainer.evaluation.lengths.run import Subject, measure_cells, plan_cells
from trainer.evaluation.lengths.store import Store
from trainer.evaluation.lengths.tasks import Measurement, Perplexity, Prompted, Statements
from trainer.evaluation.longbench.tasks import longbench_tasks
from trainer.evaluation.loss import windows_with_common_ends
from trainer.evaluation.many_shot import many_shot_tasks
from trainer.evaluation.needles.tasks import NEEDLE_TASKS
from trainer.evaluation.ruler.tasks import ruler_tasks
from trainer.report.length.writing import write_length_report
from trainer.report.lengths import PERPLEXITY, LengthReport
from trainer.runs.descriptions import environment, without_home
from trainer.runs.directory import writable_problem
from trainer.runs.fitted_temperature import keep_temperature
from trainer.runs.models import Candidate, find_candidate
from trainer.workflows.held_out import held_out_corpus, text_source
from trainer.workflows.length_request import LengthRequest

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def evaluate_lengths(request: LengthRequest, kind: str = "extension") -> tuple[LengthReport, Path]:
    """Measure every method on every model, write the report, return it with its directory.

    ``kind``: what the evaluation is called, and its directory among those of the run.

    What was measured before, in an interrupted evaluation or for another table, is not measured
    again.

    Raises:
        UserError: a checkpoint or text cannot be read, models do not fit together, a length does
            not fit a task or the text, or a method applies to no model.
    """
    torch.set_num_threads(request.threads or os.cpu_count() or 1)
    config = request.evaluation
    first = find_candidate(str(request.checkpoint))
    candidates = [first, *(find_candidate(given, "compare") for given in request.compare)]
    output = Path(request.output or (first.home / "lengths" / kind))
    if problem := writable_problem(str(output), "output"):
        raise UserError(problem)
    subjects = _subjects(candidates, config)
    C = subjects[0].layout.training_length
    recipes, notes = _recipes(subjects, config)
    lengths = [round(C * factor) for factor in config.lengths]
    text = _Text(request, first)
    tasks, not_run = _tasks(text, config, lengths, C)
    _check_prompts(tasks, lengths)
    chosen = [n for n in lengths if any(recipe.fits(n / C) for recipe in _of_all(recipes))]
    fit = FitText(
        windows_with_common_ends(text.corpus.validation, config.fit_windows, chosen),
        text.corpus.end_of_text,
        text.corpus.fingerprint,
    )
    plans = plan_cells(subjects, recipes, tasks, lengths, fit)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells, fitted = measure_cells(plans, fit, Store(output / "cells"), config.batch_tokens, device)
    order = config.methods or METHODS
    titles = {r.key: r.title for name in order for r in _of_all(recipes) if r.key == name}
    report = LengthReport(
        name="Length evaluation",
        training_length=C,
        cells=tuple(cells),
        methods=titles,
        tasks={task.key: task.title for task in tasks},
        notes=(*notes, *not_run, *fitted),
        settings=without_home(json.loads(json.dumps(asdict(config)))),
        environment=environment(text.corpus),
    )
    log.info("Writing the report")
    write_length_report(report, output)
    return report, output


def _check_prompts(tasks: list[Measurement], lengths: list[int]) -> None:
    """Find prompts that do not fit before anything is measured, for all tasks at once."""
    problems: list[str] = []
    for task in tasks:
        try:
            for length in lengths:
                task.fingerprint(length)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*dict.fromkeys(problems))


def _subjects(candidates: list[Candidate], config: LengthConfig) -> list[Subject]:
    """The models under names that differ, once they were found to fit together."""
    first = candidates[0]
    subjects: list[Subject] = []
    for candidate in candidates:
        if candidate.tokenizer.to_str() != first.tokenizer.to_str():
            raise UserError(f"compare: {candidate.given!r} has another tokenizer than the first.")
        if candidate.layout.training_length != first.layout.training_length:
            raise UserError(
                f"compare: {candidate.given!r} has a training length of "
                f"{candidate.layout.training_length} tokens, the first one of "
                f"{first.layout.training_length}."
            )
        if [other.path for other in candidates].count(candidate.path) > 1:
            raise UserError(f"compare: {candidate.given!r} is named twice.")
        name = candidate.name
        if name in {subject.name for subject in subjects}:
            name = f"{name} ({candidate.given})"

        def load(candidate: Candidate = candidate) -> Any:
            return candidate.load().to(DTYPES[config.dtype])

        def keep(fitted: dict[str, Any], candidate: Candidate = candidate) -> None:
            if candidate.run is None:
                return
            if (older := keep_temperature(candidate.path, fitted)) is None:
                log.info("The temperature of %s is kept with its checkpoint", candidate.name)
            else:
                log.info(
                    "%s keeps the temperature %.3g, which was fitted on more text",
                    *(candidate.name, older),
                )

        print_of = hashlib.sha256(candidate.fingerprint.encode() + config.dtype.encode())
        fingerprint = print_of.hexdigest()[:16]
        subjects.append(Subject(name, fingerprint, candidate.config, candidate.layout, load, keep))
    return subjects


def _recipes(
    subjects: list[Subject], config: LengthConfig
) -> tuple[dict[str, list[Recipe]], list[str]]:
    """Of every model the methods that do something to it, and a sentence for each that does not.

    Raises:
        UserError: a method does nothing to any of the models.
    """
    found: dict[str, list[Recipe]] = {subject.name: [] for subject in subjects}
    idle: dict[str, list[str]] = defaultdict(list)
    problems = []
    for name in config.methods or METHODS:
        for subject in subjects:
            made = recipe(name, subject.layout, config)
            if isinstance(made, Recipe):
                found[subject.name].append(made)
            else:
                idle[subject.name].append(made)
        idle_everywhere = not any(made.key == name for made in _of_all(found))
        if idle_everywhere and config.methods is not None:
            problems.append(
                f"evaluation.methods: {name!r} changes a rotation, which "
                f"{' and '.join(map(repr, found))} {'does' if len(found) == 1 else 'do'} not have."
            )
    if problems:
        raise UserError(*problems)
    return found, [
        f"{name} has no rotation, so there is nothing to do for {', '.join(titles)}."
        for name, titles in idle.items()
    ]


def _of_all(recipes: dict[str, list[Recipe]]) -> list[Recipe]:
    return [recipe for of_one in recipes.values() for recipe in of_one]


class _Text:
    """Held-out text: tokens for perplexity and fits, documents for haystacks."""

    def __init__(self, request: LengthRequest, first: Candidate) -> None:
        self.tokenizer, self.begin, self.run = first.tokenizer, first.begin, first.run
        self.data = text_source(request.text, first)
        self.corpus = held_out_corpus(request.text, first)

    @cached_property
    def documents(self) -> list[str]:
        """Documents of the test split."""
        documents = read_documents(self.data)
        return split_documents(documents, self.data.validation, self.data.test)["test"]

    @property
    def trained_statements(self) -> bool:
        """Whether the first model's training sequences carried statements."""
        return self.run is not None and bool(self.run.data.needles.share)


def _tasks(
    text: _Text, config: LengthConfig, lengths: list[int], training_length: int
) -> tuple[list[Measurement], list[str]]:
    """What is measured, and a sentence for everything that cannot be."""
    found: list[Measurement] = []
    notes: list[str] = []
    tokenizer, end = text.tokenizer, text.corpus.end_of_text
    bos = () if text.begin is None else (text.begin,)
    for name in config.tasks:
        if name == PERPLEXITY:
            found.append(
                Perplexity(
                    text.corpus.test, lengths, config.windows, end, training_length, config.last
                )
            )
        elif name == STATEMENTS and not text.trained_statements:
            notes.append(
                "The task statements was left out: the training text of the first model "
                "carried none (data.needles.share)."
            )
        elif name == STATEMENTS:
            found.append(
                Statements(
                    text.corpus.test,
                    lengths,
                    NeedleVocabulary.of(tokenizer),
                    end,
                    config.needles.trials,
                    config.needles.needles,
                    config.needles.seed,
                )
            )
        elif name in NEEDLE_TASKS:
            haystack = Haystack(tokenizer, text.documents, bos)
            found.append(Prompted(NEEDLE_TASKS[name](haystack, config.needles), tokenizer))
        else:
            groups = {
                RULER: lambda: ruler_tasks(config.ruler, tokenizer, text.documents, text.begin),
                LONGBENCH: lambda: longbench_tasks(config.longbench, tokenizer, text.begin),
                MANY_SHOT: lambda: many_shot_tasks(config.many_shot, tokenizer, text.begin),
            }
            tasks, missing = groups[name]()
            found += [Prompted(task, tokenizer) for task in tasks]
            notes += missing
    if not found:
        raise UserError(*(f"evaluation.tasks: {note}" for note in notes))
    return found, notes
