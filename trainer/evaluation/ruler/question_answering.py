"""Human questions about one paragraph among many: RULER, Sec. 3.4.

SQuAD 2.0 (Rajpurkar et al. 2018) and HotpotQA (Yang et al. 2018), from the files that their authors
publish: ``dev-v2.0.json`` and ``hotpot_dev_distractor_v1.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from trainer.common.errors import UserError
from trainer.evaluation.ruler.question import Question

INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)
TEMPLATE = (
    INSTRUCTION + "\n\nThe following are given documents.\n\n{context}\n\n" + INSTRUCTION + "\n\n"
    "Question: {query} Answer:"
)


@dataclass(frozen=True)
class Item:
    """A question with its answers, its own paragraphs, and those of the same article, which are
    used as distractors first."""

    query: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    related: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionAnswering:
    """The first questions of a file, in order; the haystack is counted in paragraphs of all
    questions."""

    items: tuple[Item, ...]
    paragraphs: tuple[str, ...]
    new_tokens: int = 32
    least: int = 1

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
        """Make a trial; a file with too few paragraphs repeats them."""
        item = self.items[trial]
        chosen = list(item.paragraphs)
        wanted = max(units, len(chosen))
        chosen += rng.sample(item.related, min(wanted - len(chosen), len(item.related)))
        if (missing := wanted - len(chosen)) > 0:
            taken = set(chosen)
            drawn = rng.sample(self.paragraphs, min(wanted, len(self.paragraphs)))
            chosen += [text for text in drawn if text not in taken][:missing]
        chosen = list(islice(cycle(chosen), wanted))
        rng.shuffle(chosen)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(chosen, 1))
        return Question(TEMPLATE.format(context=context, query=item.query), item.answers)


def read_squad(file: str) -> QuestionAnswering:
    """Read the questions of SQuAD that have an answer.

    Raises:
        UserError: the file is missing or of another kind.
    """
    return _read("squad_file", file, "SQuAD", _squad_items)


def read_hotpotqa(file: str) -> QuestionAnswering:
    """Read the questions of HotpotQA, each with its ten paragraphs.

    Raises:
        UserError: the file is missing or of another kind.
    """
    return _read("hotpotqa_file", file, "HotpotQA", _hotpotqa_items)


def _read(
    key: str, file: str, name: str, items_of: Callable[[Any], Iterable[Item]]
) -> QuestionAnswering:
    try:
        items = tuple(items_of(json.loads(Path(file).read_text(encoding="utf-8"))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError.at(
            f"evaluation.ruler.{key}", f"{file!r} is no {name} file ({error!r})."
        ) from error
    if not items:
        raise UserError.at(f"evaluation.ruler.{key}", f"{file!r} holds no question with an answer.")
    texts = {text for item in items for text in (*item.paragraphs, *item.related)}
    return QuestionAnswering(items, tuple(sorted(texts)))


def _squad_items(data: Any) -> Iterable[Item]:
    for article in data["data"]:
        texts = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            own = paragraph["context"]
            related = tuple(text for text in texts if text != own)
            for row in paragraph["qas"]:
                if not row.get("is_impossible"):
                    answers = tuple(answer["text"] for answer in row["answers"])
                    yield Item(row["question"], answers, (own,), related)


def _hotpotqa_items(data: Any) -> Iterable[Item]:
    for row in data:
        texts = tuple(f"{title}\n{''.join(lines)}" for title, lines in row["context"])
        yield Item(row["question"], (row["answer"],), texts)
