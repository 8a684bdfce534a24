"""What an experiment leaves behind, how it goes on, and how reports call its runs."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.program import run_ranks
from trainer.commands.train import read_config
from trainer.common.errors import Problem, UserError
from trainer.evaluation.measurements import Perplexity, Statements
from trainer.evaluation.results import troubles
from trainer.runs.arms import arms_of, control_problems
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import checkpoint_label, label, role
from trainer.runs.directory import open_run_directory, plain
from trainer.runs.fitted_temperature import FILE
from trainer.runs.models import find_candidate
from trainer.runs.parsing import control_config, merged, parse
from trainer.runs.ranks import Ranks
from trainer.workflows import experiment
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.experiment import run_experiment
from trainer.workflows.experiment_report import _median_rate
from trainer.workflows.requests import EvaluationRequest
from trainer.workflows.training_text import open_corpus

SWA = "positional=rnope_swa", "data.sequence_length=256"
EXPECTED = {
    (): ("rope", "RoPE"),
    ("positional=rope_id", "data.sequence_length=256"): ("rope_id", "RoPE-ID"),
    ("positional.layers=[rope,nope]",): ("rope_nope", "rope + nope"),
    (*SWA, "model.num_hidden_layers=4"): ("rope_nope_window", "rope + nope"),
    (*SWA, "model.num_hidden_layers=3"): ("rope_window", "rope"),  # of a pattern of four
    ("positional=irope",): ("rope", "RoPE"),
    ("+positional.heads.nope=0.5",): ("rope_nope_heads", "rope"),
    ("drop.at=10",): ("drope", "DroPE"),
    ("drop.at=10", "drop.enabled=false"): ("rope", "RoPE"),
    ("label=Mine",): ("rope", "Mine"),
}


@pytest.mark.parametrize("words", EXPECTED)
def test_role_and_label(words):
    config = read_config(list(words))
    assert (role(config), label(config)) == EXPECTED[words]


def test_run_before_its_drop_is_what_its_encoding_says():
    config = read_config(["drop.at=10", "label=Mine"])
    assert (role(config, dropped=False), label(config, dropped=False)) == ("rope", "RoPE")


def test_checkpoint_of_a_run_without_a_drop_has_the_label_of_its_run():
    config = read_config(["label=Mine"])
    assert checkpoint_label(config, config.trainer.max_steps, "last") == "Mine"
    assert checkpoint_label(config, 5, "step-000005") == "Mine (step-000005)"


def test_control_that_keeps_the_encoding_is_called_by_it_and_not_by_the_label_of_the_run():
    words = ["+experiment=drope_demo", "positional.layers=[half_rope]", "label=Mine"]
    config = read_config(words)
    controls = {name: label(control_config(plain(config), name)) for name in config.controls}
    assert (label(config), controls) == ("Mine", {"rope": "HalfRoPE", "nope": "NoPE from scratch"})


def test_runs_that_tables_could_not_tell_apart_are_refused():
    config = read_config(["+controls.again.seed=7", "+controls.other.seed=8"])
    configs = {"main": config, "again": config, "other": replace(config, label="Other")}
    (problem,) = map(str, control_problems(configs))
    assert problem.startswith("controls.again.label: 'RoPE' is what main is called too")
    config = read_config(["drop.at=0.5", "+controls.again.branch=drop"])
    (problem,) = map(str, control_problems(arms_of(config)))
    assert problem.endswith("or controls.again.drop.enabled=false if it is not to drop.")


@pytest.mark.parametrize(
    ("run", "control", "said"),
    [
        ("single", "strategy.name=ddp", "strategy: 'ddp', but the processes of the run are"),
        ("ddp", "strategy.name=single", "strategy: 'single', but the processes of the run are"),
        ("ddp", "strategy.name=fsdp2", None),
        ("single", "trainer.threads=3", "trainer.threads: 3, but a control trains in the"),
        ("single", "trainer.accelerator=cpu", "trainer.accelerator: 'cpu', but a control"),
    ],
)
def test_a_control_trains_in_the_processes_of_its_run(run, control, said):
    words = [f"strategy.name={run}", "+controls.odd.label=Odd", f"+controls.odd.{control}"]
    found = [str(problem) for problem in control_problems(arms_of(read_config(words)))]
    assert len(found) == (said is not None)
    assert all(problem.startswith(f"controls.odd.{said}") for problem in found)


UNHEARD = ["evaluation.tasks=[perplexity]", "evaluation.needles.trials=5"]


EVALUATION = {
    "lengths": [1, 2],
    "windows": 2,
    "fit_windows": 2,
    "needles": {"trials": 4, "needles": 2},
    "temperature": {"grid": [0.3, 0.4]},
}


@pytest.fixture
def measured(monkeypatch):
    """What was measured: (task, length) of every cell; the list's ``limit`` interrupts."""

    class Measured(list):
        limit = None

    found = Measured()
    for kind in (Perplexity, Statements):

        def counting(task, reading, read=kind.read):
            if len(found) == found.limit:
                raise KeyboardInterrupt
            found.append((task.key, reading.length))
            return read(task, reading)

        monkeypatch.setattr(kind, "read", counting)
    return found


