"""Text of a run: one prepared text or a mixture of several, and its held-out windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.config import DataConfig, TokenizerConfig
from trainer.data.order import Integers
from trainer.data.prepared import (
    SPLITS,
    Prepared,
    Split,
    Tokens,
    directory_of,
    is_prepared,
    open_prepared,
    prepare,
)
from trainer.data.sources import describe, digest, is_remote
from trainer.data.tokenizer import TextTokenizer, load_tokenizer, own_first_token, same_tokens


@dataclass(frozen=True)
class HeldOutText:
    """One held-out split of all texts of a run: the weight and the tokens of each.

    Windows of a mixture come from its parts in the shares of their weights, whatever their sizes.
    Each window lies within one part.
    """

    parts: tuple[tuple[float, Tokens], ...]

    def __len__(self) -> int:
        """Return the number of tokens of all parts."""
        return sum(len(tokens) for _, tokens in self.parts)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest window."""
        return max(len(tokens) for _, tokens in self.parts)

    def shares(self, count: int, length: int, apart: int | None = None) -> list[int]:
        """Divide ``count`` windows of ``length`` tokens among the parts by their weights.

        A part with too little text gives what it has, and the others give the rest.
        ``apart``: least distance between two windows (None: they may overlap). Together the parts
        may have fewer windows than ``count``.
        """

        def most(tokens: Tokens) -> int:
            spare = len(tokens) - length
            if spare < 0:
                return 0
            return count if apart is None else spare // apart + 1

        weights = [weight for weight, _ in self.parts]
        return divided(count, weights, [most(tokens) for _, tokens in self.parts])

    def windows(
        self, shares: Sequence[int], windows_of: Callable[[Tokens, int], Integers]
    ) -> Integers:
        """Return the windows of all parts, those of each part spread evenly among the others.

        ``windows_of``: returns so many windows of one part.
        """
        parts = zip(self.parts, shares, strict=True)
        rows = [windows_of(tokens, n) for (_, tokens), n in parts if n]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)[_spread(shares)]

    def parts_of_windows(self, shares: Sequence[int]) -> Integers:
        """Return the index of the part of each window of :meth:`windows`."""
        return np.repeat(np.arange(len(shares)), shares)[_spread(shares)]


def held_out_windows(
    text: HeldOutText, count: int, length: int, apart: int | None = None
) -> Integers:
    """Return ``[count, length]`` tokens, evenly spaced in each part of held-out text.

    ``apart``: as for :meth:`HeldOutText.shares`.

    Raises:
        ValueError: the text is shorter than one window.
    """
    if text.longest < length:
        raise ValueError(f"{text.longest} tokens do not fill a window of {length}")

    def of_part(stream: Tokens, windows: int) -> Integers:
        starts = np.linspace(0, len(stream) - length, windows).astype(np.int64)
        return stream.windows(starts, length)

    return text.windows(text.shares(count, length, apart), of_part)


