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
from pathlib import Path
from typing import Any

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
