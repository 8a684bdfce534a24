"""What a run leaves behind, as plain data: ``report.json`` and the types in it.

Units throughout: lengths in tokens, losses in nats per token, retrieval as a fraction of trials
(0 to 1). A number that was not measured, or is not finite, is ``None`` (``null`` in the file), so
that every file is strict JSON. Everything but ``timing`` is a function of what was trained and
evaluated, hence the same in every repetition of a run.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from trainer.errors import UserError
from trainer.report.atomic import write_atomically


class Json:
    """``to_dict`` and ``from_dict`` for a dataclass: dictionaries and lists as JSON has them."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, with lists for tuples and ``None`` for numbers that are not finite."""
        return _plain(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``. Raises pydantic's ``ValidationError``, which names each
        field that is missing or of the wrong type."""
        return TypeAdapter(cls).validate_python(data)


@dataclass(frozen=True)
class Cell(Json):
    """One method at one length. ``factor`` is the length in units of the training length."""

    method: str
    length: int
    factor: float
    retrieval: float | None = None
    retrieval_ci: tuple[float, float] | None = None  # 95%, see wilson_interval
    loss: float | None = None

    def __post_init__(self) -> None:
        for value in (self.retrieval, *(self.retrieval_ci or ())):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(
                    f"retrieval of {self.method!r} at {self.length} is a fraction of trials, "
                    f"so between 0 and 1, not {value}"
                )


@dataclass(frozen=True)
class LossByPosition(Json):
    """Held-out loss along sequences of ``length`` tokens: ``losses[i]`` is the mean over the
    positions ``edges[i]`` (included) to ``edges[i + 1]`` (excluded)."""

    method: str
    length: int
    edges: tuple[int, ...]
    losses: tuple[float | None, ...]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.losses) + 1:
            raise ValueError(
                f"{len(self.losses)} losses of {self.method!r} need {len(self.losses) + 1} edges, "
                f"not {len(self.edges)}"
            )


@dataclass(frozen=True)
class Arm(Json):
    """One training run of the experiment. ``final_loss`` is the held-out text loss at the training
    length; ``curve`` holds (step, training loss)."""

    name: str
    encoding: str
    parameters: int
    steps: int
    tokens: int
    final_loss: float | None = None
    curve: tuple[tuple[int, float | None], ...] = ()


@dataclass(frozen=True)
class Drop(Json):
    """The step at which the positional encoding was dropped, and the loss just before it, just
    after it, and at the end of recalibration."""

    step: int
    loss_before: float | None
    loss_after: float | None
    loss_end: float | None = None


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
class Observation(Json):
    """One claim of a paper held against this run: ``shown`` is True (shown), False (not shown) or
    None (not judged, ``evidence`` says why)."""

    claim: str
    source: str
    shown: bool | None
    evidence: str


@dataclass(frozen=True)
class Report(Json):
    """Everything a run reports.

    ``task`` describes the retrieval task. The report's text uses these keys, each of which may be
    absent: ``n_trials`` (per method and length), ``needles`` (statements per sequence, one of which
    is asked for), ``chance`` (success rate of a guess among all values), ``chance_listed`` (success
    rate of answering any of the sequence's own values), ``training_needles`` (bool: whether
    training sequences carried such statements), ``training_share`` (which share of them did).
    ``reach`` holds what was measured while an arm trained, by arm, the run itself first.
    ``temperature`` holds the fitted coefficient c of the softmax temperature 1 + c ln(s) by method.
    ``timing`` is free-form; ``timing["tokens_per_second"]``, a number by arm, becomes a column of
    the table of arms. Raises ``ValueError`` when two arms share a name, or two cells a method and
    a length.
    """

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    arms: tuple[Arm, ...] = ()
    drop: Drop | None = None
    table: tuple[Cell, ...] = ()
    loss_by_position: tuple[LossByPosition, ...] = ()
    observations: tuple[Observation, ...] = ()
    task: dict[str, Any] = field(default_factory=dict)
    temperature: dict[str, float | None] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)
    reach: dict[str, tuple[Reach, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _refuse_repeats("arm", [arm.name for arm in self.arms])
        _refuse_repeats("cell", [(cell.method, cell.length) for cell in self.table])

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods of the table, in the order of their first cells."""
        return tuple(dict.fromkeys(cell.method for cell in self.table))

    @property
    def lengths(self) -> dict[int, float]:
        """Length to factor, ascending."""
        return dict(sorted((cell.length, cell.factor) for cell in self.table))

    @property
    def training_length(self) -> int | None:
        """The training length in tokens, from the table; ``None`` when there is no table."""
        return round(self.table[0].length / self.table[0].factor) if self.table else None

    def cell(self, method: str, length: int) -> Cell | None:
        """The cell of one method and length, ``None`` when it was not evaluated."""
        return next((c for c in self.table if (c.method, c.length) == (method, length)), None)

    def to_dict(self) -> dict[str, Any]:
        """As ``report.json`` has it: the arms lie under ``training``, by name."""
        data = super().to_dict()
        arms = {arm.pop("name"): arm for arm in data.pop("arms")}
        head = {key: data.pop(key) for key in ("name", "config", "environment")}
        return {**head, "training": {"arms": arms}, **data}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``. Raises pydantic's ``ValidationError``, ``KeyError`` where
        ``training`` or its arms are missing, ``TypeError`` where they are not objects."""
        arms = [{**arm, "name": name} for name, arm in dict(data["training"]["arms"]).items()]
        return super().from_dict({**data, "arms": arms})

    def write(self, path: Path) -> None:
        """Write ``report.json``, complete or not at all. Raises ``TypeError`` when a free-form
        dictionary holds something that JSON has no word for."""
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        # Lists of plain numbers, such as the points of a curve, stay on one line.
        text = re.sub(r"\[\n\s+([^\[\]{}\"]*?)\n\s+\]", _one_line, text)
        write_atomically(path, text + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what ``write`` wrote. Raises ``UserError`` when it is missing or malformed."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(f"Cannot read the report {path}: {error.strerror}.") from error
        except ValidationError as error:
            raise UserError(*(_problem(path, item) for item in error.errors())) from error
        except KeyError as error:
            raise UserError(f"{path} is not a report: the key {error} is missing.") from error
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is not a report: {error}.") from error


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Score interval of a success rate, 95% for the default ``z``:

        (p + z²/2n ± z sqrt(p (1 - p) / n + z²/4n²)) / (1 + z²/n),   p = successes / n, n = trials

    Unlike p ± z sqrt(p (1 - p) / n) it keeps its coverage near 0 and 1, where many cells lie.
    Raises ``ValueError`` unless 0 <= successes <= trials and trials > 0. Source: E. B. Wilson,
    Probable Inference, the Law of Succession, and Statistical Inference, JASA 22 (1927).
    """
    if not 0 <= successes <= trials or trials == 0:
        raise ValueError(f"{successes} successes in {trials} trials is not a success rate")
    p, square = successes / trials, z * z / trials
    middle = p + square / 2
    half = math.sqrt(square * p * (1 - p) + square * square / 4)
    # At 0 and at n the bound equals p exactly; rounding would leave it 1e-17 on the wrong side.
    low = 0.0 if successes == 0 else (middle - half) / (1 + square)
    high = 1.0 if successes == trials else (middle + half) / (1 + square)
    return low, high


def _refuse_repeats(kind: str, names: list[Any]) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(f"more than one {kind} is called {', '.join(map(str, sorted(repeated)))}")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _one_line(match: re.Match[str]) -> str:
    return f"[{' '.join(match[1].split())}]"


def _problem(path: Path, item: Any) -> str:
    where = ".".join(map(str, item["loc"])) or "the report"
    return f"{path} is not a report: {where}: {item['msg']}."
