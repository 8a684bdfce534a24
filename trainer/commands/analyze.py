"""``python -m trainer analyze PATH +analysis=NAME ...``: the attention of a model, within the
training length and beyond."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, Named
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
    from trainer.report.pages import GeometryReport
    from trainer.workflows.requests import AnalysisRequest


def read(composed: Composed) -> Named[AnalysisRequest]:
    """Return the checked request."""
    from trainer.analysis.settings import kinds
    from trainer.runs.parsing import parse
    from trainer.workflows.requests import AnalysisRequest

    request = parse(AnalysisRequest, composed.values, composed.problems)
    option, kind = composed.choices["analysis"], request.analysis.kind
    # A user's option names its page. An option of the program with another kind does not.
    return Named(kind if option in kinds() else option, request)


def execute(named: Named[AnalysisRequest]) -> None:
    """Write the page, and print what was found."""
    from trainer.commands.console import set_up_console
    from trainer.workflows.analyze import analyze

    set_up_console()
    with stopping_at_once("Stopped", signal.SIGTERM, is_resumable=False):
        report, page = analyze(named.request, named.name)
    print("\n".join(summary(report) if len(report.sections) > 2 else findings(report)))
    for note in report.notes:
        print(f"Note: {note}")
    print(f"Report: {page}")


def findings(report: GeometryReport) -> list[str]:
    """Return the full findings of every section."""
    return [
        line
        for section in report.sections
        for line in (section.title, *(f"- {finding}" for finding in section.findings))
    ]


def summary(report: GeometryReport) -> list[str]:
    """Return lines on what changes with the length, and on what else the page shows."""
    from trainer.analysis.studies.section import glance
    from trainer.common.words import counted

    C, length = report.training_length, report.length
    indicators = glance([section.numbers for section in report.sections])
    width = max((len(indicator.name) for indicator in indicators), default=0)
    count = sum(len(section.findings) for section in report.sections)
    titles = ", ".join(section.title for section in report.sections)
    return [
        f"{report.name}, from {C:,} (trained) to {length:,} tokens:"
        if length > C
        else f"{report.name} at {length:,} tokens:",
        *(
            f"  {indicator.name:{width}}  {indicator.shown(indicator.within):>7}"
            + (
                f" → {indicator.shown(indicator.beyond):7} {indicator.verdict or 'not judged'}"
                if indicator.goes_beyond
                else ""
            )
            for indicator in indicators
        ),
        f"{counted(count, 'finding')} about: {titles}.",
    ]


HELP = """
python -m trainer analyze PATH +analysis=NAME [KEY=VALUE ...]

Reads held-out text with a model once and writes a page about its attention: figures (SVG, PNG,
CSV), numbers (JSON) and findings, in analysis/NAME of the run directory.
"""
COMMAND = Command(
    "analyze", HELP, read, execute, described=("analysis",), subject="checkpoint", alone=True
)
