"""Multiple-choice questions: whether the right answer is the most likely continuation."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trainer.common.errors import UserError
from trainer.config import DataConfig, MultipleChoiceConfig
from trainer.data.sources import cache_directory
from trainer.evaluation.benchmarks import Score, mean_score
from trainer.evaluation.likelihood import Encoder, Pair, log_likelihoods
from trainer.model.language_model import LanguageModel

UNCONDITIONAL = 1_000_000
"""First number of rows whose context lacks the question; they are not read."""
SUFFIX = ".jsonl.gz"


@dataclass(frozen=True)
class Question:
    """Choices, each a context and a continuation, and the index of the right one."""

    choices: tuple[Pair, ...]
    label: int


def benchmark_directory(config: MultipleChoiceConfig) -> Path:
    """Return the directory of the request files."""
    return Path(config.directory or cache_directory(DataConfig()) / "benchmarks")


def check_files(config: MultipleChoiceConfig) -> None:
    """Check that every task has its file."""
    directory = benchmark_directory(config)
    if missing := [t for t in config.tasks if not (directory / f"{t}{SUFFIX}").is_file()]:
        raise UserError(
            f"evaluation.tasks: {str(directory)!r} has no {missing[0]}{SUFFIX}; "
            "scripts/fetch_benchmarks.py fetches the files"
        )


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read the first ``limit`` questions of a request file.

    A line is an object with ``doc_id``, ``idx`` (of the choice), ``label``, and under ``request``
    ``context`` and ``continuation``, as OLMES writes them. Lines may come in any order.

    Raises:
        UserError: a choice is missing.
    """
    choices: dict[int, dict[int, Pair]] = defaultdict(dict)
    labels: dict[int, int] = {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            question, request = int(row["doc_id"]), row["request"]
            if question < UNCONDITIONAL:
                choices[question][int(row["idx"])] = request["context"], request["continuation"]
                labels[question] = int(row["label"])
    for question, pairs in choices.items():
        if sorted(pairs) != list(range(len(pairs))) or labels[question] not in pairs:
            raise UserError(f"{path}: a choice of doc_id {question} is missing")
    return [
        Question(tuple(pair for _, pair in sorted(pairs.items())), labels[question])
        for question, pairs in islice(choices.items(), limit)
    ]


def score_questions(
    model: LanguageModel,
    encoder: Encoder,
    task: str,
    questions: Sequence[Question],
    batch_tokens: int,
    *,
    silent: bool = False,
) -> list[Score]:
    """Return how often the right choice is the most likely one.

    ``acc`` compares log-likelihoods, ``acc_norm`` log-likelihoods per character of the answer (as
    lm-eval does, without the space before it). ``silent``: show no progress.
    """
    pairs = [pair for question in questions for pair in question.choices]
    title = None if silent else f"Scoring {task}"
    answers = log_likelihoods(model, encoder.requests(pairs), batch_tokens, title)
    likelihoods = iter([answer.log_likelihood for answer in answers])
    acc, acc_norm = [], []
    for question in questions:
        scores = list(islice(likelihoods, len(question.choices)))
        sizes = [max(1, len(text.removeprefix(" "))) for _, text in question.choices]
        per_character = [score / size for score, size in zip(scores, sizes, strict=True)]
        acc.append(scores.index(max(scores)) == question.label)
        acc_norm.append(per_character.index(max(per_character)) == question.label)
    return [mean_score(task, "acc", acc), mean_score(task, "acc_norm", acc_norm)]


def score_tasks(
    model: LanguageModel, encoder: Encoder, config: MultipleChoiceConfig
) -> list[Score]:
    """Score every task of a configuration."""
    scores = []
    for task in config.tasks:
        questions = read_questions(benchmark_directory(config) / f"{task}{SUFFIX}", config.limit)
        scores += score_questions(model, encoder, task, questions, config.batch_tokens)
    return scores