def test_all_that_is_wrong_is_said_at_once_and_of_every_arm(base, tmp_path, monkeypatch):
    checks = (*("device", "logger", "benchmark", "memory", "vocabulary", "spread", "control"),)
    for check in checks:

        def problems(config, *_, check=check):
            names = [config.name] if isinstance(config, RunConfig) else [*config]
            return [Problem(check, f"of {', '.join(names)}")]

        monkeypatch.setattr(experiment, f"{check}_problems", problems)

    def refuse(place):
        raise UserError.at("writing", f"to {place}")

    monkeypatch.setattr(experiment, "check_writable", refuse)
    controls = {"other": {"seed": 9, "label": "other", "trainer": {"max_steps": 13}}}
    values = {**base, "name": "x", "run_dir": str(tmp_path), "controls": controls}
    with pytest.raises(UserError) as error:
        run_experiment(parse(RunConfig, values))
    said = [f"{check}: of {'main, other' if check == 'control' else 'x'}" for check in checks]
    assert tuple(map(str, error.value.problems)) == (*said, f"writing: to {tmp_path}")


PHASES = {"a": {"steps": 6}, "b": {"steps": 6, "batch_size": 3}}
WRONG = {
    "logger": {"logger": {"tensorboard": True}},
    "vocabulary": {"model": {"vocab_size": 9}},
    "text": {"data": {"revision": "another"}},
    "spread": {"trainer": {"batch_size": 3}},
    "length": {"data": {"sequence_length": 24}},
    "benchmark": {"monitor": {"benchmarks": {"every_tokens": 512, "harness": ["x"]}}},
    "phase": {"phases": PHASES},
    "memory": {"phases": {"a": {"steps": 6}, "b": {"steps": 6, "batch_size": 1 << 30}}},
}
"""What is wrong with a configuration."""
SAID = {
    "logger": "logger.tensorboard: TensorBoard is not installed",
    "vocabulary": "model.vocab_size: 9 embeddings, but a tokenizer",
    "text": "data: a control reads the text of its run",
    "spread": "trainer.batch_size: 3 sequences do not divide",
    "length": " its longest sequences have 24 tokens",
    "benchmark": "monitor.benchmarks: lm-eval is not installed",
    "phase": "trainer.batch_size: 3 sequences do not divide",
    "memory": "trainer.micro_batch_size: 536870912 sequences of",
}


@pytest.mark.parametrize(
    ("wrong", "in_a_control"),
    [
        *((wrong, True) for wrong in WRONG),
        # Text and length of a control are held against its run.
        *((wrong, False) for wrong in WRONG if wrong not in ("text", "length")),
    ],
)
def test_a_fault_in_a_control_or_a_later_phase_alone_is_refused_before_anything_runs(
    base, tmp_path, monkeypatch, wrong, in_a_control
):
    for name in ("trainer.training.loggers", "trainer.training.callbacks.monitors"):
        monkeypatch.setattr(f"{name}.find_spec", lambda _: None)
    for heavy in ("open_corpus", "open_run_directory", "train"):
        monkeypatch.setattr(experiment, heavy, lambda *_, **__: pytest.fail("began"))
    ranks = Ranks(world_size=2, local_size=2)
    monkeypatch.setattr(experiment, "process_group", lambda _: nullcontext(ranks))
    values = {**base, "drop": {"at": None}, "model": {**base["model"], "qk_norm": {}}}
    controls = {"odd": {"label": "Odd", **WRONG[wrong]}}
    changes = {"controls": controls} if in_a_control else WRONG[wrong]
    values = merged(values, {"run_dir": str(tmp_path / "x"), **changes})
    with pytest.raises(UserError) as error:
        run_experiment(parse(RunConfig, values))
    (problem,) = map(str, error.value.problems)
    begin = "controls.odd" if in_a_control else ""
    assert problem.removeprefix(begin).lstrip(".:").startswith(SAID[wrong])
    assert problem.startswith(begin)
    assert not (tmp_path / "x").exists()


