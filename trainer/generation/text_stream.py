"""Text of tokens as they come: whole characters, up to a stop string."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

# What a decoder writes for the up to 3 bytes of a character whose last byte is still to come.
_UNFINISHED = re.compile(r"\ufffd{1,3}\Z")


class _Characters:
    """Decodes token by token, in time that does not grow with the text."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        # Tokens between the last two places where the text was whole, and those since: some
        # decoders treat the first of their tokens in a special way.
        self._tokens: list[int] = []
        self._context = 0
        self._given = 0

    def push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._decode(self._tokens)
        whole = _UNFINISHED.sub("", text)
        new = whole[self._given :]
        self._given = max(self._given, len(whole))
        if whole == text:
            del self._tokens[: self._context]
            self._context = len(self._tokens)
            self._given = len(self._decode(self._tokens))
        return new

    def rest(self) -> str:
        return self._decode(self._tokens)[self._given :] if self._tokens else ""


class TextStream:
    """The text of one continuation, given out as it becomes certain.

    Args:
        decode: token ids to text, ``tokenizer.decode`` for instance.
        stop: strings that end the text; the first of them to appear and what follows are left out.

    ``text`` is all that was decoded so far and ``stopped`` says whether a stop string appeared.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("an empty stop string stops before it begins")
        self.text = ""
        self.stopped = False
        self._characters = _Characters(decode)
        self._stop = tuple(stop)
        self._given = 0

    def push(self, token: int) -> str:
        """Add a token; returns new text that no later token can change or cut off."""
        self._add(self._characters.push(token))
        return self._give(len(self.text) if self.stopped else len(self.text) - self._pending())

    def finish(self) -> str:
        """What was held back, now that no token follows."""
        if not self.stopped:
            self._add(self._characters.rest())
        return self._give(len(self.text))

    def _add(self, new: str) -> None:
        # A stop string may have begun in the text before.
        start = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += new
        found = [at for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _pending(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        beginnings = (stop[:n] for stop in self._stop for n in range(1, len(stop)))
        return max((len(b) for b in beginnings if self.text.endswith(b)), default=0)

    def _give(self, end: int) -> str:
        new, self._given = self.text[self._given : end], end
        return new
