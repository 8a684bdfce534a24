"""``python -m trainer evaluate checkpoint=PATH ...``: how far does it reach, with every method that
costs no training?"""

from __future__ import annotations

from trainer.commands.configuration import compose_values
from trainer.commands.console import print_report, set_up_console
from trainer.runs.parsing import parse_as


def run(kind: str, words: list[str]) -> None:
    """Evaluate ``checkpoint`` and those in ``compare``, print the tables, write the report."""
    values, found = compose_values(words, "evaluate" if kind == "default" else kind)
    from trainer.workflows.evaluate import LengthRequest, evaluate_lengths

    request = parse_as(LengthRequest, values, found)
    set_up_console()
    report, output = evaluate_lengths(request, kind)
    print_report(report, str(output), existing=False)
