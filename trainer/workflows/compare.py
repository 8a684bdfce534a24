"""Runs beside each other, from their result tables; nothing is measured again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from trainer.common.errors import UserError
from trainer.common.words import factor_label, percent
from trainer.evaluation.results import AS_IS, lengths_of, read_csv
from trainer.report.tables import Entry, Table

TABLE = "results.csv"
NOT_COMPARED = ("name", "run_dir", "label", "overwrite", "controls", "evaluation", "logger")
"""Keys and groups of a run whose values do not name it in a comparison."""


def compare(runs: Sequence[str]) -> list[Table]:
    """Return a table for each task and metric with a row for each run, model and method, and a
    column for each length; runs are named by the settings in which they differ.

    ``runs``: directories that hold ``results.csv``, or whose ``evaluation`` does.

    Raises:
        UserError: a run has no results.
    """
    if not runs:
        raise UserError("runs: expected one or more directories")
    named = zip(names_of(runs), runs, strict=True)
    rows = pd.concat([results(run).assign(run=name) for name, run in named], ignore_index=True)
    rows = rows[~rows.metric.str.startswith("loss ")]  # losses at positions
    return [
        _table(f"{task}, {metric}", part)
        for (task, metric), part in rows.groupby(["task", "metric"], sort=False)
    ]


def _table(title: str, rows: pd.DataFrame) -> Table:
    lengths = lengths_of(rows)
    shown, before = [], None
    for (run, model, method), part in rows.groupby(["run", "model", "method"], sort=False):
        by_length = {row["length"]: cell(row) for row in part.to_dict("records")}
        is_first = before != (run, model)
        suffix = "" if method == AS_IS else f"+ {method}"
        name = f"{run}: {model} {suffix}".rstrip() if is_first else suffix
        shown.append((is_first, name, tuple(by_length.get(length) for length in lengths)))
        before = run, model
    heads = [(f"{length:,} tokens", factor_label(f)) for length, f in lengths.items()]
    return Table(title, "", "With 95% intervals.", tuple(heads), tuple(shown))


def results(run: str) -> pd.DataFrame:
    """Read the result table of a run, or of its evaluation."""
    for path in (Path(run, TABLE), Path(run, "evaluation", TABLE)):
        if path.is_file():
            return read_csv(path)
    raise UserError(f"runs: expected directories with {TABLE}, got {run!r}")


def cell(row: Mapping[str, Any]) -> Entry:
    """Return a score in percent, or a loss, with its 95% interval."""
    show = percent if row["metric"] == "score" else "{:.3f}".format
    limits = "" if pd.isna(row["low"]) else f"{show(row['low'])}–{show(row['high'])}"
    return Entry(show(row["value"]), limits)


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
