"""RULER's kinds of question, each with a haystack of any size: needles, chains, words, documents.

Sections are those of the paper.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from itertools import cycle, islice, pairwise
from pathlib import Path
from random import Random
from string import ascii_lowercase, ascii_uppercase
from typing import Any
from uuid import UUID

from tokenizers import Tokenizer

from trainer.common.errors import UserError

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""A meaningless line of a haystack."""


@dataclass(frozen=True)
class RulerQuestion:
    """A question as text; ``depth``: position of a single answer in its haystack, 0 to 1."""

    text: str
    answers: tuple[str, ...]
    depth: float | None = None


def distinct(rng: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """Return ``count`` distinct draws."""
    draws: dict[str, None] = {}
    while len(draws) < count:
        draws[draw(rng)] = None
    return list(draws)


@cache
def _listed(name: str) -> tuple[str, ...]:
    text = (files("wonderwords") / "assets" / f"{name}list.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines())


@cache
def vocabulary() -> tuple[str, ...]:
    """Return all nouns, adjectives and verbs, sorted."""
    return tuple(sorted({*_listed("noun"), *_listed("adjective"), *_listed("verb")}))


def compound(rng: Random) -> str:
    """Return a hyphenated adjective and noun, one of six million."""
    return f"{rng.choice(_listed('adjective'))}-{rng.choice(_listed('noun'))}"


SENTENCE_ENDS = tuple(mark + quote for mark in ".!?" for quote in ("", '"', "'", ")", "”", "’"))


class Essay:
    """Documents concatenated, and repeated from the first one after the last, as in RULER.

    Words are split on demand, however many documents there are.

    Raises:
        UserError: the documents contain no word.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        if not any(map(str.strip, documents)):
            raise UserError.at("ruler", "the documents for the haystacks hold no text.")
        self._documents = cycle(documents)
        self._words: list[str] = []
        self._sentences: list[int] = []

    def with_insertions(self, count: int, insertions: Sequence[tuple[float, str]]) -> str:
        """Return the first ``count`` words with sentences inserted.

        ``insertions``: pairs of a depth, the share of the text's sentences before it, and a
        sentence; sorted by depth.
        """
        while len(self._words) < count:
            self._read(next(self._documents))
        sentences = bisect_left(self._sentences, count)
        pieces: list[str] = []
        begin = 0
        for depth, sentence in insertions:
            before = int(sentences * depth)
            end = self._sentences[before] if before < sentences else count
            pieces += [*self._words[begin:end], sentence]
            begin = end
        return " ".join(pieces + self._words[begin:count])

    def _read(self, document: str) -> None:
        ended = True
        for place, word in enumerate(document.split(), len(self._words)):
            if ended:
                self._sentences.append(place)
            self._words.append(word)
            ended = word.endswith(SENTENCE_ENDS)


NEEDLE = "One of the special magic {values} for {key} is: {value}."
ONE = (
    "A special magic {value} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {value} afterwards.\n{context}\n"
    "What is the special magic {value} for {query} mentioned in the provided text? "
    "The special magic {value} for {query} mentioned in the provided text is"
)
SEVERAL = (
    "Some special magic {value}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {value}s afterwards.\n{context}\n"
    "What are all the special magic {value}s for {query} mentioned in the provided text? "
    "The special magic {value}s for {query} mentioned in the provided text are"
)

DEPTHS = [round(step / 39 * 100) / 100 for step in range(40)]
"""Depths of needles in an essay."""

DRAWS: dict[str, Callable[[Random], str]] = {
    "word": compound,
    "number": lambda rng: str(rng.randint(1_000_000, 9_999_999)),
    "uuid": lambda rng: str(UUID(int=rng.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class Needles:
    """``keys`` keys with ``values`` values each, of which ``queries`` keys are queried.

    ``essay``: the haystack, counted in words. Without one, it is counted in lines, which are
    meaningless or, with ``distractors``, needles with other keys. ``key`` and ``value`` are kinds
    of :data:`DRAWS`.
    """

    essay: Essay | None = None
    distractors: bool = False
    key: str = "word"
    value: str = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    new_tokens: int = 128

    @property
    def least(self) -> int:
        """Minimum size: lines before which needles can stand, or one word of an essay."""
        return 1 if self.essay else self.keys * self.values

    def question(self, rng: Random, trial: int, units: int, length: int) -> RulerQuestion:
        """Make a question; the answers are the queried keys' values, in order."""
        others = units if self.distractors else 0
        keys = distinct(rng, DRAWS[self.key], self.keys + others)
        drawn = iter(distinct(rng, DRAWS[self.value], self.keys * self.values + others))
        values = {key: [next(drawn) for _ in range(self.values)] for key in keys[: self.keys]}
        needles = [self._needle(key, value) for key in values for value in values[key]]
        rng.shuffle(needles)
        if self.essay:
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            context = self.essay.with_insertions(units, list(zip(depths, needles, strict=True)))
        else:
            lines = [NOISE] * units
            if self.distractors:
                lines = list(map(self._needle, keys[self.keys :], drawn))
            places = sorted(rng.sample(range(units), len(needles)), reverse=True)
            for place, needle in zip(places, needles, strict=True):
                lines.insert(place, needle)
            context = "\n".join(lines)
        asked = rng.sample(keys[: self.keys], self.queries)
        answers = [(key, value) for key in asked for value in values[key]]
        query = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
        template = ONE if len(answers) == 1 else SEVERAL
        begin = min(context.index(self._needle(*answer)) for answer in answers)
        return RulerQuestion(
            template.format(value=self.value, context=context, query=query),
            tuple(value for _, value in answers),
            begin / len(context),
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(values=f"{self.value}s", key=key, value=value)


HOPS = 4
EXAMPLE_TOKENS = 500
"""A solved example comes before the question, with as much noise as fits this."""

# RULER has this space at the end.
CHAIN_TEMPLATE = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    "{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
    "above. Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are: "
)


class VariableTracking:
    """One chain of assignments among lines of noise, the units of the haystack."""

    new_tokens = 30
    least = HOPS + 1

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def question(self, rng: Random, trial: int, units: int, length: int) -> RulerQuestion:
        """Make a question; the answers are the variables, beginning with the one that got the
        number."""
        example = _chain(rng, self._example_lines, letters=3)
        asked = _chain(rng, units, letters=5)
        solved = f"{example.text} {' '.join(example.answers)}\n"
        return RulerQuestion(f"{solved}\n{asked.text}", asked.answers, asked.depth)

    @cached_property
    def _example_lines(self) -> int:
        lines = self.least
        while self._tokens(lines + 1) <= EXAMPLE_TOKENS:
            lines += 1
        return lines

    def _tokens(self, lines: int) -> int:
        text = _chain(Random(0), lines, letters=3).text
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)


def _chain(rng: Random, lines: int, letters: int) -> RulerQuestion:
    names = distinct(rng, lambda r: "".join(r.choices(ascii_uppercase, k=letters)), HOPS + 1)
    value = rng.randrange(10_000, 99_999)
    first = f"VAR {names[0]} = {value}"
    # As in RULER, every assignment but the first ends with a space.
    chain = [
        first,
        *(f"VAR {new} = VAR {old} " for old, new in pairwise(names)),
    ]
    text = [NOISE] * lines
    for offset, place in enumerate(sorted(rng.sample(range(lines), len(chain)))):
        text.insert(place + offset, chain[offset])
    context = "\n".join(text)
    return RulerQuestion(
        CHAIN_TEMPLATE.format(context=context, value=value, count=len(names)),
        tuple(names),
        context.index(first) / len(context),
    )


COMMON_TEMPLATE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list? "
    "Answer: The top 10 words that appear most often in the list are:"
)
FREQUENT_TEMPLATE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? "
    "Answer: According to the coded text above, the three most frequently appeared words are:"
)

