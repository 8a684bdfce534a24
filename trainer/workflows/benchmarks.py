"""Benchmarks of checkpoints and published models, without the runs that made them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

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
from trainer.runs.directory import writable_problem
from trainer.runs.models import Candidate, find_candidate
from trainer.workflows.held_out import request_problems


@dataclass(frozen=True)
class BenchmarkRequest:
    """What ``evaluate`` is asked for with ``+evaluation=multiple_choice`` or ``harness``.

    ``checkpoint``: a run directory, a checkpoint, or a published model's directory or ``.gguf``
    file. ``compare``: more of them. ``output``: where the numbers go (null: ``evaluation/`` in the
    run; for a published model here).
    """

    checkpoint: str | None = None
    compare: list[str] = field(default_factory=list)
    output: str | None = None
    threads: int | None = None
    evaluation: BenchmarkConfig = field(default_factory=BenchmarkConfig)

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        return self.evaluation.problems() + request_problems(self.checkpoint, self.threads)


@dataclass(frozen=True)
class MultipleChoiceRequest(BenchmarkRequest):
    """Questions from files."""

    evaluation: MultipleChoiceConfig = field(default_factory=MultipleChoiceConfig)

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        return super().problems() + missing_tasks(self.evaluation)


@dataclass(frozen=True)
class HarnessRequest(BenchmarkRequest):
    """Tasks of lm-eval."""

    evaluation: HarnessConfig = field(default_factory=HarnessConfig)

    def problems(self) -> list[str]:
        """What is impossible, one sentence each."""
        found = super().problems()
        if find_spec("lm_eval") is None:
            found.append("evaluation: lm-eval is not installed; pip install 'unrope[eval]'.")
        return found


REQUESTS = {"multiple_choice": MultipleChoiceRequest, "harness": HarnessRequest}
"""By the name that ``+evaluation=`` takes."""


def run_benchmarks(request: BenchmarkRequest) -> tuple[dict[str, list[Score]], Path]:
    """Score every model, write the numbers, and return them by model with the file's path.

    Raises:
        UserError: a checkpoint or the data cannot be read.
    """
    torch.set_num_threads(request.threads or os.cpu_count() or 1)
    candidates = [
        find_candidate(str(request.checkpoint)),
        *(find_candidate(given, "compare") for given in request.compare),
    ]
    first = candidates[0]
    output = Path(request.output or first.home / "evaluation")
    if problem := writable_problem(str(output), "output"):
        raise UserError(problem)
    scores: dict[str, list[Score]] = {}
    models = []
    for candidate in candidates:
        name = candidate.name if candidate.name not in scores else str(candidate.path)
        scores[name] = _scores(candidate, request.evaluation)
        numbers = [score.to_dict() for score in scores[name]]
        models.append({"name": name, "path": str(candidate.path), "scores": numbers})
    kind = next(name for name, schema in REQUESTS.items() if isinstance(request, schema))
    record = {
        "kind": kind,
        "config": asdict(request.evaluation),
        "versions": versions(),
        "models": models,
    }
    path = output / f"{kind}.json"
    write_atomically(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    return scores, path


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
