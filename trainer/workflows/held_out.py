"""Held-out text for finished models."""

from __future__ import annotations

from trainer.common.errors import UserError
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.data.corpus import Corpus, prepare_corpus
from trainer.data.tokenizer import same_tokens
from trainer.runs.models import Candidate


def text_source(text: DataConfig | None, candidate: Candidate) -> DataConfig:
    """Return the configured text, or that of the model's own run, or the text that comes with
    Python."""
    return text or (candidate.run.data if candidate.run is not None else DataConfig())


def held_out_corpus(text: DataConfig | None, candidate: Candidate) -> Corpus:
    """Open the prepared splits of the source in the model's tokens.

    Raises:
        UserError: the text cannot be read, is too short, or differs from the run's.
    """
    source, run = text_source(text, candidate), candidate.run
    if text is None and run is not None and not run.model.is_trained:
        read = (candidate.state.get("data") or {}).get("texts")
        corpus = prepare_corpus(source, run.tokenizer, wanted=read)
        if not same_tokens(corpus.tokenizer, candidate.tokenizer):
            raise UserError.at(
                "checkpoint",
                "it was trained with another tokenizer than its text source gives here (another "
                "version of Python, or changed files); where a command takes text=, that names "
                "another source.",
            )
        return corpus
    try:
        return prepare_corpus(source, TokenizerConfig(), candidate.tokenizer)
    except UserError as error:
        if text is None:
            raise
        raise UserError(*(p.renamed({"data": "text"}) for p in error.problems)) from error