COMMON = 10
LONG = 4096
"""Tokens from which a list has the full number of repetitions."""


class CommonWords:
    """Ten words of a list occur more often than all others; counted in distinct words."""

    new_tokens = 120
    least = COMMON + 1

    def question(self, rng: Random, trial: int, units: int, length: int) -> RulerQuestion:
        """Make a question: a solved example, then the list to answer for."""
        full = length >= LONG
        solved, words = _word_list(rng, *((40, 10, 3) if full else (20, 3, 1)))
        text, answers = _word_list(rng, units, *((30, 3) if full else (6, 1)))
        return RulerQuestion(f"{solved} {_numbered(words)}\n{text}", tuple(answers))


def _word_list(rng: Random, words: int, often: int, seldom: int) -> tuple[str, list[str]]:
    # RULER takes a larger dictionary for lists of more than 100,000 tokens.
    enough = words <= len(vocabulary())
    drawn = rng.sample(vocabulary(), words) if enough else distinct(rng, compound, words)
    common = drawn[:COMMON]
    entries = common * often + drawn[COMMON:] * seldom
    rng.shuffle(entries)
    return COMMON_TEMPLATE.format(context=_numbered(entries)), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


class FrequentWords:
    """Made-up words, the k-th with frequency k^-2 / zeta(2); dots come first."""

    new_tokens = 50

    least = 53
    """From here on the fourth rank always has more words than the fifth."""

    def question(self, rng: Random, trial: int, units: int, length: int) -> RulerQuestion:
        """Make a question; the answers are the words after the dots."""
        kinds = max(5, (length - self.new_tokens) // 50)
        vocabulary = distinct(rng, lambda r: "".join(r.choices(ascii_lowercase, k=6)), kinds)
        vocabulary[0] = "..."
        zeta = math.pi**2 / 6
        counts = [int(units / rank**2 / zeta) for rank in range(1, kinds + 1)]
        text = [word for word, n in zip(vocabulary, counts, strict=True) for _ in range(n)]
        rng.shuffle(text)
        return RulerQuestion(
            FREQUENT_TEMPLATE.format(context=" ".join(text)), tuple(vocabulary[1:4])
        )


INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)
DOCUMENTS_TEMPLATE = (
    INSTRUCTION + "\n\nThe following are given documents.\n\n{context}\n\n" + INSTRUCTION + "\n\n"
    "Question: {query} Answer:"
)


