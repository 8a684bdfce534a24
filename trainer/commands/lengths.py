"""``python -m trainer evaluate checkpoint=PATH +evaluation=extension ...``: how far does it reach,
with every method that costs no training?"""

from __future__ import annotations

from rich.console import Console

from trainer.commands.console import WIDTH, set_up_console
from trainer.report.length.text import terminal_length_tables
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.length_request import LengthRequest


def show(request: LengthRequest, name: str) -> None:
    """Evaluate, print the tables, write the report."""
    set_up_console()
    report, output = evaluate_lengths(request, name)
    out = Console(width=WIDTH)
    out.print(terminal_length_tables(report))
    for note in report.notes:
        out.print(f"Note: {note}", highlight=False)
    out.print(f"Report: {output / 'report.html'}", highlight=False)
