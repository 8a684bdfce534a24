"""Rows of results.csv made of single trials."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from trainer.evaluation.results import COLUMNS, MEAN, TRIAL_COLUMNS, table
from trainer.evaluation.statistics import Estimate, average, estimate, mean_estimate

ROW = ["model", "method", "length", "factor"]


def trials_of(
    about: Mapping[str, Any], cell: Mapping[str, Any], texts: Sequence[int]
) -> pd.DataFrame:
    """Return the trials of one model, method, task and length.

    ``about``: values of these columns. ``cell``: what :meth:`Measurement.cell` returns. ``texts``:
    number of each trial's text; empty if every trial has its own.
    """
    metric, values = ("score", cell["scores"]) if "scores" in cell else ("loss", cell["losses"])
    return pd.DataFrame(
        {
            **about,
            "metric": metric,
            "text": list(texts) or range(len(values)),
            "value": pd.Series(values, dtype=float),
            "depth": pd.Series(cell.get("depths") or [None] * len(values), dtype=float),
            "label": pd.Series(cell.get("labels") or [""] * len(values), dtype=object),
        },
        columns=list(TRIAL_COLUMNS),
    )


def rows_of(
    trials: pd.DataFrame, cell: Mapping[str, Any], about: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model, method, task and length; ``about``: its other columns.

    A score is the mean over texts. Trials with labels have a row for every label too, as the task
    ``TASK|LABEL``. The loss is the mean over windows.
    """
    if "losses" in cell:
        yield _row(about, "loss", mean_estimate(trials.value), len(trials))
        return
    task, labelled = about["task"], trials[trials.label != ""]
    labels = [(f"{task}|{label}", part) for label, part in labelled.groupby("label", sort=False)]
    for name, part in [(task, trials), *labels]:
        texts = by_text(part, [task])
        yield _row({**about, "task": name}, "score", _mean_of(texts), len(texts))


def mean_over_tasks(trials: pd.DataFrame, tasks: Iterable[str]) -> list[dict[str, Any]]:
    """Return rows of the unweighted mean over ``tasks``, for each model, method and length."""
    texts = by_text(trials, tasks)
    return [
        _row({**dict(zip(ROW, key, strict=True)), "task": MEAN}, "score", _mean_of(part), len(part))
        for key, part in texts.groupby(ROW, sort=False)
    ]


def averaged(trials: pd.DataFrame) -> list[str]:
    """Return the largest set of tasks with scores at the same lengths; empty for fewer than two.

    A mean over them covers the same tasks at every length.
    """
    alike: dict[tuple[int, ...], list[str]] = {}
    for task, part in trials[trials.metric == "score"].groupby("task", sort=False):
        alike.setdefault(tuple(sorted(part.length.unique())), []).append(task)
    most = max(alike.values(), key=len, default=[])
    return most if len(most) > 1 else []


def by_text(trials: pd.DataFrame, tasks: Iterable[str]) -> pd.DataFrame:
    """Return the independent scores of ``tasks``: one for each text, in columns of :data:`ROW`,
    ``texts``, ``text``, ``value``, ``trials`` and ``tasks``.

    The score of a text is the mean over its trials. The n-th texts of tasks with the same number of
    texts (``texts``) may be the same one by design: they have a single score with their mean.
    """
    scores = trials[trials.task.isin(list(tasks)) & (trials.metric == "score")]
    keys = [*ROW, "task"]
    each = scores.groupby([*keys, "text"], sort=False).value.agg(["mean", "size"]).reset_index()
    each["texts"] = each.groupby(keys)["mean"].transform("size")
    pooled = each.groupby([*ROW, "texts", "text"], sort=False)
    return pooled.agg(
        value=("mean", "mean"), trials=("size", "sum"), tasks=("mean", "size")
    ).reset_index()


def _mean_of(texts: pd.DataFrame) -> Estimate:
    """Return the unweighted mean over all tasks of the texts of one model, method and length."""
    samples = [sample for _, sample in texts.groupby("texts", sort=False)]
    means = [estimate(sample.value.tolist(), int(sample.trials.sum())) for sample in samples]
    if len(means) == 1:
        return means[0]
    return average(means, [int(sample.tasks.iloc[0]) for sample in samples])


def _row(about: Mapping[str, Any], metric: str, value: Estimate, n: int) -> dict[str, Any]:
    return {
        **about, "metric": metric, "value": value.mean, "low": value.low, "high": value.high,
        "n": n,
    }  # fmt: skip


def all_rows(rows: Sequence[dict[str, Any]], trials: pd.DataFrame, **about: Any) -> pd.DataFrame:
    """Return the table of all rows and of the means over tasks; ``about``: run and seed."""
    means = mean_over_tasks(trials, tasks) if (tasks := averaged(trials)) else []
    return table([{**row, **about} for row in (*rows, *means)], COLUMNS)
