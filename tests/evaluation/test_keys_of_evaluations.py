"""Each key of an evaluation changes what it is said to change, and nothing else.

The keys are walked in the schema: a new one needs a line here. An evaluation ends where it would
begin to measure, with its tasks and with the layouts that methods make on a tiny model.
"""

from __future__ import annotations

import gzip
import json
from types import SimpleNamespace

import pytest

from tests.relations.leaves import leaves, other_value, with_value
from trainer.common.fields import validated
from trainer.config import EvaluationConfig, WeightedRopeSettings
from trainer.evaluation import longrope
from trainer.evaluation.fitting import FitText
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.methods import layouts_for
from trainer.evaluation.store import fingerprint
from trainer.workflows import evaluate

NEEDLES = "standard multi_key statements"
PROMPTS = f"{NEEDLES} niah_single_1 qa_1 qa_2 longbench_trec many_shot_skip"
RESCALED = "yarn dynamic_ntk_alpha temperature_rope_id"
EFFECTS = {
    "methods": "methods",
    "dtype": "dtype",
    "fit_windows": "text read",
    "layers": f"{RESCALED} temperature",
    "temperature.coefficient": "temperature",
    "temperature.models": "methods",
    "temperature.lengths": "read",
    "temperature.rope_id_exponent": "temperature_rope_id",
    "dynamic_ntk_alpha": "dynamic_ntk_alpha",
    "longrope.search": "longrope read",
    "longrope.evaluations": "read",
    "longrope.windows": "read",
    **dict.fromkeys(("choice.text", "choice.length", "choice.texts"), "read"),
    **dict.fromkeys(
        (
            *("dope.variant", "dope.by", "dope.entropy", "dope.r", "dope.stage", "dope.order"),
            *("dope.heads", "dope.removal", "dope.sigma", "dope.seed"),
        ),
        "dope",
    ),
    "weighted_rope": "weighted_rope",
    "lengths": "tasks",
    "tokens": "tasks",
    "tasks": "tasks",
    "windows": "perplexity",
    "limit": f"perplexity {PROMPTS} many_shot_needle zero_shot a_acc",
    "batch_tokens": "batch-tokens",
    "needles.trials": NEEDLES,
    "needles.depths": "standard",
    "needles.needles": "multi_key statements",
    "needles.changes": "statements",
    "needles.new_tokens": "standard multi_key",
    "needles.seed": NEEDLES,
    "ruler.tasks": "tasks",
    "ruler.trials": "niah_single_1 qa_1 qa_2",
    "ruler.squad_file": "qa_1",
    "ruler.hotpotqa_file": "qa_2",
    "longbench.directory": "longbench_trec",
    "longbench.tasks": "tasks",
    "many_shot.file": "many_shot_skip many_shot_needle zero_shot",
    "many_shot.trials": "many_shot_skip many_shot_needle zero_shot",
    "many_shot.new_tokens": "many_shot_skip many_shot_needle zero_shot",
    "multiple_choice.directory": "a_acc",
    "multiple_choice.tasks": "tasks",
}
"""What each key changes of what is :func:`planned`."""
NO_EFFECT = {
    "enabled": "a run asks it before it evaluates",
    "training_length": "of the models: tests/workflows/test_evaluate.py",
    "harness.tasks": "of an extra: tests/evaluation/test_harness.py",
    "settings": "of plugins: tests/end_to_end/test_plugin.py",
}
BASE = {
    "lengths": [20.0, 25.0],
    "methods": ["none", "temperature"],
    "tasks": [
        *("perplexity", "standard", "multi_key", "statements"),
        *("ruler", "longbench", "many_shot", "multiple_choice"),
    ],
    "windows": 3,
    "fit_windows": 6,
    "temperature": {"models": "all", "coefficient": 0.4},
    "longrope": {"evaluations": 12, "windows": 2},
    "needles": {"trials": 2, "depths": [0.0, 0.5], "needles": 2},
    "ruler": {"tasks": ["niah_single_1", "qa_1", "qa_2"], "trials": 2},
    "longbench": {"tasks": ["trec"]},
    "many_shot": {"trials": 2, "new_tokens": 16},
    "multiple_choice": {"tasks": ["a"]},
}
FILES = {
    "ruler.squad_file": "squad.json",
    "ruler.hotpotqa_file": "hotpot.json",
    "longbench.directory": ".",
    "many_shot.file": "math.jsonl",
    "multiple_choice.directory": ".",
}
OTHER = {
    "lengths": [20.0, 22.0],
    "tokens": [640, 700],
    "temperature.lengths": [3.0],
    "methods": ["none", "pi"],
    "dtype": "bf16",
    "layers": [0],
    "tasks": ["perplexity"],
    "needles.depths": [0.25, 0.5],
    "ruler.tasks": ["niah_single_1"],
    "longbench.tasks": ["lcc"],
    "multiple_choice.tasks": ["b"],
    "choice.text": "standard",
    "choice.length": 3.0,
    "dope.r": 9,
    "dope.seed": 7,
    "weighted_rope": [WeightedRopeSettings(tau=1.0, alpha=0.5)],
}
FITS = {"tasks": ["perplexity"], "lengths": [2.0], "temperature": {"models": "all"}}
CONTEXTS = {
    "dope.r": {"dope": {"heads": 4}},
    "dope.entropy": {"dope": {"heads": 4}},
    "dope.sigma": {"dope": {"variant": "by_gaussian"}},
    "dope.seed": {"dope": {"variant": "by_gaussian"}},
    "temperature.models": {"temperature": {"models": "free", "coefficient": 0.4}},
    **dict.fromkeys(("temperature.lengths", "fit_windows"), FITS),
}
"""Changes to the base without which a key has no effect."""
FITTED = {
    "longrope.": ["longrope"],
    "choice.": ["dope"],
    "dope.": ["dope"],
    "weighted_rope": ["weighted_rope"],
    "": ["temperature", *RESCALED.split()],
}
"""Methods whose layouts are made, by the beginning of a key."""


