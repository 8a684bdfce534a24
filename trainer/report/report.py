"""What the report of a run or an evaluation says, and its files.

A directory of results holds ``results.csv`` (a row for each model, method, task, length and
metric), ``trials.parquet`` (single scores and losses, for paired tests) and ``facts.json``. A
number that was not measured or is not finite is empty or ``null``. Rows (but for seconds) and
trials depend only on what was trained and evaluated.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pydantic import ConfigDict

from trainer.common.fields import adapter
from trainer.common.files import expecting, write_atomically
from trainer.data.needles import NAMES, WORDS
from trainer.evaluation.results import AS_IS, COLUMNS, MEAN, PERPLEXITY, STATEMENTS, TRIAL_COLUMNS
from trainer.evaluation.statistics import mean_estimate

FACTS = "facts.json"
"""Name of the file that marks results as complete."""
VERDICTS = {True: "shown", False: "not shown", None: "not judged"}
"""Whether an observation was made, in words."""
RowKey = tuple[str, str]
"""Model name and method key."""


def read_csv(path: Path) -> pd.DataFrame:
    """Read a results.csv; its texts may look like numbers."""
    text = dict.fromkeys(("run", "model", "method", "task", "metric"), str)
    with expecting("rows of results", path):
        return pd.read_csv(path, dtype=text, keep_default_na=False, na_values=[""])


@dataclass(frozen=True)
class RunSummary:
    """One training run of the experiment.

    ``curve``: (step, training loss). ``skipped``: updates left out because their loss or gradient
    was not finite. ``finite``: whether all weights are finite. ``changes``: one for each phase that
    began with a change, under ``step``, ``what``, ``length`` (tokens of the phase's sequences),
    ``loss_before``, ``loss_after`` and ``loss_end`` (held-out, around the change and at the end of
    the phase), and ``sequences`` (losses of each sequence by ``before``, ``after`` and ``end``).
    ``milestones``: benchmarks during training: ``scores`` by task after ``step`` updates and
    ``tokens``, and whether the encoding was ``dropped`` by then. ``tokens_per_second``: median.
    """

    name: str
    encoding: str
    parameters: int
    steps: int
    tokens: int
    curve: tuple[tuple[int, float | None], ...] = ()
    skipped: int = 0
    finite: bool = True
    changes: tuple[dict[str, Any], ...] = ()
    milestones: tuple[dict[str, Any], ...] = ()
    tokens_per_second: int | None = None


@dataclass(frozen=True)
class Observation:
    """One claim of a paper, judged by this run's numbers: ``shown`` is True, False, or None if it
    is not judged; ``evidence`` says why."""

    claim: str
    source: str
    shown: bool | None
    evidence: str


@dataclass(frozen=True, eq=False)
class Report:
    """All rows and trials of an evaluation and, where it ended an experiment, what its runs did.

    ``training_length``: C, the unit of lengths. ``rows``: under :data:`COLUMNS`, models and methods
    in the order of tables. ``trials``: under :data:`TRIAL_COLUMNS`. ``methods``, ``tasks``: titles
    by key, in the order of tables, for instance ``{"none": "as is", "yarn": "YaRN"}``.
    ``trained``: the longest context that any of the models was trained with. ``unigram_loss``: loss
    on held-out text of a model that knows only how frequent tokens are. ``notes``: what was not run
    and why, and what was fitted. ``config``: of the run, or of the evaluation alone, under
    ``evaluation`` either way. ``training_share``: share of sequences with needle statements.
    ``drop``: the change of the run that drops its encoding, as in ``RunSummary.changes``. ``made``:
    date, command, program and inputs, as text by term. ``origins``: for each model that dropped its
    encoding the name of the model that it came from. ``seeds``: for each model that differs from
    others in its seed alone the name of their mean.
    """

    __pydantic_config__: ClassVar = ConfigDict(arbitrary_types_allowed=True)

    name: str
    training_length: int
    trained: int
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=[*COLUMNS]))
    trials: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=[*TRIAL_COLUMNS]))
    methods: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unigram_loss: float | None = None
    runs: tuple[RunSummary, ...] = ()
    drop: dict[str, Any] | None = None
    observations: tuple[Observation, ...] = ()
    training_share: float | None = None
    made: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    seeds: dict[str, str] = field(default_factory=dict)

    def over_seeds(self) -> "Report":
        """Return the report with one model in the place of those that differ in their seeds alone:
        its values are their means, with Student's 95% intervals over the seeds, at least as wide as
        those of single models, and its trials are those of all of them."""
        means = {*self.seeds.values()}
        cells = []
        keys = ["model", "method", "task", "length", "metric"]
        for _, of_cell in self.rows.replace({"model": self.seeds}).groupby(keys, sort=False):
            row = of_cell.iloc[0].to_dict()
            if row["model"] in means:
                over_seeds = mean_estimate(of_cell.value)
                row["value"] = over_seeds.mean
                # All seeds answer the same trials, which may leave them without any spread.
                row["low"] = np.fmin(over_seeds.low, of_cell.low.mean())
                row["high"] = np.fmax(over_seeds.high, of_cell.high.mean())
            if row["metric"] == "score":
                row["low"] = max(row["low"], 0.0)
                row["high"] = min(row["high"], 1.0)
            cells.append(row)
        return replace(
            self,
            rows=pd.DataFrame(cells, columns=self.rows.columns),
            trials=self.trials.replace({"model": self.seeds}),
            origins={
                self.seeds.get(model, model): self.seeds.get(origin, origin)
                for model, origin in self.origins.items()
            },
        )

    @property
    def scored(self) -> list[str]:
        """Keys of the tasks with scores, the mean over all of them first."""
        measured = {*self.rows.task[self.rows.metric == "score"]}
        return [key for key in dict.fromkeys((MEAN, *self.tasks)) if key in measured]

    @property
    def chances(self) -> dict[str, float]:
        """Success rates of guesses in needle statements, if these were measured: of any value, and
        of one in the sequence."""
        if STATEMENTS not in self.tasks:
            return {}
        listed = self.config["evaluation"]["needles"]["needles"]
        return {"chance": 1 / (len(WORDS) - len(NAMES)), "any listed value": 1 / listed}

    def curve(self, row: RowKey, task: str) -> pd.DataFrame:
        """Return the rows of a model and method in a task, by length."""
        is_wanted = (self.rows.model == row[0]) & (self.rows.method == row[1])
        rows = self.rows[is_wanted & (self.rows.task == task)]
        return rows.dropna(subset="value").sort_values("length")

    @property
    def final_losses(self) -> dict[str, float]:
        """Losses of models as they are on held-out text at the training length, by name."""
        rows = self.rows[(self.rows.task == PERPLEXITY) & (self.rows.method == AS_IS)]
        rows = rows[rows.length == self.training_length].dropna(subset="value")
        return dict(zip(rows.model, rows.value, strict=True))

    def row_name(self, row: RowKey) -> str:
        """Return a row's name, such as ``DroPE + YaRN``, or ``DroPE`` for the model as is."""
        model, method = row
        return model if method == AS_IS else f"{model} + {self.methods.get(method, method)}"

    def write(self, directory: Path) -> None:
        """Write ``results.csv``, ``trials.parquet`` and last ``facts.json``, each atomically."""
        (directory / FACTS).unlink(missing_ok=True)
        buffer = BytesIO()
        self.trials.to_parquet(buffer, index=False)
        table = self.rows.to_csv(index=False, float_format="%.10g")
        write_atomically(directory / "results.csv", table)
        write_atomically(directory / "trials.parquet", buffer.getvalue())
        facts = adapter(Report).dump_json(self, indent=1, exclude={"rows", "trials"})
        write_atomically(directory / FACTS, facts + b"\n")

    @classmethod
    def read(cls, directory: Path) -> "Report":
        """Read what :meth:`write` wrote.

        Raises:
            OSError: a file is missing.
            ValueError: a file is malformed.
        """
        rows = read_csv(directory / "results.csv")
        with expecting("trials as parquet", directory / "trials.parquet"):
            trials = pd.read_parquet(directory / "trials.parquet")
        with expecting("the facts of a report", directory / FACTS):
            facts = json.loads((directory / FACTS).read_bytes())
            # 0.3.0 wrote the longest context only if it was not the training length.
            trained = facts.get("longest_context") or facts["training_length"]
            values = {"trained": trained, **facts, "rows": rows, "trials": trials}
            return adapter(Report).validate_python(values)


def troubles(runs: Sequence[RunSummary]) -> list[str]:
    """Return warnings about runs whose numbers are unreliable: a diverged run prints a loss too."""
    warnings = []
    for run in runs:
        if run.skipped:
            skipped = f"{run.skipped:,} of {run.steps:,} updates were left out"
            why = "because their loss or gradient was not finite"
            warnings.append(f"{run.name}: {skipped}, {why}.")
        if not run.finite:
            why = "the norm of its weights is not a finite number: it diverged"
            warnings.append(f"{run.name}: {why}, and its figures say nothing.")
    return warnings
