"""Reports as an evaluation writes them, without any model."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from trainer.evaluation.results import (
    MEAN,
    PERPLEXITY,
    STATEMENTS,
    TRIAL_COLUMNS,
    averaged,
    rows_of,
)
from trainer.report.report import Observation, Report, RunSummary

TRAINED = 1024
METHODS = {
    "none": "as is",
    "crop": "cropped",
    "pi": "PI",
    "ntk": "NTK-aware",
    "yarn": "YaRN",
    "temperature": "temperature",
}
TASKS = {
    "multi_key": "Multi-key needles",
    "multi_value": "Multi-value needles",
    PERPLEXITY: "Held-out perplexity",
}
KINDS = (("score", "s"), ("loss", "es"))
"""Metrics, and the end of the name of their values."""


def example(trials=20):
    """A report of two models and methods in two tasks with needles at five depths, and losses."""
    generator, cells = np.random.default_rng(0), []
    depths = np.resize([0.0, 0.25, 0.5, 0.75, 1.0], trials).tolist()
    for model in ("RoPE", "DroPE"):
        for method in ("none", "yarn"):
            for factor in (1, 2, 4, 8):
                where = {"model": model, "method": method, "length": factor * TRAINED}
                for task in ("multi_key", "multi_value"):
                    hits = generator.random(trials) < 1 / factor
                    cells.append(cell(hits.astype(float), task=task, depths=depths, **where))
                cells.append(loss(3 + generator.random(), **where))
    return report(*cells, config={"evaluation": {"dtype": "fp32"}})


def cell(scores, model="RoPE", method="none", task="multi_key", length=2048, **fields):
    """Scores or, losses, as an evaluation measures them."""
    about = {"model": model, "method": method, "task": task, "length": length}
    return about, fields if "losses" in fields else {"scores": scores, **fields}


def loss(value, model="RoPE", method="none", length=2048, **fields):
    """The loss of one window or, from a sequence, of several."""
    values = (value,) if isinstance(value, float) else tuple(value)
    return cell((), model, method, PERPLEXITY, length, losses=values, **fields)


def report(*cells, training_length=TRAINED, tasks=TASKS, **fields):
    """A report of nothing but cells."""
    columns = [*TRIAL_COLUMNS, "seconds"]
    parts = [pd.DataFrame(columns=columns)]
    for place, measured in cells:
        metric, values = next((m, measured[m + k]) for m, k in KINDS if m + k in measured)
        part = pd.DataFrame({"value": pd.Series(values, dtype=float), **place, "metric": metric})
        part["factor"] = place["length"] / training_length
        part["text"] = measured.get("groups", range(len(part)))
        part["depth"] = pd.Series(measured.get("depths", [math.nan] * len(part)), dtype=float)
        part["label"] = pd.Series(measured.get("labels", [""] * len(part)), dtype=object)
        part["seconds"] = measured.get("seconds", 1.0)
        parts.append(part[columns])
    trials = pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)
    over = {task: tasks.get(task, task) for task in trials.task.unique()}
    over |= {MEAN: "Mean over tasks"} if averaged(trials) else {}
    return Report(
        **{
            "name": "r",
            "training_length": training_length,
            "trained": training_length,
            "rows": rows_of(trials, "r", 0),
            "trials": trials[[*TRIAL_COLUMNS]],
            "methods": METHODS,
            "tasks": {**tasks, **over},
            "config": {},
            "environment": {},
            **fields,
        }
    )


def change(step, before, after, end=None, sequences=None, what="", length=0):
    """A change of a run, as it notes it."""
    if sequences is None:
        sequences = {"before": [before], "after": [after]} | ({"end": [end]} if end else {})
    return {
        "step": step,
        "what": what,
        "length": length,
        "loss_before": before,
        "loss_after": after,
        "loss_end": end,
        "sequences": sequences,
    }


EXPERIMENT = {
    "runs": (
        RunSummary("RoPE", "rope", 1000, 100, 6400, tuple((s, 9 - s / 20) for s in range(100))),
        RunSummary("DroPE", "rope, dropped", 1000, 100, 6400, ((1, 9.0), (50, None), (99, 4.5))),
    ),
    "drop": change(80, 4.1, 6.0, 4.2),
    "observations": (
        Observation("first claim", "a paper", True, "100%"),
        Observation("second claim", "a paper", False, "0%"),
        Observation("third claim", "a paper", None, "Not judged: why."),
    ),
    "training_share": 0.5,
}
"""What a report of an experiment has beside its cells."""


def statements(name, rates, losses=(4.0,) * 4, trials=256):
    """Cells of a model as it is at 1, 2, 4 and 8 times a training length of 64; rates in %, None
    for not measured."""
    made = []
    for length, rate, value in zip((64, 128, 256, 512), rates, losses, strict=True):
        if rate is not None:
            hits = round(rate * trials / 100)
            scores = (1.0,) * hits + (0.0,) * (trials - hits)
            made.append(cell(scores, name, task=STATEMENTS, length=length))
        if value is not None:
            made.append(loss((float(value),) * 4, name, length=length))
    return made
