"""``python -m trainer analyze checkpoint=PATH +analysis=NAME ...``: what does its attention look
like, within the training length and beyond?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.commands.command import Command, Named

if TYPE_CHECKING:
    from trainer.commands.configuration import Composed
    from trainer.workflows.analysis_request import AnalysisRequest


def read(composed: Composed) -> Named[AnalysisRequest]:
    """The checked request."""
    from trainer.analysis.names import kinds
    from trainer.runs.parsing import parse
    from trainer.workflows.analysis_request import AnalysisRequest

    request = parse(AnalysisRequest, composed.values, composed.problems)
    option, kind = composed.choices["analysis"], request.analysis.kind
    # An own option names its page; one of the program's with another kind is that kind's page.
    return Named(kind if option in kinds() else option, request)


def execute(named: Named[AnalysisRequest]) -> None:
    """Write the page, and print what was found."""
    from trainer.commands.console import set_up_console
    from trainer.workflows.analyze import analyze

    set_up_console()
    report, page = analyze(named.request, named.name)
    for section in report.sections:
        print(f"\n{section.title}")
        for finding in section.findings:
            print(f"- {finding}")
    for note in report.notes:
        print(f"\nNote: {note}")
    print(f"\nReport: {page}")


HELP = """
python -m trainer analyze checkpoint=PATH +analysis=NAME [KEY=VALUE ...]

Reads held-out text with a model once and writes a page about its attention: figures (SVG, PNG,
CSV), numbers (JSON) and findings, in analysis/NAME of the run directory.
"""
COMMAND = Command("analyze", HELP, read, execute, described=("analysis",))
