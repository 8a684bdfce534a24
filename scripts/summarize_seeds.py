#!/usr/bin/env python
"""Print Markdown tables of several runs of the same experiment: mean, lowest and highest values.

python scripts/summarize_seeds.py runs/seed_0 runs/seed_1 runs/seed_2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from trainer.evaluation.outcomes import Outcomes, Result
from trainer.evaluation.results import Report


def spread(values: list[float], form: str) -> str:
    """Format values as ``mean (lowest to highest)``."""
    return f"{mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(reports: list[Report]) -> str:
    """Tabulate retrieval in % and text loss in nats per token by method and length."""
    results_by_cell: dict[tuple[str, int], list[Result]] = {}
    for report in reports:
        for result in Outcomes(report).results():
            results_by_cell.setdefault((result.name, result.length), []).append(result)
    lengths = dict(
        sorted({(r.length, r.factor) for results in results_by_cell.values() for r in results})
    )
    head = [f"{factor:g}x ({length} tokens)" for length, factor in lengths.items()]
    rows = [["method", *head], ["---"] * (len(head) + 1)]
    for method in dict.fromkeys(name for name, _ in results_by_cell):
        row = [method]
        for length in lengths:
            results = results_by_cell.get((method, length), [])
            retrieval = [100 * r.retrieval.mean for r in results if r.retrieval is not None]
            loss = [r.loss for r in results if r.loss is not None]
            row.append(f"{spread(retrieval, '.1f')}<br>{mean(loss):.3f}" if retrieval else "")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def claims(reports: list[Report]) -> str:
    """Tabulate how many runs show each observation of the papers."""
    rows = ["| claim | source | shown in |", "| --- | --- | --- |"]
    for index, observation in enumerate(reports[0].observations):
        count = sum(report.observations[index].shown is True for report in reports)
        rows.append(f"| {observation.claim} | {observation.source} | {count} of {len(reports)} |")
    return "\n".join(rows)


def drops(reports: list[Report]) -> str:
    """Tabulate the effect of the drop in every run."""
    rows = [
        "| run | step | loss before | just after | at the end |",
        "| --- | --- | --- | --- | --- |",
    ]
    for report in reports:
        if (drop := report.drop) is not None:
            losses = (drop.loss_before, drop.loss_after, drop.loss_end)
            cells = " | ".join("" if loss is None else f"{loss:.3f}" for loss in losses)
            rows.append(f"| {report.name} | {drop.step} | {cells} |")
    return "\n".join(rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    reports = [Report.read(run / "report.json") for run in parser.parse_args().runs]
    print(table(reports), drops(reports), claims(reports), sep="\n\n")


if __name__ == "__main__":
    main()
