"""Reports as an evaluation writes them, without any model: success falls with length and
with depth as in the papers, and every number is drawn from a generator with a fixed seed."""

from __future__ import annotations

import math

import numpy as np

from trainer.evaluation.results import PERPLEXITY, STATEMENTS, Arm, Cell, Drop, Observation, Report

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


def example(models=MODELS, methods=METHODS, factors=FACTORS, trials=100, longbench=False):
    """A report over what is asked for; models without rotations skip what rescales them."""
    methods = dict.fromkeys(methods) if not isinstance(methods, dict) else methods
    cells = [
        cell
        for model in models
        for method in methods
        if model not in ("DroPE", "NoPE", "ALiBi") or method in _FREE
        for factor in factors
        for cell in _cells(model, method, factor, trials, longbench)
    ]
    return Report(
        name="Length generalisation of small decoders",
        training_length=TRAINED,
        cells=tuple(cells),
        methods={key: METHODS[key] for key in methods},
        tasks={**TASKS, **({"longbench": "LongBench"} if longbench else {})},
        notes=(
            "The softmax temperature of DroPE was fitted on validation text: c = 0.214.",
            "PI, NTK-aware and YaRN were not run on models without rotations.",
        ),
        config={"evaluation": {"lengths": list(factors), "seed": 0, "dtype": "fp32"}},
        environment={"torch": "2.13", "device": "cpu"},
    )


def cell(scores, model="RoPE", method="none", task="multi_key", length=2048, **fields):
    """A cell of plain scores."""
    return Cell(model, method, task, length, length / TRAINED, tuple(scores), **fields)


def report(*cells, **fields):
    """A report of nothing but cells."""
    return Report(
        **{
            "name": "r",
            "training_length": TRAINED,
            "cells": cells,
            "methods": METHODS,
            "tasks": TASKS,
            "notes": (),
            "config": {},
            "environment": {},
            **fields,
        }
    )


EXPERIMENT = {
    "arms": (
        Arm("RoPE", "rope", 1000, 100, 6400, 4.0, tuple((s, 9 - s / 20) for s in range(100))),
        Arm("DroPE", "rope, dropped", 1000, 100, 6400, 4.2, ((1, 9.0), (50, None), (99, 4.5))),
    ),
    "drop": Drop(80, 4.1, 6.0, 4.2),
    "observations": (
        Observation("first claim", "a paper", True, "100%"),
        Observation("second claim", "a paper", False, "0%"),
        Observation("third claim", "a paper", None, "Not judged: why."),
    ),
    "task": {"needles": 4, "chance": 0.01, "chance_listed": 0.25, "training_share": 0.5},
    "temperature": {"DroPE + temperature": 0.2},
    "timing": {"tokens_per_second": {"RoPE": 51000.0}, "seconds": 12.5},
}
"""What a report of an experiment has beside its cells."""


def statements(name, rates, losses=(4.0,) * 4, trials=256):
    """Cells of a model as it is at 1, 2, 4 and 8 times a training length of 64; rates in %, None
    for not measured."""
    made = []
    for length, rate, loss in zip((64, 128, 256, 512), rates, losses, strict=True):
        where = {"model": name, "method": "none", "length": length, "factor": length / 64}
        if rate is not None:
            hits = round(rate * trials / 100)
            scores = (1.0,) * hits + (0.0,) * (trials - hits)
            made.append(Cell(task=STATEMENTS, scores=scores, **where))
        made.append(Cell(task=PERPLEXITY, last_loss=loss, **where))
    return made


def _cells(model, method, factor, trials, longbench):
    length = factor * TRAINED
    seed = [*model.encode(), 0, *method.encode(), factor]
    generator = np.random.default_rng(seed)
    depths = np.resize(DEPTHS, trials)
    chances = np.array([_success(model, method, factor, depth) for depth in depths])
    hits = generator.random((4, trials)) < chances
    where = {"model": model, "method": method, "length": length, "factor": float(factor)}
    seconds = 0.01 * trials * factor
    floats = tuple(depths.tolist())
    yield Cell(
        task="multi_key",
        scores=tuple(hits[0].astype(float).tolist()),
        depths=floats,
        seconds=seconds,
        **where,
    )
    yield Cell(task="multi_value", scores=tuple(hits.mean(0).tolist()), depths=floats, **where)
    half = TRAINED // 2
    edges = tuple(range(0, length + 1, half))
    losses = [_loss(model, method, factor, end) for end in edges[1:]]
    yield Cell(
        task=PERPLEXITY,
        edges=edges,
        losses=tuple(losses),
        last_loss=_loss(model, method, factor, length) - 0.01 * math.log2(factor),
        seconds=seconds / 4,
        **where,
    )
    if longbench and factor == max(FACTORS):
        kinds = ("single-document QA", "multi-document QA", "summarisation")
        buckets = ("0–4K", "4–8K", "8–16K")
        labels = tuple(f"{kinds[i % 3]}|{buckets[i // 3 % 3]}" for i in range(trials))
        scores = np.round(generator.beta(0.4, 2.0, trials), 3)
        yield Cell(task="longbench", scores=tuple(scores.tolist()), labels=labels, **where)


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
