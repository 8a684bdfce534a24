"""Documents as one long text, counted in words, with places between sentences."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import cycle

from trainer.common.errors import UserError

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
