"""Results of an evaluation: a table of trials, and rows made of it.

Lengths are in tokens, losses in nats per token, scores are fractions from 0 to 1.
"""

from typing import Any

import pandas as pd

from trainer.evaluation.statistics import average, estimate, mean_estimate

AS_IS = "none"
"""Method that leaves a model as it was trained."""
PERPLEXITY = "perplexity"
"""Task whose trials are losses of windows instead of scores."""
STATEMENTS = "statements"
"""Task that training sequences can contain; its score is called retrieval."""
MEAN = "mean"
"""Task of rows with the mean over all scored tasks."""

COLUMNS = (
    *("run", "model", "method", "task", "length", "factor", "reach"),
    *("metric", "value", "low", "high", "n", "seed", "seconds"),
)
"""Columns of every results.csv. ``metric``: ``score``, or ``loss`` on the last C tokens of windows.
``low``, ``high``: 95% interval; ``n``: independent texts; ``factor``: length over training length;
``reach``: longest length that the model's own encoding reaches."""
TRIAL_COLUMNS = (
    *("model", "method", "task", "length", "factor"),
    *("metric", "text", "value", "depth", "label"),
)
"""Columns of trials.parquet: a row for each trial, or window of text, in the same order for all
models and methods. ``text``: number of its text, from 0; trials of one text are not independent.
``depth``: position of the needle, 0 at the beginning of the text. ``label``: kind of the trial."""


def counted(number: int, noun: str) -> str:
    """Return a count with its noun: ``1 trial``, ``256 trials``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
        value = average(means, [int(sample.tasks.iloc[0]) for sample in samples])
        n = len(texts)
    return {"value": value.mean, "low": value.low, "high": value.high, "n": n}


def averaged(trials: pd.DataFrame) -> list[str]:
    """Return the tasks with scores, over which a mean is taken; empty for fewer than two."""
    tasks = [*trials.task[trials.metric == "score"].unique()]
    return tasks if len(tasks) > 1 else []


def by_text(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the independent scores among those of trials: one for each text, in columns of
    :data:`ROW`, ``texts``, ``text``, ``value``, ``trials`` and ``tasks``.

    The score of a text is the mean over its trials. The n-th texts of tasks with equally many texts
    (``texts``) may be the same one: they have a single score with their mean.
    """
    keys = [*ROW, "task"]
    each = scores.groupby([*keys, "text"], sort=False).value.agg(["mean", "size"]).reset_index()
    each["texts"] = each.groupby(keys)["mean"].transform("size")
    pooled = each.groupby([*ROW, "texts", "text"], sort=False)
    return pooled.agg(
        value=("mean", "mean"), trials=("size", "sum"), tasks=("mean", "size")
    ).reset_index()
