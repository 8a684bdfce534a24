"""Lightning logger that writes ``metrics.csv``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from trainer.runs.metrics_file import append_metrics

log = logging.getLogger(__name__)


class MetricsFile(Logger):
    """Logger that appends rows to a CSV file and flushes each of them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.waiting: list[dict[str, Any]] = []  # rows not written yet because the disk was full

    @property
    def name(self) -> str:
        """Name that Lightning shows for the logger."""
        return "metrics"

    @property
    def version(self) -> str:
        """Version that Lightning shows; there is only one, since the run directory is stable."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Do nothing: hyperparameters are in ``config.yaml``."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Append a row; keep it in memory if the disk is full, which stops no run."""
        self.waiting.append(metrics | {"step": step})
        try:
            self._write()
        except OSError as error:
            if len(self.waiting) == 1:
                log.warning("%s: %s; the run goes on", self.path.name, error.strerror)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write the rows kept in memory.

        Raises:
            OSError: the disk is still full.
        """
        if status == "success":
            self._write()

    def _write(self) -> None:
        while self.waiting:
            append_metrics(self.path, self.waiting[0])
            del self.waiting[0]
