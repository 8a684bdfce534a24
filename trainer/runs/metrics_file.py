"""Metrics of a run: the rows of ``metrics.csv``, and the panels that show them.

There is one row a logged step, without gap or duplicate, however often a run resumes.
docs/dashboard.md explains every metric. ``phase`` is the index of the step's phase, from 0; a run
with a drop and without named phases has 0 before the drop and 1 after it. ``loss`` (nats per token,
weighted as trained) is the mean since the previous row, ``loss/quarter_1`` to ``_4`` the same by
position in the sequence. ``time/`` are seconds a step. ``memory`` is the peak on the GPU in GiB,
``mfu`` the share of its dense peak; both are empty without a GPU. The ``drop/`` columns are filled
in the first row after the drop and in the last of its phase. ``epochs/`` say how often each text
has been read. ``time/monitor`` does not count into ``tokens_per_second`` and ``mfu``. The last
columns hold the measurements of a run's monitors (``length/``, ``benchmark/``, ``probe/``), filled
in the first row after each measurement.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import write_atomically
from trainer.common.formats import read_content

BUCKETS = 4
"""Parts of a sequence whose losses are logged separately."""
PARTS = ("data", "compute", "optimizer", "checkpoint", "monitor")
"""Parts of a step whose times are logged separately."""
PART_TIMES = tuple(f"time/{part}" for part in PARTS)
DROP_LOSSES = "drop/loss_before", "drop/loss_after", "drop/loss_end"
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
    *PART_TIMES,
    "memory",
    "mfu",
    *DROP_LOSSES,
)
TIMES = ("tokens_per_second", "time/", "mfu", "memory")
"""Prefixes of the columns that differ between two runs of one configuration."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the complete rows of a metrics file, with numbers parsed and empty cells omitted.

    Raises:
        UserError: the file is damaged.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    try:
        text = read_content(path).decode("utf-8")
        if "\n" not in text:
            raise ValueError("it has no line of columns")
        # A row without line end was cut short by a kill.
        for row in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
            values = {k: _number(v) for k, v in row.items() if v not in ("", None)}
            if not isinstance(values.get("step"), int):
                raise ValueError("there is no step")
            rows.append(values)
    except (ValueError, TypeError, csv.Error) as error:
        raise UserError.at(
            "run_dir",
            f"{str(path)!r} is damaged in row {len(rows) + 1} ({error}); restore it, or remove it "
            "to go on without the rows until now.",
        ) from error
    return rows


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


def continue_metrics(path: Path, step: int, source: Path | None = None) -> list[dict[str, Any]]:
    """Keep the rows up to ``step``; return the others.

    If the file is missing, the rows come from ``source``.
    """
    if source is not None and not path.exists():
        write_atomically(path, source.read_bytes())
    rows = read_metrics(path)
    write_metrics(path, [row for row in rows if row["step"] <= step])
    return [row for row in rows if row["step"] > step]


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if text.isdecimal() else value


STEP = "trainer/global_step"
"""Name that Lightning's logger gives the optimizer step."""
LENGTH = "evaluation/length"


@dataclass(frozen=True)
class Panel:
    """Panel of `watch` and of the Weights & Biases workspace.

    It shows lines of ``metrics``, and of all that match ``pattern``, against ``x``; without ``x``
    bars of the last values. ``rows``: height of each line in a terminal; 0: only the workspace
    shows them. ``whole``: whether values lie between 0 and 1, which the axis shows.
    """

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None
    x: str | None = STEP
    rows: int = 0
    whole: bool = False


RETRIEVAL, TEXT_LOSS = "length/retrieval_", "length/loss_"
"""Prefixes of metrics that are measured at several lengths in training."""

SECTIONS = {
    "Training": (
        Panel("Loss (nats per token)", ("loss",), rows=4),
        Panel("Learning rate", ("learning_rate",), rows=1),
        Panel("Gradient norm", ("gradient_norm",)),
        Panel("Tokens per second", ("tokens_per_second",)),
        Panel("Model FLOPs utilisation", ("mfu",)),
        Panel("Skipped steps", ("skipped_steps",)),
    ),
    "Drop": (
        Panel("Held-out loss around the drop (nats per token)", DROP_LOSSES, x=None),
        Panel("Phase", ("phase",)),
    ),
    "Length generalisation": (
        Panel(
            "Retrieval by length (fraction of trials)",
            pattern="evaluation/retrieval/.+",
            x=LENGTH,
        ),
        Panel("Loss by length (nats per token)", pattern="evaluation/loss/.+", x=LENGTH),
    ),
    "While training": (
        Panel(
            "Retrieval by length (fraction of trials)",
            pattern=f"{RETRIEVAL}.+",
            rows=2,
            whole=True,
        ),
        Panel("Loss by length (nats per token)", pattern=f"{TEXT_LOSS}[^/]+", rows=1),
        Panel("Loss by length and text (nats per token)", pattern=f"{TEXT_LOSS}[^/]+/.+"),
        Panel("Attention", pattern="probe/.+"),
    ),
    "System": (
        Panel("Seconds of a step", PART_TIMES),
        Panel("Peak memory (GiB)", ("memory",)),
    ),
}
"""Panels by section, in the order in which they are shown."""
