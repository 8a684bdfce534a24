"""Results of an evaluation and a run as plain data: ``report.json`` and the types in it.

Lengths are in tokens, losses in nats per token, scores are fractions from 0 to 1. A number that
was not measured or is not finite is ``None`` (``null`` in the file), so every file is strict JSON.
Everything but ``timing`` and the seconds of cells depends only on what was trained and evaluated,
so repetitions give the same file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeGuard

from trainer.common.errors import UserError
from trainer.common.fields import adapter
from trainer.common.files import csv_text, write_atomically

PERPLEXITY = "perplexity"
"""Task whose cells have losses by position instead of scores."""
STATEMENTS = "statements"
"""Task that training sequences can contain; reports call its score retrieval."""


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether a number was measured and is finite."""
    return value is not None and math.isfinite(value)


class Json:
    """Dataclass that converts to and from the dictionaries and lists of JSON."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, with lists for tuples and ``None`` for numbers that are not finite."""
        return _plain(asdict(self))  # type: ignore[call-overload]  # its subclasses are dataclasses

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Invert ``to_dict``.

        Raises pydantic's ``ValidationError``, which names each missing or mistyped field.
        """
        return adapter(cls).validate_python(data)


@dataclass(frozen=True)
class Cell(Json):
    """Result of one method on one model in one task at one length.

    ``factor``: length over training length. ``scores``: one for each trial, in the order of the
    task's prompts, which are the same for all methods and models. ``depths``, ``labels``: one for
    each trial, or empty. ``groups``: number of each trial's text, from 0; empty if every trial has
    its own. Trials of one text are not independent. ``losses[i]``: mean held-out loss over
    positions ``edges[i]`` (included) to ``edges[i + 1]`` (excluded). ``last_loss``: mean loss on
    the last tokens, which are the same at every length. ``by_window``: this loss for each window,
    or empty. ``seconds``: duration.
    ``unchanged``: whether the method leaves the model as it is at this length.
    """

    model: str
    method: str
    task: str
    length: int
    factor: float
    scores: tuple[float, ...] = ()
    depths: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    last_loss: float | None = None
    by_window: tuple[float | None, ...] = ()
    seconds: float = 0.0
    unchanged: bool = False

    @property
    def texts(self) -> int:
        """Number of texts with scores, which are independent of each other."""
        return len(set(self.groups)) or len(self.scores)

    def __post_init__(self) -> None:
        where = f"{self.task!r} of {self.model!r} with {self.method!r} at {self.length}"
        for name in ("depths", "labels", "groups"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.scores):
                raise ValueError(
                    f"{where} has {len(self.scores)} scores but {len(getattr(self, name))} {name}"
                )
        if self.losses and len(self.edges) != len(self.losses) + 1:
            raise ValueError(f"{where} has {len(self.losses)} losses but {len(self.edges)} edges")
        if not all(0 <= score <= 1 for score in self.scores):
            raise ValueError(f"{where} has a score that is not between 0 and 1")


@dataclass(frozen=True)
class Change(Json):
    """Change of a run at the start of a phase, with the held-out loss around it.

    The losses are measured just before the change, just after it, and at the end of the phase.
    ``length``: tokens of the phase's sequences.
    """

    step: int
    what: str
    length: int
    loss_before: float | None
    loss_after: float | None
    loss_end: float | None = None


@dataclass(frozen=True)
class Arm(Json):
    """One training run of the experiment.

    ``final_loss``: held-out text loss at the training length. ``curve``: (step, training loss).
    ``changes``: one for each phase, in order. ``skipped``: updates left out because their loss or
    gradient was not finite. ``finite``:
    whether all weights are finite.
    """

    name: str
    encoding: str
    parameters: int
    steps: int
    tokens: int
    final_loss: float | None = None
    curve: tuple[tuple[int, float | None], ...] = ()
    skipped: int = 0
    finite: bool = True
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Drop(Json):
    """Drop of the positional encoding: its step, and the loss around it.

    The losses are measured just before the drop, just after it, and at the end of recalibration.
    ``sequences``: the loss of each sequence, by ``before``, ``after`` and ``end``.
    """

    step: int
    loss_before: float | None
    loss_after: float | None
    loss_end: float | None = None
    sequences: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reach(Json):
    """Loss and retrieval of a model in training, on validation text at several lengths.

    ``dropped``: whether its encoding was dropped by ``step``. ``loss``: mean on the last
    ``training_length`` tokens, which are the same at every length. ``retrieval``: empty if it was
    not measured. ``losses[i]``: mean over positions ``edges[i]`` to ``edges[i + 1]`` of the longest
    sequences.
    """

    step: int
    dropped: bool
    training_length: int
    lengths: tuple[int, ...]
    loss: tuple[float | None, ...]
    retrieval: tuple[float, ...]
    edges: tuple[int, ...]
    losses: tuple[float | None, ...]


Reaches = dict[str, tuple[Reach, ...]]
"""Measurements by arm, the run itself first."""


@dataclass(frozen=True)
class Milestone(Json):
    """Scores of a model in training after ``step`` updates and ``tokens``, by task.

    ``dropped``: whether its encoding was dropped by then.
    """

    step: int
    tokens: int
    dropped: bool
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Observation(Json):
    """One claim of a paper, judged by this run's numbers.

    ``shown``: True (shown), False (not shown) or None (not judged; ``evidence`` says why).
    """

    claim: str
    source: str
    shown: bool | None
    evidence: str


@dataclass(frozen=True)
class Report(Json):
    """All cells of an evaluation and, where it ended an experiment, what its runs did.

    ``training_length``: C, the unit of lengths. ``longest_context``: the longest context that any
    of the models was trained with; None: C. ``methods``: titles by key, in the order of
    tables, for instance ``{"none": "as is", "yarn": "YaRN"}``. ``tasks``: titles by key.
    ``notes``: a sentence each, for what was not run and why, and for values that were fitted.
    ``config``: of the run, or of the evaluation alone, under ``evaluation`` either way.
    ``task`` describes :data:`STATEMENTS` where they were measured: ``needles`` (statements per
    sequence, one of which is asked for), ``chance`` (success rate of a guess among all values),
    ``chance_listed`` (of naming any of the sequence's own values), ``training_share`` (which share
    of the training sequences carried such statements).
    ``reach`` and ``milestones``: measurements during training by arm, the run itself first.
    ``temperature``: the fitted coefficient c of 1 + c ln s by row, such as ``DroPE + temperature``.
    ``made``: date, command, program and inputs, as text by term. ``timing`` is free-form;
    ``timing["tokens_per_second"]``, a number by arm, becomes a column of the table of arms. Raises
    ``ValueError`` if two arms share a name, or two cells have the same model, method, task and
    length.
    """

    name: str
    training_length: int
    cells: tuple[Cell, ...]
    methods: dict[str, str]
    tasks: dict[str, str]
    notes: tuple[str, ...]
    config: dict[str, Any]
    environment: dict[str, Any]
    arms: tuple[Arm, ...] = ()
    drop: Drop | None = None
    observations: tuple[Observation, ...] = ()
    task: dict[str, Any] = field(default_factory=dict)
    temperature: dict[str, float] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    reach: dict[str, tuple[Reach, ...]] = field(default_factory=dict)
    milestones: dict[str, tuple[Milestone, ...]] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    longest_context: int | None = None

    def __post_init__(self) -> None:
        places = Counter((cell.model, cell.method, cell.task, cell.length) for cell in self.cells)
        for place, times in places.items():
            if times > 1:
                raise ValueError(f"{times} cells are of {' / '.join(map(str, place))}")
        for name, times in Counter(arm.name for arm in self.arms).items():
            if times > 1:
                raise ValueError(f"{times} arms are called {name}")

    @property
    def trained(self) -> int:
        """The longest context that any of the models was trained with."""
        return self.longest_context or self.training_length

    @property
    def unit(self) -> str:
        """Words for the length that counts as 1×."""
        if self.trained == self.training_length:
            return "the training length"
        return f"{self.training_length} tokens"

    @property
    def last(self) -> int:
        """Number of tokens at the end of every window over which ``last_loss`` is the mean."""
        asked = self.config.get("evaluation", {}).get("last")
        lengths = [cell.length for cell in self.cells if cell.task == PERPLEXITY]
        return asked if isinstance(asked, int) else min([self.training_length, *lengths])

    def write(self, path: Path) -> None:
        """Write ``report.json`` atomically, with one key or cell a line for diff and grep.

        Raises ``TypeError`` if a free-form dictionary holds something that JSON cannot.
        """
        data = self.to_dict()
        cells = data.pop("cells")
        lines = [f"{json.dumps(key)}: {_line(value)}" for key, value in data.items()]
        lines.append('"cells": [\n' + ",\n".join(map(_line, cells)) + "\n]")
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what :meth:`write` wrote. Raises ``UserError`` if it is malformed."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}: expected a report, got {error}") from error


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


COLUMNS = (
    *("run", "model", "method", "task", "length", "factor"),
    *("metric", "value", "low", "high", "n", "seed", "seconds"),
)
"""Columns of every results.csv: 95% intervals, n independent texts, lengths in tokens."""


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows under :data:`COLUMNS`; missing values are empty."""
    lines = [[row.get(column) for column in COLUMNS] for row in rows]
    write_atomically(path, csv_text(COLUMNS, lines))


def troubles(arms: Sequence[Arm]) -> list[str]:
    """Return warnings about arms whose numbers are unreliable: a diverged run prints a loss too."""
    return [f"{arm.name}: {trouble}" for arm in arms for trouble in _arm_troubles(arm)]


def _arm_troubles(arm: Arm) -> list[str]:
    warnings = []
    if arm.skipped:
        warnings.append(
            f"{arm.skipped:,} of {arm.steps:,} updates were left out, because their loss or "
            "gradient was not finite."
        )
    if not arm.finite:
        warnings.append(
            "the norm of its weights is not a finite number: it diverged, and its figures say "
            "nothing."
        )
    if arm.curve and arm.curve[-1][0] < arm.steps:
        warnings.append(
            f"its metrics.csv ends at step {arm.curve[-1][0]:,} of {arm.steps:,}, and with it its "
            "curve of the loss."
        )
    return warnings
