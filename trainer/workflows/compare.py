"""Comparison of a sweep's runs from their directories; nothing is measured again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, renaming
from trainer.config import CompareRequest, RunConfig
from trainer.evaluation.results import Report, is_known
from trainer.evaluation.store import all_fields
from trainer.report.pages import write_sweep_report
from trainer.report.sweep import FINISHED, Sweep, SweptRun, effective, reached
from trainer.runs.descriptions import label, made_now
from trainer.runs.directory import (
    FREE_TO_CHANGE,
    differences,
    plain,
    saved_run,
)
from trainer.runs.metrics_file import read_metrics
from trainer.runs.sweep import RECORD, Swept, failure, open_sweep, place_of_sweep, read_sweep

PARENT = Path("multirun")
NOT_COMPARED = (*FREE_TO_CHANGE, "controls")
NOT_OF_TRIALS = {
    "methods": "every method is asked the same trials",
    "lengths": "lengths are paired one by one; the longest decides where windows end and the "
    "shortest how many tokens count, and both are in the key",
    "tokens": "lengths in another unit",
    "training_length": "the unit of lengths",
    "dtype": "the precision that it stands for is in the key",
    "prefill_chunk": "it changes rounding alone",
}
"""Settings of an evaluation on which trials and windows do not depend, with the reason."""


@renaming(run_dir="runs")
def compare_runs(request: CompareRequest) -> tuple[Sweep, Path]:
    """Compare runs: write table, figure and page; return the sweep and the page.

    A single run is compared with its controls.

    Raises:
        UserError: a directory holds no run, or its contents are damaged.
    """
    places = [Path(path) for path in request.runs]
    if request.output:
        Path(request.output).mkdir(parents=True, exist_ok=True)
    if len(places) == 1 and (places[0] / RECORD).is_file():
        place, sweep = places[0], compared(places[0])
    else:
        named = [run for path in places for run in _runs_of(path)]
        if len(named) == 1:
            controls = saved_run(places[0]).controls
            named += [Swept(str(places[0] / "controls" / name)) for name in controls]
        runs = list({run.run_dir: run for run in named}.values())
        place = place_of_sweep(PARENT, runs)
        sweep = _beside_each_other(runs, place)
        if not request.output:
            PARENT.mkdir(parents=True, exist_ok=True)
            open_sweep(PARENT, runs)
    return sweep, write_sweep_report(sweep, made_now(), Path(request.output or place))


@renaming(run_dir="runs")
def compared(place: Path) -> Sweep:
    """Compare the runs of the sweep in ``place``, finished or not.

    Raises:
        UserError: the contents of a directory are damaged.
    """
    return _beside_each_other(read_sweep(place), place)


def _beside_each_other(runs: Sequence[Swept], place: Path) -> Sweep:
    places = [Path(run.run_dir) for run in runs]
    configs = [saved_run(p) if (p / "config.yaml").is_file() else None for p in places]
    settings = _settings(runs, configs)
    report_of = cache(_report)  # a run and its controls share one
    rows = [_read(*row, place, report_of) for row in zip(runs, configs, settings, strict=True)]
    return Sweep(place.resolve().name, tuple(rows))


def _runs_of(place: Path) -> list[Swept]:
    """Return the runs that a directory stands for."""
    if (place / RECORD).is_file():
        return read_sweep(place)
    if not (place / "config.yaml").is_file():
        raise UserError.at(
            "runs", f"{str(place)!r} is no run (it has no config.yaml), nor a sweep ({RECORD})."
        )
    return [Swept(str(place))]


def _settings(runs: Sequence[Swept], configs: Sequence[RunConfig | None]) -> list[dict[str, str]]:
    """Return how runs differ: the words of their command lines, or else their configurations."""
    if all(run.settings for run in runs):
        return [run.settings for run in runs]
    values = [plain(config) if config else {} for config in configs]
    first, *others = [config for config in values if config] or [{}]
    keys = dict.fromkeys(
        key for other in others for key, *_ in differences(first, other, NOT_COMPARED)
    )
    return [{k: _text(_value_at(config, k)) for k in keys} if config else {} for config in values]


def _value_at(values: Any, key: str) -> Any:
    """Return the value of a dotted key in nested groups, or None if there is none."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _read(
    run: Swept,
    config: RunConfig | None,
    settings: dict[str, str],
    sweep: Path,
    report_of: Callable[[Path], Report | None],
) -> SweptRun:
    place = Path(run.run_dir)
    failed = failure(sweep, run.run_dir)
    if config is None:
        state = "not started" if failed is None else "failed"
        return SweptRun(run.run_dir, place.name, settings, state, failed or "")
    called = label(config)
    rows = read_metrics(place / "metrics.csv")
    last = rows[-1] if rows else {}
    report = report_of(_report_path(place)) if failed is None else None
    state, problem = FINISHED, failed or ""
    if report is None:
        progress = f"step {last.get('step', 0):,} of {config.trainer.max_steps:,}"
        state = progress if failed is None else f"failed, {progress}"
    elif not math.isfinite(last.get("parameter_norm", 0.0)):
        problem = "its weights are no numbers any more: it diverged, and its figures say nothing"
    arm = next((arm for arm in report.arms if arm.name == called), None) if report else None
    if arm is not None and (end := last.get("step", 0)) < arm.steps:
        problem = f"its metrics.csv ends at step {end:,} of {arm.steps:,}"
        last = {}
    return SweptRun(
        run.run_dir,
        called,
        settings,
        state,
        problem,
        last.get("tokens"),
        last.get("loss") if is_known(last.get("loss")) else None,
        last.get("skipped_steps"),
        _measured_on(report) if report else "",
        reached(report, called) if report else (),
        effective(report, called) if report else None,
    )


def _report_path(place: Path) -> Path:
    """Return the path of the report of a run or of its main run."""
    home = place.resolve()
    home = home.parent.parent if home.parent.name == "controls" else home
    return home / "report.json"


def _report(path: Path) -> Report | None:
    """Read a report; None if there is none yet."""
    try:
        return Report.read(path) if path.is_file() else None
    except UserError as error:
        raise UserError.at(
            "runs",
            f"{error} Remove it; the command that trained the run then makes it again, without "
            "training.",
        ) from None


def _measured_on(report: Report) -> str:
    """Return the text, precision and settings on which results depend, as text to compare."""
    settings = report.config.get("evaluation", {})
    lengths = [round(report.training_length * factor) for factor in settings.get("lengths", ())]
    tokens = settings.get("tokens") or lengths
    key = {
        "corpus": report.environment.get("corpus"),
        # Reports of earlier versions, which computed in their dtype, do not name the precision.
        "precision": report.environment.get("precision", settings.get("dtype")),
        "settings": all_fields(settings, NOT_OF_TRIALS),
        "longest": max(tokens, default=None),
        "last": settings.get("last") or min([report.training_length, *tokens]),
    }
    return json.dumps(key, sort_keys=True)
