"""The text of a run, in the tokens of its model."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import SMALLEST_VOCABULARY, vocabulary_size
from trainer.errors import UserError
from trainer.interchange.pretrained import read_pretrained
from trainer.runs.config import RunConfig
from trainer.runs.starting_point import texts_read


def open_corpus(config: RunConfig, alone: bool = True) -> Corpus:
    """The run's text, with the tokenizer of its pretrained model where it has one; that of a run
    that goes on is the text it has read, also where its source has changed since.

    ``alone``: whether the run has one process, which may prepare small text.

    Raises:
        UserError: text or tokenizer cannot be read, the text is not prepared, or the model has
            fewer embeddings than the tokenizer has tokens.
    """
    tokenizer = pretrained_tokenizer(config)
    wanted = None if config.overwrite else texts_read(Path(config.run_dir))
    corpus = prepare_corpus(config.data, config.tokenizer, tokenizer, alone=alone, wanted=wanted)
    tokens, embeddings = vocabulary_size(corpus.tokenizer), config.model.vocab_size
    if embeddings is not None and embeddings < tokens:
        raise UserError(
            f"model.vocab_size: {embeddings} embeddings, but the tokenizer has {tokens} tokens; "
            f"give {tokens} or more, or null."
        )
    return corpus


def vocabulary_problems(config: RunConfig) -> list[str]:
    """What can be said of the vocabulary before there is a tokenizer."""
    embeddings, least = config.model.vocab_size, SMALLEST_VOCABULARY
    given = config.tokenizer.path or config.model.from_pretrained
    if given or embeddings is None or embeddings >= least:
        return []
    return [
        f"model.vocab_size: {embeddings} embeddings, but a tokenizer that is trained here has at "
        f"least {least} tokens; give more, or null."
    ]


def pretrained_tokenizer(config: RunConfig) -> Tokenizer | None:
    """That of the run's pretrained model, where it has one and no other is configured.

    Raises:
        UserError: the model came without.
    """
    given = config.model.from_pretrained
    if given is None or config.tokenizer.path:
        return None
    return read_pretrained(given).require_tokenizer()
