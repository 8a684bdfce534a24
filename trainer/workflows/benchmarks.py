"""Benchmarks of checkpoints and published models, without their runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trainer.checkpoint import versions
from trainer.common.errors import UserError, raise_all, renaming
from trainer.common.files import write_atomically
from trainer.common.processes import usual_threads
from trainer.config import (
    BenchmarkConfig,
    BenchmarkRequest,
    DataConfig,
    HarnessConfig,
    MultipleChoiceConfig,
)
from trainer.evaluation.benchmarks import Score, Scored, comparisons
from trainer.evaluation.fitting import FitText, Fitting
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.methods import CHOICE, Method, Recipe, applicable
from trainer.evaluation.multiple_choice import missing_tasks, score_tasks
from trainer.evaluation.outcomes import AS_IS
from trainer.evaluation.passes import precision_of
from trainer.evaluation.store import Store, all_fields, fingerprint
from trainer.model.language_model import LanguageModel
from trainer.runs.directory import free_place
from trainer.runs.models import Candidate, distinct, find_candidate
from trainer.runs.ranks import current_ranks
from trainer.workflows.fit_text import fit_text
from trainer.workflows.subjects import held_out_corpus, multiplying, subject_of

log = logging.getLogger(__name__)

NOT_ASKED = {
    "models": "results; the weights are a key of their own",
    "notes": "results",
    "versions": "they change rounding alone",
}
"""Keys of a record in which two of the same benchmarks may differ, with the reason."""
NOT_GIVEN = {"training_length": "records of earlier versions lack it"}
"""Settings that a record omits if they are null, with the reason."""


@dataclass
class Benchmarks:
    """Results of benchmarks.

    ``scored``: every model with every method that changes it. ``notes``: choices of methods and
    omissions, in words.
    """

    scored: list[Scored] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return JSON values by model and method; ``change`` is of paired questions."""
        rows = []
        for row in self.scored:
            numbers = [
                score.to_dict() | ({} if change is None else {"change": asdict(change)})
                for score, change in zip(row.scores, comparisons(row, self.scored), strict=True)
            ]
            rows.append(
                {"name": row.model, "method": row.method, "path": row.path, "scores": numbers}
            )
        return rows


def run_benchmarks(request: BenchmarkRequest, name: str) -> tuple[Benchmarks, Path]:
    """Score every model with every method, and write the results as ``name``.

    Returns:
        The results and the path of their file.

    Raises:
        UserError: a checkpoint, the data or the text that methods choose on cannot be read, no
            method changes any of the models, or several processes were started.
    """
    config = request.evaluation
    if (processes := current_ranks().world_size) > 1:
        raise UserError.at(
            "evaluation", f"{name} uses one process, and {processes} were started; start one."
        )
    if isinstance(config, HarnessConfig):
        from trainer.evaluation import harness

        raise_all(harness.task_problems(config))
    elif isinstance(config, MultipleChoiceConfig):
        raise_all(missing_tasks(config))
    torch.set_num_threads(request.threads or usual_threads())
    first = find_candidate(str(request.checkpoint))
    others = [find_candidate(path) for path in request.compare]
    length = config.training_length
    candidates = distinct([c.with_training_length(length) for c in [first, *others]])
    output = Path(request.output or first.home / "evaluation")
    output.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = replace(config, dtype=precision_of(config.dtype, device))
    subjects = [subject_of(candidate, config.dtype, device) for candidate in candidates]
    recipes, idle = applicable(subjects, config)
    # Before the weights are read, which takes long for large models.
    texts = [_fit_text(request.text, c, config, recipes[c.name]) for c in candidates]
    results = Benchmarks(notes=idle)
    for candidate, subject, text in zip(candidates, subjects, texts, strict=True):
        model = subject.load().eval()
        for recipe in recipes[subject.name]:
            store = Store(output / "cells")
            fitting = Fitting(model, subject.fingerprint, text, store, config.batch_tokens)
            method = recipe.make(fitting)
            log.info("%s, %s", candidate.name, recipe.title)
            with multiplying(device), model.using(method.layout_at(config.factor)):
                scores = _scores(model, candidate, method, config)
            checkpoint = str(candidate.path)
            scored = Scored(candidate.name, recipe.key, recipe.title, checkpoint, scores)
            results.scored.append(scored)
            results.notes += _notes(candidate, recipe, fitting, config)
        del model  # frees memory for the next one
    record = {
        "kind": name,
        "config": all_fields(asdict(config), {} if length else NOT_GIVEN),
        "text": None if request.text is None else asdict(request.text),
        "weights": {c.name: fingerprint(c.fingerprint) for c in candidates},
        "versions": versions(),
        "models": results.to_dicts(),
        "notes": results.notes,
    }
    record = json.loads(json.dumps(record, allow_nan=False))  # tuples become lists
    path = free_place(output / f"{name}.json", lambda older: _is_same(record, older))
    write_atomically(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    return results, path


def _fit_text(
    source: DataConfig | None,
    candidate: Candidate,
    config: BenchmarkConfig,
    recipes: Sequence[Recipe],
) -> FitText:
    """Return the text that a model's methods choose on; read nothing if no method chooses."""
    if not any(recipe.fits(config.factor) for recipe in recipes):
        return FitText({}, 0, "")
    corpus = held_out_corpus(source, candidate)
    C = candidate.layout.training_length
    length = round(config.factor * C)
    with renaming(**{"evaluation.lengths": "evaluation.factor"}):
        return fit_text(corpus, candidate.bos_token, config, recipes, [length], C)


def _notes(
    candidate: Candidate, recipe: Recipe, fitting: Fitting, config: BenchmarkConfig
) -> Iterator[str]:
    """Yield notes about the length that a method is set for, its text and its choices."""
    if recipe.key == AS_IS:
        return
    C = candidate.layout.training_length
    length = round(config.factor * C)
    setting = f"set for {length:,} tokens, {config.factor:g} times the training length"
    on_validation = CHOICE not in recipe.settings or fitting.text.choice is None
    if recipe.fits(config.factor) and length in fitting.text.windows and on_validation:
        count = len(fitting.text.windows[length])
        setting += f"; it chooses on validation text, {count} windows of that length at most"
    for note in (setting, *fitting.notes):
        yield f"{candidate.name}, {recipe.title}: {note}"


def _is_same(record: dict[str, Any], path: Path) -> bool:
    """Whether the file is missing or has the same settings, text and weights."""
    if not path.exists():
        return True
    try:
        older = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # not a record of this kind
        return False
    if not isinstance(older, dict):
        return False
    return all_fields(older, NOT_ASKED) == all_fields(record, NOT_ASKED)


def _scores(
    model: LanguageModel, candidate: Candidate, method: Method, config: BenchmarkConfig
) -> list[Score]:
    C = candidate.layout.training_length
    encoder = Encoder(
        candidate.tokenizer,
        min(config.max_length or C, method.reads or config.max_length or C),
        candidate.run is not None if config.add_bos is None else config.add_bos,
        candidate.eos,
    )
    if isinstance(config, HarnessConfig):
        from trainer.evaluation import harness

        return harness.score_tasks(model, encoder, config)
    assert isinstance(config, MultipleChoiceConfig)
    return score_tasks(model, encoder, config)
