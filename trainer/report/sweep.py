"""The runs of a sweep beside each other: how they are called, and what they reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainer.report.outcomes import AS_IS, Outcomes
from trainer.report.results import PERPLEXITY, STATEMENTS, Report, is_known
from trainer.report.statistics import (
    Comparison,
    Estimate,
    change,
    sign_test,
)

FEW = 2
"""Swept keys that are all named in every row; of more, those in which it differs from the first."""


@dataclass(frozen=True)
class Reached:
    """A run as it is at one ``length`` (tokens; ``factor`` times its training length): ``scores``
    of its trials and their mean, ``loss`` on the last tokens (nats per token), the mean of those of
    the windows (``by_window``). None and empty: not measured."""

    length: int
    factor: float
    retrieval: Estimate | None = None
    scores: tuple[float, ...] = ()
    loss: float | None = None
    by_window: tuple[float, ...] = ()


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep.

    ``place``: its directory. ``label``: what its own report calls it. ``settings``: values by key,
    of keys that differ between runs. ``state``: ``finished``, or how far it is. ``problem``: why it
    failed, or that its numbers say nothing. ``tokens``, ``loss``, ``skipped``: read, the training
    loss and updates left out, in its last row of metrics. ``measured_on``: runs with the same saw
    the same trials and windows. ``reached``: by length, ascending.
    """

    place: str
    label: str
    settings: Mapping[str, str]
    state: str
    problem: str = ""
    tokens: int | None = None
    loss: float | None = None
    skipped: int | None = None
    measured_on: str = ""
    reached: tuple[Reached, ...] = ()


@dataclass(frozen=True)
class Sweep:
    """``runs`` in the order in which they were given. The first with measurements is what the
    others are compared with."""

    name: str
    runs: tuple[SweptRun, ...]

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Those that differ between runs, in the order of the runs' settings."""
        found = dict.fromkeys(key for run in self.runs for key in run.settings)
        return tuple(k for k in found if len({run.settings.get(k) for run in self.runs}) > 1)

    @cached_property
    def titles(self) -> dict[str, str]:
        """The ends of the keys, of two words or as many as tell them apart: ``qk_norm.when`` for
        ``model.qk_norm.when``."""
        return {key: _shortest(key, self.keys) for key in self.keys}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all runs, by what differs between them; no two alike."""
        first = self.runs[0].settings
        found = []
        for run in self.runs:
            own = {key: run.settings[key] for key in self.keys if key in run.settings}
            if len(self.keys) > FEW:
                own = {key: value for key, value in own.items() if first.get(key) != value}
            found.append(", ".join(f"{self.titles[k]}={v}" for k, v in own.items()) or run.label)
        shared = Counter(found)
        return tuple(
            f"{name} ({run.place})" if shared[name] > 1 else name
            for name, run in zip(found, self.runs, strict=True)
        )

    @cached_property
    def reference(self) -> SweptRun | None:
        """What the others are compared with; None where nothing was measured."""
        return next((run for run in self.runs if run.reached), None)

    @cached_property
    def factors(self) -> tuple[float, ...]:
        """Lengths in units of the training length at which any run was measured, ascending."""
        return tuple(sorted({at.factor for run in self.runs for at in run.reached}))

    def at(self, run: SweptRun, factor: float) -> Reached | None:
        """What a run reached at a length; None where it was not measured there."""
        return next((at for at in run.reached if at.factor == factor), None)

    def comparison(self, run: SweptRun, factor: float) -> Comparison | None:
        """The sign test of its retrieval with the reference's, on the same trials."""
        own, other = self._pair(run, factor)
        if own is None or other is None or not own.scores:
            return None
        same = len(own.scores) == len(other.scores)
        return sign_test(own.scores, other.scores) if same else None

    def loss_change(self, run: SweptRun, factor: float) -> Estimate | None:
        """How much its loss is above the reference's (0.01 for 1%), on the same windows."""
        own, other = self._pair(run, factor)
        if own is None or other is None or not own.by_window:
            return None
        same = len(own.by_window) == len(other.by_window)
        return change(own.by_window, other.by_window) if same else None

    def _pair(self, run: SweptRun, factor: float) -> tuple[Reached | None, Reached | None]:
        first = self.reference
        if first is None or run is first or run.measured_on != first.measured_on:
            return None, None
        own, other = self.at(run, factor), self.at(first, factor)
        alike = own is not None and other is not None and own.length == other.length
        return (own, other) if alike else (None, None)


def reached(report: Report, label: str) -> tuple[Reached, ...]:
    """What a run's own report says of a model as it is: its retrieval (that of the statements, or
    else the mean over the tasks with scores) and its loss, by length."""
    outcomes = Outcomes(report)
    row = (label, AS_IS)
    tasks = [STATEMENTS] if STATEMENTS in outcomes.scored else outcomes.averaged
    tasks = tasks or outcomes.scored[:1]
    lengths = {c.length: c.factor for c in report.cells if (c.model, c.method) == row}
    found = []
    for length, factor in sorted(lengths.items()):
        cells = [outcomes.cell(row, task, length) for task in tasks]
        text = outcomes.cell(row, PERPLEXITY, length)
        found.append(
            Reached(
                length,
                factor,
                outcomes.estimate(row, tasks, length) if tasks else None,
                tuple(score for cell in cells if cell for score in cell.scores),
                text.last_loss if text else None,
                tuple(x for x in text.by_window if is_known(x)) if text else (),
            )
        )
    return tuple(found)


def numeric(text: str) -> float | None:
    """The number that a setting is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _shortest(key: str, keys: Sequence[str]) -> str:
    parts = key.split(".")
    ends = (".".join(parts[-n:]) for n in range(2, len(parts)))
    return next((e for e in ends if sum(f".{k}".endswith(f".{e}") for k in keys) == 1), key)
