"""Lightning's logger that writes ``metrics.csv``."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from trainer.training.metrics_file import COLUMNS, read_metrics


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
