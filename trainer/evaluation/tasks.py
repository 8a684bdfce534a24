"""Tasks that a configuration names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

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
from trainer.evaluation.held_out import HeldOut, perplexity, statements
from trainer.evaluation.longbench import longbench_tasks
from trainer.evaluation.many_shot import many_shot_tasks
from trainer.evaluation.methods import TITLES
from trainer.evaluation.multiple_choice import multiple_choice_tasks
from trainer.evaluation.needles import NEEDLE_TASKS
from trainer.evaluation.results import counted
from trainer.evaluation.ruler import ruler_tasks
from trainer.evaluation.task import PromptTask, Task

GROUPS = (PERPLEXITY, STATEMENTS, RULER, LONGBENCH, MANY_SHOT, MULTIPLE_CHOICE, HARNESS)
"""Names of ``evaluation.tasks`` beside those of :data:`NEEDLE_TASKS`."""


def check_names(config: EvaluationConfig) -> None:
    """Check that all tasks and methods exist.

    Raises:
        UserError: one does not.
    """
    parts = [part for name in config.methods for part in name.split("+")]
    for key, names, known in (
        ("tasks", config.tasks, [*GROUPS, *NEEDLE_TASKS]),
        ("methods", parts, [*TITLES]),
    ):
        if missing := [name for name in names if name not in known]:
            raise UserError(f"evaluation.{key}: expected some of {', '.join(known)}, got {missing}")


def make_tasks(
    text: HeldOut, config: EvaluationConfig, lengths: list[int], training_length: int
) -> tuple[list[Task], list[str]]:
    """Return each task at every length, and a sentence for each impossible one.

    Raises:
        UserError: no task is possible, a length does not fit a task, or the text is shorter than
            the longest length.
    """
    tasks: list[Task] = []
    notes: list[str] = []
    C = training_length
    limit = config.limit or sys.maxsize
    windows = min(config.windows, limit)
    needles = replace(config.needles, trials=min(config.needles.trials, limit))
    ruler = replace(config.ruler, trials=min(config.ruler.trials, limit))
    many_shot = replace(config.many_shot, trials=min(config.many_shot.trials, limit))
    for name in config.tasks:
        asked: Sequence[PromptTask] = ()
        if name == PERPLEXITY:
            last = min(C, *lengths)
            made = perplexity(text, lengths, windows, last)
            tasks += made
            if (count := len(made[0].trials)) < windows:
                notes.append(
                    f"Losses are over {counted(count, 'window')}, not {windows} "
                    f"(evaluation.windows): the held-out text of {len(text.split):,} tokens has no "
                    f"more of {max(lengths):,} tokens whose last {last:,} do not overlap."
                )
        elif name == STATEMENTS and text.training_share:
            tasks += statements(text, lengths, needles)
        elif name == STATEMENTS:
            notes.append(
                "The task 'statements' was left out: the training text of the first model "
                "carried none, or is not known (data.needles.share)."
            )
        elif name in NEEDLE_TASKS:
            asked = [NEEDLE_TASKS[name](text.haystack, needles)]
        elif name == RULER:
            asked, missing = ruler_tasks(ruler, text.encoder, text.documents)
            notes += missing
        elif name == LONGBENCH:
            asked = longbench_tasks(config.longbench, text.encoder, C)
        elif name == MANY_SHOT:
            asked = many_shot_tasks(many_shot, text.encoder)
        elif name == MULTIPLE_CHOICE:
            tasks += multiple_choice_tasks(config.multiple_choice, text.encoder, lengths, limit)
        elif name == HARNESS:
            from trainer.evaluation.harness import harness_tasks

            tasks += harness_tasks(config.harness, text.encoder, lengths, limit)
        tasks += [task.at(length, limit) for task in asked for length in lengths]
    if notes and not tasks:
        raise UserError(f"evaluation.tasks: {' '.join(notes)}")
    return tasks, notes