LACKS = "trainer.fp8", "float8 products need an NVIDIA GPU of compute capability 8.9 or later."
SHORT = "evaluation.lengths", "more than is free."
SIZES = "strategy.shard_size: by default the number of ranks on a node, but nodes have 2 or 4"


@pytest.mark.parametrize(
    ("first", "others", "strategy", "said"),
    [
        # On four ranks of three nodes: what the first sees is said once, and of the others once
        # a node.
        ([], [("b", 2, LACKS), ("b", 2, LACKS), ("c", 2, None)], {}, [(LACKS, "b")]),
        ([LACKS], [("b", 2, LACKS), ("b", 2, SHORT), ("c", 2, SHORT)], {}, [
            (LACKS, None), (SHORT, "b"), (SHORT, "c")
        ]),
        ([], [("b", 4, None)], {}, []),
        ([], [("b", 4, None)], {"name": "hsdp", "shard_size": 2}, []),
        ([], [("b", 4, None)], {"name": "hsdp"}, [SIZES]),
    ],
)  # fmt: skip
def test_what_gpus_and_nodes_of_other_ranks_lack_is_refused_before_anything_runs(
    base, tmp_path, monkeypatch, first, others, strategy, said
):
    """As on a node of an L40S, first, and an A100."""
    monkeypatch.setattr(experiment, "machine_problems", lambda *_: [Problem(*one) for one in first])
    rows = [(node, size, [Problem(*one)] if one else []) for node, size, one in others]

    def gathered(mine):
        return [mine, *rows] if isinstance(mine, tuple) else [mine]

    monkeypatch.setattr(experiment, "all_gather", gathered)
    monkeypatch.setattr(experiment, "open_corpus", lambda *_, **__: pytest.fail("began"))
    ranks = Ranks(world_size=4, local_size=2)
    monkeypatch.setattr(experiment, "process_group", lambda _: nullcontext(ranks))
    values = merged(base, {"run_dir": str(tmp_path / "x"), "strategy": strategy})
    outcome = pytest.raises(UserError if said else pytest.fail.Exception)
    with outcome as error:
        run_experiment(parse(RunConfig, values))
    if not said:
        return
    found = [str(problem) for problem in error.value.problems]
    wanted = [
        one
        if isinstance(one, str)
        else f"{one[0][0]}: {one[0][1]}" + f" (On {one[1]}.)" * bool(one[1])
        for one in said
    ]
    assert len(found) == len(wanted)
    assert all(map(str.startswith, found, wanted))


APART = {"packing": "best_fit"}, {"document_mask": True}


