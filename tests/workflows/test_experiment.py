"""Experiments: what is refused before training, how they resume, and what their report says."""

from __future__ import annotations

import json
import math
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import lightning as L
import pandas as pd
import pytest

from tests.program import blank
from tests.report.examples import change, example
from trainer import plotting
from trainer.common.errors import UserError
from trainer.config import EvaluationRequest
from trainer.evaluation import engine
from trainer.report.pages import write_renderings
from trainer.report.report import FACTS, RunSummary, troubles
from trainer.runs.directory import locked, open_run_directory, plain, write_metrics
from trainer.runs.models import name_and_role, without_home
from trainer.runs.parsing import merged, parse
from trainer.workflows import experiment
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.experiment import (
    check_machine,
    is_finished,
    run_experiment,
    summary_of,
)


def label_of(run):
    return name_and_role(run.config, run.phases)[0]


def test_a_control_has_the_label_of_its_encoding_and_branches_off_the_run():
    controls = {
        "rope": {"branch": "drop", "drop": {"at": None}},
        "early": {"branch": 3},
        "nope": {"positional": {"layers": ["nope"]}, "drop": {"at": None}},
    }
    values = {"name": "x", "run_dir": "runs/x", "drop": {"at": 10}}
    run = parse({**values, "controls": controls})
    labels = {name: label_of(each) for name, each in run.runs.items()}
    assert labels == {"main": "DroPE", "rope": "RoPE", "early": "DroPE", "nope": "NoPE"}
    branches = {name: each.branch for name, each in run.runs.items()}
    assert branches == {"main": None, "rope": "drop", "early": 3, "nope": None}


def test_an_encoding_without_rotation_has_nothing_to_drop():
    for name, step in (("rope", 850), ("alibi", 850), ("nope", None)):
        values = {"positional": {"layers": [name]}, "drop": {"at": 0.85}}
        run = parse(values)
        assert run.phases.drop_step == step
        assert len(run.phases) == (1 if step is None else 2)
    assert label_of(run) == "NoPE"


def test_a_control_may_have_the_schedule_of_the_drop_and_keep_its_encoding():
    drop = {"at": 0.85, "schedule": {"peak": 0.5, "warmup_steps": 20}}
    controls = {"same": {"branch": "drop", "drop": {"to": "same"}}}
    run, control = parse({"run_dir": "x", "drop": drop, "controls": controls}).runs.values()
    of_run, of_control = run.phases, control.phases
    rates = [[phase.factor(step) for step in range(phase.start, 1000)] for phase in of_run]
    assert rates == [[p.factor(step) for step in range(p.start, 1000)] for p in of_control]
    assert of_control[1].optimizer_state == of_run[1].optimizer_state == "reset"
    assert of_run[1].drop is not None
    assert of_control[1].drop is None
    assert [label_of(run) for run in (run, control)] == [
        "DroPE",
        "RoPE, schedule of a drop",
    ]


