"""Benchmarks of checkpoints and published models, without their runs."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from trainer.common.errors import UserError
from trainer.common.files import write_atomically
from trainer.common.processes import usual_threads
from trainer.common.ranks import current_ranks
from trainer.config import (
    BenchmarkConfig,
    EvaluationRequest,
    HarnessConfig,
    MultipleChoiceConfig,
)
from trainer.evaluation.benchmarks import Score
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.methods import Method, Recipe, applicable
from trainer.evaluation.multiple_choice import check_files, score_tasks
from trainer.evaluation.passes import precision_of
from trainer.evaluation.results import AS_IS, table, write_csv
from trainer.evaluation.statistics import sign_test
from trainer.evaluation.store import Store, fingerprint
from trainer.model.language_model import LanguageModel
from trainer.runs.models import Candidate, distinct, find_candidate
from trainer.workflows.subjects import held_out_corpus, subject_of
from trainer.workflows.text import fit_text

log = logging.getLogger(__name__)

Scored = tuple[Candidate, Recipe, list[Score], float]
"""A model with a method, its scores, and the seconds that they took."""


def run_benchmarks(request: EvaluationRequest, name: str) -> tuple[Table, Path]:
    """Score every model with every method; return a table, and the directory of the results.

    The directory holds ``results.csv``, and ``facts.json`` with settings, weights and notes.

    Raises:
        UserError: a checkpoint, the data or the text that methods choose on cannot be read, no
            method changes any of the models, or several processes were started.
    """
    config = request.evaluation
    assert isinstance(config, BenchmarkConfig)
    if current_ranks().world_size > 1:
        raise UserError(f"evaluation: {name} uses one process, and several were started")
    if isinstance(config, HarnessConfig):
        from trainer.evaluation import harness

        harness.check_tasks(config)
    elif isinstance(config, MultipleChoiceConfig):
        check_files(config)
    torch.set_num_threads(usual_threads())
    found = [find_candidate(path) for path in (str(request.checkpoint), *request.compare)]
    candidates = distinct([c.with_training_length(config.training_length) for c in found])
    output = Path(request.output or candidates[0].home / "evaluation")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = replace(config, dtype=precision_of(config.dtype, device))
    subjects = [subject_of(candidate, config.dtype, device) for candidate in candidates]
    recipes, notes = applicable(subjects, config)
    scored: list[Scored] = []
    for candidate, subject in zip(candidates, subjects, strict=True):
        C = candidate.layout.training_length
        lengths, applied = [round(config.factor * C)], recipes[subject.name]
        text = FitText({}, 0, "")
        if any(recipe.fits(config.factor) for recipe in applied):
            corpus = held_out_corpus(request.text, candidate)
            text = fit_text(corpus, candidate.bos_token, config, applied, lengths, C)
        model = subject.load().eval()
        for recipe in applied:
            log.info("%s, %s", candidate.name, recipe.title)
            store = Store(output / "cells")
            fitting = Fitting(model, subject.fingerprint, text, store, config.batch_tokens)
            method, began = recipe.make(fitting), time.perf_counter()
            with model.using(method.layout_at(config.factor)):
                scores = _scores(model, candidate, method, config)
            scored.append((candidate, recipe, scores, time.perf_counter() - began))
            notes += [f"{candidate.name}, {recipe.title}: {note}" for note in fitting.notes]
        del model  # frees memory for the next one
    facts = {
        "config": asdict(config),
        "text": None if request.text is None else asdict(request.text),
        "weights": {c.name: fingerprint(c.fingerprint) for c in candidates},
        "notes": notes,
    }
    place = output / name
    place.mkdir(parents=True, exist_ok=True)
    write_csv(place / "results.csv", table(_rows(name, config, scored)))
    write_atomically(place / "facts.json", json.dumps(facts, indent=2) + "\n")
    return _table(scored), place


def _scores(
    model: LanguageModel, candidate: Candidate, method: Method, config: BenchmarkConfig
) -> list[Score]:
    most = config.max_length or candidate.layout.training_length
    encoder = Encoder(
        candidate.tokenizer,
        min(most, method.reads or most),
        candidate.run is not None,
        candidate.eos,
    )
    if isinstance(config, HarnessConfig):
        from trainer.evaluation import harness

        return harness.score_tasks(model, encoder, config)
    assert isinstance(config, MultipleChoiceConfig)
    return score_tasks(model, encoder, config)


def _rows(name: str, config: BenchmarkConfig, scored: list[Scored]) -> list[dict[str, Any]]:
    """Return rows of results.csv; limits are 1.96 standard errors away."""
    rows = []
    for candidate, recipe, scores, seconds in scored:
        about = {
            "run": name,
            "model": candidate.name,
            "method": recipe.key,
            "length": round(config.factor * candidate.layout.training_length),
            "factor": config.factor,
            "seconds": round(seconds, 3),
        }
        for score in scores:
            row = {"task": score.task, "metric": score.metric, "value": score.value}
            if (error := score.standard_error) is not None:
                row |= {"low": score.value - 1.96 * error, "high": score.value + 1.96 * error}
            rows.append({**about, **row, "n": score.questions})
    return rows


def _table(scored: list[Scored]) -> Table:
    """Return the scores with standard errors, a row for each.

    An arrow marks scores that differ with p < 0.05 by the sign test on the same questions: from the
    same model as is or, for a model as is, from the first one.
    """
    as_is = {c.name: scores for c, recipe, scores, _ in scored if recipe.key == AS_IS}
    first = next(iter(as_is.values()), None)
    table = Table("model", "task", "metric", "questions", "score")
    for candidate, recipe, scores, _ in scored:
        base = first if recipe.key == AS_IS else as_is.get(candidate.name)
        title = "" if recipe.key == AS_IS else f" + {recipe.title}"
        for number, score in enumerate(scores):
            cell = f"{score.value:.3f}"
            if score.standard_error is not None:
                cell += f" ± {score.standard_error:.3f}"
            reference = base[number].each if base and base is not scores else ()
            if score.each and len(score.each) == len(reference):
                cell += f" {sign_test(score.each, reference).mark}"
            names = escape(f"{candidate.name}{title}"), escape(score.task), escape(score.metric)
            table.add_row(*names, str(score.questions), cell.rstrip())
    return table
