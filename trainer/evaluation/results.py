"""Results of an evaluation and a run: tables of rows and trials, and facts that are no rows.

A directory of results holds ``results.csv`` (a row for each model, method, task, length and
metric), ``trials.parquet`` (single scores and losses, for paired tests) and ``facts.json``. Lengths
are in tokens, losses in nats per token, scores are fractions from 0 to 1. A number that was not
measured or is not finite is empty or ``null``. Everything but seconds and
``tokens_per_second`` depends only on what was trained and evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from pydantic import ConfigDict

from trainer.common.fields import adapter
from trainer.common.files import write_atomically
from trainer.config import PERPLEXITY, STATEMENTS
from trainer.data.needles import NAMES, WORDS
from trainer.evaluation.statistics import average, estimate, mean_estimate

AS_IS = "none"
AS_IS_TITLE = "as is"
"""Key and title of the method that leaves a model as it was trained."""
MEAN = "mean"
"""Task of rows with the mean over all scored tasks."""

COLUMNS = (
    *("run", "model", "method", "task", "length", "factor", "reach"),
    *("metric", "value", "low", "high", "n", "seed", "seconds"),
)
"""Columns of every results.csv. ``metric``: ``score``, or ``loss``, on the last tokens of windows,
which are the same at every length. ``low``, ``high``: 95% interval; ``n``: independent texts;
``factor``: length over training length; ``reach``: longest length that the model's own encoding
reaches."""
TRIAL_COLUMNS = (
    *("model", "method", "task", "length", "factor"),
    *("metric", "text", "value", "depth", "label"),
)
"""Columns of trials.parquet: a row for each trial, or window of text, in the same order for all
models and methods. ``text``: number of its text, from 0; trials of one text are not independent.
``depth``: position of the needle, 0 at the beginning of the text. ``label``: kind of the trial."""

VERDICTS = {True: "shown", False: "not shown", None: "not judged"}
"""Whether an observation was made, in words."""
Row = tuple[str, str]
"""Model name and method key."""


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``256 trials``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def read_csv(path: Path) -> pd.DataFrame:
    """Read a results.csv; its texts may look like numbers."""
    text = dict.fromkeys(("run", "model", "method", "task", "metric"), str)
    return pd.read_csv(path, dtype=text, keep_default_na=False, na_values=[""])


ROW = ["model", "method", "length", "factor"]


def rows_of(trials: pd.DataFrame, run: str, seed: int) -> pd.DataFrame:
    """Return the rows of results.csv.

    A score is the mean over texts, a loss the mean over windows. Trials with labels have a row for
    every label too, as the task ``TASK|LABEL``. The last rows are the means over tasks.

    ``trials``: in columns :data:`TRIAL_COLUMNS` and ``seconds`` (of all trials of a cell together).
    """
    rows: list[dict[str, Any]] = []
    columns = ["model", "method", "task", "length", "factor", "metric"]
    for key, of_cell in trials.groupby(columns, sort=False):
        about = dict(zip(columns, key, strict=True))
        rows.append({**about, **_numbers(of_cell), "seconds": of_cell.seconds.iloc[0]})
        for label, part in of_cell[of_cell.label != ""].groupby("label", sort=False):
            rows.append({**about, **_numbers(part), "task": f"{about['task']}|{label}"})
    for key, part in trials[trials.task.isin(averaged(trials))].groupby(ROW, sort=False):
        about = dict(zip(ROW, key, strict=True))
        rows.append({**about, **_numbers(part), "task": MEAN, "metric": "score"})
    return pd.DataFrame([{**row, "run": run, "seed": seed} for row in rows], columns=[*COLUMNS])


def _numbers(trials: pd.DataFrame) -> dict[str, Any]:
    """Return the mean over trials of one metric, its interval, and how many texts it is over; the
    unweighted mean over tasks of scores in several."""
    if (trials.metric == "loss").all():
        value = mean_estimate(trials.value)
        n = len(trials)
    else:
        texts = by_text(trials)
        samples = [sample for _, sample in texts.groupby("texts", sort=False)]
        means = [estimate(sample.value.tolist(), int(sample.trials.sum())) for sample in samples]
        weights = [int(sample.tasks.iloc[0]) for sample in samples]
        value = means[0] if len(means) == 1 else average(means, weights)
        n = len(texts)
    return {"value": value.mean, "low": value.low, "high": value.high, "n": n}


def averaged(trials: pd.DataFrame) -> list[str]:
    """Return the largest set of tasks with scores at the same lengths; empty for fewer than two.

    A mean over them covers the same tasks at every length.
    """
    alike: dict[frozenset[int], list[str]] = {}
    for task, lengths in trials[trials.metric == "score"].groupby("task", sort=False).length:
        alike.setdefault(frozenset(lengths), []).append(task)
    most = max(alike.values(), key=len, default=[])
    return most if len(most) > 1 else []


def by_text(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the independent scores among those of trials: one for each text, in columns of
    :data:`ROW`, ``texts``, ``text``, ``value``, ``trials`` and ``tasks``.

    The score of a text is the mean over its trials. The n-th texts of tasks with the same number of
    texts (``texts``) may be the same one by design: they have a single score with their mean.
    """
    keys = [*ROW, "task"]
    each = scores.groupby([*keys, "text"], sort=False).value.agg(["mean", "size"]).reset_index()
    each["texts"] = each.groupby(keys)["mean"].transform("size")
    pooled = each.groupby([*ROW, "texts", "text"], sort=False)
    return pooled.agg(
        value=("mean", "mean"), trials=("size", "sum"), tasks=("mean", "size")
    ).reset_index()


