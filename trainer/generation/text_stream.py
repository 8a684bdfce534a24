"""Incremental decoding of tokens to text: whole characters, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class _Characters:
    """Token-by-token decoder that holds back characters with missing bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin()

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._whole = 0  # number of tokens whose text was returned
        self._returned = 0  # number of characters returned of them

    def push(self, token: int) -> str:
        self._tokens.append(token)
        try:
            new = self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers raises bare Exception
            if "Invalid prefix" not in str(error):
                raise
            # Invalid bytes can make a byte-fallback decoder change its reading of earlier bytes.
            # Text already returned stays as it is; decoding continues after it.
            new = self._tokenizer.decode(self._tokens[self._whole :])
            self._begin()
            return new
        if new:
            self._whole = len(self._tokens)
            self._returned += len(new)
        return new

    def unfinished(self) -> str:
        """Return the last, incomplete character, which DecodeStream never returns."""
        return self._tokenizer.decode(self._tokens)[self._returned :]


class TextStream:
    """Text of one continuation, returned as soon as later tokens cannot change it.

    Args:
        tokenizer: the model's tokenizer; its special tokens are omitted.
        stop: strings that end the text; the first one to appear, and all that follows, is omitted.

    ``text`` is everything decoded so far; ``stopped`` says whether a stop string appeared.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if "" in stop:
            raise ValueError("an empty stop string stops before it begins")
        self.text = ""
        self.stopped = False
        self._characters = _Characters(tokenizer)
        self._stop = tuple(stop)
        self._returned = 0

    def push(self, token: int) -> str:
        """Add a token; return new text that no later token can change or cut off."""
        self._add(self._characters.push(token))
        return self._give(len(self.text) if self.stopped else len(self.text) - self._pending())

    def finish(self) -> str:
        """Return the text held back, now that no token follows."""
        if not self.stopped:
            self._add(self._characters.unfinished())
        return self._give(len(self.text))

    def _add(self, new: str) -> None:
        # A stop string may begin in earlier text.
        start = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += new
        places = [place for stop in self._stop if (place := self.text.find(stop, start)) >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _pending(self) -> int:
        """Return the number of trailing characters that may begin a stop string."""
        beginnings = (stop[:n] for stop in self._stop for n in range(1, len(stop)))
        return max((len(b) for b in beginnings if self.text.endswith(b)), default=0)

    def _give(self, end: int) -> str:
        new, self._returned = self.text[self._returned : end], end
        return new
