"""LongBench (Bai et al. 2023, arXiv 2308.14508): questions, summaries and code on real long texts.

The sixteen English tasks, in the words and by the metrics of the benchmark's own programs
(github.com/THUDM/LongBench), for models without a chat template. RoPE-ID averages fourteen of them
(App. A.8), the default here; DroPE reports four (Table 2) and the mean of all (Table 8).

``longbench.yaml`` holds wording, numbers of tokens and the choice of metrics. Metrics compare one
continuation with one right answer, 0 to 1. Each equals the benchmark's own ``metrics.py`` with
``rouge`` 1.0.1 and ``fuzzywuzzy``, which uses Python's difflib.
"""

import json
import re
import string
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import chain, product
from pathlib import Path
from typing import Any

import yaml

from trainer.common.errors import UserError
from trainer.common.files import expecting
from trainer.config import LongBenchSettings
from trainer.evaluation.likelihood import Encoder
from trainer.evaluation.scoring import Prompt, check_room
from trainer.evaluation.task import PromptTask, TaskInputs, task

HUB_NAME, HUB_FILE = "THUDM/LongBench", "data.zip"
"""The file holds ``data/TASK.jsonl``; the data set's loading script would be foreign code."""

PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
COMMENTS = ("`", "#", "//")
"""Marks of lines that are a comment or formatting, not code."""


def qa_f1(prediction: str, answer: str) -> float:
    """Return F1 of the words, ignoring case, punctuation and articles (SQuAD's)."""
    predicted, right = _words(prediction), _words(answer)
    common = (Counter(predicted) & Counter(right)).total()
    return 2 * common / (len(predicted) + len(right)) if common else 0.0


def _words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation and articles."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def rouge_l(prediction: str, answer: str) -> float:
    """Return ROUGE-L of whole summaries (Lin 2004, Sec. 3.2), as ``rouge`` counts it.

    The words of the longest common subsequences of all pairs of sentences are compared with the
    words of both texts, as sets. Sentences end at full stops, and case matters. Of sentences with a
    thousand words together the benchmark counts 0, because ``rouge`` fails.
    """
    predicted, right = _sentences(prediction), _sentences(answer)
    if not predicted or not right:
        return 0.0
    shared: set[str] = set()
    for x, y in product(right, predicted):
        shared.update(longest_common_subsequence(x, y))
    precision = len(shared) / len(set(chain.from_iterable(predicted)))
    recall = len(shared) / len(set(chain.from_iterable(right)))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    # `rouge` treats white space between two full stops as a sentence of one empty word.
    return [part.split() or [""] for part in text.split(".") if part]


