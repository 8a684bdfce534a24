"""Needle prompts for analyses and for what is fitted on them, in the words of DroPE's App. C.2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.analysis.needle_prompt import NeedlePrompt
from trainer.data.corpus import Corpus
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.methods import Recipe
from trainer.evaluation.needle_loss import AnsweredTexts, answered_texts
from trainer.evaluation.needles.quiz import one_of_many
from trainer.evaluation.settings import LongRopeSettings

DEPTH, PROMPTS = 0.1, 4
HAYSTACK = 1 << 22
"""Tokens of held-out documents that haystacks are made of."""


def needle_prompt(
    tokenizer: Tokenizer, ids: Tensor, length: int, seed: int = 0
) -> NeedlePrompt | None:
    """One statement, at a tenth of the first texts, and the question for it at their end.

    Args:
        tokenizer: of the model.
        ids: ``[B, T]`` texts behind a beginning-of-text token each.
        length: tokens of a prompt, at most T.
        seed: of the statement.

    Returns:
        None where there is no room for a text four times as long as statement and question.
    """
    haystack = Haystack(tokenizer, (), ())
    quiz = one_of_many(1, "", np.random.default_rng(seed))
    needle = haystack.encode(f" {quiz.needles[0]}")
    question = haystack.encode(f"\n\n{quiz.question}")
    text = length - len(needle) - len(question)
    if text < 4 * (len(needle) + len(question)) or length > ids.shape[1]:
        return None
    place = 1 + round(DEPTH * (text - 1))
    rows = ids[:PROMPTS, :text]

    def inserted(tokens: list[int]) -> Tensor:
        return torch.tensor(tokens, device=ids.device).expand(len(rows), -1)

    parts = [rows[:, :place], inserted(needle), rows[:, place:], inserted(question)]
    return NeedlePrompt(torch.cat(parts, dim=1), slice(place, place + len(needle)))


def searched_needles(
    settings: LongRopeSettings,
    recipes: Sequence[Recipe],
    corpus: Corpus,
    bos_token: int | None,
    lengths: Sequence[int],
    training_length: int,
) -> dict[int, AnsweredTexts]:
    """Validation text with statements, questions and answers, of every length beyond the training
    length where a method searches factors on them.

    Raises:
        UserError: a length is too short for them, or the text is shorter than it.
    """
    searched = any("longrope" in recipe.key.split("+") for recipe in recipes)
    if settings.search != "needles" or settings.factors is not None or not searched:
        return {}
    documents = corpus.documents(corpus.validation, HAYSTACK)
    haystack = Haystack(corpus.tokenizer, documents, () if bos_token is None else (bos_token,))
    return {
        length: answered_texts(haystack, settings.windows, length, settings.seed)
        for length in lengths
        if length > training_length
    }
