"""``metrics.csv``: one row a logged step, no gap and no duplicate, however often a run resumes.

Columns: ``phase`` is 0 before the drop and 1 after it; ``loss`` (nats per token, weighted as
trained) is the mean since the row before, ``loss/quarter_1`` to ``_4`` the same by position in the
sequence; ``time/`` are seconds a step; ``memory`` is the peak on the GPU in GiB and ``mfu`` the
share of its dense peak, both empty where there is none; the ``drop/`` columns are filled in the
first row after the drop and in the last. ``time/monitor`` does not count into
``tokens_per_second`` and ``mfu``. Behind these stand the columns of what a run monitors
(``length/``, ``probe/``), filled in the first row after each measurement.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from trainer.training.tally import BUCKETS
from trainer.training.timers import PARTS

COLUMNS = (
    "step",
    "tokens",
    "phase",
    "loss",
    *(f"loss/quarter_{i}" for i in range(1, BUCKETS + 1)),
    "gradient_norm",
    "parameter_norm",
    "skipped_steps",
    "loss_spikes",
    "gradient_spikes",
    "learning_rate",
    "tokens_per_second",
    *(f"time/{part}" for part in PARTS),
    "memory",
    "mfu",
    "drop/loss_before",
    "drop/loss_after",
    "drop/loss_end",
)


TIMES = ("tokens_per_second", "time/", "mfu", "memory")
"""Beginnings of the columns that differ between two runs of the same."""


class MetricsFile(Logger):
    """Appends to a CSV file; a row is flushed as soon as it is written.

    A row with other columns than the file's has the file written anew, with room for them.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def name(self) -> str:
        """Lightning's name for the logger."""
        return "metrics"

    @property
    def version(self) -> str:
        """There is one version: the run directory is stable."""
        return ""

    def continue_from(self, step: int, source: Path | None = None) -> None:
        """Keep the rows up to ``step``, of this file or of ``source`` where this is missing."""
        if source is not None and not self.path.exists():
            shutil.copyfile(source, self.path)
        self._write([row for row in read_metrics(self.path) if row["step"] <= step])

    def _write(self, rows: list[dict[str, Any]]) -> None:
        temporary = self.path.with_suffix(".csv.partial")
        with temporary.open("w", newline="") as file:
            columns = dict.fromkeys([*COLUMNS, *(key for row in rows for key in row)])
            writer = csv.DictWriter(file, list(columns))
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self.path)

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They stand in ``config.yaml``."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Append a row."""
        row = metrics | {"step": step}
        with self.path.open(newline="") as file:
            columns = next(csv.reader(file))
        if not row.keys() <= set(columns):
            self._write([*read_metrics(self.path), row])
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete rows of a metrics file, numbers as numbers, empty cells left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        text = file.read()
    rows = []
    # A row that a killed process left without its line end is incomplete.
    for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        rows.append({key: _number(value) for key, value in row.items() if value not in ("", None)})
    return rows


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if text.isdecimal() else value
