"""The texts that analyses read."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from trainer.data.corpus import Corpus
from trainer.data.order import Integers
from trainer.data.shards import TokenStream
from trainer.errors import UserError
from trainer.runs.models import Candidate
from trainer.workflows.analysis_request import AnalysisConfig

FURTHEST, USUAL, MOST_TEXTS = 8, 4096, 16
MOST_TOKENS = 2**24
"""Of the held-out text that are looked at."""


def page_texts(corpus: Corpus, config: AnalysisConfig, candidate: Candidate) -> Tensor:
    """``[texts, length]`` tokens of the test split, evenly spread, behind a beginning-of-text token
    each.

    Raises:
        UserError: there is less text.
    """
    C = candidate.layout.training_length
    tokens = _running(corpus, corpus.test)
    wanted = config.length or max(2 * C, min(FURTHEST * C, USUAL))
    length = wanted if config.length else min(wanted, len(tokens) + 1)
    if length - 1 > len(tokens):
        raise UserError(
            f"analysis.length: the held-out text has {len(tokens):,} tokens, too few for a text of "
            f"{length:,} behind its beginning-of-text token; at most {len(tokens) + 1:,}, or give "
            "more text."
        )
    fitting = max(1, len(tokens) // max(1, length - 1))
    texts = config.texts or min(fitting, MOST_TEXTS, max(1, USUAL // length))
    if texts > fitting:
        raise UserError(
            f"analysis.texts: {texts} texts of {length:,} tokens do not fit the {len(tokens):,} "
            f"held-out tokens; at most {fitting}."
        )
    return _spread(tokens, texts, length, corpus, candidate)


def choice_texts(
    corpus: Corpus, config: AnalysisConfig, candidate: Candidate, page: Tensor
) -> Tensor | None:
    """As many of the validation split, on which pairs are chosen whose attenuation is measured on
    those of the page; None: on the same.

    Raises:
        UserError: there is less text.
    """
    settings = config.attenuation
    if settings.choice == "page":
        return None
    tokens = _running(corpus, corpus.validation)
    length = settings.choice_length or page.shape[1]
    if length - 1 > len(tokens):
        raise UserError(
            f"analysis.attenuation.choice_length: the validation text has {len(tokens):,} tokens, "
            f"too few for a text of {length:,}; at most {len(tokens) + 1:,}, or give more text."
        )
    return _spread(tokens, len(page), length, corpus, candidate)


def _running(corpus: Corpus, stream: TokenStream) -> Integers:
    """Without separators between documents: every one of them can be a sink."""
    read = stream.windows(np.zeros(1, np.int64), min(len(stream), MOST_TOKENS))[0]
    return read[read != corpus.end_of_text]


def _spread(
    tokens: Integers, texts: int, length: int, corpus: Corpus, candidate: Candidate
) -> Tensor:
    starts = np.linspace(0, len(tokens) - (length - 1), texts).astype(np.int64)
    bos = corpus.end_of_text if candidate.bos_token is None else candidate.bos_token
    rows = np.full((texts, length), bos, dtype=np.int64)
    rows[:, 1:] = np.stack([tokens[start : start + length - 1] for start in starts])
    return torch.from_numpy(rows)