def test_a_fault_of_a_later_phase_or_a_control_is_found_before_training(
    base, tmp_path, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    phases = {"phases": {"a": {"steps": 6}, "b": {"steps": 6, "batch_size": 3}}}
    values = {**base, "drop": {"at": None}, "model": {**base["model"], "qk_norm": {}}}
    with pytest.raises(UserError, match=r"^strategy: single uses one process, and 2 were started$"):
        check_machine(parse({**values, "run_dir": str(tmp_path / "x")}))
    values["strategy"] = {"name": "ddp"}
    for changes in (phases, {"controls": {"odd": phases}}):
        run = parse(merged(values, {"run_dir": str(tmp_path / "x"), **changes}))
        with pytest.raises(UserError, match="3 sequences do not divide"):
            check_machine(run)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"strategy": {"name": "fsdp2"}, "optimizer": {"name": "muon"}}, "^optimizer: muon needs"),
        ({"logger": {"tensorboard": True}}, "tensorboard"),
        ({"logger": {"wandb": True}}, "wandb"),
    ],
    ids=["sharded muon", "tensorboard", "wandb"],
)
def test_what_a_run_lacks_is_said_before_its_text_is_prepared(base, monkeypatch, changes, error):
    for package in ("TENSORBOARD", "TENSORBOARDX"):
        monkeypatch.setattr(f"lightning.fabric.loggers.tensorboard._{package}_AVAILABLE", False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = parse(merged(base, changes))
    with pytest.raises((UserError, ImportError, AttributeError), match=error):
        check_machine(run)


def test_a_report_answers_for_its_evaluation_and_its_controls_alone(tmp_path):
    values = {"run_dir": str(tmp_path / "x"), "controls": {"a": {"seed": 1}}}
    config = parse(values).config
    place = open_run_directory(config)
    assert not is_finished(config)
    (place / FACTS).write_text(json.dumps({"config": without_home(plain(config))}))
    assert is_finished(config)
    assert is_finished(parse(values | {"name": "again"}).config)
    for changes in ({"evaluation": {"windows": 3}}, {"controls": {}}, {"overwrite": True}):
        assert not is_finished(parse(values | changes).config)
    (place / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(UserError, match="holds another run"):
        is_finished(parse(values | {"seed": 1}).config)


def test_other_plots_draw_the_figures_of_a_finished_run_anew_and_measure_nothing(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    wide, narrow = (parse({"plots": {"width": width}}) for width in ("double", "single"))
    place = open_run_directory(wide.config)
    results = example()
    write_renderings(results, place)
    replace(results, config=without_home(plain(wide.config))).write(place)
    numbers = (place / "results.csv").read_bytes()

    widths = []

    def rendered(figure, suffix, **options):
        widths.append(round(figure.get_figwidth(), 2))
        return blank(figure, suffix, **options)

    monkeypatch.setattr(plotting, "_rendered", rendered)
    for run, expected in ((wide, set()), (narrow, {3.3}), (narrow, set())):
        assert run_experiment(run).config == without_home(plain(run.config))
        assert {*widths} == expected
        widths.clear()
        assert (place / "results.csv").read_bytes() == numbers


EVALUATION = {
    "lengths": [1, 2],
    "windows": 2,
    "fit_windows": 2,
    "needles": {"trials": 4, "needles": 2},
    "temperature": {"coefficient": 0.3},
}


@pytest.fixture
def measured(monkeypatch):
    """A list of (task, length) of every measured cell; its ``limit`` interrupts."""

    class Measured(list):
        limit = None

    cells = Measured()
    measure = engine._measure

    def counting(cell, *rest):
        if len(cells) == cells.limit:
            raise KeyboardInterrupt
        cells.append((*cell.task.titles, cell.task.length))
        return measure(cell, *rest)

    monkeypatch.setattr(engine, "_measure", counting)
    return cells


@pytest.mark.slow
def test_an_interrupted_evaluation_resumes_with_its_next_cell(base, tmp_path, measured):
    run_dir = tmp_path / "run"
    planned = parse({**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    measured.limit = 3
    with pytest.raises(KeyboardInterrupt):
        run_experiment(planned)
    assert not (run_dir / "facts.json").exists()
    trained = (run_dir / "metrics.csv").read_text()

    measured.limit = None
    report = run_experiment(planned)
    assert (run_dir / "metrics.csv").read_text() == trained
    cells = report.rows.drop_duplicates(["method", "task", "length"])
    count = len(measured)
    assert 3 < count <= len(cells) == 20  # some methods change nothing at the training length
    *_, note = report.notes
    assert note.startswith("DroPE, temperature: logits times 1 + ")
    (run,) = report.runs
    assert (run.name, run.encoding) == ("DroPE", "rope, dropped at step 6")
    assert [*report.final_losses] == ["RoPE (before its drop)", "DroPE"]
    assert report.origins == {"DroPE": "RoPE (before its drop)"}
    assert report.drop["step"] == 6
    assert any("Recalibration wins back" in o.claim for o in report.observations)

    # `evaluate` has nothing left to measure, and a finished run is shown as it was.
    again, output = evaluate_lengths(
        EvaluationRequest(str(run_dir), evaluation=planned.config.evaluation)
    )
    assert output == run_dir / "evaluation"
    pd.testing.assert_frame_equal(again.trials, report.trials)
    assert len(measured) == count
    same = run_experiment(planned)
    assert same.observations == report.observations


def test_a_time_limit_counts_from_the_start_of_the_command(base, tmp_path, monkeypatch):
    """Also that of controls, which are trained after the run; each takes an hour."""
    seconds, began = [1000.0], {}

    def train(each, corpus, branch, callbacks, *, start_time):
        began[each.directory.name] = start_time
        seconds[0] += 3600
        return each.directory

    monkeypatch.setattr(experiment, "time", SimpleNamespace(time=lambda: seconds[0]))
    monkeypatch.setattr(experiment, "gc", SimpleNamespace(collect=lambda: None))  # takes long
    monkeypatch.setattr(experiment, "_open", lambda run, lock: [])
    monkeypatch.setattr(experiment, "corpus_at", lambda data, places: None)
    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(experiment, "make_report", lambda *_: None)
    controls = {"rope": {"branch": "drop", "drop": {"at": None}}}
    run_experiment(parse({**base, "run_dir": str(tmp_path / "run"), "controls": controls}))
    assert began == {"run": 1000.0, "rope": 1000.0}


def test_a_run_opens_its_text_its_directories_and_its_log(base, tmp_path, monkeypatch):
    corpus = SimpleNamespace(parts=[SimpleNamespace(directory=Path("text"))])
    checked = []
    monkeypatch.setattr(experiment, "open_corpus", lambda run: corpus)
    monkeypatch.setattr(experiment, "check_vocabularies", lambda runs, _: checked.extend(runs))
    controls = {"controls": {"other": {"seed": 1}}}
    run = parse({**base, "run_dir": str(tmp_path / "run"), **controls})
    with ExitStack() as lock:
        assert experiment._open(run, lock) == ["text"]
        with pytest.raises(UserError, match="another process"), locked(run.directory):
            pass
    assert checked == ["main", "other"]
    names = ("config.yaml", "log.txt", "controls/other/config.yaml")
    assert all((run.directory / name).is_file() for name in names)


def test_a_report_without_an_evaluation_tells_of_the_last_phase_and_the_first_drop(
    tmp_path, monkeypatch
):
    longer, dropped, again = (change(step, 2.0, 3.0, what="x", length=64) for step in (4, 6, 8))
    phases = {
        "a": {"steps": 4},
        "b": {"steps": 2, "sequence_length": 64},
        "c": {"steps": 2, "sequence_length": 64, "drop": {"layers": [0]}},
        "d": {"steps": 2, "sequence_length": 64, "drop": {}},
    }
    values = {"run_dir": str(tmp_path), "data": {"sequence_length": 32}, "phases": phases}
    run = parse({**values, "evaluation": {"enabled": False}})
    state = {"effects": {"b": longer, "c": dropped, "d": again}, "benchmarks": [{"step": 4}]}
    path = tmp_path / "last"
    model = SimpleNamespace(name="Mine", parameters=1, state=state, path=path)
    rates = [{"step": step, "tokens_per_second": x} for step, x in enumerate((9, 1, 5, 3))]
    write_metrics(tmp_path / "metrics.csv", rates)

    def found(references, unit, *, with_origins):
        assert (references, with_origins) == ([str(path)], False)
        return [model]

    monkeypatch.setattr(experiment, "find_models", found)
    monkeypatch.setattr(experiment, "environment", lambda corpus, device: {"device": device})
    monkeypatch.setattr(experiment, "publish", lambda report, models, directory: report)
    made = experiment.make_report(run, [path], None)
    assert (made.training_length, made.drop) == (64, dropped)
    assert made.config == without_home(plain(run.config))
    (summary,) = made.runs
    assert summary.tokens_per_second == 5
    assert summary.milestones == ({"step": 4},)


@pytest.mark.parametrize(("size", "is_refused"), [(None, False), (2, False), (3, True), (8, True)])
def test_groups_of_shards_divide_the_ranks(base, monkeypatch, size, is_refused):
    monkeypatch.setenv("WORLD_SIZE", "4")
    run = parse({**base, "strategy": {"name": "hsdp", "shard_size": size}})
    expected = nullcontext()
    if is_refused:
        expected = pytest.raises(UserError, match=rf"^strategy\.shard_size: .* 4 ranks, got {size}")
    with expected:
        check_machine(run)


@pytest.mark.slow
def test_a_diverged_run_is_reported_as_one(base, tmp_path):
    rates = {"optimizer": {"lr": 1e3, "weight_decay": 1e3}, "schedule": {"peak": 1e3}}
    changes = {"run_dir": str(tmp_path), "evaluation": EVALUATION, **rates}
    report = run_experiment(parse({**base, **changes}))
    (run,) = report.runs
    assert not run.finite
    assert 8 < run.skipped <= run.steps == 12
    assert all(line in (tmp_path / "report.html").read_text() for line in troubles(report.runs))
    assert not any(observation.shown for observation in report.observations)


@pytest.mark.slow
def test_a_run_may_end_without_an_evaluation(base, tmp_path, measured):
    changes = {"run_dir": str(tmp_path / "run"), "evaluation": {"enabled": False}}
    report = run_experiment(parse({**base, **changes}))
    assert measured == []
    assert report.rows.empty
    assert report.final_losses == {}
    assert (tmp_path / "run" / "report.html").is_file()
    assert (report.config["name"], report.drop["step"]) == (base["name"], 6)
    rates = pd.read_csv(tmp_path / "run" / "metrics.csv").tokens_per_second
    rate = report.runs[0].tokens_per_second
    assert rate == round(rates.quantile(0.5, interpolation="higher")) > 0


def made(tmp_path, rows, effects=None, **values):
    run = parse({"run_dir": str(tmp_path), "trainer": {"max_steps": 20}, **values})
    state = {"effects": effects or {}}
    write_metrics(tmp_path / "metrics.csv", rows)
    model = SimpleNamespace(name="Mine", parameters=123, state=state)
    return summary_of(run, model)


def test_a_run_with_a_drop_and_a_longer_phase(tmp_path):
    phases = {
        "short": {"steps": 10},
        "long": {"steps": 6, "sequence_length": 256, "batch_size": 4},
        "dropped": {"steps": 4, "sequence_length": 256, "batch_size": 4, "drop": {}},
    }
    longer = change(10, 2.5, 2.75, what="longer", length=256)
    dropped = change(16, 2.0, 5.0, what="dropped", length=256)
    rows = [
        {"step": 5, "loss": 3.0, "skipped_steps": 1},
        {"step": 10},
        {"step": 20, "loss": 2.0, "skipped_steps": 7, "parameter_norm": 4.0},
    ]
    run = made(
        tmp_path,
        rows,
        {"long": longer, "dropped": dropped},
        phases=phases,
        data={"sequence_length": 128},
        positional={"layers": ["rope", "nope", "rope"]},
        trainer={"batch_size": 8},
    )
    assert run == RunSummary(
        name="Mine",
        encoding="rope + nope, dropped at step 16",
        parameters=123,
        steps=20,
        tokens=10 * 8 * 128 + 10 * 4 * 256,
        curve=((5, 3.0), (20, 2.0)),
        skipped=7,
        finite=True,
        changes=(longer, dropped),
    )


def test_a_run_whose_weights_are_not_finite_is_marked(tmp_path):
    assert made(tmp_path, []).finite
    assert not made(tmp_path, [{"step": 1, "parameter_norm": math.nan}]).finite


@pytest.mark.parametrize("key", ["methods", "tasks"])
def test_what_a_run_is_to_be_measured_by_exists_before_it_trains(base, key):
    wrong = {"evaluation": {key: ["none", "yarnn"]}}
    for changes in (wrong, {"controls": {"other": wrong}}):
        with pytest.raises(UserError, match=rf"evaluation\.{key}: .*, got "):
            check_machine(parse({**base, "run_dir": "x", **changes}))


class Counted(L.Callback):
    """Notes all that are made."""

    made: ClassVar = []

    def __init__(self):
        self.made.append(self)


def test_callbacks_are_made_once_before_the_text_is_read(base, monkeypatch, tmp_path):
    trained, prepared = [], []

    def train(run, corpus, begin, callbacks, *, start_time):
        trained.extend(callbacks)

    monkeypatch.setattr(experiment, "_open", lambda *_: prepared.append(len(Counted.made)) or [])
    monkeypatch.setattr(experiment, "corpus_at", lambda *_: None)
    monkeypatch.setattr(experiment, "make_report", lambda *_: None)
    monkeypatch.setattr(experiment, "train", train)
    own = {"callbacks": {"own": {"_target_": f"{__name__}.Counted"}}}
    own |= {"run_dir": str(tmp_path / "x"), "controls": {"other": {"seed": 1}}}
    run_experiment(parse(merged(base, own)))
    assert prepared == [2]
    assert trained == Counted.made
