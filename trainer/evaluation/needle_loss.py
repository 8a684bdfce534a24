"""Needle-driven perplexity (LongRoPE2, Shang et al. 2025): loss of the answer alone.

A long text states the answer once and asks for it at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.common.errors import UserError
from trainer.data.order import Integers
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.needles.quiz import one_of_many
from trainer.evaluation.passes import sequences_at_once
from trainer.model.language_model import LanguageModel


@dataclass(frozen=True)
class AnsweredTexts:
    """``tokens`` ``[N, T]``, each text with question and answer at its end, and ``answers``
    ``[N]``, the number of answer tokens at the end."""

    tokens: Integers
    answers: Integers


def answered_texts(haystack: Haystack, count: int, length: int, seed: int) -> AnsweredTexts:
    """Make texts of ``length`` tokens with one needle each, in the words of the task ``standard``.

    Text n of N has its needle at a random depth from (n - 1) / N to n / N, so that all depths
    count.

    Raises:
        UserError: the needle does not fit the length, or the text is too short.
    """
    rows, answers = [], []
    for number in range(count):
        random = np.random.default_rng((seed, number))
        quiz = one_of_many(1, haystack.numbers, random)
        needle = haystack.encode(f" {quiz.needles[0]}")
        question = haystack.encode(f"\n\n{quiz.question}")
        answer = haystack.encode(f" {quiz.answers[0]}")
        around = len(haystack.bos) + len(needle) + len(question) + len(answer)
        if length <= around:
            raise UserError.at(
                "evaluation.longrope.search",
                f"expected at least {around + 1} tokens for needles, their questions and answers, "
                f"got {length}; give longer evaluation.lengths, or search=perplexity.",
            )
        excerpt = haystack.excerpt(length - around, random)
        place = excerpt.place((number + random.random()) / count)
        text = excerpt.with_insertions([(place, needle)])
        rows.append([*haystack.bos, *text, *question, *answer])
        answers.append(len(answer))
    return AnsweredTexts(np.array(rows, dtype=np.int64), np.array(answers))


@torch.no_grad()
def answer_loss(model: LanguageModel, texts: AnsweredTexts, batch_tokens: int) -> float:
    """Return the mean over texts of the mean loss of their answers' tokens, in nats.

    Only these tokens pass through the head.
    """
    length, most = texts.tokens.shape[1], int(texts.answers.max())
    tokens, answers = torch.from_numpy(texts.tokens), torch.from_numpy(texts.answers)
    size = sequences_at_once(model, length, batch_tokens)
    total = 0.0
    for ids, counts in zip(tokens.split(size), answers.split(size), strict=True):
        here = ids.to(model.device)
        states = model.prefilled(here[:, :-1], length=length, last=most)
        losses = model.losses(states, here[:, -most:]).double().cpu()
        answer = torch.arange(most) >= most - counts[:, None]
        total += ((losses * answer).sum(dim=1) / counts).sum().item()
    return total / len(tokens)
