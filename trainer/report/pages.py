"""The page of a run, with the files beside it.

A page is one HTML file that opens anywhere: no network, no scripts, and figures inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomically
from trainer.common.words import VERDICTS, counted, factor_label, percent
from trainer.evaluation.outcomes import Outcomes, row_name
from trainer.evaluation.results import PERPLEXITY, Report, troubles
from trainer.report.figures import write_figures
from trainer.report.files import Drawn, render
from trainer.report.tables import highest, interval, markdown_tables, tables, trials_of

PAGE = "report.html"
_RATE = "tokens_per_second"  # timing that the page shows in the table of arms


def write_renderings(report: Report, directory: Path) -> list[Drawn]:
    """Write ``table.md``, ``figures/`` and ``report.html``; return the figures.

    All files depend on the report alone. ``report.json`` is written last, by :meth:`Report.write`,
    and marks the directory as complete.
    """
    write_atomically(directory / "table.md", markdown_tables(report))
    figures = write_figures(report, directory / "figures")
    write_html(report, figures, directory / PAGE)
    return figures


def write_html(report: Report, figures: Sequence[Drawn], path: Path) -> None:
    """Write the page of a report atomically. Raises ``OSError`` if a figure cannot be read."""
    filters: dict[str, Callable[..., Any]] = {
        "by_model": lambda rows: [
            (m, list(group)) for m, group in groupby(rows, lambda row: row[0])
        ],
        # A no-break space after the plus.
        "row_name": lambda method, model, first: row_name(model, method, first=first).replace(
            "+ ", "+\u00a0"
        ),
        "percent": percent,
        "thousands": lambda number: f"{number:,}".replace(",", "\u202f"),
    }
    timing = {key: value for key, value in report.timing.items() if key != _RATE}
    counts = Counter(VERDICTS[observation.shown] for observation in report.observations)
    verdicts = ", ".join(f"{counts[word]} {word}" for word in VERDICTS.values() if counts[word])
    claims = counted(len(report.observations), "claim")
    tally = f"Of {claims} of the papers: {verdicts}." if counts else ""
    text = render(
        "report.html.j2",
        filters,
        report=report,
        lead=" ".join(filter(None, (lead(report), tally))),
        troubles=troubles(report.arms),
        measured=measured(report),
        tables=tables(report),
        figures=figures,
        verdicts=VERDICTS,
        rates=report.timing.get(_RATE, {}),
        made=report.made,
        details={"Settings": report.config, "Environment": report.environment, "Timing": timing},
    )
    write_atomically(path, text)


def lead(report: Report) -> str:
    """Return the result in two sentences, or an empty text if nothing has a score."""
    outcomes = Outcomes(report)
    tasks = outcomes.averaged or outcomes.scored[:1]
    if not tasks:
        return ""
    longest, factor = list(outcomes.lengths(tasks).items())[-1]
    estimates = {row: outcomes.estimate(row, tasks, longest) for row in outcomes.rows}
    scores = {row: f"{percent(e.mean)}% ({interval(e)})" for row, e in estimates.items() if e}
    measure = outcomes.task(tasks[0]) if len(tasks) == 1 else f"the mean over {len(tasks)} tasks"
    times = factor_label(factor) + ("" if report.trained == report.training_length else report.unit)
    text = f"Trained at {report.trained} tokens and tested at up to {longest} ({times})."
    if not scores:
        return text
    best, *ties = highest(estimates)
    first = outcomes.rows[0]
    alike = f" (and {len(ties)} alike)" if ties else ""
    text += f" There {outcomes.name(best)}{alike} scores highest in {measure}, {scores[best]}"
    if first in scores and first not in (best, *ties):
        text += f", and {outcomes.name(first)} {scores[first]}"
    return f"{text}."


def measured(report: Report) -> list[tuple[str, str]]:
    """Return what was measured, as pairs of term and text; empty if nothing was."""
    if not report.cells:
        return []
    outcomes = Outcomes(report)
    lengths = dict(sorted({(cell.length, cell.factor) for cell in report.cells}))
    words = [
        ("Models", ", ".join(outcomes.models)),
        ("Methods", ", ".join(map(outcomes.method, outcomes.methods))),
        ("Lengths in tokens", ", ".join(f"{n} ({factor_label(f)})" for n, f in lengths.items())),
    ]
    for task in outcomes.scored:
        trials = trials_of([c for c in report.cells if c.task == task and c.scores])
        text = f"{trials} at each length, the same for all models and methods"
        words.append((outcomes.task(task), text))
    if any(cell.task == PERPLEXITY for cell in report.cells):
        text = "held-out text; windows of all lengths end with the same tokens"
        words.append((outcomes.task(PERPLEXITY), text))
    seconds = sum(cell.seconds for cell in report.cells)
    time = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} minutes"
    words.append(("Time", f"{time} of measuring {counted(len(report.cells), 'cell')}"))
    return words
