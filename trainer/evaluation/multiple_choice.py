"""Multiple-choice questions: whether the right answer is the most likely continuation."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.config import DataConfig, MultipleChoiceConfig
from trainer.data.sources import cache_directory
from trainer.evaluation.benchmarks import Score, mean_score
from trainer.evaluation.likelihood import Encoder, Pair, log_likelihoods
from trainer.model.language_model import LanguageModel

UNCONDITIONAL = 1_000_000
"""Offset of a question's number in rows whose context lacks the question."""

SUFFIX = ".jsonl.gz"


@dataclass(frozen=True)
class Question:
    """Choices, each a context and a continuation, and the index of the right one.

    ``unconditional``: the same continuations without the question, or empty.
    """

    choices: tuple[Pair, ...]
    label: int
    unconditional: tuple[Pair, ...] = ()


def benchmark_directory(config: MultipleChoiceConfig) -> Path:
    """Return the directory of the request files."""
    return Path(config.directory or cache_directory(DataConfig()) / "benchmarks")


def missing_tasks(config: MultipleChoiceConfig) -> list[Problem]:
    """Return a problem for every task without a file, or one if there are no files."""
    directory = benchmark_directory(config)
    there = [path.name.removesuffix(SUFFIX) for path in directory.glob(f"*{SUFFIX}")]
    if not there:
        return [
            Problem(
                "evaluation.directory",
                f"there are no request files in {str(directory)!r}; "
                "python scripts/fetch_benchmarks.py fetches them.",
            )
        ]
    return [
        Problem(
            "evaluation.tasks",
            f"there is no {task}{SUFFIX} in {str(directory)!r}.",
            did_you_mean(task, there),
        )
        for task in config.tasks
        if task not in there
    ]


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """Read the first ``limit`` questions of a request file.

    A line is an object with ``doc_id``, ``idx`` (of the choice), ``label``, and under ``request``
    ``context`` and ``continuation``, as OLMES writes them. Lines may come in any order.

    Raises:
        UserError: a line is malformed, a choice is missing, or there is no line.
    """
    choices: dict[int, dict[int, Pair]] = defaultdict(dict)
    labels: dict[int, int] = {}
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                number += 1
                row: dict[str, Any] = json.loads(line)
                question, request = int(row["doc_id"]), row["request"]
                pair = str(request["context"]), str(request["continuation"])
                if choices[question].setdefault(int(row["idx"]), pair) is not pair:
                    raise ValueError(f"doc_id {question} has two choices {row['idx']}")
                labels[question] = int(row["label"])
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError.at(str(path), f"line {number} is no request ({error!r}).") from error
    if not choices:
        raise UserError.at(str(path), "expected a question or more, got none.")
    for question, pairs in choices.items():
        if sorted(pairs) != list(range(len(pairs))) or labels[question] not in pairs:
            raise UserError.at(
                str(path), f"doc_id {question} lacks a choice, or its label is none of them."
            )
    asked = islice((n for n in choices if n < UNCONDITIONAL), limit)
    return [
        Question(_in_order(choices[n]), labels[n], _in_order(choices.get(n + UNCONDITIONAL, {})))
        for n in asked
    ]


def _in_order(choices: dict[int, Pair]) -> tuple[Pair, ...]:
    return tuple(choices[index] for index in sorted(choices))


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
    lm-eval does, without the space before it). ``acc_uncond`` subtracts log-likelihoods without the
    question (Brown et al. 2020, Sec. 2.4), if all questions have them. ``silent``: show no
    progress.
    """
    free = all(question.unconditional for question in questions)
    pairs = [pair for question in questions for pair in question.choices]
    extra = [pair for question in questions for pair in question.unconditional] if free else []
    title = None if silent else f"Scoring {task}"
    answers = log_likelihoods(model, encoder.requests(pairs + extra), batch_tokens, title)
    likelihoods = [answer.log_likelihood for answer in answers]
    asked, unasked = iter(likelihoods), iter(likelihoods[len(pairs) :])
    hits: dict[str, list[bool]] = defaultdict(list)
    for question in questions:
        scores = list(islice(asked, len(question.choices)))
        sizes = [max(1, len(text.removeprefix(" "))) for _, text in question.choices]
        ways = {"acc": scores, "acc_norm": [s / n for s, n in zip(scores, sizes, strict=True)]}
        if free:
            without = islice(unasked, len(scores))
            ways["acc_uncond"] = [s - u for s, u in zip(scores, without, strict=True)]
        for metric, values in ways.items():
            hits[metric].append(values.index(max(values)) == question.label)
    return [mean_score(task, metric, values) for metric, values in hits.items()]


def score_tasks(
    model: LanguageModel, encoder: Encoder, config: MultipleChoiceConfig
) -> list[Score]:
    """Score every task of a configuration; all its files must exist.

    Raises:
        UserError: a request file is malformed.
    """
    scores = []
    for task in config.tasks:
        path = benchmark_directory(config) / f"{task}{SUFFIX}"
        questions = read_questions(path, config.limit)
        if not config.unconditional:
            questions = [replace(question, unconditional=()) for question in questions]
        scores += score_questions(model, encoder, task, questions, config.batch_tokens)
    return scores
