"""Text of a run: one prepared text or a mixture; small texts are prepared on the way."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.encoding import Split
from trainer.data.held_out import HeldOutPart, HeldOutText, divided
from trainer.data.plan import digest
from trainer.data.prepared import Prepared, is_prepared, open_prepared
from trainer.data.preparing import Preparation, of_mixture
from trainer.data.shards import TokenStream
from trainer.data.sources import describe, is_here, list_source
from trainer.data.tokenizer import (
    TextTokenizer,
    is_tokenizer_file,
    load_tokenizer,
    own_first_token,
    same_tokens,
)

log = logging.getLogger(__name__)


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
        """Sixteen hexadecimal digits that change whenever the tokens change."""
        if len(self.parts) == 1:
            return self.parts[0].text.fingerprint
        weights = [part.weight for part in self.parts]
        texts = [list(text) for text in zip(self.fingerprints, weights, strict=True)]
        return digest(texts) + digest(texts[::-1])

    @property
    def held_out_fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change whenever the held-out windows change.

        A single text has the same as its tokens. A mixture has another one, since earlier versions
        drew its windows whatever the weights, and stored results under ``fingerprint``.
        """
        if len(self.parts) == 1:
            return self.fingerprint
        return digest(["by weight", self.fingerprint]) + digest([self.fingerprint, "by weight"])

    @property
    def fingerprints(self) -> list[str]:
        """Fingerprint of each text."""
        return [part.text.fingerprint for part in self.parts]

    @property
    def train(self) -> TokenStream:
        """Training text of all parts, concatenated."""
        streams = [part.text.train for part in self.parts]
        if len(streams) == 1:
            return streams[0]
        return TokenStream([place for stream in streams for place in stream.places])

    @cached_property
    def validation(self) -> HeldOutText:
        """Held-out text for fitting and the drop's effect."""
        parts = (HeldOutPart(p.name, p.weight, p.text.validation) for p in self.parts)
        return HeldOutText("validation", tuple(parts))

    @cached_property
    def test(self) -> HeldOutText:
        """Held-out text for reported figures."""
        parts = (HeldOutPart(p.name, p.weight, p.text.test) for p in self.parts)
        return HeldOutText("test", tuple(parts))

    @property
    def directories(self) -> list[str]:
        """Directory of each part, as :func:`corpus_at` takes them."""
        return [str(part.text.directory) for part in self.parts]

    def mixed(self, config: DataConfig) -> Corpus:
        """Return the corpus with only the texts that ``config`` mixes, weighted as it says."""
        weights = {name: weight for name, (_, weight) in config.texts.items()}
        parts = (part for part in self.parts if part.name in weights)
        return replace(self, parts=tuple(replace(p, weight=weights[p.name]) for p in parts))

    def documents(self, split: Split, tokens: int) -> list[str]:
        """Decode the first documents of each part's split, at most ``tokens`` tokens in total.

        The parts share them by their weights, as far as they have text.
        """
        streams = [getattr(part.text, split) for part in self.parts]
        sizes = [len(stream) for stream in streams]
        shares = divided(tokens, [part.weight for part in self.parts], sizes)
        ids = [d for stream, n in zip(streams, shares, strict=True) for d in stream.documents(n)]
        return self.tokenizer.decode_batch([document[:-1].tolist() for document in ids])


def prepare_corpus(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: TextTokenizer | None = None,
    *,
    alone: bool = True,
    wanted: list[str] | None = None,
) -> Corpus:
    """Open the configured text; prepare it first if it is small and on this machine.

    ``tokenizer``: used if ``tokenizer_config`` names none, instead of training one. ``alone``:
    whether no other process waits for this one; only then is text prepared here. ``wanted``:
    fingerprints of the texts as they were read before. A text that is prepared with its fingerprint
    is used even if its source has changed since.

    Raises:
        UserError: the text or tokenizer cannot be read, the text is too short, it must be prepared
            by a separate command, or a newer version of this program prepared it.
    """
    directories = []
    texts = config.texts
    known: dict[str, str] = {}
    if isinstance(wanted, list) and len(wanted) == len(texts):
        known = dict(zip(texts, map(str, wanted), strict=True))
    for index, (name, (text, _)) in enumerate(texts.items(), 1):
        with of_mixture(config, name):
            work = Preparation.find(text, tokenizer_config, tokenizer, wanted=known.get(name))
            if not work.is_done:
                if not alone or not work.is_small:
                    raise UserError(work.missing)
                for later, _ in [*texts.values()][index:]:
                    if not later.prepared and is_here(later):
                        list_source(later)  # fail now if it is missing, not after the first text
                if not is_prepared(work.directory):
                    log.info("Preparing %s once, in %s", describe(text), work.directory)
                work.run(wait=True)
            directories.append(str(work.directory))
            if index < len(texts):  # later texts use the first one's tokenizer
                tokenizer = tokenizer or open_prepared(work.directory).text_tokenizer
    corpus = corpus_at(config, directories)
    if any(text.prepared for text, _ in texts.values()):
        _check_tokenizer(corpus, tokenizer_config.path, tokenizer)
    return corpus


def _check_tokenizer(corpus: Corpus, path: str | None, tokenizer: TextTokenizer | None) -> None:
    """Check that prepared text was tokenized with the file ``path``, or else with ``tokenizer``.

    A tokenizer on the hub is not loaded: without a network only its name is known.
    """
    wanted = load_tokenizer(path) if path and is_tokenizer_file(path) else tokenizer
    if wanted is not None and not same_tokens(wanted.tokenizer, corpus.tokenizer):
        expected = f"tokenizer.path={path}" if path else "the model's"
        raise UserError.at(
            "data.prepared",
            f"{corpus.directories[0]!r} was prepared with another tokenizer than {expected}.",
        )


def corpus_at(config: DataConfig, directories: Sequence[str]) -> Corpus:
    """Open the corpus whose texts lie in ``directories``, one per configured text.

    Raises:
        UserError: something is missing or damaged, or a split is shorter than one sequence.
    """
    parts = []
    for (name, (_, weight)), directory in zip(config.texts.items(), directories, strict=True):
        text = open_prepared(Path(directory))
        for split in ("train", "validation", "test"):
            if len(getattr(text, split)) < config.sequence_length:
                raise UserError.at(
                    "data",
                    f"the {split} split of {directory!r} holds fewer tokens than one sequence of "
                    f"{config.sequence_length}; give more text, larger data.validation and "
                    "data.test, or a shorter data.sequence_length.",
                )
        parts.append(Part(name, weight, text))
    first = parts[0].text
    for part in parts[1:]:
        if not same_tokens(part.text.tokenizer, first.tokenizer):
            raise UserError.at(
                f"data.mixture.{part.name}",
                f"it was prepared with another tokenizer than {parts[0].name!r}; prepare both "
                "with one tokenizer.path.",
            )
    return Corpus(first.tokenizer, first.end_of_text, tuple(parts))
