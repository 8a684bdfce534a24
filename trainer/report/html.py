"""The report as one HTML file that opens anywhere: no network, no scripts, figures inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.report.atomic import write_atomically
from trainer.report.drawn import Drawn
from trainer.report.health import troubles
from trainer.report.outcomes import Outcomes, row_name
from trainer.report.rendering import base64, render
from trainer.report.results import PERPLEXITY, Observation, Report
from trainer.report.table import tables
from trainer.report.words import VERDICTS, counted, factor_label, percent

_OWN_COLUMN = "tokens_per_second"  # of the table of arms


def write_html(report: Report, figures: Sequence[Drawn], path: Path) -> None:
    """Write the page, complete or not at all; it holds nothing but the report's data, the figures
    and fixed text. Raises ``OSError`` when a figure cannot be read."""
    filters: dict[str, Callable[..., Any]] = {
        "by_model": lambda rows: [(m, list(own)) for m, own in groupby(rows, lambda row: row[0])],
        "row_name": _row_name,
        "embedded": base64,
        "percent": percent,
        "counted": counted,
        "thousands": lambda number: f"{number:,}".replace(",", "\u202f"),
    }
    text = render(
        "report.html.j2",
        filters,
        report=report,
        lead=" ".join(filter(None, (lead(report), tally(report.observations)))),
        troubles=troubles(report.arms),
        measured=measured(report),
        tables=tables(report),
        figures=figures,
        verdicts=VERDICTS,
        rates=report.timing.get(_OWN_COLUMN, {}),
        timing={key: value for key, value in report.timing.items() if key != _OWN_COLUMN},
    )
    write_atomically(path, text)


def _row_name(method: str, model: str, first: bool) -> str:
    """A row's name, of which no line ends with the plus."""
    return row_name(model, method, first=first).replace("+ ", "+\u00a0")


def lead(report: Report) -> str:
    """The result in two sentences, made of the numbers alone; empty where nothing has a score."""
    outcomes = Outcomes(report)
    tasks = outcomes.averaged or outcomes.scored[:1]
    if not tasks:
        return ""
    longest, factor = list(outcomes.lengths(tasks).items())[-1]
    found = {row: outcomes.estimate(row, tasks, longest) for row in outcomes.rows}
    ranked = sorted(
        ((row, own) for row, own in found.items() if own is not None),
        key=lambda item: -item[1].mean,
    )
    what = outcomes.task(tasks[0]) if len(tasks) == 1 else f"the mean over {len(tasks)} tasks"
    text = (
        f"Trained at {report.training_length} tokens and tested at up to {longest} "
        f"({factor_label(factor)})."
    )
    if not ranked:
        return text
    (best, own), first = ranked[0], outcomes.rows[0]
    reached = f"{percent(own.mean)}% ({percent(own.low)}–{percent(own.high)})"
    if len(ranked) == 1:
        return f"{text} {outcomes.name(best)} reaches {reached} there in {what}."
    of_all = f"{len(ranked)} combinations of model and method"
    if own.mean == 0:
        return f"{text} None of {of_all} finds anything there in {what}: {reached}."
    text += f" Of {of_all} {outcomes.name(best)} reaches most there in {what}: {reached}"
    reference = found[first]
    if reference is None or best == first:
        return f"{text}."
    limits = f"{percent(reference.low)}–{percent(reference.high)}"
    return f"{text}; {outcomes.name(first)} has {percent(reference.mean)}% ({limits})."


def tally(observations: Sequence[Observation]) -> str:
    """How many of the papers' observations show; empty where none was held against the numbers."""
    if not observations:
        return ""
    counts = Counter(VERDICTS[observation.shown] for observation in observations)
    said = ", ".join(f"{counts[word]} {word}" for word in VERDICTS.values() if counts[word])
    return f"Of {counted(len(observations), 'observation')} of the papers: {said}."


def measured(report: Report) -> list[tuple[str, str]]:
    """What was measured, in words: a term and what it was."""
    outcomes = Outcomes(report)
    lengths = dict(sorted({(cell.length, cell.factor) for cell in report.cells}))
    spans = (f"{length} ({factor_label(factor)})" for length, factor in lengths.items())
    words = [
        ("Models", ", ".join(outcomes.models)),
        ("Methods", ", ".join(map(outcomes.method, outcomes.methods))),
        ("Lengths in tokens", ", ".join(spans)),
    ]
    for task in outcomes.scored:
        counts = sorted({len(c.scores) for c in report.cells if c.task == task and c.scores})
        least = "" if counts[0] == counts[-1] else f"{counts[0]:,} to "
        text = f"{least}{counted(counts[-1], 'trial')} at each length"
        words.append((outcomes.task(task), f"{text}, the same for all models and methods"))
    if any(cell.task == PERPLEXITY for cell in report.cells):
        text = "held-out text; windows of all lengths end with the same tokens"
        words.append((outcomes.task(PERPLEXITY), text))
    seconds = sum(cell.seconds for cell in report.cells)
    if seconds:
        time = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} minutes"
        words.append(("Time", f"{time} of measuring {counted(len(report.cells), 'cell')}"))
    return words
