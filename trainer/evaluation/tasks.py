"""Tasks that a configuration names; importing this module registers those of the program."""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from trainer.common.errors import UserError, nearest
from trainer.common.fields import validated
from trainer.config import EvaluationConfig
from trainer.evaluation import (  # noqa: F401 - they register their tasks
    longbench,
    many_shot,
    multiple_choice,
    needles,
    perplexity,
    ruler,
    statements,
)
from trainer.evaluation.fitting import VALIDATION
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.methods import known_methods
from trainer.evaluation.task import TASKS, Task, TaskInputs, task


@task("harness", settings="harness")
def harness(inputs: TaskInputs) -> list[Task]:
    """Make the tasks of lm-eval, an extra that is imported only for them."""
    from trainer.evaluation.harness import harness_tasks

    return harness_tasks(inputs.settings, inputs.text.encoder, inputs.lengths, inputs.limit)


def check_names(config: EvaluationConfig) -> None:
    """Raise a UserError if a task or method does not exist, ``settings`` are wrong or of a task
    without any, or parts of a method do not combine."""
    parts = [part for name in config.methods for part in name.split("+")]
    drawn = [*needles.NEEDLE_TASKS, *many_shot.TASKS]  # tasks whose prompts depend on a seed
    with_settings = [name for name, kind in TASKS.items() if isinstance(kind.settings, type)]
    for key, names, known in (
        ("tasks", config.tasks, TASKS),
        ("ruler.tasks", config.ruler.tasks, ruler.TASKS),
        ("longbench.tasks", config.longbench.tasks, longbench.KINDS),
        ("methods", parts, known_methods()),
        ("settings", config.settings, with_settings),
        ("choice.text", [config.choice.text], [VALIDATION, *drawn]),
    ):
        missing = [name for name in names if name not in known]
        if missing:
            expected = ", ".join(sorted(known)) or "nothing"
            text = f"evaluation.{key}: expected some of {expected}, got {missing}"
            raise UserError(text + nearest(missing[0], known))
    for name in (*config.tasks, *config.settings):
        settings_of(name, config)  # raises if they are wrong
    interventions = ["weighted_rope"]  # a layer takes one
    if config.dope.variant == "by_gaussian" or config.dope.removal == "zero":
        interventions.append("dope")
    for name in config.methods:
        both = [part for part in name.split("+") if part in interventions]
        if len(both) > 1:
            raise UserError(f"evaluation.methods: {name}: {' and '.join(both)} do not combine")


def settings_of(name: str, config: EvaluationConfig) -> Any:
    """Return the settings of a task: a key of ``config``, or the class that it registered."""
    settings = TASKS[name].settings
    if isinstance(settings, type):
        values = config.settings.get(name, {})
        return validated(settings, values, f"evaluation.settings.{name}.")
    return None if settings is None else getattr(config, settings)


def make_tasks(
    text: HeldOut, config: EvaluationConfig, lengths: list[int], training_length: int
) -> tuple[list[Task], list[str]]:
    """Return each task at every length, and sentences about tasks that are impossible or smaller.

    Raises:
        UserError: no task is possible, a length does not fit a task, the text is shorter than the
            longest length, or two tasks have results of one name.
    """
    inputs = TaskInputs(text, lengths, training_length, config.limit or sys.maxsize)
    tasks: list[Task] = []
    for name in config.tasks:
        for each in TASKS[name].make(replace(inputs, settings=settings_of(name, config))):
            if isinstance(each, Task):
                tasks.append(each)
            else:
                tasks += [each.at(length, inputs.limit) for length in lengths]
    if not any(len(task.trials) for task in tasks):
        reasons = " ".join(inputs.notes) or "none has a trial"
        raise UserError(f"evaluation.tasks: {reasons}")
    results = Counter((key, task.length) for task in tasks for key in task.titles)
    (key, _), count = results.most_common(1)[0]
    if count > 1:
        raise UserError(f"evaluation.tasks: two tasks have results of the name {key!r}")
    return tasks, inputs.notes
