"""``python -m trainer analyze PATH +analysis=NAME ...``: the attention of a model, within the
training length and beyond."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from trainer.commands.hydra.command import Command, Named
from trainer.common.processes import stopping_at_once

if TYPE_CHECKING:
    from trainer.commands.hydra.composing import Composed
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
    """Write the page."""
    from trainer.commands.console import set_up_console
    from trainer.workflows.analyze import analyze

    set_up_console()
    with stopping_at_once("Stopped", signal.SIGTERM, is_resumable=False):
        _, page = analyze(named.request, named.name)
    print(f"Numbers: {page.with_name('results.csv')}")
    print(f"Report: {page}")


HELP = """
python -m trainer analyze PATH +analysis=NAME [KEY=VALUE ...]

Reads held-out text with a model once and writes a page about its attention: figures (SVG, PNG)
and numbers (results.csv), in analysis/NAME of the run directory.
"""
COMMAND = Command(
    "analyze", HELP, read, execute, described=("analysis",), subject="checkpoint", alone=True
)
