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
from trainer.common.files import expecting
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
    ``context`` and ``continuation``, as OLMES writes them. Lines may come in any order. Raise a
    UserError if a line is damaged, or a choice is missing or has no token.
    """
    with expecting("lines that gzip compressed", path):
        lines = gzip.decompress(path.read_bytes()).split(b"\n")
    rows: list[tuple[int, int, int, tuple[str, str]]] = []
    for number, line in enumerate(lines, start=1):
        if line:
            with expecting("a choice as OLMES writes it", f"{path}: line {number}"):
                row = json.loads(line)
                texts = row["request"]["context"], row["request"]["continuation"]
                rows.append((int(row["doc_id"]), int(row["idx"]), int(row["label"]), texts))
    rows = [row for row in rows if row[0] < UNCONDITIONAL]
    rows.sort(key=itemgetter(0, 1))
    questions = []
    for question, choices in islice(groupby(rows, itemgetter(0)), limit):
        _, indices, (label, *_), texts = zip(*choices, strict=True)
        if max(label, indices[-1]) >= len(indices) or label < 0:
            raise UserError(f"{path}: a choice of doc_id {question} is missing")
        # The space before an answer does not count, as in lm-eval.
        sizes = tuple(max(1, len(answer.removeprefix(" "))) for _, answer in texts)
        with expecting(f"choices of doc_id {question} that have tokens", path):
            requests = tuple(encoder.requests(texts))
        questions.append(Question(requests, sizes, label))
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
