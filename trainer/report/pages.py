"""The pages of a run, a sweep and an analysis, with the files beside them.

A page is one HTML file that opens anywhere: no network, no scripts, and figures inside.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomically
from trainer.common.words import VERDICTS, counted, factor_label, percent
from trainer.evaluation.outcomes import Outcomes, row_name
from trainer.evaluation.results import PERPLEXITY, Observation, Report, troubles
from trainer.report.figures import write_figures
from trainer.report.files import Drawn, render
from trainer.report.sweep import (
    Sweep,
    csv_sweep,
    facts,
    legend,
    markdown_sweep,
    sweep_columns,
    unfinished,
)
from trainer.report.sweep_figures import sweep_figure
from trainer.report.tables import (
    UNMEASURED,
    csv_table,
    highest,
    interval,
    latex_tables,
    markdown_tables,
    tables,
    trials_of,
)

PAGE = "report.html"
_RATE = "tokens_per_second"  # timing that the page shows in the table of arms
_WIDEST = 52  # width in rem of a figure as wide as the text


def write_renderings(report: Report, directory: Path) -> list[Drawn]:
    """Write ``table.md``, ``table.tex``, ``table.csv``, ``figures/`` and ``report.html``.

    Returns the figures. All files depend on the report alone. ``report.json`` is written last, by
    :meth:`Report.write`, and marks the directory as complete. Raises ``OSError`` as the file system
    does.
    """
    write_atomically(directory / "table.md", markdown_tables(report))
    write_atomically(directory / "table.tex", latex_tables(report))
    write_atomically(directory / "table.csv", csv_table(report))
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
    text = render(
        "report.html.j2",
        filters,
        report=report,
        lead=" ".join(filter(None, (lead(report), tally(report.observations)))),
        troubles=troubles(report.arms),
        measured=measured(report),
        unmeasured=UNMEASURED,
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
    scored = {row: estimate for row, estimate in estimates.items() if estimate is not None}
    measure = outcomes.task(tasks[0]) if len(tasks) == 1 else f"the mean over {len(tasks)} tasks"
    if report.trained == report.training_length:
        trained, times = f"at {report.trained}", factor_label(factor)
    else:
        trained, times = f"at up to {report.trained}", f"{factor_label(factor)} {report.unit}"
    text = f"Trained {trained} tokens and tested at up to {longest} ({times})."
    if not scored:
        return text
    winners, first = highest(scored), outcomes.rows[0]
    best = winners[0]
    top = scored[best]
    reached = f"{percent(top.mean)}% ({interval(top)})"
    if len(scored) == 1:
        return f"{text} {outcomes.name(best)} reaches {reached} there in {measure}."
    of_all = f"{len(scored)} combinations of model and method"
    if top.mean == 0:
        return f"{text} None of {of_all} finds anything there in {measure}: {reached}."
    if len(winners) == 1:
        do_best = f"{outcomes.name(best)} scores highest"
    else:
        do_best = f"{len(winners)} score highest, all alike ({outcomes.name(best)} is one),"
    text += f" Of {of_all}, {do_best} there in {measure}: {reached}"
    reference = scored.get(first)
    if reference is None or first in winners:
        return f"{text}."
    share = f"{percent(reference.mean)}% ({interval(reference)})"
    return f"{text}; {outcomes.name(first)} has {share}."


def tally(observations: Sequence[Observation]) -> str:
    """Return how many of the papers' claims are shown, or an empty text if none was judged."""
    if not observations:
        return ""
    counts = Counter(VERDICTS[observation.shown] for observation in observations)
    verdicts = ", ".join(f"{counts[word]} {word}" for word in VERDICTS.values() if counts[word])
    return f"Of {counted(len(observations), 'observation')} of the papers: {verdicts}."


def measured(report: Report) -> list[tuple[str, str]]:
    """Return what was measured, as pairs of term and text; empty if nothing was."""
    if not report.cells:
        return []
    outcomes = Outcomes(report)
    lengths = dict(sorted({(cell.length, cell.factor) for cell in report.cells}))
    spans = (f"{length} ({factor_label(factor)})" for length, factor in lengths.items())
    words = [
        ("Models", ", ".join(outcomes.models)),
        ("Methods", ", ".join(map(outcomes.method, outcomes.methods))),
        ("Lengths in tokens", ", ".join(spans)),
    ]
    for task in outcomes.scored:
        trials = trials_of([c for c in report.cells if c.task == task and c.scores])
        text = f"{trials} at each length, the same for all models and methods"
        words.append((outcomes.task(task), text))
    if any(cell.task == PERPLEXITY for cell in report.cells):
        text = "held-out text; windows of all lengths end with the same tokens"
        words.append((outcomes.task(PERPLEXITY), text))
    seconds = sum(cell.seconds for cell in report.cells)
    if seconds:
        time = f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} minutes"
        words.append(("Time", f"{time} of measuring {counted(len(report.cells), 'cell')}"))
    return words


def write_sweep_report(sweep: Sweep, made: dict[str, str], directory: Path) -> Path:
    """Write ``table.md``, ``table.csv``, ``figures/sweep.*`` and ``report.html``; return the page.

    ``made``: date, command and program, as text by term. Raises ``OSError`` as the file system
    does.
    """
    write_atomically(directory / "table.md", markdown_sweep(sweep))
    write_atomically(directory / "table.csv", csv_sweep(sweep))
    figures = [plan.write(directory / "figures" / plan.name) for plan in sweep_figure(sweep)]
    columns = sweep_columns(sweep)
    text = render(
        "sweep.html.j2",
        {},
        sweep=sweep,
        made=made,
        details={},
        troubles=unfinished(sweep),
        legend=legend(sweep),
        heads=[head.split("\n") for head, _ in columns],
        rows=[
            (
                name,
                run,
                [column.get(run.place) for _, column in columns],
                facts(run),
                _page_of(run.place, directory),
            )
            for name, run in zip(sweep.names, sweep.runs, strict=True)
        ],
        figures=figures,
    )
    write_atomically(directory / PAGE, text)
    return directory / PAGE


def _page_of(place: str, directory: Path) -> str | None:
    """Return the relative path of a run's own page, or None if it has none."""
    page = Path(place, PAGE)
    return os.path.relpath(page, directory) if page.is_file() else None
