"""``python -m trainer compare runs/a runs/b ...``: the runs of a sweep beside each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, reading

if TYPE_CHECKING:
    from trainer.workflows.requests import CompareRequest


def execute(request: CompareRequest) -> None:
    """Write the comparison, and print its table."""
    from trainer.commands.console import report_console
    from trainer.report.sweep import terminal_sweep
    from trainer.workflows.compare import compare_runs

    sweep, page = compare_runs(request)
    out = report_console()
    out.print(terminal_sweep(sweep, out.width))
    out.print(f"Comparison: {page}", highlight=False, markup=False)


HELP = """
python -m trainer compare RUN [RUN ...] [output=DIR]

Puts the runs of a sweep beside each other: a table, a figure and a page of what they reached, each
run named by what differs between them. RUN is a run directory, that of a control, or that of a
sweep (multirun/NAME), which stands for its runs, also while some are missing. One run alone stands
for itself and its controls. Nothing is measured anew; train --multirun does this at its end.
"""
COMMAND = Command(
    "compare",
    HELP,
    reading("CompareRequest", "runs"),
    execute,
    single="name all runs in one command.",
    bare=True,
)
