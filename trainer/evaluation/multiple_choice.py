"""Multiple-choice questions: whether the right answer is the most likely continuation."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

import pandas as pd

from trainer.common.errors import UserError
from trainer.config import DataConfig, MultipleChoiceSettings
from trainer.data.sources import cache_directory
from trainer.evaluation.likelihood import Encoder, Pair, Request, log_likelihoods
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Batch, Task, Value
from trainer.model.language_model import LanguageModel

METRICS = ("acc", "acc_norm")
UNCONDITIONAL = 1_000_000
"""First number of rows whose context lacks the question; they are not read."""
TOGETHER = 1024
"""Questions read together: those with contexts of equal length share passes."""


@dataclass(frozen=True)
class Question:
    """Choices, each a context and a continuation, as text and as tokens, and the index of the right
    one."""

    choices: tuple[Pair, ...]
    requests: tuple[Request, ...]
    label: int


def read_questions(path: Path, encoder: Encoder, limit: int | None = None) -> list[Question]:
    """Read the first ``limit`` questions of a request file.

    A line is an object with ``doc_id``, ``idx`` (of the choice), ``label``, and under ``request``
    ``context`` and ``continuation``, as OLMES writes them. Lines may come in any order.

    Raises:
        UserError: a choice is missing or has no token.
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
    numbers = list(islice(choices, limit))
    texts = [tuple(pair for _, pair in sorted(choices[number].items())) for number in numbers]
    requests = iter(encoder.requests(list(chain.from_iterable(texts))))
    return [
        Question(pairs, tuple(islice(requests, len(pairs))), labels[number])
        for number, pairs in zip(numbers, texts, strict=True)
    ]


def multiple_choice_tasks(
    settings: MultipleChoiceSettings,
    encoder: Encoder,
    lengths: Sequence[int],
    limit: int | None = None,
) -> list[Task]:
    """Return a task for every file and length, of the file's first ``limit`` questions.

    A score is 1 if the right choice has the largest value. ``acc`` compares log-likelihoods,
    ``acc_norm`` log-likelihoods per character of the answer (as lm-eval does, without the space
    before it). A length limits what the model reads: longer contexts lose their beginning, and the
    questions are the same at every length.

    Raises:
        OSError: there is no such file; scripts/fetch_benchmarks.py fetches them.
        UserError: a choice is missing or has no token.
    """
    directory = Path(settings.directory or cache_directory(DataConfig()) / "benchmarks")
    tasks = []
    for name in settings.tasks:
        questions = read_questions(directory / f"{name}.jsonl.gz", encoder, limit)
        titles = {f"{name}_{metric}": f"{name} ({metric})" for metric in METRICS}
        trials = pd.DataFrame(index=range(len(questions)))
        for length in lengths:
            batches = partial(_batches, name, questions, length)
            tasks.append(Task(titles, length, fingerprint(questions), trials, batches))
    return tasks


def _batches(
    name: str,
    questions: Sequence[Question],
    length: int,
    model: LanguageModel,
    batch_tokens: int,
) -> list[Batch]:
    """Return batches of questions, with ``acc`` and ``acc_norm`` of each."""
    longest = min(length, model.context or length)

    def read(first: int) -> list[Value]:
        values: list[Value] = []
        batch = questions[first : first + TOGETHER]
        requests = list(chain.from_iterable(question.requests for question in batch))
        likelihoods = iter(log_likelihoods(model, requests, batch_tokens, longest))
        for number, question in enumerate(batch, first):
            totals = [next(likelihoods)[0] for _ in question.choices]
            sizes = [max(1, len(text.removeprefix(" "))) for _, text in question.choices]
            means = [total / size for total, size in zip(totals, sizes, strict=True)]
            for metric, each in zip(METRICS, (totals, means), strict=True):
                is_right = each.index(max(each)) == question.label
                values.append((number, f"{name}_{metric}", float(is_right)))
        return values

    return [partial(read, first) for first in range(0, len(questions), TOGETHER)]
