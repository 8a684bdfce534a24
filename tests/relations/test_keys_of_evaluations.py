"""Keys of measurements, of the jobs of an evaluation, and of reports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.relations.keys import (
    FIT_TEXT,
    LAYOUT,
    WINDOWS,
    Key,
    Paths,
    changed,
    ignored_leaves,
)
from trainer.data.needles import Trials
from trainer.evaluation import plan as cells
from trainer.evaluation.config import EvaluationConfig, KeyTokenSettings
from trainer.evaluation.key_tokens import Chooser, ChosenTokens, Contexts, KeyTokens
from trainer.evaluation.measurements import Perplexity, Prompted, Statements
from trainer.evaluation.methods import Recipe
from trainer.evaluation.plan import Subject, choice_key, plan_cells, plan_jobs
from trainer.evaluation.results import Report
from trainer.evaluation.scoring import Prompt
from trainer.evaluation.store import Claims, Share, Store, pack
from trainer.model.config import ModelConfig
from trainer.workflows import benchmarks, compare, evaluate
from trainer.workflows.evaluate import STATED

TRIALS = Trials(np.arange(8).reshape(2, 4), np.arange(2), np.arange(2) + 1)
MASK = np.array([[True, False], [False, True]])


def prompted(prompt):
    """Return the fingerprint of a task with one prompt."""
    task = SimpleNamespace(name="t", stop=None, score=None, prompts=lambda length: [prompt])
    return Prompted(task, None).fingerprint(4)


@dataclass(frozen=True)
class ChoiceOfTokens:
    """What the choice of key tokens depends on."""

    model: str
    windows: np.ndarray
    end_of_text: int
    last: int
    settings: KeyTokenSettings


def choice_of_tokens_key(choice):
    """Return the key under which a choice of key tokens is stored."""
    paths = []

    class Choices(Paths):
        def get(self, kind, key, make):
            paths.append(self.path(kind, key))
            return pack(np.zeros((1, 1), np.uint8))

    layout = SimpleNamespace(training_length=4)
    subject = SimpleNamespace(fingerprint=choice.model, layout=layout, name="a")
    chooser = Chooser(subject, choice.settings, Choices(Path("/")), 1)
    chooser.choose(choice.windows, choice.end_of_text, choice.last)
    return paths


def evaluated(evaluation):
    """Return what tables of runs are compared by, for a report of this evaluation."""
    asked = {k: v for k, v in asdict(evaluation).items() if k not in STATED}
    return compare._measured_on(report_of({"evaluation": asked}))


def report_of(config, **more):
    environment = {"corpus": "text", "models": {"a": "weights"}, "precision": "fp32"}
    values = {"cells": (), "methods": {"none": "as is"}, "tasks": {"a": "A"}, "notes": ()}
    values |= {"name": "n", "training_length": 64, "environment": environment, "config": config}
    return Report(**values | more)


OF_REPORT = {
    "name": "a heading",
    **dict.fromkeys(("cells", "notes", "observations", "temperature", "timing"), "results"),
    "key_tokens": "how many there are, and settings of the configuration",
    **dict.fromkeys(("arms", "drop", "reach", "milestones"), "of training"),
    "environment": "versions; text and models are taken from it",
    "made": "date and command; the inputs are taken from it",
    "longest_context": "of the models, whose weights are among the inputs",
}
OF_TRIALS = {
    "methods": "every method is asked the same trials",
    "dtype": "the precision is a key of its own",
    "prefill_chunk": "how much is read at once",
    "training_length": "a field of the report",
    "tokens": "stated as lengths",
    "lengths": "each length is compared by itself; the longest and shortest are in the key",
    **dict.fromkeys(
        (f"key_tokens.{item.name}" for item in fields(KeyTokenSettings)),
        "of a task that tables of several runs do not show",
    ),
}
KEYS = {
    "perplexity": Key(
        Perplexity(WINDOWS, 0, 4, 2),
        lambda task: task.fingerprint(4),
        {"key": "names the task in the key of a cell", "title": "a heading"},
    ),
    "key tokens": Key(
        KeyTokens(WINDOWS, 0, ChosenTokens(MASK, Contexts(4, 2, 2.0, -2.0), "a")),
        lambda task: task.fingerprint(4),
        {
            "key": "names the task in the key of a cell",
            "title": "a heading",
            "chosen.by": "the mask says which tokens were chosen",
            **dict.fromkeys(
                (f"chosen.contexts.{item.name}" for item in fields(Contexts)),
                "the mask says which tokens were chosen",
            ),
        },
    ),
    "a choice of key tokens": Key(
        ChoiceOfTokens("model", WINDOWS[4], 0, 2, KeyTokenSettings(short=2)),
        choice_of_tokens_key,
        {"settings.model": "its weights are in the key"},
    ),
    "statements": Key(
        Statements({4: TRIALS}, 0),
        lambda task: task.fingerprint(4),
        {"key": "names the task in the key of a cell", "title": "a heading"},
        {"trials": {4: replace(TRIALS, depths=TRIALS.depths + 1)}},
    ),
    "trials": Key(TRIALS, lambda trials: Statements({4: trials}, 0).fingerprint(4)),
    "a prompt": Key(
        Prompt((1, 2), ("a",), 4, 0.5, 1, "x", (7,)),
        prompted,
        {"group": "a shared forward pass saves time"},
        {"answers": ("b",), "tokens": (1, 3), "never_first": (8,), "classes": ("b",)},
    ),
    "how runs are compared": Key(EvaluationConfig(), evaluated, OF_TRIALS),
    "how an evaluation is found again": Key(
        report_of({"evaluation": {"a": 1}}),
        evaluate._asked,
        OF_REPORT,
        {
            "methods": {"pi": "PI"}, "tasks": {"b": "B"}, "config": {"evaluation": {"a": 2}},
            "task": {"needles": 3}, "cells": (), "arms": (), "drop": None, "observations": (),
            "reach": {}, "milestones": {},
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_changes_with_every_leaf_but_those_listed(name):
    assert ignored_leaves(KEYS[name]) == sorted(KEYS[name].without)


def test_an_evaluation_is_found_again_whatever_it_is_called_and_took():
    report = report_of({})
    changes = {"name": "b", "notes": ("b",), "timing": {"seconds": 2}, "temperature": {"b": 1.0}}
    for field, value in changes.items():
        assert evaluate._asked(replace(report, **{field: value})) == evaluate._asked(report), field


def test_keys_of_a_report_change_with_its_text_models_and_precision():
    report = report_of({})
    for key, other in (("corpus", "b"), ("models", {"a": "other"})):
        other_report = replace(report, environment={**report.environment, key: other})
        assert evaluate._asked(other_report) != evaluate._asked(report)
    assert evaluate._asked(replace(report, made={"Of": "b"})) != evaluate._asked(report)
    for key in ("corpus", "precision"):
        other_report = replace(report, environment={**report.environment, key: "b"})
        assert compare._measured_on(other_report) != compare._measured_on(report)
    for lengths in ([1.0, 2.0], [0.5, 8.0]):  # the longest, and the shortest
        asked, before = (EvaluationConfig(lengths=n) for n in (lengths, [1.0, 8.0]))
        assert evaluated(asked) != evaluated(before)


@dataclass(frozen=True)
class Record:
    """A stored benchmark."""

    kind: str = "a"
    config: Any = "a"
    text: Any = "a"
    weights: Any = "a"
    models: Any = "a"
    notes: Any = "a"
    versions: Any = "a"


def test_a_benchmark_is_the_same_if_all_but_its_results_are(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(asdict(Record())))
    results = {"models", "notes", "versions"}
    for name in (item.name for item in fields(Record)):
        other = asdict(replace(Record(), **{name: "b"}))
        assert benchmarks._is_same(other, path) == (name in results), name


@dataclass(frozen=True)
class CellInput:
    """What a stored cell depends on."""

    model: str = "weights"
    method: str = "temperature"
    settings: int = 1
    task: str = "task"
    asked: str = "prompts"
    length: int = 64
    text: str = "text"
    batch_tokens: int = 1000
    device: str = "cpu"


def job_keys(cell):
    """Return the keys of all jobs of a cell, which is large enough to be divided."""
    text = replace(FIT_TEXT, fingerprint=cell.text)
    subject = Subject(
        "name", cell.model, ModelConfig(vocab_size=300), LAYOUT, print, True, cell.device
    )
    method = Recipe(cell.method, "T", {"a": cell.settings}, lambda factor: {2.0: 3}, print)
    task = SimpleNamespace(
        key=cell.task, fingerprint=lambda length: cell.asked, sequences=lambda length: 3
    )
    plans = plan_cells([subject], {"name": [method]}, [task], [cell.length], text)
    assert choice_key(plans) == {"cells": [plan.key for plan in plans]}
    return [[job.kind, job.key] for job in plan_jobs(plans, cell.batch_tokens)]


def test_every_job_of_an_evaluation_is_stored_with_all_that_it_depends_on(monkeypatch):
    monkeypatch.setattr(cells, "PART", {"cpu": 1.0, "cuda": 1.0})
    before = job_keys(CellInput())
    assert {kind for kind, _ in before} == {"choice", "part"}
    of_parts = {"batch_tokens", "device"}
    for name in (item.name for item in fields(CellInput)):
        after = job_keys(replace(CellInput(), **{name: next(changed(CellInput(), name))}))
        assert {json.dumps(key) for key in after if key[0] == "part"}.isdisjoint(
            {json.dumps(key) for key in before if key[0] == "part"}
        ), name
        same_choice = [key for key in after if key[0] == "choice"] == before[:1]
        assert same_choice == (name in of_parts), name


def test_a_claim_and_a_stored_value_are_named_by_all_of_their_key(tmp_path):
    store = Store(tmp_path)
    keys = [("a", {"x": 1}), ("b", {"x": 1}), ("a", {"x": 2}), ("a", {"y": 1}), ("a", {"x": [1]})]
    assert len({store.path(*key) for key in keys}) == len(keys)
    claims = Claims(tmp_path, Share(0, 2))
    assert [claims.take(*key) for key in keys] == [True] * len(keys)
    assert [claims.take(*key) for key in keys] == [False] * len(keys)
