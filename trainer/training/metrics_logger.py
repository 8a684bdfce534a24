"""Lightning's logger that writes ``metrics.csv``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from trainer.runs.metrics_file import append_metrics


class MetricsFile(Logger):
    """Appends to a CSV file; a row is flushed as soon as it is written."""

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

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """They stand in ``config.yaml``."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Append a row."""
        append_metrics(self.path, metrics | {"step": step})
