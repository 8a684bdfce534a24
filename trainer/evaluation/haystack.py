"""Text to hide needles in: a token stream, excerpts of exact lengths, and places for insertions.

Prompts are assembled from tokens, not from text, so that they have exactly the requested length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.data.order import Integers

NEAR = 0.05
"""Share of an excerpt by which a place may miss its depth to stand between sentences or words."""
SENTENCE_ENDS = re.compile(r"""[.!?]["')\]]*$""")
ANCHOR = "."
"""Text before another one, so that a tokenizer treats the latter as the middle of a text."""


@dataclass(frozen=True)
class Excerpt:
    """``tokens`` of running text, with places for insertions.

    ``sentences``, ``words``: ascending indices of tokens that begin with white space, after a
    sentence or line, and after any word.
    """

    tokens: list[int]
    sentences: Integers
    words: Integers

    def place(self, depth: float) -> int:
        """Return the index of the token to insert before at a depth from 0 to 1.

        Beginning and end are exact. Between them a nearby end of a sentence, or else of a word, is
        preferred to the exact place.
        """
        wanted = round(depth * len(self.tokens))
        if 0 < wanted < len(self.tokens):
            for places in (self.sentences, self.words):
                nearest = places[np.abs(places - wanted).argmin()] if len(places) else -1
                if abs(nearest - wanted) <= NEAR * len(self.tokens):
                    return int(nearest)
        return wanted

    def with_insertions(self, insertions: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
        """Return the tokens with insertions, each given with its place."""
        pieces: list[int] = []
        done = 0
        for place, tokens in sorted(insertions, key=lambda insertion: insertion[0]):
            pieces += [*self.tokens[done:place], *tokens]
            done = place
        return tuple(pieces + self.tokens[done:])


@dataclass(eq=False)
class Haystack:
    """Documents as one token stream, with a blank line before each.

    ``bos``: tokens before every prompt. ``eos``: see :func:`~trainer.data.tokenizer.end_of_text`.
    """

    tokenizer: Tokenizer
    documents: Sequence[str]
    bos: tuple[int, ...]
    eos: tuple[int, ...] = ()

    @cached_property
    def tokens(self) -> Integers:
        """The stream, computed on first use."""
        blank = self.encode("\n\n")
        encodings = self.tokenizer.encode_batch(self.documents, add_special_tokens=False)
        return np.concatenate([np.array([*blank, *e.ids], dtype=np.int32) for e in encodings])

    @cached_property
    def numbers(self) -> str:
        """All runs of five or more digits in the text, so that new values can avoid them."""
        return " ".join(n for text in self.documents for n in re.findall(r"[0-9]{5,}", text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that follows another one."""
        before = len(self._anchor)
        ids = self.tokenizer.encode(ANCHOR + text, add_special_tokens=False).ids
        if ids[:before] == self._anchor:
            return ids[before:]
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def excerpt(self, length: int, random: np.random.Generator) -> Excerpt:
        """Return ``length`` tokens from a random start, if possible at a sentence or line.

        Raises:
            UserError: the stream is too short.
        """
        room = len(self.tokens) - length
        if room < 0:
            raise UserError(
                f"text: expected {length} tokens for a haystack, got {len(self.tokens)}"
            )
        last = np.searchsorted(self._starts, room, side="right")
        begin = self._starts[random.integers(last)]
        return self.marked(self.tokens[begin : begin + length])

    def marked(self, tokens: Integers) -> Excerpt:
        """Return tokens of the stream with the places between their sentences and words."""
        # Shared Python integers: 8 bytes per token instead of 36.
        shared = list(map(self._integers.__getitem__, tokens.tolist()))
        return Excerpt(shared, *self._places(tokens))

    def _places(self, tokens: Integers) -> tuple[Integers, Integers]:
        opens, breaks, stops = self._kinds[:, tokens]
        ends = breaks[1:] | (opens[1:] & stops[:-1])
        return ends.nonzero()[0] + 1, opens[1:].nonzero()[0] + 1

    @cached_property
    def _starts(self) -> Integers:
        return np.concatenate([[0], self._places(self.tokens)[0]])

    @cached_property
    def _anchor(self) -> list[int]:
        return self.tokenizer.encode(ANCHOR, add_special_tokens=False).ids

    @cached_property
    def _integers(self) -> list[int]:
        return list(range(self._kinds.shape[1]))

    @cached_property
    def _kinds(self) -> NDArray[np.bool_]:
        """Whether a token begins with white space, breaks a line, ends a sentence, ``[3, V]``."""
        ids = np.unique(self.tokens)
        known = len(self.tokenizer.decode(self._anchor))
        texts = self.tokenizer.decode_batch([[*self._anchor, i] for i in ids.tolist()])
        kinds = np.zeros((3, self.tokens.max(initial=0) + 1), dtype=bool)
        for token, whole in zip(ids, texts, strict=True):
            text = whole[known:]
            stops = SENTENCE_ENDS.search(text.rstrip()) is not None
            kinds[:, token] = text[:1].isspace(), text[:1] == "\n", stops
        return kinds
