"""Contexts and continuations as tokens, truncated as in lm-eval's ``hf`` model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.data.tokenizer import end_of_text

log = logging.getLogger(__name__)

Pair = tuple[str, str]
"""A context and a continuation, a space between them belonging to the continuation."""


@dataclass(frozen=True)
class Request:
    """Request for the likelihood of the tokens ``continuation`` after the tokens ``context``.

    Neither is empty. ``cut``: number of tokens removed from the beginning of the context.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    cut: int = 0

    def within(self, max_length: int) -> Request:
        """Truncate the context for a model that reads ``max_length`` tokens.

        The last token is predicted and not read. A continuation is never truncated, and keeps one
        token before it.
        """
        room = max(1, max_length + 1 - len(self.continuation))
        cut = max(0, len(self.context) - room)
        return Request(self.context[cut:], self.continuation, self.cut + cut)


@dataclass(frozen=True)
class Encoder:
    """Encoder of text to requests.

    ``max_length``: tokens that the model reads at once; longer contexts lose their beginning.
    ``add_bos``: begin every context with end-of-text, as in training, unless the tokenizer itself
    adds a first token.
    """

    tokenizer: Tokenizer
    max_length: int
    add_bos: bool = False

    @cached_property
    def bos_token(self) -> int:
        """The token that stands for an empty context."""
        own = self.tokenizer.encode("").ids
        return own[0] if own else self.end_of_text

    @cached_property
    def end_of_text(self) -> int:
        """The end-of-text token."""
        return end_of_text(self.tokenizer)

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of texts, with a beginning-of-text token if ``add_bos`` requires one."""
        before = [self.bos_token] if self.add_bos and not self.tokenizer.encode("").ids else []
        return [[*before, *encoding.ids] for encoding in self.tokenizer.encode_batch(list(texts))]

    def requests(self, pairs: Sequence[Pair]) -> list[Request]:
        """Encode context and continuation together, and split the tokens where the context ends.

        Raises:
            UserError: a continuation adds no token to its context.
        """
        moved = [_with_spaces_in_the_continuation(*pair) for pair in pairs]
        contexts = self.tokens([context for context, _ in moved])
        wholes = self.tokens([context + continuation for context, continuation in moved])
        found = []
        for (text, continuation), context, whole in zip(moved, contexts, wholes, strict=True):
            if text:
                request = Request(tuple(context), tuple(whole[len(context) :]))
            else:
                request = self._after_nothing(continuation)
            if not request.continuation:
                raise UserError.at("", f"{continuation!r} adds no token to {text!r}.")
            found.append(request.within(self.max_length))
        if cut := sum(request.cut > 0 for request in found):
            log.warning(
                "%d of %d contexts lost their beginning: with their continuations they are longer "
                "than %d tokens (evaluation.max_length)",
                cut,
                len(found),
                self.max_length,
            )
        return found

    def _after_nothing(self, text: str) -> Request:
        tokens = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        has_bos = tokens[:1] == (self.bos_token,)
        return Request((self.bos_token,), tokens[1:] if has_bos else tokens)

    def windows(self, text: str) -> list[Request]:
        """Split a text into requests of ``max_length`` tokens that cover every token once.

        The first token is predicted from ``bos_token``; the last window is padded with context.
        """
        tokens = tuple(self.tokens([text])[0])
        if tokens[:1] != (self.bos_token,):
            tokens = (self.bos_token, *tokens)
        size = self.max_length
        return [
            Request(tokens[:start], tokens[start : start + size]).within(size)
            for start in range(1, len(tokens), size)
        ]


def _with_spaces_in_the_continuation(context: str, continuation: str) -> Pair:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
