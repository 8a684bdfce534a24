"""Text of a run: one prepared text or a mixture of several, and its held-out windows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.config import DataConfig
from trainer.data.order import Integers
from trainer.data.prepared import (
    SPLITS,
    Ids,
    Prepared,
    directory_of,
    is_prepared,
    open_prepared,
    prepare,
    shared_tokenizer,
)
from trainer.data.sources import cache_directory, digest, source_of
from trainer.data.tokenizer import SpecialTokens, TokenizerChoice, load_tokenizer, same_tokens


@dataclass(frozen=True, eq=False)
class HeldOutText:
    """One held-out split of all texts of a run: the weight and the token ids of each."""

    parts: tuple[tuple[float, Ids], ...]

    def __len__(self) -> int:
        """Return the number of tokens of all parts."""
        return sum(len(ids) for _, ids in self.parts)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest window."""
        return max(len(ids) for _, ids in self.parts)


def held_out_windows(
    text: HeldOutText, count: int, length: int, apart: int | None = None
) -> Integers:
    """Return ``[count, length]`` tokens that end at the same places whatever their length.

    The parts share the windows by their weights, and the windows of each part are spread evenly
    among the others. Window i of the n of a part, counted from 1, ends at i / n of it; one that is
    longer than what is before its end begins in the end of the part. A shorter part has none.

    ``apart``: least distance between two ends (None: any), which may limit the number of windows.
    Raise a UserError if the text is shorter than one window.
    """
    if text.longest < length:
        raise UserError(
            f"data: expected {length} tokens of held-out text or more, got {text.longest}"
        )
    most = []
    for _, ids in text.parts:
        fitting = count if apart is None else max(1, len(ids) // apart)
        if len(ids) < length:
            fitting = 0
        most.append(fitting)
    shares = divided(count, [weight for weight, _ in text.parts], most)
    windows = []
    for (_, ids), share in zip(text.parts, shares, strict=True):
        for end in (np.arange(1, share + 1) * len(ids) // max(share, 1)).tolist():
            windows.append(np.take(ids, np.arange(end - length, end), mode="wrap"))
    places = np.concatenate([(np.arange(n) + 0.5) / max(n, 1) for n in shares])
    return np.stack(windows).astype(np.int64)[np.argsort(places, kind="stable")]


def divided(count: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide ``count`` by weights with largest remainders, at most ``most[i]`` for item i.

    What an item cannot take is divided among the others.
    """
    shares = [*most]
    open_items = [*range(len(weights))]
    full = open_items
    left = count
    while full:
        total = sum(weights[i] for i in open_items)
        exact = {i: left * weights[i] / total for i in open_items}
        full = [i for i in open_items if exact[i] > most[i]]
        left -= sum(most[i] for i in full)
        open_items = [i for i in open_items if i not in full]
    for i in open_items:
        shares[i] = int(exact[i])
    left -= sum(shares[i] for i in open_items)
    for i in sorted(open_items, key=lambda i: shares[i] - exact[i])[:left]:
        shares[i] += 1
    return shares


@dataclass(frozen=True)
class Corpus:
    """Texts of a run, which have one tokenizer."""

    parts: tuple[Prepared, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of all texts."""
        return self.parts[0].special.tokenizer

    @property
    def end_of_text(self) -> int:
        """Id after each document."""
        return self.parts[0].special.end

    @property
    def first_token(self) -> int:
        """Id of the token that begins every sequence: the tokenizer's own, else end-of-text."""
        first = self.parts[0].special.first
        return self.end_of_text if first is None else first

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change whenever the tokens or the weights change."""
        if len(self.parts) == 1:
            return self.parts[0].fingerprint
        return digest([[part.fingerprint, part.weight] for part in self.parts])

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprint of each text."""
        return [part.fingerprint for part in self.parts]

    @property
    def validation(self) -> HeldOutText:
        """Held-out text for fitting and the drop's effect."""
        return HeldOutText(tuple((part.weight, part.validation) for part in self.parts))

    @property
    def test(self) -> HeldOutText:
        """Held-out text for reported figures."""
        return HeldOutText(tuple((part.weight, part.test) for part in self.parts))

    def mixed(self, config: DataConfig) -> "Corpus":
        """Return the corpus with only the texts that ``config`` mixes, weighted as it says."""
        weights = {name: text.weight for name, text in config.texts.items()}
        parts = (part for part in self.parts if part.name in weights)
        return replace(self, parts=tuple(replace(p, weight=weights[p.name]) for p in parts))

    def probe(self, sequences: int, length: int) -> Integers:
        """Return validation text ``[sequences, length + 1]``, windows after the first token."""
        windows = held_out_windows(self.validation, sequences, length)
        return np.pad(windows, ((0, 0), (1, 0)), constant_values=self.first_token)

    def documents(self, text: HeldOutText, tokens: int) -> list[str]:
        """Decode the first documents of each part of a text, at most ``tokens`` tokens in total.

        The parts share them by their weights, as far as they have text.
        """
        weights = [weight for weight, _ in text.parts]
        sizes = [len(ids) for _, ids in text.parts]
        shares = divided(tokens, weights, sizes)
        documents: list[Ids] = []
        for (_, ids), share in zip(text.parts, shares, strict=True):
            ends = np.flatnonzero(ids[:share] == self.end_of_text)
            documents += np.split(ids[:share], ends + 1)[:-1]
        return self.tokenizer.decode_batch([document[:-1].tolist() for document in documents])


def prepare_corpus(
    config: DataConfig,
    tokenizer: TokenizerChoice,
    *,
    alone: bool = True,
    wanted: list[str] | None = None,
) -> Corpus:
    """Open the configured text; prepare it first if this process is ``alone``.

    Text that needs a network is prepared by a command of its own.

    ``wanted``: fingerprints of the texts as they were read before. A text that is prepared with its
    fingerprint is used even if its source has changed since. Another number of them has no effect.
    Raise a UserError if the text is not prepared, or too short.
    """
    directories = []
    texts = [*config.texts.values()]
    tokens = None
    if isinstance(tokenizer, SpecialTokens):
        tokens = tokenizer
    elif tokenizer.path and any(text.prepared for text in texts):
        tokens = load_tokenizer(tokenizer.path)
    known = wanted if wanted and len(wanted) == len(texts) else [None] * len(texts)
    for text, fingerprint in zip(texts, known, strict=True):
        directory = directory_of(text, tokenizer, fingerprint)
        if not is_prepared(directory):
            source = source_of(text)
            if not alone or source.is_remote(text):
                raise UserError(
                    f"data: {source.title(text)} is not prepared in {directory}; "
                    "`python -m trainer prepare` with the arguments of the run does it once"
                )
            directory = prepare(text, tokenizer)
        directories.append(directory)
        tokenizer = shared_tokenizer(tokenizer, directory, cache_directory(config))
    return corpus_at(config, directories, tokens)


def corpus_at(
    config: DataConfig, directories: Sequence[str | Path], tokens: SpecialTokens | None = None
) -> Corpus:
    """Open the corpus in ``directories``, one per configured text; check its bytes once.

    ``tokens``: of the model (None: those of the first text). Raise a UserError if a split is
    shorter than one sequence, or a text is damaged or has other tokens.
    """
    parts = []
    cache = cache_directory(config)
    for (name, source), directory in zip(config.texts.items(), directories, strict=True):
        text = open_prepared(Path(directory), name, source.weight, cache)
        for split in SPLITS:
            count = len(getattr(text, split))
            if count < config.sequence_length:
                raise UserError(
                    f"data: expected {config.sequence_length} tokens or more in the {split} split "
                    f"of {directory}, got {count}"
                )
        tokens = tokens or text.special
        if not same_tokens(text.special.tokenizer, tokens.tokenizer):
            raise UserError(f"data: {directory} has other tokens than the model or the first text")
        parts.append(text)
    return Corpus(tuple(parts))
