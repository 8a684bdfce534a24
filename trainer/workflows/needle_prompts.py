"""Needle prompts for analyses, in the words of DroPE's App. C.2."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from trainer.analysis.capture import NeedlePrompt
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.needles import one_of_many

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
