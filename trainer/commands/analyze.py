"""``python -m trainer analyze checkpoint=PATH +analysis=NAME ...``: what does its attention look
like, within the training length and beyond?"""

from __future__ import annotations

from trainer.commands.configuration import compose_values
from trainer.commands.console import set_up_console
from trainer.errors import UserError, did_you_mean

CHOICES = ("+analysis=", "analysis=")


def run(words: list[str]) -> None:
    """Analyse ``checkpoint`` and write a page into ``output``."""
    if any(word in ("-h", "--help") for word in words):
        print(HELP)
        return
    from trainer.runs.parsing import parse_as
    from trainer.workflows.analysis_request import AnalysisRequest
    from trainer.workflows.analyze import KINDS, analyze

    kinds = [word.partition("=")[2] for word in words if word.startswith(CHOICES)]
    problems = [
        f"analysis: there is no analysis {kind!r}.{did_you_mean(kind, KINDS)}"
        for kind in kinds
        if kind not in KINDS
    ]
    if len(kinds) > 1:
        problems.append(f"analysis: expected one analysis or 'all', got {', '.join(kinds)}.")
    if not kinds:
        problems.append(f"analysis: give +analysis=NAME, one of {', '.join(KINDS)}.")
    if problems:
        raise UserError(*problems)
    values, found = compose_values([w for w in words if not w.startswith(CHOICES)], "analyze")
    request = parse_as(AnalysisRequest, values, found)
    set_up_console()
    report, page = analyze(request, kinds[-1])
    for section in report.sections:
        print(f"\n{section.title}")
        for finding in section.findings:
            print(f"- {finding}")
    for note in report.notes:
        print(f"\nNote: {note}")
    print(f"\nReport: {page}")


HELP = """\
python -m trainer analyze checkpoint=PATH +analysis=NAME [KEY=VALUE ...]

Reads held-out text with a model once and writes a page about its attention: figures (SVG, PNG,
CSV), numbers (JSON) and findings, in analysis/NAME of the run directory.

  clusters           queries and keys as clouds, with and without the rotation, by length
  sinks              attention on the first token, and how it is lost
  synthetic          what the model's spectrum and others do to a cloud in principle
  frequency_entropy  which frequencies carry regular signals
  offset_features    rotary features with large norms, and their bounds
  matrix_entropy     which heads have few directions
  positional_bias    heads that attend by position alone
  drop               before and after a drop; compare= for another model before it
  all                those of them that the model has the structure for, on one page

  checkpoint=  a run directory, a checkpoint in it, or a published model (a directory or .gguf)
  output=      where the page goes
  text=        another source of held-out text, such as 'text={source: files, files: [a.txt]}'
  analysis.    length, texts, chosen, dtype, seed: see conf/analyze.yaml
"""
