"""Loggers: ``metrics.csv``, and the dashboards Weights & Biases and TensorBoard."""

from __future__ import annotations

import logging
import netrc
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from trainer.common.errors import Problem, UserError, first_line, os_reason
from trainer.common.files import write_atomically
from trainer.config import RunConfig
from trainer.evaluation.outcomes import Result
from trainer.evaluation.results import REACH_HEAD, Reaches, reach_rows
from trainer.runs.metrics_file import LENGTH, append_metrics
from trainer.runs.ranks import current_ranks, on_rank_zero

log = logging.getLogger(__name__)

WAIT = 30.0
"""Seconds for the first connection; wandb's own 90 are long where a job waits for them."""


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
                log.warning("%s: %s; the run goes on", self.path.name, os_reason(error))

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


def other_loggers(config: RunConfig) -> list[Logger]:
    """Create the configured loggers; all ranks call this together.

    wandb runs offline without a key, or if it cannot be reached.

    Raises:
        UserError: TensorBoard is requested and not installed.
    """
    loggers: list[Logger] = []
    settings = config.logger
    if settings.wandb:
        loggers.append(_wandb(config, on_rank_zero(lambda: wandb_id(Path(config.run_dir)))))
    if settings.tensorboard:
        from lightning.pytorch.loggers import TensorBoardLogger

        if problems := logger_problems(config):
            raise UserError(*problems)
        loggers.append(TensorBoardLogger(config.run_dir, name="tensorboard", version=""))
    return loggers


def _wandb(config: RunConfig, identity: str) -> Logger:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    global _unreachable  # noqa: PLW0603
    settings = config.logger

    def made(mode: str | None, identity: str = identity) -> WandbLogger:
        logger = WandbLogger(
            name=dashboard_name(config),
            group=config.name,
            project=settings.project,
            entity=settings.entity,
            id=identity,
            # Offline there is nothing to resume, and some versions warn of it.
            resume=None if mode == "offline" else "allow",
            save_dir=config.run_dir,
            # Lightning's `offline` sets a deprecated variable for the whole process.
            mode=mode,
            experiment=_kept.pop(identity, None) if _kept is not None else None,
            reinit="create_new",  # the run's own stays open while its controls train
            # otherwise it prints a screen of history
            settings=wandb.Settings(silent=True, init_timeout=WAIT),
        )
        logger._wandb_init.pop("anonymous", None)  # wandb warns about it, whatever its value
        return logger

    if settings.offline or not has_wandb_key():
        return made("offline")
    apart = f"{identity}-offline"  # the failed attempt keeps its id
    if _unreachable:
        return made("offline", apart)
    logger = made(None)
    if current_ranks().is_rank_zero:
        try:
            _ = logger.experiment  # which connects; Lightning would not before fit
        except Exception as error:  # whatever it is, it need not stop a run
            why = first_line(error)
            log.warning(
                "Weights & Biases cannot be reached (%s): this command logs offline; later "
                "`wandb sync %s/wandb/offline-run-*` sends it",
                *(why, config.run_dir),
            )
            _unreachable = _kept is not None
            return made("offline", apart)
    return logger


def logger_problems(config: RunConfig) -> list[Problem]:
    """Check that configured dashboards are installed; return a problem for each that is not."""
    if not config.logger.tensorboard or any(map(find_spec, ("tensorboard", "tensorboardX"))):
        return []
    return [
        Problem(
            "logger.tensorboard", "TensorBoard is not installed; pip install 'unrope[tensorboard]'."
        )
    ]


def dashboard_name(config: RunConfig) -> str:
    """Return the run's name on dashboards, for a control with its own: ``drope_demo/nope``."""
    place = Path(config.run_dir)
    return f"{config.name}/{place.name}" if place.parent.name == "controls" else config.name


_kept: dict[str, Any] | None = None
"""Within :func:`kept_dashboards` the runs of wandb that are open, by their ids."""
_unreachable = False
"""Whether within it Weights & Biases was tried and not reached: the other runs do not wait too."""


@contextmanager
def kept_dashboards() -> Iterator[None]:
    """Keep closed Weights & Biases runs open until the end of the block.

    Results computed after training go to the same run, which could not be continued offline.
    """
    global _kept, _unreachable  # noqa: PLW0603
    _kept = {}
    try:
        yield
    finally:
        finish_dashboards()
        _kept, _unreachable = None, False


def finish_dashboards() -> None:
    """End the Weights & Biases runs that are kept open, and upload what they have not sent."""
    while _kept:
        _, run = _kept.popitem()
        _finish(run)


def close(loggers: list[Logger]) -> None:
    """Finalize the loggers of a run."""
    for logger in loggers:
        logger.finalize("success")
        run = getattr(logger, "_experiment", None)  # accessing .experiment would start a run
        if type(logger).__name__ != "WandbLogger" or run is None:
            continue
        if _kept is None:
            _finish(run)
        else:
            _kept[run.id] = run


def _finish(run: Any) -> None:
    """End a Weights & Biases run and log its location."""
    place = f"offline; wandb sync {Path(run.dir).parent}" if run.offline else run.url
    try:
        run.finish()
    except Exception as error:  # whatever it is, it need not stop other work
        log.warning("Weights & Biases, %s: not all was sent (%s)", run.name, first_line(error))
    log.info("Weights & Biases, %s: %s", run.name, place)


def log_table(
    config: RunConfig,
    results: Sequence[Result],
    reach: Reaches | None = None,
    images: Mapping[str, Path] | None = None,
) -> None:
    """Log an evaluation's results to the dashboards, against the length in tokens.

    Weights & Biases also gets a table of the reach of the run and its controls during training, and
    ``images`` (PNG files).
    """
    loggers = other_loggers(config)
    rows: dict[int, dict[str, float]] = {}
    for result in sorted(results, key=lambda result: result.length):
        row = rows.setdefault(result.length, {LENGTH: result.length})
        if result.retrieval is not None:
            row[f"evaluation/retrieval/{result.name}"] = result.retrieval.mean
        if result.loss is not None:
            row[f"evaluation/loss/{result.name}"] = result.loss
    dashboards: list[Any] = [x for x in loggers if type(x).__name__ == "WandbLogger"]
    for logger in loggers:
        for length, row in rows.items():
            if logger in dashboards:
                _log_by_length(logger, row)
            else:
                logger.log_metrics(row, step=length)
    for dashboard in dashboards:
        if reach:
            history = [list(row) for row in reach_rows(reach)]
            dashboard.log_table("length/history", list(REACH_HEAD), history)
        for name, path in (images or {}).items():
            dashboard.log_image(f"length/{name}", [str(path)])
    close(loggers)


def _log_by_length(dashboard: Any, row: Mapping[str, float]) -> None:
    """Log a row to Weights & Biases with the length as its axis, and no step of the training.

    Each metric is defined by its name: Lightning's ``*`` takes precedence over ``evaluation/*``.
    """
    for name in row.keys() - {LENGTH}:
        dashboard.experiment.define_metric(name, step_metric=LENGTH)
    dashboard.log_metrics(row)


def wandb_id(run_dir: Path) -> str:
    """Return the run's id on the dashboard: drawn once by one process, kept on every resume."""
    path = run_dir / "wandb_id"
    if not path.exists():
        write_atomically(path, secrets.token_hex(4))
    return path.read_text()


def has_wandb_key() -> bool:
    """Whether wandb will find a key, in ``WANDB_API_KEY`` or in the netrc file it writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return host is not None and netrc.netrc().authenticators(host) is not None
    except (FileNotFoundError, netrc.NetrcParseError):
        return False
