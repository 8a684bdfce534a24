"""Reports as an evaluation writes them, without any model: success falls with length and
with depth as in the papers, and every number is drawn from a generator with a fixed seed."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from trainer.config import PERPLEXITY, STATEMENTS
from trainer.evaluation.results import (
    MEAN,
    TRIAL_COLUMNS,
    Observation,
    Report,
    RunSummary,
    averaged,
    rows_of,
    table,
)

TRAINED = 1024
FACTORS = (1, 2, 4, 8)
METHODS = {
    "none": "as is",
    "crop": "cropped",
    "pi": "PI",
    "ntk": "NTK-aware",
    "dynamic_ntk": "dynamic NTK",
    "yarn": "YaRN",
    "longrope": "LongRoPE",
    "temperature": "temperature",
    "dope": "DoPE-by-Gaussian",
    "weighted": "Weighted RoPE",
}
TASKS = {
    "multi_key": "Multi-key needles",
    "multi_value": "Multi-value needles",
    PERPLEXITY: "Held-out perplexity",
}
MODELS = ("RoPE", "DroPE", "NoPE", "HalfRoPE", "RoPE-ID", "ALiBi")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

# How many octaves beyond the training length it takes to halve the success.
_REACH = {"RoPE": 0.15, "DroPE": 2.2, "NoPE": 1.6, "HalfRoPE": 0.6, "RoPE-ID": 1.9, "ALiBi": 0.4}
_HELP = {"pi": 0.1, "ntk": 0.8, "dynamic_ntk": 0.7, "yarn": 0.6, "longrope": 0.7}
_FREE = ("none", "crop", "temperature")  # what can be done to a model without rotations


KINDS = (("score", "s"), ("loss", "es"))
"""Metrics, and the end of the name of their values."""


def example(models=MODELS, methods=tuple(METHODS), factors=FACTORS, trials=100):
    """A report over what is asked for; models without rotations skip what rescales them."""
    cells = [
        made
        for model in models
        for method in methods
        if model not in ("DroPE", "NoPE", "ALiBi") or method in _FREE
        for factor in factors
        for made in _cells(model, method, factor, trials)
    ]
    return report(*cells, config={"evaluation": {"lengths": list(factors), "dtype": "fp32"}})


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
    parts = [table([], columns)]
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
    return {
        "step": step,
        "what": what,
        "length": length,
        "loss_before": before,
        "loss_after": after,
        "loss_end": end,
        "sequences": sequences or {},
    }


EXPERIMENT = {
    "runs": (
        RunSummary(
            "RoPE", "rope", 1000, 100, 6400, 4.0, tuple((s, 9 - s / 20) for s in range(100))
        ),
        RunSummary(
            "DroPE", "rope, dropped", 1000, 100, 6400, 4.2, ((1, 9.0), (50, None), (99, 4.5))
        ),
    ),
    "drop": change(80, 4.1, 6.0, 4.2),
    "observations": (
        Observation("first claim", "a paper", True, "100%"),
        Observation("second claim", "a paper", False, "0%"),
        Observation("third claim", "a paper", None, "Not judged: why."),
    ),
    "task": {"needles": 4, "chance": 0.01, "chance_listed": 0.25, "training_share": 0.5},
    "timing": {"tokens_per_second": {"RoPE": 51000.0}, "seconds": 12.5},
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


def _cells(model, method, factor, trials):
    length = factor * TRAINED
    generator = np.random.default_rng([*model.encode(), 0, *method.encode(), factor])
    depths = np.resize(DEPTHS, trials)
    chances = np.array([_success(model, method, factor, depth) for depth in depths])
    hits = generator.random((4, trials)) < chances
    floats, where = depths.tolist(), {"model": model, "method": method, "length": length}
    yield cell(hits[0].astype(float).tolist(), task="multi_key", depths=floats, **where)
    yield cell(hits.mean(0).tolist(), task="multi_value", depths=floats, **where)
    last = _loss(model, method, factor, length) - 0.01 * math.log2(factor)
    yield loss(last, **where)


def _success(model, method, factor, depth):
    seen = 1 / factor
    if method == "crop":
        return 0.97 if depth >= 1 - seen else 0.02
    if method in ("yarn", "pi") and depth < 1 - 1.3 * seen:
        return 0.05
    reach = _REACH[model] + _HELP.get(method, 0.0)
    reach *= 1.3 if method in ("temperature", "dope") else 1.0
    return 0.98 * 0.5 ** (math.log2(factor) / reach) * (0.85 + 0.15 * abs(2 * depth - 1))


def _loss(model, method, factor, end):
    base = 3.1 + 0.06 * MODELS.index(model) + 0.4 * (end / (TRAINED / 2)) ** -1
    beyond = max(0.0, math.log2(end / TRAINED))
    if method in ("crop", "yarn"):
        return base + 0.02
    growth = 1.5 / (1 + 8 * _REACH[model]) if method == "none" else 0.15
    return base + growth * beyond**1.3 + (0.05 * math.log2(factor) if method == "pi" else 0.0)
