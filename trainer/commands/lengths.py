"""``python -m trainer evaluate checkpoint=PATH +evaluation=extension ...``: how far does it reach,
with every method that costs no training?"""

from __future__ import annotations

from rich.console import Console

from trainer.commands.configuration import compose_values
from trainer.commands.console import WIDTH, set_up_console
from trainer.runs.parsing import parse_as


def run(kind: str, words: list[str]) -> None:
    """Evaluate ``checkpoint`` and those in ``compare``, print the tables, write the report."""
    values, found = compose_values(words, kind)
    from trainer.report.length.text import terminal_length_tables
    from trainer.workflows.evaluate import LengthRequest, evaluate_lengths

    request = parse_as(LengthRequest, values, found)
    set_up_console()
    report, output = evaluate_lengths(request, kind)
    out = Console(width=WIDTH)
    out.print(terminal_length_tables(report))
    for note in report.notes:
        out.print(f"Note: {note}", highlight=False)
    out.print(f"Report: {output / 'report.html'}", highlight=False)
