"""``python -m trainer evaluate checkpoint=PATH ...``: how far does a checkpoint reach?"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

from trainer.commands.command import Command, Named
from trainer.commands.kinds import KINDS, kind_problem, request_schema
from trainer.common.errors import UserError
from trainer.stopping import stopping_at_once

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed


def read(composed: Composed) -> Named[Any]:
    """The checked request.

    Raises:
        UserError: with every problem that can be seen before the checkpoint is read.
    """
    from trainer.runs.parsing import parse

    values, kind = composed.without_kind("evaluation")
    name = composed.choices["evaluation"]
    if kind not in KINDS:
        raise UserError(*composed.problems, kind_problem(name, kind, KINDS))
    request = parse(request_schema(kind), values, composed.problems)
    return Named(name, request, composed.words)


def execute(named: Named[Any]) -> None:
    """Evaluate, print the tables, write the report."""
    from trainer.commands.console import print_report, set_up_console
    from trainer.workflows.evaluation_request import EvaluationRequest
    from trainer.workflows.remarks import say_idle_settings

    set_up_console()
    say_idle_settings(named.request.evaluation, named.words)
    with stopping_at_once("Stopped", signal.SIGTERM):
        if isinstance(named.request, EvaluationRequest):
            from trainer.workflows.evaluate import evaluate_lengths

            report, output = evaluate_lengths(named.request, named.name)
            print_report(report, str(output), existing=False)
        else:
            from trainer.commands.benchmarks import show

            show(named.request, named.name)


HELP = """
python -m trainer evaluate checkpoint=PATH [compare=[PATH,...]] [+evaluation=NAME] [KEY=VALUE ...]

Measures checkpoints, all on the same trials. Without +evaluation: needle retrieval and held-out
loss at multiples of the training length, for the checkpoint as it is and with every context
extension that applies to it. With +evaluation=extension: every method that costs no training, also
for published models; niah, ruler, longbench and many_shot are the same with other tasks.
multiple_choice takes its questions from the files of scripts/fetch_benchmarks.py, harness from the
hub, both with any methods, which evaluation.factor sets for a length.
"""
COMMAND = Command("evaluate", HELP, read, execute, described=("evaluation",))