def test_each_control_is_trained_with_its_own_callbacks_from_where_it_branches_off(
    base, tmp_path, monkeypatch
):
    trained, looked, begun, started = [], [], [], []
    monkeypatch.setattr(
        experiment, "check_run_directory", lambda arm: looked.append(Path(arm.run_dir).name)
    )

    def opening(*given):
        begun.append(time.time())
        return open_corpus(*given)

    def train(config, corpus, branch, *, user_callbacks, is_control, start_time):
        # The limit of time covers what precedes training, and all controls.
        assert start_time < begun[-1]
        started.append(start_time)
        assert is_control == ("controls" in Path(config.run_dir).parts)
        place = branch and str(branch.relative_to(tmp_path))
        trained.append((config.run_dir, config.seed, place, user_callbacks))
        if len(trained) >= 4:
            raise KeyboardInterrupt
        return "done"

    monkeypatch.setattr(experiment, "open_corpus", opening)
    monkeypatch.setattr(experiment, "train", train)
    monkeypatch.setattr(experiment, "make_all_callbacks", lambda arms: {n: [n] for n in arms})
    controls = {
        "rope": {"branch": "drop", "drop": {"enabled": False}},
        "early": {"branch": 3, "label": "early"},
        "other": {"seed": 9, "label": "other"},
    }
    values = {**base, "run_dir": str(tmp_path / "run"), "controls": controls}
    with pytest.raises(KeyboardInterrupt):
        run_experiment(parse(RunConfig, values))
    # A run that is made anew takes its controls' directories with it.
    assert looked == ["run", "rope", "early", "other"]
    with pytest.raises(KeyboardInterrupt):
        run_experiment(parse(RunConfig, {**values, "overwrite": True}))
    assert looked[4:] == ["run"]
    assert len(set(started[:4])) == 1
    run, seed = str(tmp_path / "run"), base.get("seed", 0)
    assert trained[:4] == [
        (run, seed, None, ["main"]),
        (f"{run}/controls/rope", seed, "run/checkpoints/before-drop", ["rope"]),
        (f"{run}/controls/early", seed, "run/checkpoints/step-000003", ["early"]),
        (f"{run}/controls/other", 9, None, ["other"]),
    ]


def test_controls_that_a_resume_adds_begin_where_they_should(base, tmp_path):
    """Of a run that was interrupted after step 8 of 12, with its drop at 6."""
    run = {**base, "run_dir": str(tmp_path)}
    open_run_directory(parse(RunConfig, run))
    for name in ("step-000006", "step-000008", "before-drop"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "controls" / "old").mkdir(parents=True)

    def problems(name="new", **control):
        config = parse(RunConfig, {**run, "controls": {name: {"label": "x", **control}}})
        try:
            experiment.check_added_controls(config)
        except UserError as error:
            return [str(problem) for problem in error.problems]
        return []

    keeps = {"drop": {"enabled": False}}
    assert not problems()
    assert not problems(branch="drop", **keeps)
    assert not problems(branch=6, **keeps)
    assert problems(branch=3) == [
        "controls.new.branch: the run has passed step 3 and keeps checkpoints of [6, 8] alone; "
        "choose one of these, or leave branch out."
    ]
    (problem,) = problems("old")
    assert problem.startswith(f"controls.old: '{tmp_path / 'controls' / 'old'}' holds a control")
    (tmp_path / "checkpoints" / "step-000008").rmdir()
    assert not problems(branch=6, **keeps)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("PreemptedError", "stopped"),
    ],
)
def test_no_rank_leaves_before_the_first_has_uploaded_and_unlocked(base, tmp_path, kind, message):
    """A launcher ends all ranks as soon as one exits with an error."""
    open_corpus(parse(RunConfig, base), alone=True)
    values = {**base, "run_dir": str(tmp_path / "run"), "strategy": {"name": "ddp"}}
    (tmp_path / "run.json").write_text(json.dumps(values))
    script = Path(__file__).with_name("leaving_ranks.py")
    ranks = run_ranks(2, script, tmp_path / "run.json", kind, cwd=tmp_path)
    assert [rank.stdout.splitlines()[-1:] for rank in ranks] == [[f"{message} uploaded free"]] * 2


def test_a_diverged_run_is_reported_as_one(base, tmp_path, caplog):
    rates = {"optimizer": {"lr": 1e3, "weight_decay": 1e3}, "schedule": {"peak": 1e3}}
    changes = {"run_dir": str(tmp_path), "evaluation": EVALUATION, **rates}
    report, _ = run_experiment(parse(RunConfig, {**base, **changes}))
    (arm,) = report.arms
    assert not arm.finite
    assert 8 < arm.skipped <= arm.steps == 12
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == troubles(report.arms)
    assert all(line in (tmp_path / "log.txt").read_text() for line in said)
    assert not any(observation.shown for observation in report.observations)


