"""Numbers of reports and dashboards under the names that say what they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from tests.data.conftest import held_out
from tests.report.examples import cell, loss, report
from trainer.config import EvaluationConfig, PlotsConfig
from trainer.evaluation.held_out import HeldOut
from trainer.evaluation.results import STATEMENTS
from trainer.evaluation.task import Task
from trainer.runs.models import environment
from trainer.runs.parsing import merged, parse
from trainer.training import dashboards
from trainer.workflows import analyze, evaluate, experiment


class Parts(SimpleNamespace):
    """A corpus of 7, 3 and 2 tokens."""

    fingerprint, tokenizer = "text", None
    parts = (SimpleNamespace(train=range(4)), SimpleNamespace(train=range(3)))
    validation, test = held_out([0, 1, 1]), held_out([0, 0])


def test_an_environment_counts_the_text():
    told = environment(Parts(), "cpu")
    assert told["corpus"] == "text"
    assert (told["training_text_tokens"], told["held_out_text_tokens"]) == (7, 5)
    assert told["device"] == "CPU"


def test_dashboards_get_retrieval_and_loss_by_length(monkeypatch, tmp_path):
    made = report(
        *(cell([1.0, 0.0], task=STATEMENTS, length=length) for length in (2048, 1024)),
        loss(3.5, length=1024),
        loss(4.5, length=1024, method="yarn"),
        cell([1.0], task="multi_key", length=1024),
    )
    values = experiment._by_length(made)
    assert values == {
        1024: {
            "evaluation/retrieval/RoPE": 0.5,
            "evaluation/loss/RoPE": 3.5,
            "evaluation/loss/RoPE + YaRN": 4.5,
        },
        2048: {"evaluation/retrieval/RoPE": 0.5},
    }
    assert [*values] == [1024, 2048]
    logged, ended = [], []
    board = SimpleNamespace(
        log_metrics=lambda row, step: logged.append((step, row)), finalize=ended.append
    )
    monkeypatch.setattr(dashboards, "dashboards", lambda run: [board])
    dashboards.log_results(None, values)
    assert logged == [(n, {"evaluation/length": n, **row}) for n, row in values.items()]
    assert ended == ["success"]


@pytest.mark.parametrize("is_control", [False, True])
def test_dashboards_of_a_run_and_its_controls_have_names_in_one_group(
    base, monkeypatch, tmp_path, is_control
):
    asked = []
    monkeypatch.setattr(dashboards, "_wandb", lambda *given: asked.append(given))
    changes = {"run_dir": str(tmp_path / "a"), "logger": {"wandb": True, "offline": True}}
    run = replace(parse(merged(base, changes)), is_control=is_control)
    dashboards.dashboards(run)
    assert asked == [(tmp_path / "a", "tiny/a" if is_control else "tiny", "tiny", True)]


def saved(layout, name, longest_context, reach):
    layout = replace(layout, reach=reach)
    return SimpleNamespace(
        name=name, layout=layout, training_length=32, longest_context=longest_context,
        computed_by=None,
    )  # fmt: skip


def test_a_report_has_the_numbers_of_its_evaluation(tiny_decoder, monkeypatch, tmp_path):
    """What is said about models, text and precision; rows are those of the trials."""
    layout = tiny_decoder().layout
    models = [saved(layout, "a", 48, 64), saved(layout, "b", 96, 0)]
    config = EvaluationConfig(
        methods=["none", "yarn", "temperature"], lengths=[1.0, 2.0, 2.0], dtype="bf16"
    )
    columns = {"text": 0, "depth": np.nan, "label": "", "metric": "score", "seconds": 1.0}

    def task(key, length):
        return Task({key: key.upper()}, length, "", pd.DataFrame(index=[0]), print)

    def make_tasks(text, config, lengths, training_length):
        assert (lengths, training_length) == ([32, 64], 32)
        assert config.lengths == [1.0, 2.0, 2.0]
        return [task(key, length) for key in "xy" for length in lengths], ["a note"]

    def measure(of_models, methods, tasks, setup):
        assert methods == {"a": ["none", "yarn"], "b": ["none", "yarn"]}
        trials = [
            {"model": m.name, "method": "none", "task": key, "length": t.length, "value": 0.5}
            | {"factor": t.length / 32, **columns}
            for m in of_models
            for t in tasks
            for key in t.titles
        ]
        return pd.DataFrame(trials), ["fitted"]

    monkeypatch.setattr(evaluate, "make_tasks", make_tasks)
    monkeypatch.setattr(evaluate, "measure", measure)
    monkeypatch.setattr(evaluate, "vocabulary_size", lambda tokenizer: 2)
    text = HeldOut(Parts(), Parts.test, (), 0.25)
    made = evaluate.measure_models("n", models, config, text, tmp_path)
    assert (made.name, made.training_length, made.trained) == ("n", 32, 96)
    assert made.methods == {"none": "as is", "yarn": "YaRN"}
    assert made.tasks == {"x": "X", "y": "Y", "mean": "Mean over 2 tasks (X, Y)"}
    assert made.rows.groupby("model").reach.unique().map(list).to_dict() == {"a": [64], "b": [32]}
    assert made.environment["precision"] == "bf16"
    assert made.training_share == 0.25
    assert made.notes[-2:] == ("a note", "fitted")
    assert any(note.startswith("temperature: ") for note in made.notes)
    # Of the test text two tokens are 0; of the validation text a third, and each counts once more.
    assert made.unigram_loss == pytest.approx(-np.log(2 / 5))
    assert {*made.rows.seed} == {config.needles.seed}


def test_reports_are_drawn_in_the_look_that_is_asked_for(base, monkeypatch):
    look = PlotsConfig("single", "serif", 9.0)

    class DrawnError(Exception):
        pass

    def use_style(**given):
        raise DrawnError(PlotsConfig(**given))

    run = parse(merged(base, {"plots": vars(look), "run_dir": "x"}))
    request = SimpleNamespace(plots=look, evaluation=None, analysis=None)
    for workflow, go in (
        (experiment, lambda: experiment.make_report(run, [], None)),
        (evaluate, lambda: evaluate.evaluate_lengths(request)),
        (analyze, lambda: analyze.analyze(request)),
    ):
        monkeypatch.setattr(workflow, "use_style", use_style)
        with pytest.raises(DrawnError) as drawn:
            go()
        assert drawn.value.args == (look,)
