"""Read how runs are getting on, from the files in their directories alone.

Nothing is written and torch is not imported: a run may be training in another process, finished,
stopped or killed.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError
from trainer.common.formats import read_plain
from trainer.evaluation.results import is_known
from trainer.report.claims import SAME_LOSS
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import label
from trainer.runs.directory import check_runs, saved_run
from trainer.runs.metrics_file import (
    DROP_LOSSES,
    PART_TIMES,
    RETRIEVAL,
    SECTIONS,
    TEXT_LOSS,
    read_metrics,
)
from trainer.runs.phases import Phase, phase_before, phases_of, with_ends
from trainer.runs.run_lock import Sign, last_sign
from trainer.runs.sweep import RECORD, failure, read_sweep

RECENT = 10
"""Rows of metrics from which the speed is estimated."""
Rows = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Recovery:
    """Share of a drop's rise in the held-out loss that recalibration has won back.

    ``before``, ``after``: loss on the fixed held-out batch just before and just after the drop.
    ``share`` is None if it cannot be known yet, or if ``costs_nothing``. ``is_final``: whether
    ``end``, the loss at the end of recalibration on the same batch, gives it. Otherwise it is
    estimated from the text loss that ``monitor.lengths_every`` measures at the shortest length, if
    a row was logged at the drop.
    """

    before: float
    after: float
    end: float | None
    share: float | None
    is_final: bool

    @property
    def costs_nothing(self) -> bool:
        """Whether the loss rises at the drop by at most 1%, which reports do not judge either."""
        return self.after - self.before <= SAME_LOSS * self.before


@dataclass(frozen=True)
class WatchedArm:
    """A run or one of its controls.

    ``start``: the step at which it branches off. ``beat``: unix time of the last heartbeat, None
    without one. ``problem``: why its files cannot be read, or empty.
    """

    name: str
    phases: tuple[Phase, ...] = ()
    rows: Rows = ()
    start: int = 0
    beat: float | None = None
    problem: str = ""

    @property
    def step(self) -> int:
        """Last step that was logged."""
        return self.rows[-1]["step"] if self.rows else self.start

    @property
    def steps(self) -> int:
        """Configured number of steps."""
        return self.phases[-1].end if self.phases else 0

    @property
    def is_trained(self) -> bool:
        """Whether the last step was logged."""
        return bool(self.rows) and self.step >= self.steps

    @property
    def phase(self) -> Phase:
        """Phase of the last logged step."""
        return phase_before(self.phases, self.step)

    @property
    def tokens_left(self) -> int:
        """Tokens to read until the last step."""
        if not self.phases or self.is_trained:
            return 0
        return self.phases[-1].tokens_at(self.steps) - self.phase.tokens_at(self.step)

    def last(self, metric: str) -> float | None:
        """Return the last value of a metric, or None."""
        return next((row[metric] for row in reversed(self.rows) if metric in row), None)

    def metrics_like(self, pattern: str) -> list[str]:
        """Return the metrics whose whole names match ``pattern``, in natural order."""
        names = {key for row in self.rows for key in row if re.fullmatch(pattern, key)}
        return sorted(names, key=lambda name: [float(n) for n in re.findall(r"[\d.]+", name)])


@dataclass(frozen=True)
class WatchedRun:
    """A run with its controls, in the order in which they train.

    ``sign``: sign of life of the process that trains; None without one. ``report``: page of a
    finished run. ``failed``: error of its job in a sweep. ``cells``: number of evaluated cells at
    the end.
    """

    place: Path
    arms: tuple[WatchedArm, ...] = ()
    sign: Sign | None = None
    report: Path | None = None
    failed: str = ""
    cells: int = 0

    @property
    def current(self) -> WatchedArm | None:
        """Arm that trains now or next; the run itself if all are trained."""
        untrained = [arm for arm in self.arms if not arm.is_trained]
        return next(iter([*untrained, *self.arms]), None)

    @property
    def is_finished(self) -> bool:
        """Whether its report was written."""
        return self.report is not None

    @property
    def is_running(self) -> bool:
        """Whether the process that trains seems alive."""
        return not self.is_finished and self.sign is not None and self.sign.is_alive

    @property
    def state(self) -> str:
        """Activity of the run, or how it ended, in a word or two."""
        if self.is_finished:
            return "finished"
        if self.is_running:
            return "evaluating" if all(arm.is_trained for arm in self.arms) else "training"
        if self.sign is not None:
            return "seems dead"
        if self.failed:
            return "failed"
        return "not started" if seconds_since_beat(self) is None else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the last arm is trained, without the evaluation."""
        pace = next(filter(None, map(seconds_per_token, reversed(self.arms))), None)
        return None if pace is None else pace * sum(arm.tokens_left for arm in self.arms)


