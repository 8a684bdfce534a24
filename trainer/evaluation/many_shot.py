"""Many-shot in-context learning with the question among the examples (DoPE, Sec. 5.3 and Table 2).

A prompt is filled with solved problems and ends with one that, with a needle, is solved among them
at one of four depths. The problems are those of MATH (Hendrycks et al. 2021), and final answers are
compared as in MATH.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np

from trainer.common.errors import UserError
from trainer.common.files import expecting
from trainer.config import ManyShotSettings
from trainer.evaluation.likelihood import Encoder, Tokens
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.task import PromptTask, TaskInputs, task

TASKS = {
    "many_shot_needle": {"has_examples": True, "has_needle": True},
    "many_shot_skip": {"has_examples": True, "has_needle": False},
    "zero_shot": {"has_examples": False, "has_needle": False},
}
"""Whether the prompts of a task have solved problems, and the question among them."""
DEPTHS = (0.0, 1 / 3, 2 / 3, 1.0)
"""Places of the needle: 0 the beginning of the examples, 1 their end."""
SEED = 42

QUESTION = "Problem: {problem}\nSolution:"
NEXT = "Problem:"
"""Text that ends an answer, as in the paper (App. A.2); its wording of prompts is unpublished."""


def read_problems(file: str) -> list[tuple[str, str, str]]:
    """Return the distinct problems of a file: question, example with the solution, final answer."""
    problems: dict[str, tuple[str, str, str]] = {}
    for number, line in enumerate(Path(file).read_bytes().split(b"\n"), start=1):
        if line.strip():
            with expecting("a problem, its solution and answer", f"{file}: line {number}"):
                row = json.loads(line)
                question = QUESTION.format(problem=row["problem"])
                answer = row.get("answer", "")
                if answer in (None, ""):  # 0 is an answer
                    answer = boxed(row["solution"])
                if not normalised(str(answer)):  # a text without a number has that final answer
                    raise ValueError("no answer")
                example = f"{question} {row['solution']}\n\n"
                problems.setdefault(question, (question, example, str(answer)))
    return list(problems.values())


def filling(examples: list[Tokens], problem: int, room: int, seed: int) -> list[Tokens]:
    """Choose examples of other problems in random order, until none fits ``room`` tokens."""
    chosen: list[Tokens] = []
    for index in np.random.default_rng((seed, problem)).permutation(len(examples)).tolist():
        if index != problem and len(examples[index]) <= room:
            chosen.append(examples[index])
            room -= len(examples[index])
    if room > max(map(len, examples)):
        text = f"{len(chosen)} solved problems leave {room:,} tokens of a prompt empty"
        raise UserError(f"evaluation.lengths: {text}; expected shorter prompts or more problems")
    if not chosen:
        raise UserError(f"evaluation.lengths: no solved problem fits {room:,} tokens of a prompt")
    return chosen


def right_final_answer(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the final answer is right, else 0."""
    final = normalised(final_answer(text.partition(NEXT)[0]))
    return float(any(final == normalised(answer) for answer in answers))


def many_shot_tasks(
    settings: ManyShotSettings, encoder: Encoder, seed: int = SEED
) -> list[PromptTask]:
    """Return the tasks in the order of :data:`TASKS`; raise a UserError if no file is named, or a
    problem has no answer."""
    if settings.file is None:
        raise UserError("evaluation.many_shot.file: expected a file of MATH, got null")
    problems = read_problems(settings.file)
    tokenizer = encoder.tokenizer
    examples = replace(encoder, bos=()).tokens([example for _, example, _ in problems])

    def prompts(length: int, *, has_examples: bool, has_needle: bool) -> list[Prompt]:
        """Return the trials; prompt and answer together have ``length`` tokens, less the room that
        no example fits.

        The examples of a problem depend on the seed and are the same at all depths.
        """
        count = min(settings.trials, len(problems))
        trials = []
        for problem in Random(seed).sample(range(len(problems)), count):
            text, _, answer = problems[problem]
            question = tokenizer.encode(text, add_special_tokens=False).ids
            needle = examples[problem] if has_needle else ()
            depths = DEPTHS if has_needle else (None,)
            room = length - len(encoder.bos) - len(needle) - len(question) - settings.new_tokens
            others = filling(examples, problem, room, seed) if has_examples else []
            begins = np.cumsum([0, *map(len, others)])
            for depth in depths:
                place = np.abs(begins - (depth or 0) * begins[-1]).argmin()
                shown = chain(*others[:place], needle, *others[place:])
                tokens = (*encoder.bos, *shown, *question)
                label = "" if depth is None else f"{depth:.0%}"
                trials.append(Prompt(tokens, (answer,), settings.new_tokens, depth, problem, label))
        return trials

    def stop(text: str, answers: Sequence[str]) -> bool:
        return NEXT in text

    return [
        PromptTask(name, tokenizer, partial(prompts, **parts), right_final_answer, stop)
        for name, parts in TASKS.items()
    ]


@task("many_shot", settings="many_shot")
def many_shot(inputs: TaskInputs) -> list[PromptTask]:
    """Return the tasks for the settings."""
    settings = replace(inputs.settings, trials=inputs.trials)
    return many_shot_tasks(settings, inputs.text.encoder)


def boxed(text: str) -> str:
    r"""Return the argument of the last ``\boxed``, in balanced braces or up to a space or a ``$``;
    "" if there is none."""
    _, mark, argument = text.rpartition(r"\boxed")
    argument = argument.lstrip() if mark else ""
    if not argument.startswith("{"):
        return re.split(r"[\s$]", argument)[0]
    depth = 0
    for end, character in enumerate(argument):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return argument[1:end]
    return ""


def final_answer(text: str) -> str:
    """Return a solution's boxed answer, or else its last number, or ""."""
    numbers = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", text)
    return boxed(text) or next(reversed(numbers), "")


TYPOGRAPHY = [
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:left|right)(?![A-Za-z])|\\[!,;: ]|\\?[$%]|\^\{?\\circ\}?", ""),
    (r"(?<=\S)\s*\\text\{ [^{}]*\}$", ""),  # a unit
    (r"\\text\{([^{}]*)\}", r"\1"),
    (r"^\s*[A-Za-z]{1,2}\s*=", ""),
    (r"\s", ""),
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"\.$", ""),
    (r"(?<!\d)\.(?=\d)", "0."),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt(\d)", r"\\sqrt{\1}"),
    (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    (r"^0\.5$", r"\\frac{1}{2}"),
]
"""Patterns of ways to write the same answer, and what takes their place."""


def normalised(answer: str) -> str:
    """Return the answer as MATH compares it: without typography, units and ``x=``, with fractions
    and roots in braces."""
    for pattern, new in TYPOGRAPHY:
        answer = re.sub(pattern, new, answer)
    return answer
