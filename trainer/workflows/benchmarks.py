"""Benchmarks of checkpoints and published models, without the runs that made them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer.cores import cores
from trainer.errors import UserError
from trainer.evaluation.benchmarks import (
    BenchmarkConfig,
    HarnessConfig,
    MultipleChoiceConfig,
    Score,
)
from trainer.evaluation.multiple_choice import missing_tasks
from trainer.evaluation.requests import Encoder
from trainer.report.atomic import write_atomically
from trainer.runs.checkpoints import versions
from trainer.runs.directory import free_place, writable_problem
from trainer.runs.models import Candidate, distinct, find_candidate
from trainer.workflows.evaluation_request import BenchmarkRequest


def run_benchmarks(request: BenchmarkRequest, name: str) -> tuple[dict[str, list[Score]], Path]:
    """Score every model, write the numbers as ``name``, and return them by model with the file's
    path.

    Raises:
        UserError: a checkpoint or the data cannot be read.
    """
    config = request.evaluation
    if isinstance(config, MultipleChoiceConfig) and (problems := missing_tasks(config)):
        raise UserError(*problems)
    torch.set_num_threads(request.threads or cores())
    first = find_candidate(str(request.checkpoint))
    others = [find_candidate(given, "compare") for given in request.compare]
    candidates = distinct([first, *others])
    output = Path(request.output or first.home / "evaluation")
    if problem := writable_problem(str(output), "output"):
        raise UserError(problem)
    scores: dict[str, list[Score]] = {}
    models = []
    for candidate in candidates:
        own = scores[candidate.name] = _scores(candidate, request.evaluation)
        numbers = [score.to_dict() for score in own]
        models.append({"name": candidate.name, "path": str(candidate.path), "scores": numbers})
    record = {
        "kind": name,
        "config": json.loads(json.dumps(asdict(request.evaluation))),
        "versions": versions(),
        "models": models,
    }
    path = free_place(output / f"{name}.json", lambda older: _is_same(record, older))
    write_atomically(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    return scores, path


def _is_same(record: dict[str, Any], path: Path) -> bool:
    """Whether there is no such file, or one of the same settings and models."""
    if not path.exists():
        return True
    try:
        older = json.loads(path.read_text(encoding="utf-8"))
        models = [model["path"] for model in older["models"]]
        return bool(older["config"] == record["config"]) and models == [
            model["path"] for model in record["models"]
        ]
    except (ValueError, KeyError, TypeError):  # another file than these
        return False


def _scores(candidate: Candidate, config: BenchmarkConfig) -> list[Score]:
    model = candidate.load("cuda" if torch.cuda.is_available() else "cpu").eval()
    encoder = Encoder(
        candidate.tokenizer,
        config.max_length or model.layout.training_length,
        candidate.run is not None if config.add_bos is None else config.add_bos,
    )
    if isinstance(config, HarnessConfig):
        from trainer.evaluation import harness

        return harness.score_tasks(model, encoder, config)
    assert isinstance(config, MultipleChoiceConfig)
    from trainer.evaluation import multiple_choice

    return multiple_choice.score_tasks(model, encoder, config)