@dataclass(frozen=True)
class RunSummary:
    """One training run of the experiment.

    ``curve``: (step, training loss). ``skipped``: updates left out because their loss or gradient
    was not finite. ``finite``: whether all weights are finite. ``changes``: one for each phase that
    began with a change, in order, under ``step``, ``what``, ``length`` (tokens of the phase's
    sequences), ``loss_before``, ``loss_after`` and ``loss_end`` (held-out, just before and after
    the change and at the end of the phase), and ``sequences`` (the losses of each sequence by
    ``before``, ``after`` and ``end``).
    ``milestones``: benchmarks during training: ``scores`` by task after ``step`` updates and
    ``tokens``, and whether the encoding was ``dropped`` by then. ``tokens_per_second``: median of
    training.
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
    """One claim of a paper, judged by this run's numbers.

    ``shown``: True (shown), False (not shown) or None (not judged; ``evidence`` says why).
    """

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
    on held-out text of a model that knows only how frequent tokens are.
    ``notes``: a sentence each, for what was not run and why, and for values that were fitted.
    ``config``: of the run, or of the evaluation alone, under ``evaluation`` either way.
    ``training_share``: share of the training sequences with needle statements, if it is known.
    ``drop``: the change of the run that drops its encoding, as in ``RunSummary.changes``. ``made``:
    date, command, program and inputs, as text by term.
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

    def curve(self, row: Row, task: str) -> pd.DataFrame:
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

    def row_name(self, row: Row) -> str:
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
    def read(cls, directory: Path) -> Report:
        """Read what :meth:`write` wrote.

        Raises:
            OSError: a file is missing.
            ValueError: a file is malformed.
        """
        facts = adapter(dict[str, Any]).validate_json((directory / FACTS).read_bytes())
        rows = read_csv(directory / "results.csv")
        trials = pd.read_parquet(directory / "trials.parquet")
        # 0.3.0 wrote the longest context only if it was not the training length.
        trained = facts.get("longest_context") or facts["training_length"]
        values = {"trained": trained, **facts, "rows": rows, "trials": trials}
        return adapter(Report).validate_python(values)


FACTS = "facts.json"
"""Name of the file that marks results as complete."""


def troubles(runs: Sequence[RunSummary]) -> list[str]:
    """Return warnings about runs whose numbers are unreliable: a diverged run prints a loss too."""
    skipped = [
        f"{run.name}: {run.skipped:,} of {run.steps:,} updates were left out, because their loss "
        "or gradient was not finite."
        for run in runs
        if run.skipped
    ]
    diverged = [
        f"{run.name}: the norm of its weights is not a finite number: it diverged, and its figures "
        "say nothing."
        for run in runs
        if not run.finite
    ]
    return skipped + diverged