def written(place, version):
    """Files that tasks read, whose contents differ by version."""
    place.mkdir()
    articles, questions, sums, choices = [], [], [], []
    for n in range(60):
        asked = {"question": f"What is {n} {version}?", "answers": [{"text": f"{n}"}]}
        articles.append({"context": f"Number {n} {version}, it is.", "qas": [asked]})
        lines = [[f"Title {n}", [f"It is {n} {version}. "]]]
        questions.append({"question": f"Who is {n}?", "answer": f"{n}", "context": lines})
        sums.append({"problem": f"{n} {version}?", "solution": f"{n}.", "answer": f"{n}"})
        for index in range(2):
            request = {"context": f"{n} {version} is", "continuation": f" {n + index}"}
            row = {"doc_id": n, "idx": index, "label": 0, "request": request}
            choices.append(json.dumps(row) + "\n")
    (place / "squad.json").write_text(json.dumps({"data": [{"paragraphs": articles}]}))
    (place / "hotpot.json").write_text(json.dumps(questions))
    (place / "math.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    row = {"input": version, "context": "x", "answers": ["a"], "all_classes": ["a", "b"]}
    for task in ("trec", "lcc"):
        (place / f"{task}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    for name in "ab":
        with gzip.open(place / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(choices)
    return place


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    directory = tmp_path_factory.mktemp("files")
    return [written(directory / version, version) for version in "ab"]


class BeginsToMeasureError(Exception):
    pass


@pytest.fixture(scope="module")
def known():
    """What was planned before, by the configuration."""
    return {}


@pytest.fixture
def planned(model, corpus, monkeypatch, tmp_path, known):
    """A function that returns everything that an evaluation would measure, by name."""
    saved = SimpleNamespace(
        name="tiny", layout=model.layout, training_length=32, computed_by=None, fingerprint=""
    )

    def stop(*given):
        raise BeginsToMeasureError(*given)

    read = []

    def loss(text, model, windows, batch_tokens):
        read.append(windows.shape)
        return 0.0

    def answer_loss(model, requests, batch_tokens):
        read.append(len(requests))
        return 0.0

    def choice(text, config, length, choose=FitText.choice):
        ids = choose(text, config, length)
        read.append(fingerprint(ids.numpy()))
        return ids

    monkeypatch.setattr(evaluate, "measure", stop)
    monkeypatch.setattr(FitText, "loss", loss)
    monkeypatch.setattr(FitText, "choice", choice)
    monkeypatch.setattr(longrope, "answer_loss", answer_loss)

    def plan(config, methods):
        key = f"{config} {methods}"
        if key in known:
            return known[key]
        text = HeldOut(corpus, corpus.test, (corpus.first_token,), 0.5)
        with pytest.raises(BeginsToMeasureError) as begun:
            evaluate.measure_models("tiny", [saved], config, text, tmp_path)
        _, applied, tasks, setup = begun.value.args
        assert setup.text.held_out.split.parts == corpus.validation.parts
        seen = {
            "methods": applied,
            "dtype": setup.dtype,
            "text": setup.text.count,
            "batch-tokens": setup.config.batch_tokens,
            "tasks": [(*task.titles, task.length) for task in tasks],
        }
        for task in tasks:
            seen[f"{next(iter(task.titles))} {task.length}"] = task.fingerprint, len(task.trials)
        read.clear()
        for name in methods:
            given = setup.config, lambda: model, setup.text
            seen[name] = fingerprint(layouts_for(name, model.layout, [5.0], *given)[0])
        known[key] = seen | {"read": [*read]}
        return known[key]

    return plan


def test_each_key_has_a_line():
    assert {*leaves(EvaluationConfig())} == {*EFFECTS, *NO_EFFECT}


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_changes_what_it_is_said_to_change_and_nothing_else(planned, places, key):
    methods = next(FITTED[beginning] for beginning in FITTED if key.startswith(beginning))
    config = validated(EvaluationConfig, BASE | CONTEXTS.get(key, {}))
    for name, file in FILES.items():
        config = with_value(config, name, str(places[0] / file))
    if key in FILES:
        other = str(places[1] / FILES[key])
    else:
        other = OTHER.get(key) or other_value(config, key)
    before, after = planned(config, methods), planned(with_value(config, key, other), methods)
    both = before.keys() & after.keys()
    changed = {name.split()[0] for name in both if before[name] != after[name]}
    if key.startswith("choice."):
        changed.discard("dope")  # another text may choose the same heads
    assert changed == {*EFFECTS[key].split()}, other