def divided(count: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide ``count`` by weights with largest remainders, at most ``most[i]`` for item i.

    What an item cannot take is divided among the others.
    """
    shares = [0] * len(weights)
    open_items, left = list(range(len(weights))), count
    while open_items:
        total = sum(weights[i] for i in open_items)
        exact = {i: left * weights[i] / total for i in open_items}
        full = [i for i in open_items if exact[i] > most[i]]
        if not full:
            for i in open_items:
                shares[i] = int(exact[i])
            left -= sum(shares[i] for i in open_items)
            for i in sorted(open_items, key=lambda i: shares[i] - exact[i])[:left]:
                shares[i] += 1
            break
        for i in full:
            shares[i] = most[i]
            left -= most[i]
        open_items = [i for i in open_items if i not in full]
    return shares


def _spread(shares: Sequence[int]) -> Integers:
    """Return the order in which items of groups of these sizes are spread evenly."""
    places = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in shares])
    return np.argsort(places, kind="stable")


@dataclass(frozen=True)
class Part:
    """One text of a run and its sampling weight."""

    name: str
    weight: float
    text: Prepared


@dataclass(frozen=True)
class Corpus:
    """Texts of a run with their common tokenizer; ``end_of_text`` is the id after each document."""

    tokenizer: Tokenizer
    end_of_text: int
    parts: tuple[Part, ...]

    @cached_property
    def first_token(self) -> int:
        """Id of the token that begins every sequence: the tokenizer's own, else end-of-text."""
        first = own_first_token(self.tokenizer)
        return self.end_of_text if first is None else first

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change whenever the tokens or the weights change."""
        if len(self.parts) == 1:
            return self.parts[0].text.fingerprint
        return digest([[part.text.fingerprint, part.weight] for part in self.parts])

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprint of each text."""
        return [part.text.fingerprint for part in self.parts]

    @property
    def training_tokens(self) -> int:
        """Number of tokens of the training text of all parts."""
        return sum(len(part.text.train) for part in self.parts)

    @cached_property
    def validation(self) -> HeldOutText:
        """Held-out text for fitting and the drop's effect."""
        return self.split("validation")

    @cached_property
    def test(self) -> HeldOutText:
        """Held-out text for reported figures."""
        return self.split("test")

    def split(self, name: Split) -> HeldOutText:
        """Return one split of all texts."""
        return HeldOutText(tuple((part.weight, getattr(part.text, name)) for part in self.parts))

    @property
    def directories(self) -> list[str]:
        """Directory of each part, as :func:`corpus_at` takes them."""
        return [str(part.text.directory) for part in self.parts]

    def mixed(self, config: DataConfig) -> Corpus:
        """Return the corpus with only the texts that ``config`` mixes, weighted as it says."""
        weights = {name: text.weight for name, text in config.texts.items()}
        parts = (part for part in self.parts if part.name in weights)
        return replace(self, parts=tuple(replace(p, weight=weights[p.name]) for p in parts))

    def documents(self, text: HeldOutText, tokens: int) -> list[str]:
        """Decode the first documents of each part of a text, at most ``tokens`` tokens in total.

        The parts share them by their weights, as far as they have text.
        """
        weights, sizes = zip(*((weight, len(ids)) for weight, ids in text.parts), strict=True)
        shares = divided(tokens, weights, sizes)
        ids = [
            document
            for (_, stream), share in zip(text.parts, shares, strict=True)
            for document in stream.documents(self.end_of_text, share)
        ]
        return self.tokenizer.decode_batch([document[:-1].tolist() for document in ids])


def prepare_corpus(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: TextTokenizer | None = None,
    *,
    alone: bool = True,
    wanted: list[str] | None = None,
) -> Corpus:
    """Open the configured text; prepare it first if this process is ``alone``.

    Text that needs a network is prepared by a command of its own.

    ``tokenizer``: used if ``tokenizer_config`` names none, instead of training one. ``wanted``:
    fingerprints of the texts as they were read before. A text that is prepared with its fingerprint
    is used even if its source has changed since.

    Raises:
        UserError: the text is not prepared, or too short.
    """
    directories = []
    texts = [*config.texts.values()]
    if tokenizer_config.path and any(text.prepared for text in texts):
        tokenizer = load_tokenizer(tokenizer_config.path)
    known = wanted if wanted and len(wanted) == len(texts) else [None] * len(texts)
    for text, fingerprint in zip(texts, known, strict=True):
        directory = directory_of(text, tokenizer_config, tokenizer, fingerprint)
        if not is_prepared(directory):
            if not alone or is_remote(text):
                raise UserError(
                    f"data: {describe(text)} is not prepared in {directory}; "
                    "`python -m trainer prepare` with the arguments of the run does it once"
                )
            directory = prepare(text, tokenizer_config, tokenizer)
        directories.append(directory)
        tokenizer = tokenizer or open_prepared(directory).text_tokenizer  # one for all texts
    corpus = corpus_at(config, directories)
    assert tokenizer is not None  # there is a text
    if not same_tokens(tokenizer.tokenizer, corpus.tokenizer):
        raise UserError(f"data.prepared: {directories[0]} has other tokens than the model")
    return corpus


def corpus_at(config: DataConfig, directories: Sequence[str | Path]) -> Corpus:
    """Open the corpus whose texts lie in ``directories``, one per configured text.

    Raises:
        UserError: a split is shorter than one sequence, or the texts have different tokenizers.
    """
    parts = []
    for (name, source), directory in zip(config.texts.items(), directories, strict=True):
        text = open_prepared(Path(directory))
        for split in SPLITS:
            if (count := len(getattr(text, split))) < config.sequence_length:
                raise UserError(
                    f"data: expected {config.sequence_length} tokens or more in the {split} split "
                    f"of {directory}, got {count}"
                )
        parts.append(Part(name, source.weight, text))
    first = parts[0].text
    for part in parts[1:]:
        if not same_tokens(part.text.tokenizer, first.tokenizer):
            raise UserError(
                f"data.mixture.{part.name}: expected the tokenizer of {parts[0].name}, got another"
            )
    return Corpus(first.tokenizer, first.end_of_text, tuple(parts))
