"""Held-out text of a model: its tokens, its documents, and these as a haystack for needles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from trainer.common.errors import UserError
from trainer.data.corpus import Corpus, HeldOutText
from trainer.data.order import Integers
from trainer.evaluation.likelihood import Encoder

HAYSTACK = 1 << 22
"""Tokens of held-out documents that haystacks are made of."""
NEAR = 0.05
"""Share of an excerpt by which a place may miss its depth to stand between sentences or words."""
SENTENCE_ENDS = re.compile(r"""[.!?]["')\]]*$""")
ANCHOR = "."
"""Text before another one, so that a tokenizer treats the latter as the middle of a text."""


class Places(NamedTuple):
    """Ascending indices of tokens that begin with white space: those after a sentence or line, and
    those after any word."""

    sentences: Integers
    words: Integers


@dataclass(eq=False)
class Haystack:
    """Documents as one token stream, with a blank line before each."""

    encoder: Encoder
    documents: Sequence[str]

    @cached_property
    def tokens(self) -> Integers:
        """The stream, computed on first use."""
        blank = self.encode("\n\n")
        encodings = self.encoder.tokenizer.encode_batch(self.documents, add_special_tokens=False)
        return np.concatenate([np.array([*blank, *e.ids], dtype=np.int32) for e in encodings])

    @cached_property
    def numbers(self) -> str:
        """All runs of five or more digits in the text, so that new values can avoid them."""
        return " ".join(n for text in self.documents for n in re.findall(r"[0-9]{5,}", text))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text that follows another one."""
        before = len(self._anchor)
        ids = self.encoder.tokenizer.encode(ANCHOR + text, add_special_tokens=False).ids
        if ids[:before] == self._anchor:
            return ids[before:]
        return self.encoder.tokenizer.encode(text, add_special_tokens=False).ids

    def begin(self, length: int, random: np.random.Generator) -> int:
        """Return the index at which an excerpt of ``length`` tokens begins, random and if possible
        at a sentence or line."""
        room = len(self.tokens) - length
        if room < 0:
            expected = f"expected {length} tokens for a haystack"
            raise UserError(f"text: {expected}, got {len(self.tokens)}")
        starts = np.concatenate([[0], self.places.sentences])
        return int(starts[random.integers(np.searchsorted(starts, room, side="right"))])

    def place(self, begin: int, length: int, depth: float) -> int:
        """Return the number of an excerpt's tokens to insert something after, at a depth from 0
        to 1.

        Between beginning and end, a nearby end of a sentence, or else of a word, is preferred.
        """
        wanted = round(depth * length)
        if 0 < wanted < length:
            for places in self.places:
                inside = slice(*np.searchsorted(places, [begin + 1, begin + length]))
                away = np.abs(places[inside] - begin - wanted)
                if away.min(initial=length) <= NEAR * length:
                    return int(places[inside][away.argmin()]) - begin
        return wanted

    @cached_property
    def places(self) -> Places:
        """Indices at which a needle may be inserted; computed on first use."""
        ids, kinds = np.unique(self.tokens, return_inverse=True)
        known = len(self.encoder.tokenizer.decode(self._anchor))
        texts = self.encoder.tokenizer.decode_batch([[*self._anchor, i] for i in ids.tolist()])
        texts = [text[known:] for text in texts]
        opens = np.array([text[:1].isspace() for text in texts])[kinds]
        breaks = np.array([text[:1] == "\n" for text in texts])[kinds]
        stops = np.array([bool(SENTENCE_ENDS.search(text.rstrip())) for text in texts])[kinds]
        ends = breaks[1:] | (opens[1:] & stops[:-1])
        return Places(ends.nonzero()[0] + 1, opens[1:].nonzero()[0] + 1)

    @cached_property
    def _anchor(self) -> list[int]:
        """Tokens of :data:`ANCHOR`."""
        return self.encoder.tokenizer.encode(ANCHOR, add_special_tokens=False).ids


@dataclass(frozen=True)
class HeldOut:
    """A held-out split of a corpus. ``bos``: tokens before every prompt. ``training_share``: share
    of the training sequences with statements (None: unknown)."""

    corpus: Corpus
    split: HeldOutText
    bos: tuple[int, ...]
    training_share: float | None

    @cached_property
    def documents(self) -> list[str]:
        """Documents of at most :data:`HAYSTACK` tokens; raise a UserError if none has a word."""
        documents = self.corpus.documents(self.split, HAYSTACK)
        if not any(map(str.strip, documents)):
            raise UserError("text: expected a document that ends in the held-out text, got none")
        return documents

    @cached_property
    def haystack(self) -> Haystack:
        """The documents as a haystack; its tokens are computed once for all tasks."""
        return Haystack(self.encoder, self.documents)

    @property
    def encoder(self) -> Encoder:
        """Encoder of questions, which begin as prompts do."""
        return Encoder(self.corpus.tokenizer, self.bos, self.corpus.first_token)
