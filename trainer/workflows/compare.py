"""Runs beside each other, from their result tables; nothing is measured again."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from trainer.common.errors import UserError
from trainer.common.words import factor_label, percent

TABLE = "results.csv"
NOT_COMPARED = ("name", "run_dir", "label", "overwrite", "controls", "evaluation", "logger")
"""Keys and groups of a run whose values do not name it in a comparison."""


def compare(runs: Sequence[str]) -> Table:
    """Return a table with a row for each run, model and method, and a column for each task and
    length; runs are named by the settings in which they differ.

    ``runs``: directories that hold ``results.csv``, or whose ``evaluation`` does.

    Raises:
        UserError: a run has no results.
    """
    if not runs:
        raise UserError("runs: expected one or more directories")
    names = names_of(runs)
    rows = [(name, row) for name, run in zip(names, runs, strict=True) for row in results(run)]
    places = sorted({_place(row) for _, row in rows}, key=lambda place: (place[0], place[2]))
    cells: dict[tuple[str, str, str], dict[Any, str]] = {}
    for name, row in rows:
        cells.setdefault((name, row["model"], row["method"]), {})[_place(row)] = cell_text(row)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for title in ("run", "model", "method"):
        table.add_column(title)
    for task, metric, length, factor in places:
        head = f"{task}\n{length:,} ({factor_label(factor)})\n{metric}"
        table.add_column(head, justify="right")
    for row_name, values in cells.items():
        table.add_row(*row_name, *(values.get(place, "") for place in places))
    return table


def results(run: str) -> list[dict[str, str]]:
    """Read the result table of a run, or of its evaluation."""
    for path in (Path(run, TABLE), Path(run, "evaluation", TABLE)):
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
    raise UserError(f"runs: expected directories with {TABLE}, got {run!r}")


def cell_text(row: Mapping[str, str]) -> str:
    """Return a score in percent, or a loss, with its 95% interval."""
    show = percent if row["metric"] == "score" else "{:.3f}".format
    value, low, high = (show(float(row[k])) if row[k] else "" for k in ("value", "low", "high"))
    return f"{value} ({low}–{high})" if low and high else value


def names_of(runs: Sequence[str]) -> list[str]:
    """Return the settings in which runs differ, or their paths if nothing else does."""
    settings = [dict(_flat(_config(run))) for run in runs]
    keys = dict.fromkeys(key for values in settings for key in values)
    differing = [key for key in keys if len({str(values.get(key)) for values in settings}) > 1]
    if not 0 < len(differing) <= 3:
        return list(runs)
    return [", ".join(f"{key}={values.get(key)}" for key in differing) for values in settings]


def _config(run: str) -> dict[str, Any]:
    path = Path(run, "config.yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if not prefix and key in NOT_COMPARED:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _place(row: Mapping[str, str]) -> tuple[str, str, int, float]:
    return row["task"], row["metric"], int(row["length"]), float(row["factor"])
