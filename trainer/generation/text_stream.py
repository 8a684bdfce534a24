"""Text of tokens as they come: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class _Characters:
    """Decodes token by token; a character whose bytes have not all come yet is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._whole = 0  # tokens whose text was given out
        self._given = 0  # characters of it

    def push(self, token: int) -> str:
        self._tokens.append(token)
        try:
            new = self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
            # Bytes that are no text make a byte-fallback decoder read those before them in another
            # way. What was given out stays; the text goes on with the rest.
            new = self._tokenizer.decode(self._tokens[self._whole :])
            self._begin()
            return new
        if new:
            self._whole = len(self._tokens)
            self._given += len(new)
        return new

    def rest(self) -> str:
        """What DecodeStream never gives out: a last character that was not finished."""
        return self._tokenizer.decode(self._tokens)[self._given :]


class TextStream:
    """The text of one continuation, given out as it becomes certain.

    Args:
        tokenizer: of the model; its special tokens are left out.
        stop: strings that end the text; the first of them to appear and what follows are left out.

    ``text`` is all that was decoded so far and ``stopped`` says whether a stop string appeared.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("an empty stop string stops before it begins")
        self.text = ""
        self.stopped = False
        self._characters = _Characters(tokenizer)
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