@dataclass(frozen=True)
class Item:
    """A question with its answers, its own paragraphs, and ``related`` ones of the same article.

    Related paragraphs are the first distractors.
    """

    query: str
    answers: tuple[str, ...]
    paragraphs: tuple[str, ...]
    related: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuestionAnswering:
    """The first questions of a file, in order; units are paragraphs of all questions."""

    items: tuple[Item, ...]
    paragraphs: tuple[str, ...]
    new_tokens: int = 32
    least: int = 1

    def question(self, rng: Random, trial: int, units: int, length: int) -> RulerQuestion:
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
        return RulerQuestion(
            DOCUMENTS_TEMPLATE.format(context=context, query=item.query), item.answers
        )


def read_squad(file: str) -> QuestionAnswering:
    """Read the questions of SQuAD that have an answer.

    Raises:
        UserError: the file is missing or of another kind.
    """
    return _read_questions("squad_file", file, "SQuAD", _squad_items)


def read_hotpotqa(file: str) -> QuestionAnswering:
    """Read the questions of HotpotQA, each with its ten paragraphs.

    Raises:
        UserError: the file is missing or of another kind.
    """
    return _read_questions("hotpotqa_file", file, "HotpotQA", _hotpotqa_items)


def _read_questions(
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
            context = paragraph["context"]
            related = tuple(text for text in texts if text != context)
            for row in paragraph["qas"]:
                if not row.get("is_impossible"):
                    answers = tuple(answer["text"] for answer in row["answers"])
                    yield Item(row["question"], answers, (context,), related)


def _hotpotqa_items(data: Any) -> Iterable[Item]:
    for row in data:
        texts = tuple(f"{title}\n{''.join(lines)}" for title, lines in row["context"])
        yield Item(row["question"], (row["answer"],), texts)


RulerKind = Needles | VariableTracking | CommonWords | FrequentWords | QuestionAnswering
"""A kind of task.

``question`` makes a trial with a haystack of ``units``, at least ``least``, for a prompt of about
``length`` tokens. ``new_tokens``: largest number of tokens in an answer.
"""
