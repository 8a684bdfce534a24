"""The text of a run: one prepared text or a mixture of several, opened, or prepared where small."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.plan import digest
from trainer.data.prepared import Prepared, is_prepared, open_prepared
from trainer.data.preparing import Preparation, of_mixture
from trainer.data.shards import TokenStream
from trainer.data.sources import describe, is_here, list_source
from trainer.data.tokenizer import load_tokenizer, same_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One text of a run and its weight among them."""

    name: str
    weight: float
    text: Prepared


@dataclass(frozen=True)
class Corpus:
    """The texts of a run, with one tokenizer; ``end_of_text``: the id behind every document."""

    tokenizer: Tokenizer
    end_of_text: int
    parts: tuple[Part, ...]

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that change whenever the tokens do."""
        if len(self.parts) == 1:
            return self.parts[0].text.fingerprint
        weights = [part.weight for part in self.parts]
        whole = [list(one) for one in zip(self.fingerprints, weights, strict=True)]
        return digest(whole) + digest(whole[::-1])

    @property
    def fingerprints(self) -> list[str]:
        """Those of its texts."""
        return [part.text.fingerprint for part in self.parts]

    @property
    def train(self) -> TokenStream:
        """The training text of all parts, one after the other."""
        return _joined([part.text.train for part in self.parts])

    @property
    def validation(self) -> TokenStream:
        """Held-out text for fitting and the drop's effect."""
        return _joined([part.text.validation for part in self.parts])

    @property
    def test(self) -> TokenStream:
        """Held-out text for reported figures."""
        return _joined([part.text.test for part in self.parts])

    @property
    def directories(self) -> list[str]:
        """Where the parts lie; see :func:`corpus_at`."""
        return [str(part.text.directory) for part in self.parts]

    def mixed(self, config: DataConfig) -> Corpus:
        """Those of its texts that ``config`` mixes, with the weights they have there."""
        weights = {name: weight for name, (_, weight) in config.texts.items()}
        parts = (part for part in self.parts if part.name in weights)
        return replace(self, parts=tuple(replace(p, weight=weights[p.name]) for p in parts))

    def documents(self, stream: TokenStream, tokens: int) -> list[str]:
        """The first documents of a split as text, so many that they have at most ``tokens``."""
        ids = stream.documents(tokens)
        return self.tokenizer.decode_batch([of_one[:-1].tolist() for of_one in ids])


def _joined(streams: Sequence[TokenStream]) -> TokenStream:
    return streams[0] if len(streams) == 1 else TokenStream([p for s in streams for p in s.places])


def prepare_corpus(
    config: DataConfig,
    tokenizer_config: TokenizerConfig,
    tokenizer: Tokenizer | None = None,
    *,
    alone: bool = True,
    wanted: list[str] | None = None,
) -> Corpus:
    """Open the configured text; where it is small and on this machine, prepare it first.

    Args:
        config: where the text comes from.
        tokenizer_config: its tokenizer.
        tokenizer: one to use where ``tokenizer_config`` names none, instead of training one.
        alone: whether no other process waits for this one; text is prepared by itself only then.
        wanted: fingerprints of the texts as they were read before, taken where they are prepared,
            whatever the sources are now.

    Raises:
        UserError: the text or tokenizer cannot be read, the text is too short, it has to be
            prepared by a command of its own, or a newer version of this program prepared it.
    """
    directories = []
    texts = config.texts
    known: dict[str, str] = {}
    if isinstance(wanted, list) and len(wanted) == len(texts):
        known = dict(zip(texts, map(str, wanted), strict=True))
    begun: set[str] = set()
    for name, (text, _) in texts.items():
        begun.add(name)
        with of_mixture(config, name):
            work = Preparation.of(text, tokenizer_config, tokenizer, name, wanted=known.get(name))
            if not work.is_done:
                if not alone or not work.is_small:
                    raise UserError(work.missing)
                _check_sources([one for other, (one, _) in texts.items() if other not in begun])
                if not is_prepared(work.directory):
                    log.info("Preparing %s once, in %s", describe(text), work.directory)
                work.run(wait=True)
            directories.append(str(work.directory))
            if len(directories) < len(texts):  # those to come have the tokenizer of the first
                tokenizer = tokenizer or open_prepared(work.directory).tokenizer
    corpus = corpus_at(config, directories)
    if any(text.prepared for text, _ in texts.values()):
        _check_tokenizer(corpus, tokenizer_config.path, tokenizer)
    return corpus


def _check_sources(texts: list[DataConfig]) -> None:
    """See that what will be read later is there, before long work on what is read first.

    Raises:
        UserError: a source on this machine is missing.
    """
    for text in texts:
        if not text.prepared and is_here(text):
            list_source(text)


def _check_tokenizer(corpus: Corpus, path: str | None, given: Tokenizer | None) -> None:
    """See that text that is taken as it is has the tokens of the model; one of the hub is known by
    its name alone, without a network.

    Raises:
        UserError: it was prepared with another tokenizer than is configured or given.
    """
    wanted = load_tokenizer(path) if path and Path(path).is_file() else given
    if wanted is not None and not same_tokens(wanted, corpus.tokenizer):
        of = f"tokenizer.path={path}" if path else "the model's"
        raise UserError.at(
            "data.prepared",
            f"{corpus.directories[0]!r} was prepared with another tokenizer than {of}.",
        )


def corpus_at(config: DataConfig, directories: Sequence[str]) -> Corpus:
    """The corpus whose texts lie in ``directories``, one for each that is configured.

    Raises:
        UserError: something is missing or damaged, or holds too little.
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
