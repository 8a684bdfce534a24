"""The page of a run, with its figures beside it.

A page is one HTML file that opens anywhere: no network, no scripts, and figures inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomically
from trainer.common.words import VERDICTS, counted, factor_label, percent
from trainer.config import PERPLEXITY
from trainer.evaluation.results import Report, estimates, lengths_of, troubles
from trainer.plotting.style import save
from trainer.report.figures import plots
from trainer.report.files import base64, render
from trainer.report.tables import highest, interval, tables, trials_of

PAGE = "report.html"
_RATE = "tokens_per_second"  # timing that the page shows in the table of arms


def write_renderings(report: Report, directory: Path) -> None:
    """Write ``figures/NAME.svg`` and ``.png``, and ``report.html`` with the figures in it."""
    figures = []
    for plot in plots(report):
        svg = base64(save(plot.figure, directory / "figures" / plot.name))
        figures.append((plot, svg))
    filters: dict[str, Callable[..., Any]] = {
        "percent": percent,
        "thousands": lambda number: f"{number:,}".replace(",", "\u202f"),
    }
    timing = {key: value for key, value in report.timing.items() if key != _RATE}
    counts = Counter(VERDICTS[observation.shown] for observation in report.observations)
    text = render(
        "report.html.j2",
        filters,
        report=report,
        lead=lead(report),
        tally=", ".join(f"{counts[word]} {word}" for word in VERDICTS.values() if counts[word]),
        troubles=troubles(report.arms),
        measured=measured(report),
        tables=tables(report),
        figures=figures,
        verdicts=VERDICTS,
        rates=report.timing.get(_RATE, {}),
        made=report.made,
        details={"Settings": report.config, "Environment": report.environment, "Timing": timing},
    )
    write_atomically(directory / PAGE, text)


def lead(report: Report) -> str:
    """Return the result in two sentences, or an empty text if nothing has a score."""
    if not report.scored:
        return ""
    task = report.scored[0]
    scores = estimates(report.rows, task)
    longest, factor = list(lengths_of(report.rows[report.rows.task == task]).items())[-1]
    far = {row: of_row[longest] for row, of_row in scores.items() if longest in of_row}
    shown = {row: f"{percent(e.mean)}% ({interval(e)})" for row, e in far.items()}
    times = factor_label(factor) + ("" if report.trained == report.training_length else report.unit)
    best, *ties = highest({row: e.mean for row, e in far.items()})
    first = next(iter(scores))
    alike = f" (and {len(ties)} alike)" if ties else ""
    text = (
        f"Trained at {report.trained} tokens and tested at up to {longest} ({times}). There "
        f"{report.row_name(best)}{alike} scores highest in {report.tasks[task]}, {shown[best]}"
    )
    if first in shown and first not in (best, *ties):
        text += f", and {report.row_name(first)} {shown[first]}"
    return f"{text}."


def measured(report: Report) -> list[tuple[str, str]]:
    """Return what was measured, as pairs of term and text; empty if nothing was."""
    rows = report.rows
    if rows.empty:
        return []
    lengths = ", ".join(f"{n} ({factor_label(f)})" for n, f in lengths_of(rows).items())
    words = [
        ("Models", ", ".join(rows.model.unique())),
        ("Methods", ", ".join(report.methods[key] for key in rows.method.unique())),
        ("Lengths in tokens", lengths),
    ]
    for task in report.scored:
        if task in set(report.trials.task):
            text = f"{trials_of(report, task)} at each length, the same for all models and methods"
            words.append((report.tasks[task], text))
    if PERPLEXITY in set(rows.task):
        text = "held-out text; windows of all lengths end with the same tokens"
        words.append((report.tasks[PERPLEXITY], text))
    cells = rows.drop_duplicates(["model", "method", "task", "length"]).seconds.dropna()
    seconds = float(cells.sum())
    time = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} minutes"
    words.append(("Time", f"{time} of measuring {counted(len(cells), 'cell')}"))
    return words
