"""Many-shot in-context learning with the question among the examples (DoPE, Sec. 5.3 and Table 2).

A prompt is filled with solved problems and ends with an unsolved one. With a needle, that problem
and its solution are among the examples, at one of four depths; without, they are not. The paper
uses MATH (Hendrycks et al. 2021); without a file of it, the problems are sums and differences of
two-digit numbers. Final answers are extracted and compared as in MATH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from trainer.common.errors import UserError
from trainer.config import ManyShotSettings
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.task import PromptTask

TASKS = ("many_shot_needle", "many_shot_skip", "zero_shot")
DEPTHS = (0.0, 1 / 3, 2 / 3, 1.0)
"""Places of the needle: 0 the beginning of the examples, 1 their end."""
SEED = 42
FILE_KEY = "evaluation.many_shot.file"
FILE_TOKENS, ARITHMETIC_TOKENS = 2048, 32
"""Tokens of an answer: the paper's (App. A.2), and twice the bytes of a sum."""

QUESTION = "Problem: {problem}\nSolution:"
NEXT = "Problem:"
"""Text that ends an answer, as in the paper (App. A.2); its wording of prompts is unpublished."""


@dataclass(frozen=True)
class SolvedProblem:
    """``answer``: the final answer."""

    problem: str
    solution: str
    answer: str


def arithmetic() -> list[SolvedProblem]:
    """Return all sums and differences of two two-digit numbers."""
    return [
        SolvedProblem(f"What is {a} {sign} {b}?", f"{a} {sign} {b} = {result}.", str(result))
        for a in range(10, 100)
        for b in range(10, 100)
        for sign, result in (("+", a + b), ("-", a - b))
    ]


def read_problems(file: str) -> list[SolvedProblem]:
    """Return the distinct problems of a file, with their answers."""
    problems: dict[str, SolvedProblem] = {}
    for line in filter(str.strip, Path(file).read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        answer = row.get("answer") or boxed(row["solution"])
        if answer is None:
            raise UserError(f"{FILE_KEY}: expected an answer to {row['problem'][:60]!r}")
        made = SolvedProblem(row["problem"], row["solution"], str(answer))
        problems.setdefault(row["problem"], made)
    return list(problems.values())


@dataclass(frozen=True)
class ManyShot:
    """Prompts filled with solved problems, for one of :data:`TASKS`.

    ``examples``: tokens of every solved problem. ``bos`` begins every prompt unless it is None. The
    examples of a trial depend on ``seed`` and the problem asked; they are the same at all depths.
    """

    name: str
    problems: Sequence[SolvedProblem]
    examples: Sequence[list[int]]
    tokenizer: Tokenizer
    bos: int | None
    trials: int
    new_tokens: int
    seed: int

    def prompts(self, length: int) -> list[Prompt]:
        """Return the trials, grouped by problem.

        Prompt and answer together have ``length`` tokens, less the room that no example fits.

        Raises:
            UserError: the length is too short, or there are too few problems for it.
        """
        every = range(len(self.problems))
        asked = Random(self.seed).sample(every, min(self.trials, len(every)))
        return [prompt for index in asked for prompt in self._trial(index, length)]

    def _trial(self, asked: int, length: int) -> list[Prompt]:
        before = [] if self.bos is None else [self.bos]
        text = QUESTION.format(**vars(self.problems[asked]))
        question = self.tokenizer.encode(text, add_special_tokens=False).ids
        room = length - len(before) - len(question) - self.new_tokens

        def prompt(examples: Iterable[int], depth: float | None = None) -> Prompt:
            shown = chain.from_iterable(self.examples[index] for index in examples)
            group, label = (None, "") if depth is None else (asked, f"{depth:.0%}")
            tokens, answers = (*before, *shown, *question), (self.problems[asked].answer,)
            return Prompt(tokens, answers, self.new_tokens, depth, group, label)

        if self.name == "zero_shot":
            if room < 0:
                raise UserError(
                    f"evaluation.lengths: expected {length - room} tokens or more for zero_shot, "
                    f"got {length}"
                )
            return [prompt(())]
        if self.name == "many_shot_skip":
            return [prompt(self._haystack(room, asked, length))]
        others = self._haystack(room - len(self.examples[asked]), asked, length)
        begins = np.cumsum([0, *(len(self.examples[index]) for index in others)])
        places = [np.abs(begins - depth * begins[-1]).argmin() for depth in DEPTHS]
        return [
            prompt(np.insert(others, place, asked), depth)
            for place, depth in zip(places, DEPTHS, strict=True)
        ]

    def _haystack(self, room: int, asked: int, length: int) -> list[int]:
        """Choose the examples: problems other than ``asked`` in random order, until none fits
        ``room``."""
        sizes = [len(example) for example in self.examples]
        shortest, longest = min(sizes), max(sizes)
        chosen: list[int] = []
        for index in np.random.default_rng((self.seed, asked)).permutation(len(sizes)).tolist():
            if room < shortest:
                break
            if index != asked and sizes[index] <= room:
                chosen.append(index)
                room -= sizes[index]
        if room > longest or not chosen:
            raise UserError(
                f"evaluation.lengths: {len(sizes)} solved problems do not fill {length} tokens, or "
                f"none fits ({self.name})"
            )
        return chosen


def right_final_answer(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the final answer is right, else 0."""
    final = normalised(final_answer(text.partition(NEXT)[0]))
    return float(any(final == normalised(answer) for answer in answers))


def next_problem_begins(text: str, answers: Sequence[str]) -> bool:
    """Return whether the next problem has begun."""
    return NEXT in text


def many_shot_tasks(
    settings: ManyShotSettings, tokenizer: Tokenizer, bos: int | None, seed: int = SEED
) -> tuple[list[PromptTask], list[str]]:
    """Return the tasks in the order of :data:`TASKS`, and a sentence if they are not of MATH."""
    if settings.file is None:
        problems, new_tokens = arithmetic(), ARITHMETIC_TOKENS
        notes = [f"Many-shot prompts are of arithmetic: {FILE_KEY} names no file of MATH."]
    else:
        problems, new_tokens, notes = read_problems(settings.file), FILE_TOKENS, []
    solved = [f"{QUESTION.format(**vars(p))} {p.solution}\n\n" for p in problems]
    encodings = tokenizer.encode_batch_fast(solved, add_special_tokens=False)
    examples = [encoding.ids for encoding in encodings]
    trials, new = settings.trials, settings.new_tokens or new_tokens
    common = problems, examples, tokenizer, bos, trials, new, seed
    scoring = right_final_answer, next_problem_begins
    return [
        PromptTask(name, tokenizer, ManyShot(name, *common).prompts, *scoring) for name in TASKS
    ], notes


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` with balanced braces, or None."""
    begin = text.rfind(r"\boxed{")
    if begin < 0:
        return None
    begin += len(r"\boxed{")
    depth = 1
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[begin:end]
    return None


def final_answer(text: str) -> str:
    """Return a solution's boxed answer, or else its last number, or ""."""
    if (answer := boxed(text)) is not None:
        return answer
    return next(reversed(re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)), "")


SAME = [
    (r"\\[dt]frac", r"\\frac"),
    (r"\\text\{([^{}]*)\}", r"\1"),
    (r"\\left|\\right|\\[!,;: ]|\\?[$%]|\^\{?\\circ\}?|\s", ""),
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"\.$", ""),
]


def normalised(answer: str) -> str:
    """Return the answer without typography: spaces, degree and percent signs, delimiter sizes,
    thousands separators, and a final full stop."""
    for pattern, new in SAME:
        answer = re.sub(pattern, new, answer)
    return answer