def watch(places: Sequence[str]) -> list[WatchedRun]:
    """Read the state of the runs that the directories stand for.

    A directory is a run, a control, a sweep, or holds runs.

    Raises:
        UserError: a directory is none of these.
    """
    check_runs(places)
    return [run for place in places for run in _runs_at(Path(place))]


def _runs_at(place: Path) -> list[WatchedRun]:
    if _is_run(place):
        return [_read_run(place)]
    if (place / RECORD).is_file():
        runs = [Path(run.run_dir) for run in read_sweep(place)]
        return [_read_run(run, failure(place, str(run)) or "") for run in runs]
    if inside := sorted(filter(_is_run, place.glob("*"))):
        return [_read_run(run) for run in inside]
    raise UserError.at(
        "runs",
        f"{str(place)!r} is no run (it has no config.yaml), no sweep ({RECORD}), and has "
        "no runs in it.",
    )


def _is_run(place: Path) -> bool:
    return (place / "config.yaml").is_file()


def _read_run(place: Path, failed: str = "") -> WatchedRun:
    """Read a run with its controls, or a control alone."""
    home = place.parent.parent if place.absolute().parent.name == "controls" else place
    report = home / "report.html" if (home / "report.json").is_file() else None
    cells = sum(1 for _ in (home / "evaluation" / "cells").glob("*.json"))
    arms = tuple(_read_arms(place)) if _is_run(place) else ()
    return WatchedRun(place, arms, last_sign(home), report, failed, cells)


def _read_arms(place: Path) -> list[WatchedArm]:
    try:
        config = _config(place, _stamp(place / "config.yaml"))
    except UserError as error:
        return [WatchedArm(place.name, problem=str(error))]
    arms = [_read_arm(place, config)]
    for name, changes in config.controls.items():
        directory = place / "controls" / name
        branch = changes.get("branch")
        start = config.drop_step if branch == "drop" else branch
        try:
            control = _config(directory, _stamp(directory / "config.yaml"))
        except (OSError, UserError) as error:  # its directory is made after the run's
            problem = str(error) if isinstance(error, UserError) else ""
            arms.append(WatchedArm(changes.get("label") or name, problem=problem))
        else:
            arms.append(_read_arm(directory, control, start or 0))
    return arms


def _read_arm(place: Path, config: RunConfig, start: int = 0) -> WatchedArm:
    rows: Rows = ()
    problem = ""
    try:
        rows = _rows(place / "metrics.csv")
    except FileNotFoundError:
        pass
    except UserError as error:
        problem = str(error)
    phases = phases_of(with_ends(config, _early_ends(config, rows)))
    return WatchedArm(label(config), phases, rows, start, _beat(place), problem)


