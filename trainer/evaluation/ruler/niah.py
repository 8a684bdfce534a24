"""RULER's needle tasks (Sec. 3.1), which ask for the value of a key.

The haystack may be an essay: documents joined to one text, with needles between its sentences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random
from uuid import UUID

from trainer.common.errors import UserError
from trainer.evaluation.ruler.question import NOISE, Question, compound, distinct

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
"""Where needles can stand in an essay."""

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

    def question(self, rng: Random, trial: int, units: int, length: int) -> Question:
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
        return Question(
            template.format(value=self.value, context=context, query=query),
            tuple(value for _, value in answers),
            begin / len(context),
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(values=f"{self.value}s", key=key, value=value)