def longest_common_subsequence(x: Sequence[str], y: Sequence[str]) -> tuple[str, ...]:
    """Return one of the longest common subsequences: a common last word belongs to it; otherwise x
    loses its last word only if keeping it would cost length."""
    # Entry j is for the words of x so far and the first j of y.
    longest: list[tuple[str, ...]] = [()] * (len(y) + 1)
    for word in x:
        without, longest = longest, [()]
        for j, other in enumerate(y):
            if word == other:
                longest.append((*without[j], word))
            elif len(without[j + 1]) > len(longest[j]):
                longest.append(without[j + 1])
            else:
                longest.append(longest[j])
    return longest[-1]


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 / (number of classes named) if the right one is among them, else 0; a class whose
    name is part of the right one's does not count."""
    named = [name for name in classes if name in prediction]
    named = [name for name in named if name == answer or name not in answer]
    return 1 / len(named) if answer in named else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Return the similarity of the first line of code to the right line, in whole percents."""
    lines = prediction.lstrip("\n").split("\n")
    line = next(filter(is_code, lines), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


def is_code(line: str) -> bool:
    """Return whether the line has no mark of a comment or of formatting."""
    return not any(mark in line for mark in COMMENTS)


def count(prediction: str, answer: str) -> float:
    """Return the share of the numbers in the prediction that equal the answer."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Return :func:`count` for an answer ``Paragraph 7``."""
    return count(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


METRICS: dict[str, Callable[..., float]] = {
    each.__name__: each
    for each in (qa_f1, rouge_l, classification, code_similarity, count, retrieval)
}

KINDS: dict[str, dict[str, Any]] = yaml.safe_load(
    resources.files(__package__).joinpath("longbench.yaml").read_text("utf-8")
)
"""The keys of ``longbench.yaml`` by task."""

Row = Mapping[str, Any]
"""A question as the benchmark distributes it, with keys ``input``, ``context``, ``answers`` and, in
classification tasks, ``all_classes``."""


def longbench_task(
    name: str, rows: Sequence[Row], encoder: Encoder, training_length: int
) -> PromptTask:
    """Return the task of these questions, the same at every length; short texts stay short.
    ``training_length``: C in tokens, for the labels."""
    kind = KINDS[name]
    metric = METRICS[kind["metric"]]
    first_line = kind.get("first_line", False)
    new_tokens: int = kind["new_tokens"]
    if metric is classification:
        metric = partial(classification, classes=rows[0]["all_classes"])
    line_break = encoder.tokenizer.encode("\n", add_special_tokens=False).ids[-1:]
    never_first = tuple(line_break) if kind.get("one_line", False) else ()
    texts = [kind["template"].format(**row) for row in rows]
    # Four bytes for a token: the texts of all tasks are kept in memory together.
    encoded = [array("i", tokens) for tokens in encoder.tokens(texts)]

    def prompts(length: int) -> list[Prompt]:
        """Return one prompt per question; with its answer it has at most ``length`` tokens.

        A longer prompt loses its middle. Its halves are joined as tokens, in the benchmark as text.
        """
        room = length - new_tokens
        check_room(room - 2, name, length)
        half = room // 2
        trials = []
        for row, ids in zip(rows, encoded, strict=True):
            read = ids[:half] + ids[-half:] if len(ids) > room else ids
            bucket = label(len(ids) / training_length)
            trials.append(Prompt(read, tuple(row["answers"]), new_tokens, label=bucket))
        return trials

    def score(text: str, answers: Sequence[str]) -> float:
        """Return the score for the answer that agrees best."""
        if first_line:
            text = text.lstrip("\n").split("\n")[0]
        return max(metric(text, answer) for answer in answers)

    def stop(text: str, answers: Sequence[str]) -> bool:
        """Return whether further text cannot change the score."""
        complete_lines = text.lstrip("\n").split("\n")[:-1]
        if metric is code_similarity:
            return any(map(is_code, complete_lines))
        return first_line and bool(complete_lines)

    return PromptTask(f"longbench_{name}", encoder.tokenizer, prompts, score, stop, never_first)


def label(contexts: float) -> str:
    """Return a prompt's bucket by its length in training lengths, before truncation (DroPE, Tables
    9 and 10)."""
    low = max(edge for edge in (0, 2, 4, 8, 16) if edge <= contexts)
    high = max(2, 2 * low)
    return "16×+ ctx" if low == 16 else f"{low}–{high}× ctx"


@task("longbench", settings="longbench")
def longbench_tasks(inputs: TaskInputs) -> list[PromptTask]:
    """Return the tasks.

    Their files ``TASK.jsonl`` are in a directory, or else in the archive of the hub or its cache.

    Raises:
        OSError: a file does not exist.
        UserError: a file holds no question, or a line something else.
    """
    settings: LongBenchSettings = inputs.settings
    files: Traversable
    if settings.directory is not None:
        files = Path(settings.directory)
    else:
        from huggingface_hub import hf_hub_download

        files = zipfile.Path(hf_hub_download(HUB_NAME, HUB_FILE, repo_type="dataset"), "data/")
    tasks = []
    names = settings.tasks or [name for name in KINDS if not name.startswith("passage")]
    for name in names:
        keys = ["input", "context", "answers"]
        if METRICS[KINDS[name]["metric"]] is classification:
            keys.append("all_classes")
        path = files / f"{name}.jsonl"
        rows = []
        for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
            if line.strip():
                with expecting(f"a question with {keys}", f"{path}: line {number}"):
                    row = json.loads(line)
                    rows.append({key: row[key] for key in keys})
        if not rows:
            raise UserError(f"evaluation.longbench: expected questions in {name}.jsonl, got none")
        tasks.append(longbench_task(name, rows, inputs.text.encoder, inputs.training_length))
    return tasks
