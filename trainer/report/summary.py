"""The report in one sentence, and the words that all of its renderings share."""

from __future__ import annotations

from trainer.report.results import Cell, Observation, Report

VERDICTS = {True: "shown", False: "not shown", None: "not judged"}


def factor_label(factor: float) -> str:
    """``2×`` for 2.0, ``1.5×`` for 1.5."""
    return f"{factor:g}×"


def percent(fraction: float) -> str:
    """``97.3`` for 0.973."""
    return f"{100 * fraction:.1f}"


def half_width(cell: Cell) -> float | None:
    """Half the width of a cell's 95% interval, as a fraction; ``None`` without an interval."""
    return None if cell.retrieval_ci is None else (cell.retrieval_ci[1] - cell.retrieval_ci[0]) / 2


def summary(report: Report) -> str:
    """One or two sentences built from the numbers alone: reach, and the tally of observations."""
    parts = [_reach(report), _tally(report.observations)]
    return " ".join(part for part in parts if part)


def _reach(report: Report) -> str:
    measured = [cell for cell in report.table if cell.retrieval is not None]
    if not measured:
        return ""
    longest = max(cell.length for cell in measured)
    cells = [cell for cell in measured if cell.length == longest]
    best = max(cells, key=lambda cell: cell.retrieval or 0)
    worst = min(cells, key=lambda cell: cell.retrieval or 0)
    text = (
        f"Trained at {report.training_length} tokens and tested at up to {longest} "
        f"({factor_label(best.factor)}), where "
    )
    if len(cells) == 1:
        return f"{text}{best.method} retrieves {percent(best.retrieval or 0)}% of the needles."
    return (
        f"{text}retrieval ranges from {percent(worst.retrieval or 0)}% ({worst.method}) "
        f"to {percent(best.retrieval or 0)}% ({best.method})."
    )


def _tally(observations: tuple[Observation, ...]) -> str:
    if not observations:
        return ""
    counts = dict.fromkeys(VERDICTS.values(), 0)
    for observation in observations:
        counts[VERDICTS[observation.shown]] += 1
    said = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"Of {len(observations)} observations of the papers: {said}."
