"""Multiple-choice questions: whether the right answer is the most likely continuation."""

import gzip
import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trainer.common.errors import UserError
from trainer.config import DataConfig, MultipleChoiceSettings
from trainer.data.sources import cache_directory
from trainer.evaluation.likelihood import Encoder, Request, log_likelihoods
from trainer.evaluation.store import fingerprint
from trainer.evaluation.task import Batch, Task, TaskInputs, Value, task
from trainer.model.language_model import LanguageModel

UNCONDITIONAL = 1_000_000
"""First number of rows whose context lacks the question; they are not read."""
TOGETHER = 1024
"""Questions read together: those with contexts of equal length share passes."""


class Question(NamedTuple):
    """The choices of a question as ``requests``, the ``sizes`` of their answers in characters, and
    the number of the right choice."""

    requests: tuple[Request, ...]
    sizes: tuple[int, ...]
    label: int


def read_questions(path: Path, encoder: Encoder, limit: int | None = None) -> list[Question]:
    """Read the first ``limit`` questions of a request file, in the order of their numbers.

    A line is an object with ``doc_id``, ``idx`` (of the choice), ``label``, and under ``request``
    ``context`` and ``continuation``, as OLMES writes them. Lines may come in any order.

    Raises:
        UserError: a choice is missing or has no token.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if row["doc_id"] < UNCONDITIONAL]
    rows.sort(key=itemgetter("doc_id", "idx"))
    questions = []
    for number, of_question in islice(groupby(rows, itemgetter("doc_id")), limit):
        choices = list(of_question)
        label = choices[0]["label"]
        if max(label, choices[-1]["idx"]) >= len(choices):
            raise UserError(f"{path}: a choice of doc_id {number} is missing")
        texts = [(row["request"]["context"], row["request"]["continuation"]) for row in choices]
        # The space before an answer does not count, as in lm-eval.
        sizes = tuple(max(1, len(answer.removeprefix(" "))) for _, answer in texts)
        questions.append(Question(tuple(encoder.requests(texts)), sizes, label))
    return questions


@task("multiple_choice", settings="multiple_choice")
def multiple_choice_tasks(inputs: TaskInputs) -> list[Task]:
    """Return a task for every file and length, of the file's first questions.

    A score is 1 if the right choice has the largest value. ``acc`` compares log-likelihoods,
    ``acc_norm`` log-likelihoods per character of the answer (as in lm-eval). A length limits what
    the model reads: longer contexts lose their beginning, and the questions are the same at every
    length.

    Raises:
        OSError: there is no such file; scripts/fetch_benchmarks.py fetches them.
        UserError: a choice is missing or has no token.
    """
    settings: MultipleChoiceSettings = inputs.settings
    directory = Path(settings.directory or cache_directory(DataConfig()) / "benchmarks")
    tasks = []
    for name in settings.tasks:
        path = directory / f"{name}.jsonl.gz"
        questions = read_questions(path, inputs.text.encoder, inputs.limit)
        titles = {f"{name}_{metric}": f"{name} ({metric})" for metric in ("acc", "acc_norm")}
        trials = pd.DataFrame(index=range(len(questions)))
        for length in inputs.lengths:
            batches = partial(_batches, name, questions, length)
            tasks.append(Task(titles, length, fingerprint(questions), trials, batches))
    return tasks


def _batches(
    name: str, questions: Sequence[Question], length: int, model: LanguageModel, batch_tokens: int
) -> list[Batch]:
    """Return batches of questions, whose values are ``acc`` and ``acc_norm`` of each."""
    longest = min(length, model.context or length)

    def read(first: int) -> list[Value]:
        values: list[Value] = []
        batch = questions[first : first + TOGETHER]
        requests = [request for question in batch for request in question.requests]
        likelihoods = iter(log_likelihoods(model, requests, batch_tokens, longest))
        for number, (choices, sizes, label) in enumerate(batch, first):
            totals = np.array([next(likelihoods)[0] for _ in choices])
            for metric, scores in ("acc", totals), ("acc_norm", totals / sizes):
                values.append((number, f"{name}_{metric}", float(scores.argmax() == label)))
        return values

    return [partial(read, first) for first in range(0, len(questions), TOGETHER)]
