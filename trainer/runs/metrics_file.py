"""Metrics of a run: the rows of ``metrics.csv``.

There is one row a logged step, without gap or duplicate, however often a run resumes.
docs/cluster.md explains every metric. ``phase`` is the index of the step's phase, from 0; a run
with a drop and without named phases has 0 before the drop and 1 after it. ``loss`` (nats per token,
weighted as trained) is the mean since the previous row. ``memory`` is the peak on the GPU in GiB,
``mfu`` the share of its dense peak; both are empty without a GPU. The ``drop/`` columns are filled
in the first row after the drop and in the last of its phase. ``epochs/`` say how often each text
has been read. Measurements and checkpoints do not count into ``tokens_per_second`` and ``mfu``. The
last columns hold the measurements of a run's monitors (``length/``, ``benchmark/``, ``probe/``),
filled in the first row after each measurement.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomically

DROP_LOSSES = "drop/loss_before", "drop/loss_after", "drop/loss_end"
COLUMNS = (
    "step",
    "tokens",
    "phase",
    "loss",
    "gradient_norm",
    "parameter_norm",
    "skipped_steps",
    "learning_rate",
    "tokens_per_second",
    "memory",
    "mfu",
    *DROP_LOSSES,
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a metrics file, with numbers parsed and empty cells omitted; none
    if there is no file."""
    if not path.exists():
        return []
    text = path.read_text("utf-8")
    # A row without line end was cut short by a kill.
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{key: _number(value) for key, value in row.items() if value} for row in rows]


def write_metrics(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replace the file by these rows, with the standard columns and those of the rows."""
    text = StringIO(newline="")
    columns = dict.fromkeys([*COLUMNS, *(key for row in rows for key in row)])
    writer = csv.DictWriter(text, list(columns))
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def append_metrics(path: Path, row: dict[str, Any]) -> None:
    """Append a row; rewrite the file if it has new columns."""
    with path.open(newline="") as file:
        columns = next(csv.reader(file))
    if not row.keys() <= set(columns):
        write_metrics(path, [*read_metrics(path), row])
        return
    size = path.stat().st_size
    try:
        with path.open("a", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)
    except OSError:  # remove the partial row that a full disk left
        os.truncate(path, size)
        raise


def continue_metrics(path: Path, step: int, source: Path | None = None) -> None:
    """Keep the rows up to ``step``; take them from ``source`` if there is no file."""
    rows = read_metrics(path if path.exists() or source is None else source)
    write_metrics(path, [row for row in rows if row["step"] <= step])


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if text.isdecimal() else value


LENGTH = "evaluation/length"
