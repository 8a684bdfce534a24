"""Results of a length evaluation as plain data: what one method on one model reached in one task at
one length.

Lengths in tokens, losses in nats per token, scores from 0 to 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainer.report.results import Json

PERPLEXITY = "perplexity"
"""The task whose cells have losses by position instead of scores."""


@dataclass(frozen=True)
class LengthCell(Json):
    """One method on one model in one task at one length.

    ``factor``: the length in units of the training length. ``scores``: of every trial, in the order
    of the task's prompts, the same trials for all methods and models. ``depths``, ``labels``: of
    every trial, or empty. ``edges``, ``losses``: mean held-out loss from position ``edges[i]``
    (included) to ``edges[i + 1]`` (excluded). ``last_loss``: mean loss on the last tokens, the same
    tokens at every length. ``seconds``: what it took.
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
class LengthReport(Json):
    """All cells of an evaluation.

    ``training_length``: C. ``methods``: titles by key, in the order of tables, for instance
    ``{"none": "as is", "yarn": "YaRN"}``. ``tasks``: titles by key. ``notes``: a sentence each, for
    what was not run and why, and for values that were fitted. ``settings``: the evaluation's own.
    """

    name: str
    training_length: int
    cells: tuple[LengthCell, ...]
    methods: dict[str, str]
    tasks: dict[str, str]
    notes: tuple[str, ...]
    settings: dict[str, object]
    environment: dict[str, object]

    def __post_init__(self) -> None:
        places = Counter((cell.model, cell.method, cell.task, cell.length) for cell in self.cells)
        for place, times in places.items():
            if times > 1:
                raise ValueError(f"{times} cells are of {' / '.join(map(str, place))}")

    @property
    def last(self) -> int:
        """Tokens at the end of every window that ``last_loss`` is of."""
        asked = self.settings.get("last")
        lengths = [cell.length for cell in self.cells if cell.task == PERPLEXITY]
        return asked if isinstance(asked, int) else min([self.training_length, *lengths])