def _stamp(path: Path) -> tuple[int, int]:
    """Return what changes with a file's content."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=1024)
def _config(place: Path, stamp: tuple[int, int]) -> RunConfig:
    return saved_run(place)


_newest: dict[Path, tuple[tuple[int, int], Rows]] = {}
"""Rows of each file as it was read last, with its stamp. A growing file is not kept twice."""


def _rows(path: Path) -> Rows:
    stamp = _stamp(path)
    if path not in _newest or _newest[path][0] != stamp:
        _newest[path] = stamp, tuple(read_metrics(path))
    return _newest[path][1]


def _early_ends(config: RunConfig, rows: Rows) -> dict[str, int]:
    """Return the steps of phases that ended early: rows of the next phase begin before their end.

    A phase that ends early logs a row at its last step.
    """
    ends: dict[str, int] = {}
    start = 0
    for index, (name, phase) in enumerate(config.phases.items()):
        steps = [row["step"] for row in rows if row.get("phase", 0) <= index]
        if phase.until is None or not steps or len(steps) == len(rows):
            start += phase.steps or 0
            continue
        ends[name] = steps[-1] - start
        start = steps[-1]
    return ends


def _beat(place: Path) -> float | None:
    try:
        return float(read_plain(place / "heartbeat.json")["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def seconds_per_token(arm: WatchedArm) -> float | None:
    """Return the time per token in the last rows of the present phase, monitors and checkpoints
    included; None without two such rows."""
    last = [row for row in arm.rows[-RECENT:] if row.get("phase") == arm.rows[-1].get("phase")]
    seconds, tokens = 0.0, 0
    for before, row in pairwise(last):
        steps = row["step"] - before["step"]
        seconds += steps * sum(row.get(name, 0.0) for name in PART_TIMES)
        tokens += row.get("tokens", 0) - before.get("tokens", 0)
    return seconds / tokens if seconds > 0 and tokens > 0 else None


def seconds_since_beat(run: WatchedRun) -> float | None:
    """Return the seconds since any arm logged a step; None if none did."""
    beats = [arm.beat for arm in run.arms if arm.beat is not None]
    return max(time.time() - max(beats), 0.0) if beats else None


def recovery(arm: WatchedArm) -> Recovery | None:
    """Return how much of the rise at the last drop is won back; None without a drop so far."""
    before, after, end = DROP_LOSSES
    index = next((i for i, row in reversed([*enumerate(arm.rows)]) if before in row), None)
    if index is None or after not in (row := arm.rows[index]):
        return None
    last = next((later[end] for later in arm.rows[index:] if end in later), None)
    drop = Recovery(row[before], row[after], last, None, last is not None)
    if drop.costs_nothing:
        return drop
    if last is not None:
        return replace(drop, share=_won(drop.before, drop.after, last))
    share = None
    if names := arm.metrics_like(f"{TEXT_LOSS}[^/]+"):
        measured = [(r["step"], r[names[0]]) for r in arm.rows if names[0] in r]
        # A drop between two rows overwrites the measurement before it by the one after it.
        old = next(
            (x for s, x in measured if s == phase_before(arm.phases, row["step"]).start), None
        )
        new = [x for s, x in measured if s >= row["step"]]
        if old is not None and len(new) > 1:
            share = _won(old, new[0], new[-1])
    return replace(drop, share=share)


def _won(before: float, after: float, now: float) -> float | None:
    """Return the share of the rise from ``before`` to ``after`` that ``now`` has won back."""
    share = (after - now) / (after - before) if after > before else math.nan
    return share if is_known(share) else None


def retrievals(arm: WatchedArm) -> list[tuple[str, float]]:
    """Return the last retrieval at every length, shortest first: (``4x``, share of trials)."""
    return [
        (name.removeprefix(RETRIEVAL), value)
        for name in arm.metrics_like(f"{RETRIEVAL}.+")
        if (value := arm.last(name)) is not None
    ]


@dataclass(frozen=True)
class Line:
    """Course of a metric: points (step, value), in ``rows`` lines of a terminal."""

    metric: str
    points: tuple[tuple[int, float], ...]
    rows: int
    limits: tuple[float, float]


def lines(arm: WatchedArm) -> list[Line]:
    """Return the course of every metric of the panels that a terminal shows."""
    drawn = []
    for panel in (panel for panels in SECTIONS.values() for panel in panels if panel.rows):
        for name in (*panel.metrics, *(arm.metrics_like(panel.pattern) if panel.pattern else ())):
            points = tuple((r["step"], r[name]) for r in arm.rows if is_known(r.get(name)))
            if points:
                values = [value for _, value in points]
                limits = (0.0, 1.0) if panel.whole else (min(values), max(values))
                drawn.append(Line(name, points, panel.rows, limits))
    return drawn
