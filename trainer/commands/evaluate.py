"""``python -m trainer evaluate PATH ...``: how far does a checkpoint reach?"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.commands.hydra.command import Command, Named
from trainer.common.errors import Problem, UserError, did_you_mean
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from rich.table import Table

    from trainer.commands.hydra.composing import Composed
    from trainer.evaluation.benchmarks import Score, Scored
    from trainer.evaluation.statistics import Comparison
    from trainer.workflows.requests import BenchmarkRequest

LENGTHS = "lengths"
KINDS = (LENGTHS, "multiple_choice", "harness")
OF_A_RUN = (LENGTHS,)
"""Kinds that a run can end with."""
COLUMNS = 4
"""Models with methods that fit into the terminal side by side."""


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
    from trainer.workflows.requests import EvaluationRequest

    set_up_console()
    # A batch script requeues the job. Its command then resumes from the stored results.
    with stopping_at_once("Stopped", signal.SIGTERM, signal.SIGUSR1):
        if isinstance(named.request, EvaluationRequest):
            from trainer.workflows.evaluate import evaluate_lengths

            asked = asks_for_statements(named.words)
            if (outcome := evaluate_lengths(named.request, named.name, asked)) is not None:
                print_report(outcome[0], str(outcome[1]), existing=False)
        else:
            show_benchmarks(named.request, named.name)


def show_benchmarks(request: BenchmarkRequest, name: str) -> None:
    """Score the models with every method, print tables and write JSON."""
    from rich.console import Console

    from trainer.commands.console import WIDTH
    from trainer.workflows.benchmarks import run_benchmarks

    results, path = run_benchmarks(request, name)
    out = Console(width=WIDTH, highlight=False)
    for begin in range(0, len(results.scored), COLUMNS):
        out.print(benchmark_table(results.scored[begin : begin + COLUMNS], results.scored))
    if len(results.scored) > 1:
        out.print(
            "↑ and ↓: other than the model as is, or than the first model, on the same questions, "
            "p < 0.05 by the sign test."
        )
    for note in results.notes:
        out.print(f"Note: {note}", markup=False)
    out.print(f"Numbers: {path}", markup=False)


def benchmark_table(columns: Sequence[Scored], scored: Sequence[Scored]) -> Table:
    """Return a table with a row for every metric of every task and a column for each of
    ``columns``, compared with their counterparts among ``scored``."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from trainer.evaluation.benchmarks import comparisons

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("task", "metric"):
        table.add_column(head, overflow="fold")
    table.add_column("questions", justify="right")
    for column in columns:
        table.add_column(escape(column.name), justify="right", overflow="fold")
    previous = ""
    rows = zip(*(column.scores for column in columns), strict=True)
    changes = zip(*(comparisons(column, scored) for column in columns), strict=True)
    for row, changed in zip(rows, changes, strict=True):
        score = row[0]
        if previous not in ("", score.task):
            table.add_section()
        task = score.task if score.task != previous else ""
        previous = score.task
        cells = map(_cell, row, changed)
        table.add_row(escape(task), escape(score.metric), str(score.questions), *cells)
    return table


def _cell(score: Score, change: Comparison | None) -> str:
    error = f" ± {score.standard_error:.3f}" if score.standard_error is not None else ""
    mark = f" {change.mark}" if change is not None and change.mark else ""
    return f"{score.value:.3f}{error}{mark}"


def asks_for_statements(words: Iterable[str]) -> bool:
    """Whether the words of a command line name the task ``statements``."""
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


def both_lengths(composed: Composed) -> list[Problem]:
    """Return the problem of ``evaluation.lengths`` beside ``evaluation.tokens``."""
    tokens = composed.value("evaluation.tokens")
    if tokens is None or "evaluation.lengths" not in composed.named_keys:
        return []
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
