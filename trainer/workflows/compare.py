"""Runs beside each other, from their result tables; nothing is measured again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from trainer.common.errors import UserError
from trainer.common.words import factor_label, percent
from trainer.config import SAME
from trainer.evaluation.results import AS_IS, lengths_of, read_csv
from trainer.report.tables import Entry, Table
from trainer.runs.directory import RECORD, saved_run

TABLE = "results.csv"


def compare(runs: Sequence[str]) -> list[Table]:
    """Return a table for each task and metric with a row for each run, model and method, and a
    column for each length. Runs are named by their directories.

    ``runs``: directories that hold ``results.csv``, or whose ``evaluation`` does.

    Raises:
        UserError: a run has no results.
    """
    if not runs:
        raise UserError("runs: expected one or more directories")
    names = [Path(run).resolve().name for run in runs]
    named = zip(names if len({*names}) == len(names) else runs, runs, strict=True)
    rows = pd.concat([results(run).assign(run=name) for name, run in named], ignore_index=True)
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
        if path.is_file() and len(rows := read_csv(path)):
            return rows
    raise UserError(f"runs: expected directories with rows in {TABLE}, got {run!r}")


def cell(row: Mapping[str, Any]) -> Entry:
    """Return a score in percent, or a loss, with its 95% interval."""
    show = percent if row["metric"] == "score" else "{:.3f}".format
    limits = "" if pd.isna(row["low"]) else f"{show(row['low'])}–{show(row['high'])}"
    return Entry(show(row["value"]), limits)


def missing_control(runs: Sequence[str]) -> str | None:
    """Say that a drop is compared with runs of another schedule alone; None if it is not.

    A drop warms the learning rate up again. The control has this schedule too: ``drop.to=same``.
    """
    configs = [saved_run(Path(run)) for run in runs if Path(run, RECORD).is_file()]
    drops = {config.drop_step is not None for config in configs}
    controls = [control.get("drop") or {} for c in configs for control in c.controls.values()]
    if len(drops) < 2 or SAME in [c.drop.to for c in configs] + [c.get("to") for c in controls]:
        return None
    return "Runs with a drop restart their learning rate, the others do not: drop.to=same does."
