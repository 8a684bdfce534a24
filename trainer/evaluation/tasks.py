"""Tasks that a configuration names, and the text on which its methods are fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trainer.common.errors import UserError
from trainer.config import (
    HARNESS,
    LONGBENCH,
    MANY_SHOT,
    MULTIPLE_CHOICE,
    PERPLEXITY,
    RULER,
    STATEMENTS,
    EvaluationConfig,
)
from trainer.data.corpus import Corpus, parts_of_windows
from trainer.data.order import Integers
from trainer.evaluation.fitting import FitText, spread_evenly
from trainer.evaluation.held_out import HeldOut, statements
from trainer.evaluation.longbench import longbench_tasks
from trainer.evaluation.longrope import needle_requests
from trainer.evaluation.loss import Perplexity, windows_with_common_ends
from trainer.evaluation.many_shot import SEED, many_shot_tasks
from trainer.evaluation.methods import CHOICE, PARTS, Method
from trainer.evaluation.multiple_choice import multiple_choice_tasks
from trainer.evaluation.needles import NEEDLE_TASKS, Haystack
from trainer.evaluation.results import counted
from trainer.evaluation.ruler import ruler_tasks
from trainer.evaluation.task import Task


def check_names(config: EvaluationConfig) -> None:
    """Check that all tasks and methods exist.

    Raises:
        UserError: one does not.
    """
    parts = [part for name in config.methods for part in name.split("+")]
    groups = STATEMENTS, PERPLEXITY, RULER, LONGBENCH, MANY_SHOT, MULTIPLE_CHOICE, HARNESS
    for key, names, known in (
        ("tasks", config.tasks, [*groups, *NEEDLE_TASKS]),
        ("methods", parts, [*PARTS]),
    ):
        for name in names:
            if name not in known:
                raise UserError(
                    f"evaluation.{key}: expected some of {', '.join(known)}, got {name!r}"
                )


def make_tasks(
    text: HeldOut, config: EvaluationConfig, lengths: list[int], training_length: int
) -> tuple[list[Task], list[str]]:
    """Return the tasks, and a sentence for each impossible one.

    Raises:
        UserError: no task is possible, or the text is shorter than the longest length.
    """
    tasks: list[Task] = []
    notes: list[str] = []
    bos, tokenizer, C = text.bos_token, text.corpus.tokenizer, training_length
    for name in config.tasks:
        made: Sequence[Task] = ()
        missing: Sequence[str] = ()
        if name == PERPLEXITY:
            made, missing = perplexity(text, config, lengths, config.last or min(C, *lengths))
        elif name == STATEMENTS and text.training_share:
            made = [statements(text.corpus, text.split, lengths, config.needles)]
        elif name == STATEMENTS:
            known = text.training_share is not None
            why = "carried none" if known else "is not known to have carried any"
            missing = [
                "The task 'statements' was left out: the training text of the first model "
                f"{why} (data.needles.share)."
            ]
        elif name in NEEDLE_TASKS:
            made = [NEEDLE_TASKS[name](text.haystack, config.needles)]
        elif name == RULER:
            made, missing = ruler_tasks(config.ruler, tokenizer, text.documents, bos)
        elif name == LONGBENCH:
            made, missing = longbench_tasks(config.longbench, tokenizer, bos, C)
        elif name == MANY_SHOT:
            made = many_shot_tasks(config.many_shot, tokenizer, bos)
        elif name == MULTIPLE_CHOICE:
            made = multiple_choice_tasks(config.multiple_choice, text.encoder)
        elif name == HARNESS:
            from trainer.evaluation.harness import harness_tasks

            made = harness_tasks(config.harness, text.encoder)
        tasks += made
        notes += missing
    if notes and not tasks:
        raise UserError(f"evaluation.tasks: {' '.join(notes)}")
    return tasks, notes


def perplexity(
    text: HeldOut, config: EvaluationConfig, lengths: list[int], last: int
) -> tuple[list[Task], list[str]]:
    """Return the task on the ``last`` tokens of windows, and a sentence if the text has too few."""
    if last > min(lengths):
        raise UserError(f"evaluation.last: expected at most {min(lengths)}, got {last}")
    wanted, longest = config.windows, max(lengths)
    notes: list[str] = []
    windows = windows_with_common_ends(text.split, wanted, lengths, last=last)
    if (count := len(windows[longest])) < wanted:
        notes.append(
            f"Losses are over {counted(count, 'window')}, not {wanted} (evaluation.windows): the "
            f"held-out text of {len(text.split):,} tokens has no more of {longest:,} tokens "
            f"whose last {last:,} do not overlap."
        )
    return [Perplexity(windows, text.corpus.first_token, last)], notes


def fit_text(
    corpus: Corpus,
    bos_token: int | None,
    config: EvaluationConfig,
    methods: Sequence[Method],
    lengths: Sequence[int],
    training_length: int,
) -> FitText:
    """Return the texts for all methods at the lengths at which they read them.

    These are validation text, texts with needles for searches of factors beyond the training
    length, and the texts on which heads and pairs are chosen (DoPE, Sec. 5.1, Tables 3 and 4).

    Raises:
        UserError: the text is too short, or a length does not fit a file or a task.
    """
    C, longrope, choice, text = training_length, config.longrope, config.choice, corpus.validation
    fitted = sorted({round(s * C) for n in lengths for m in methods for s in m.fits(n / C)})
    by_needles = longrope.search == "needles" and any(
        "longrope" in method.key.split("+") for method in methods
    )
    searched = [n for n in fitted if n > C and by_needles]
    chosen = fitted if choice.length is None else [round(choice.length * C)]
    if choice.text == "validation" or not any(CHOICE in method.settings for method in methods):
        chosen = []
    needles, prompts = {}, None
    if searched or chosen:
        straw = HeldOut(corpus, text, bos_token, None).haystack
        needles = {n: needle_requests(straw, longrope.windows, n) for n in searched}
        prompts = {n: choice_prompts(config, straw, n) for n in chosen} or None
    longest, parts = max(fitted, default=0), ()
    if longest and len(text.parts) > 1:  # the text of a mixture that each window is from
        parts = tuple(parts_of_windows(text, config.fit_windows, longest).tolist())
    windows = windows_with_common_ends(text, config.fit_windows, fitted, name="validation")
    return FitText(windows, corpus.first_token, needles, prompts, parts)


def choice_prompts(config: EvaluationConfig, straw: Haystack, length: int) -> Integers:
    """Return ``[texts, tokens]`` of prompts on which methods choose, none of which is evaluated.

    The prompts are spread over the trials and depths of a task. A prompt leaves room for its
    answer, and all are cut at their beginning to the shortest: many-shot prompts differ by less
    than an example. ``straw``: validation text. ``length``: tokens of a prompt and its answer.
    """
    name, texts = config.choice.text, config.choice.texts
    if name in NEEDLE_TASKS:
        needles = replace(config.needles, trials=texts, seed=config.needles.seed + 1)
        prompts = NEEDLE_TASKS[name](straw, needles).prompts(length)
    else:
        shots, first = replace(config.many_shot, trials=texts), next(iter(straw.bos), None)
        tasks = many_shot_tasks(shots, straw.tokenizer, first, seed=SEED + 1)
        prompts = next(task for task in tasks if task.name == name).prompts(length)
    tokens = [prompts[i].tokens for i in spread_evenly(texts, len(prompts))]
    bos = len(straw.bos)
    behind = min(map(len, tokens)) - bos
    return np.array([[*row[:bos], *row[len(row) - behind :]] for row in tokens], dtype=np.int64)
