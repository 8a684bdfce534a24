"""``python -m trainer evaluate checkpoint=PATH ...``: how far does a checkpoint reach?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.commands.command import Command
from trainer.commands.kinds import KINDS, LENGTHS, kind_problem, request_schema
from trainer.commands.running import run_command
from trainer.errors import UserError

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed
    from trainer.workflows.evaluation_request import EvaluationRequest


@dataclass(frozen=True)
class Named:
    """A request, its kind, and the name of the option that was chosen."""

    kind: str
    name: str
    request: Any


def run(words: Sequence[str]) -> None:
    """Evaluate ``checkpoint`` (and those in ``compare``) and write a report into ``output``."""
    run_command(COMMAND, words)


def read(composed: Composed) -> Named:
    """The checked request.

    Raises:
        UserError: with every problem that can be seen before the checkpoint is read.
    """
    from trainer.runs.parsing import parse

    values, kind = composed.without_kind("evaluation")
    name = composed.choices["evaluation"]
    if kind not in KINDS:
        raise UserError(*composed.problems, kind_problem(name, kind, KINDS))
    return Named(kind, name, parse(request_schema(kind), values, composed.problems))


def execute(named: Named) -> None:
    """Evaluate, print the tables, write the report."""
    if named.kind == LENGTHS:
        _measure(named.request, named.name)
    else:
        from trainer.commands import benchmarks

        benchmarks.show(named.request, named.name)


def _measure(request: EvaluationRequest, name: str) -> None:
    from trainer.commands.console import print_report, set_up_console
    from trainer.workflows.evaluate import evaluate_lengths

    set_up_console()
    report, output = evaluate_lengths(request, name)
    print_report(report, str(output), existing=False)


HELP = """
python -m trainer evaluate checkpoint=PATH [compare=[PATH,...]] [+evaluation=NAME] [KEY=VALUE ...]

Measures checkpoints, all on the same trials. Without +evaluation: needle retrieval and held-out
loss at multiples of the training length, for the checkpoint as it is and with every context
extension that applies to it. With +evaluation=extension: every method that costs no training, also
for published models; niah, ruler, longbench and many_shot are the same with other tasks.
multiple_choice takes its questions from the files of scripts/fetch_benchmarks.py.
"""
COMMAND = Command("evaluate", HELP, read, execute, described=("evaluation",))
