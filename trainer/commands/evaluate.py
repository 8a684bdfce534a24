"""``python -m trainer evaluate PATH ...``: how far does a checkpoint reach?"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainer.commands.hydra.command import Command, Named
from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed


def read(composed: Composed) -> Named[Any]:
    """Return the checked request.

    Raises:
        UserError: with every problem that can be seen before the checkpoint is read.
    """
    from trainer.runs.parsing import parse

    values, kind = composed.without_kind("evaluation")
    name = composed.choices["evaluation"]
    if kind not in KINDS:
        raise UserError(*composed.problems, kind_problem(name, kind, KINDS))
    problems = [*composed.problems, *both_lengths(composed)]
    request = parse(request_schema(kind), values, problems)
    return Named(name, request, composed.words)


def execute(named: Named[Any]) -> None:
    """Evaluate, print the tables, write the report."""
    from trainer.commands.console import print_report, set_up_console
    from trainer.common.processes import ask_for_requeue
    from trainer.workflows.remarks import say_idle_settings
    from trainer.workflows.requests import EvaluationRequest

    set_up_console(quiet=os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0")
    say_idle_settings(named.request.evaluation, named.words)
    # A batch script requeues the job. Its command then resumes from the stored results.
    with stopping_at_once("Stopped", signal.SIGTERM, signal.SIGUSR1, first=ask_for_requeue):
        if isinstance(named.request, EvaluationRequest):
            from trainer.workflows.evaluate import evaluate_lengths

            asked = asks_for_statements(named.words)
            if (outcome := evaluate_lengths(named.request, named.name, asked)) is not None:
                print_report(outcome[0], str(outcome[1]), existing=False)
        else:
            from trainer.commands.benchmarks import show

            show(named.request, named.name)


def asks_for_statements(words: Iterable[str]) -> bool:
    """Whether the words of a command line name the task ``statements``, which not every model
    knows."""
    pairs = (word.lstrip("+").partition("=") for word in words)
    return any(key == "evaluation.tasks" and "statements" in value for key, _, value in pairs)


HELP = """
python -m trainer evaluate PATH [compare=[PATH,...]] [+evaluation=NAME] [KEY=VALUE ...]

Measures checkpoints, all on the same trials. Without +evaluation: needle retrieval and held-out
loss at multiples of the training length, for the checkpoint as it is and with every context
extension that applies to it. With +evaluation=extension: every method that costs no training, also
for published models; niah, ruler, longbench and many_shot are the same with other tasks.
multiple_choice takes its questions from the files of scripts/fetch_benchmarks.py, harness from the
hub, both with any methods, which evaluation.factor sets for a length.
"""
COMMAND = Command("evaluate", HELP, read, execute, described=("evaluation",), subject="checkpoint")


LENGTHS = "lengths"
KINDS = (LENGTHS, "multiple_choice", "harness")
OF_A_RUN = (LENGTHS,)
"""Kinds that a run can end with."""


def both_lengths(composed: Composed) -> list[Problem]:
    """Return the problem of ``evaluation.lengths`` beside ``evaluation.tokens``."""
    evaluation = composed.values.get("evaluation")
    if not isinstance(evaluation, dict) or evaluation.get("tokens") is None:
        return []
    if "evaluation.lengths" not in composed.given:
        return []
    tokens = evaluation["tokens"]
    return [
        Problem(
            "evaluation.lengths",
            f"evaluation.tokens={tokens} gives the lengths already; leave out one of them.",
        )
    ]


def request_schema(kind: str) -> type[Any]:
    """Return the dataclass of a request of that kind."""
    from trainer.workflows import requests

    return {
        LENGTHS: requests.EvaluationRequest,
        "multiple_choice": requests.MultipleChoiceRequest,
        "harness": requests.HarnessRequest,
    }[kind]


def kind_problem(name: str, kind: Any, kinds: Iterable[str]) -> Problem:
    """Return the problem of an option whose kind is not one of ``kinds``."""
    if kind is None:
        return Problem(
            "evaluation",
            f"{name!r} does not say what it is; begin its defaults list with an option that "
            f"it changes, such as extension, or give it a kind: {', '.join(kinds)}.",
        )
    if kind in KINDS:
        return Problem(
            "evaluation", f"{name!r} is for the evaluate command, not for the end of a run."
        )
    return Problem(
        "evaluation.kind", f"{name!r} is of kind {kind!r}.", did_you_mean(str(kind), kinds)
    )