def test_an_evaluation_that_was_interrupted_goes_on_with_its_next_cell(base, tmp_path, measured):
    run_dir = tmp_path / "run"
    config = parse(RunConfig, {**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    measured.limit = 3
    with pytest.raises(KeyboardInterrupt):
        run_experiment(config)
    assert not (run_dir / "report.json").exists()

    measured.limit = None
    report, existed = run_experiment(config)
    assert not existed
    # As it is and with its temperature, two tasks at two lengths; none of them twice.
    assert len(measured) == len(report.cells) == 8
    assert {(cell.model, cell.method) for cell in report.cells} == {
        ("DroPE", "none"),
        ("DroPE", "temperature"),
    }
    kept = json.loads(find_candidate(str(run_dir)).path.joinpath(FILE).read_text())
    assert report.temperature == {"DroPE + temperature": kept["coefficient"]}
    assert kept["coefficient"] in (0.3, 0.4)
    (arm,) = report.arms
    assert (arm.name, arm.encoding) == ("DroPE", "rope, dropped at step 6")
    assert arm.final_loss == report.cells[0].last_loss
    assert report.drop.step == 6
    assert any("Recalibration wins back" in o.claim for o in report.observations)

    # `evaluate` has nothing left to measure, and a finished run is shown as it was.
    again, output = evaluate_lengths(EvaluationRequest(str(run_dir), evaluation=config.evaluation))
    assert output == run_dir / "evaluation"
    assert again.cells == report.cells
    assert len(measured) == 8
    assert run_experiment(config) == (report, True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failed_evaluation_names_the_command_that_trains_nothing(
    base, tmp_path, measured, monkeypatch, overwrite
):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cells/a")

    run_dir = tmp_path / "run"
    config = parse(RunConfig, {**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "make_report", full)
        with pytest.raises(UserError) as error:
            run_experiment(replace(config, overwrite=overwrite))
    again = " without overwrite=true" * overwrite
    assert str(error.value) == (
        "'cells/a': No space left on device. The run is trained: the same "
        f"command{again} evaluates it, and trains nothing."
    )
    assert error.value.is_transient
    trained = (run_dir / "metrics.csv").read_text()
    report, existed = run_experiment(config)
    assert (run_dir / "metrics.csv").read_text() == trained
    assert (existed, len(report.cells)) == (False, 8)


def test_a_run_of_an_earlier_version_is_evaluated_again_once_its_report_is_away(
    base, tmp_path, measured
):
    run_dir = tmp_path / "run"
    config = parse(RunConfig, {**base, "run_dir": str(run_dir), "evaluation": EVALUATION})
    run_experiment(config)
    trained = (run_dir / "metrics.csv").read_text()
    record = yaml.safe_load((run_dir / "config.yaml").read_text())
    record["evaluation"] = {"enabled": True, "trials": 256, "needles": 4, "rescalings": ["pi"]}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(record))
    (run_dir / "report.json").write_text('{"name": "tiny", "table": []}')
    with pytest.raises(UserError, match=r"report\.json' is damaged, or of an earlier") as caught:
        run_experiment(config)
    assert len(caught.value.problems) == 1
    (run_dir / "report.json").unlink()
    _, existed = run_experiment(config)
    assert not existed
    assert (run_dir / "metrics.csv").read_text() == trained
    assert len(measured) == 8


def test_a_run_is_finished_before_its_dashboard_gets_the_results(base, tmp_path, monkeypatch):
    def refuse(*_):
        raise ConnectionError

    monkeypatch.setattr(experiment, "log_table", refuse)
    config = parse(RunConfig, {**base, "run_dir": str(tmp_path / "run")})
    config = replace(config, evaluation=replace(config.evaluation, enabled=False))
    with pytest.raises(ConnectionError):
        run_experiment(config)
    report, existed = run_experiment(config)
    assert (report.name, existed) == (base["name"], True)


def test_a_run_may_end_without_an_evaluation(base, tmp_path, measured):
    changes = {"run_dir": str(tmp_path / "run"), "evaluation": {"enabled": False}}
    report, _ = run_experiment(parse(RunConfig, {**base, **changes}))
    assert (measured, report.cells) == ([], ())
    assert report.arms[0].final_loss is None
    assert (tmp_path / "run" / "report.html").is_file()
    # What is known without one.
    assert (report.config["name"], report.drop.step) == (base["name"], 6)
    assert report.made["Of"].startswith("DroPE: ")
    assert (report.reach, report.milestones) == ({"DroPE": ()}, {"DroPE": ()})
    rate, seconds = report.timing["tokens_per_second"], report.timing["training_seconds"]
    assert rate["DroPE"] == _median_rate(tmp_path / "run") > 0
    assert seconds["DroPE"] > 0 <= report.timing["evaluation_seconds"]
