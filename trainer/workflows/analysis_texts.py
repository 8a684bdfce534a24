"""Texts for analyses, and prompts with a needle in the words of DroPE's App. C.2."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.analysis.capture import NeedlePrompt
from trainer.common.errors import UserError
from trainer.data.corpus import Corpus
from trainer.data.order import Integers
from trainer.data.shards import TokenStream
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.needles import one_of_many
from trainer.runs.models import Candidate
from trainer.workflows.requests import AnalysisConfig

FURTHEST, USUAL, MOST_TEXTS = 8, 4096, 16
MOST_TOKENS = 2**24
"""Of the held-out text that are looked at."""


def page_texts(corpus: Corpus, config: AnalysisConfig, candidate: Candidate) -> Tensor:
    """Return ``[texts, length]`` tokens, each text after a beginning-of-text token.

    The texts are evenly spread over the test split. A configured file is read instead, whole unless
    a length is given.

    Raises:
        UserError: there is too little text, or the file cannot be read.
    """
    C = candidate.layout.training_length
    if config.file is None:
        tokens, source = _running(corpus, corpus.test), "the held-out text"
        wanted = config.length or max(2 * C, min(FURTHEST * C, USUAL))
    else:
        tokens, source = _of_file(config.file, candidate), config.file
        wanted = config.length or len(tokens) + 1
    length = wanted if config.length else min(wanted, len(tokens) + 1)
    if length - 1 > len(tokens):
        raise UserError.at(
            "analysis.length",
            f"{source} has {len(tokens):,} tokens, too few for a text of {length:,} behind its "
            f"beginning-of-text token; at most {len(tokens) + 1:,}, or give more text.",
        )
    fitting = max(1, len(tokens) // max(1, length - 1))
    texts = config.texts or min(fitting, MOST_TEXTS, max(1, USUAL // length))
    if texts > fitting:
        raise UserError.at(
            "analysis.texts",
            f"{texts} texts of {length:,} tokens do not fit the {len(tokens):,} tokens of "
            f"{source}; at most {fitting}.",
        )
    return _spread(tokens, texts, length, corpus, candidate)


def choice_texts(
    corpus: Corpus, config: AnalysisConfig, candidate: Candidate, page: Tensor
) -> Tensor | None:
    """Return texts of the validation split on which the pairs to attenuate are chosen, or None.

    There are as many as on the page. None: the pairs are chosen on the page's texts.

    Raises:
        UserError: there is too little text.
    """
    settings = config.attenuation
    if settings.choice == "page":
        return None
    tokens = _running(corpus, corpus.validation)
    length = settings.choice_length or page.shape[1]
    if length - 1 > len(tokens):
        raise UserError.at(
            "analysis.attenuation.choice_length",
            f"the validation text has {len(tokens):,} tokens, too few for a text of {length:,}; "
            f"at most {len(tokens) + 1:,}, or give more text.",
        )
    return _spread(tokens, len(page), length, corpus, candidate)


def _of_file(path: str, candidate: Candidate) -> Integers:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError.at("analysis.file", f"there is no file {path!r}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.at(
            "analysis.file", f"{path} is no text that can be read: {error}."
        ) from error
    tokens = np.array(candidate.tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
    if not len(tokens):
        raise UserError.at("analysis.file", f"{path} is empty; expected a text.")
    return tokens


def _running(corpus: Corpus, stream: TokenStream) -> Integers:
    """Remove separators between documents: each of them could be an attention sink."""
    read = stream.windows(np.zeros(1, np.int64), min(len(stream), MOST_TOKENS))[0]
    return read[read != corpus.end_of_text]


def _spread(
    tokens: Integers, texts: int, length: int, corpus: Corpus, candidate: Candidate
) -> Tensor:
    starts = np.linspace(0, len(tokens) - (length - 1), texts).astype(np.int64)
    known = (candidate.bos_token, candidate.named_bos, corpus.end_of_text)
    bos = next(token for token in known if token is not None)
    rows = np.full((texts, length), bos, dtype=np.int64)
    rows[:, 1:] = np.stack([tokens[start : start + length - 1] for start in starts])
    return torch.from_numpy(rows)


PROMPTS = 4


def needle_prompt(
    tokenizer: Tokenizer, ids: Tensor, length: int, seed: int = 0, depth: float = 0.1
) -> NeedlePrompt | None:
    """Insert one statement into the first texts, and the question for it at their end.

    Args:
        tokenizer: the model's.
        ids: ``[B, T]`` texts, each after a beginning-of-text token.
        length: tokens of a prompt, at most T.
        seed: seed of the statement.
        depth: position of the statement, 0 for the beginning of the text and 1 for its end.

    Returns:
        None if the text would be less than four times as long as statement and question.
    """
    haystack = Haystack(tokenizer, (), ())
    quiz = one_of_many(1, "", np.random.default_rng(seed))
    needle = haystack.encode(f" {quiz.needles[0]}")
    question = haystack.encode(f"\n\n{quiz.question}")
    text = length - len(needle) - len(question)
    if text < 4 * (len(needle) + len(question)) or length > ids.shape[1]:
        return None
    place = 1 + round(depth * (text - 1))
    rows = ids[:PROMPTS, :text]

    def inserted(tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=ids.device).expand(len(rows), -1)

    parts = [rows[:, :place], inserted(needle), rows[:, place:], inserted(question)]
    at = slice(place, place + len(needle))
    return NeedlePrompt(torch.cat(parts, dim=1), at, len(question))
