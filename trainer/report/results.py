"""Results of an evaluation and a run as plain data: ``report.json`` and the types in it.

Units throughout: lengths in tokens, losses in nats per token, scores as fractions (0 to 1). A
number that was not measured, or is not finite, is ``None`` (``null`` in the file), so that every
file is strict JSON. Everything but ``timing`` and the seconds of cells is a function of what was
trained and evaluated, hence the same in every repetition.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TypeGuard

from pydantic import ValidationError

from trainer.common.errors import UserError
from trainer.common.validation import adapter
from trainer.formats import read_plain
from trainer.report.atomic import write_atomically

PERPLEXITY = "perplexity"
"""The task whose cells have losses by position instead of scores."""
STATEMENTS = "statements"
"""The task that training sequences can carry, which is what a report calls retrieval."""


def is_known(value: float | None) -> TypeGuard[float]:
    """Whether a number was measured and is finite."""
    return value is not None and math.isfinite(value)


class Json:
    """``to_dict`` and ``from_dict`` for a dataclass: dictionaries and lists as JSON has them."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, with lists for tuples and ``None`` for numbers that are not finite."""
        return _plain(asdict(self))  # type: ignore[call-overload]  # its subclasses are dataclasses

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``. Raises pydantic's ``ValidationError``, which names each
        field that is missing or of the wrong type."""
        return adapter(cls).validate_python(data)


@dataclass(frozen=True)
class Cell(Json):
    """One method on one model in one task at one length.

    ``factor``: the length in units of the training length. ``scores``: of every trial, in the order
    of the task's prompts, the same trials for all methods and models. ``depths``, ``labels``: of
    every trial, or empty. ``edges``, ``losses``: mean held-out loss from position ``edges[i]``
    (included) to ``edges[i + 1]`` (excluded). ``last_loss``: mean loss on the last tokens, the same
    tokens at every length; ``by_window``: the same of every window, or empty. ``seconds``: what it
    took.
    """

    model: str
    method: str
    task: str
    length: int
    factor: float
    scores: tuple[float, ...] = ()
    depths: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()
    edges: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    last_loss: float | None = None
    by_window: tuple[float | None, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        where = f"{self.task!r} of {self.model!r} with {self.method!r} at {self.length}"
        for name in ("depths", "labels"):
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
    """What the start of a phase changed in a run, and the held-out loss (nats per token) just
    before it, just after, and at the end of the phase; ``length``: of its sequences in tokens."""

    step: int
    what: str
    length: int
    loss_before: float | None
    loss_after: float | None
    loss_end: float | None = None


@dataclass(frozen=True)
class Arm(Json):
    """One training run of the experiment. ``final_loss`` is the held-out text loss at the training
    length; ``curve`` holds (step, training loss); ``changes``: those of its phases, in order.
    ``skipped``: updates that were left out, because their loss or gradient was not finite;
    ``rewinds``: how often it went back to a checkpoint; ``finite``: whether all its weights are
    numbers."""

    name: str
    encoding: str
    parameters: int
    steps: int
    tokens: int
    final_loss: float | None = None
    curve: tuple[tuple[int, float | None], ...] = ()
    skipped: int = 0
    rewinds: int = 0
    finite: bool = True
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Drop(Json):
    """The step at which the positional encoding was dropped, and the loss just before it, just
    after it, and at the end of recalibration; ``sequences``: each of these (``before``, ``after``,
    ``end``) of every sequence that it is the mean of."""

    step: int
    loss_before: float | None
    loss_after: float | None
    loss_end: float | None = None
    sequences: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reach(Json):
    """What a model in training could do after ``step`` updates, on validation text at ``lengths``.

    ``dropped``: whether its encoding was dropped by then. ``loss``: mean on the last
    ``training_length`` tokens, the same tokens at every length; ``retrieval``: empty where it was
    not measured. ``losses[i]``: mean over the positions ``edges[i]`` to ``edges[i + 1]`` of the
    longest sequences.
    """

    step: int
    dropped: bool
    training_length: int
    lengths: tuple[int, ...]
    loss: tuple[float | None, ...]
    retrieval: tuple[float, ...]
    edges: tuple[int, ...]
    losses: tuple[float | None, ...]


@dataclass(frozen=True)
class Milestone(Json):
    """What a model in training scored after ``step`` updates and ``tokens``, by task, the more the
    better but for perplexities; ``dropped``: whether its encoding was dropped by then."""

    step: int
    tokens: int
    dropped: bool
    scores: dict[str, float | None]


@dataclass(frozen=True)
class Observation(Json):
    """One claim of a paper held against this run: ``shown`` is True (shown), False (not shown) or
    None (not judged, ``evidence`` says why)."""

    claim: str
    source: str
    shown: bool | None
    evidence: str


@dataclass(frozen=True)
class Report(Json):
    """All cells of an evaluation and, where it ended an experiment, what its runs did.

    ``training_length``: C. ``methods``: titles by key, in the order of tables, for instance
    ``{"none": "as is", "yarn": "YaRN"}``. ``tasks``: titles by key. ``notes``: a sentence each, for
    what was not run and why, and for values that were fitted. ``config``: of the run, or of the
    evaluation alone, under ``evaluation`` either way.
    ``task`` describes :data:`STATEMENTS` where they were measured: ``needles`` (statements per
    sequence, one of which is asked for), ``chance`` (success rate of a guess among all values),
    ``chance_listed`` (of naming any of the sequence's own values), ``training_share`` (which share
    of the training sequences carried such statements).
    ``reach`` and ``milestones`` hold what was measured while an arm trained, by arm, the run itself
    first.
    ``temperature`` holds the fitted coefficient c of 1 + c ln s by row, ``DroPE + temperature``.
    ``made``: when, by which command and program and of what, in words by their terms.
    ``timing`` is free-form; ``timing["tokens_per_second"]``, a number by arm, becomes a column of
    the table of arms. Raises ``ValueError`` when two arms share a name, or two cells a place.
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

    def __post_init__(self) -> None:
        places = Counter((cell.model, cell.method, cell.task, cell.length) for cell in self.cells)
        for place, times in places.items():
            if times > 1:
                raise ValueError(f"{times} cells are of {' / '.join(map(str, place))}")
        for name, times in Counter(arm.name for arm in self.arms).items():
            if times > 1:
                raise ValueError(f"{times} arms are called {name}")

    @property
    def last(self) -> int:
        """Tokens at the end of every window that ``last_loss`` is of."""
        asked = self.config.get("evaluation", {}).get("last")
        lengths = [cell.length for cell in self.cells if cell.task == PERPLEXITY]
        return asked if isinstance(asked, int) else min([self.training_length, *lengths])

    def write(self, path: Path) -> None:
        """Write ``report.json``, complete or not at all, one cell a line, so that files can be
        searched and compared by lines. Raises ``TypeError`` when a free-form dictionary holds
        something that JSON has no word for."""
        data = self.to_dict()
        cells = [
            json.dumps(cell, ensure_ascii=False, allow_nan=False) for cell in data.pop("cells")
        ]
        head = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
        # Lists of plain numbers, such as the points of a curve, stay on one line.
        head = re.sub(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", _one_line, head)
        write_atomically(path, head + ',\n  "cells": [\n' + ",\n".join(cells) + "\n  ]\n}\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote. Raises ``UserError`` when it is missing or malformed."""
        try:
            return cls.from_dict(read_plain(path))
        except OSError as error:
            raise UserError.at("", f"Cannot read the report {path}: {error.strerror}.") from error
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"])) or "the report"
            raise UserError.at("", f"{path} is not a report: {where}: {problem['msg']}.") from error
        except (ValueError, TypeError) as error:
            raise UserError.at("", f"{path} is not a report: {error}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"
