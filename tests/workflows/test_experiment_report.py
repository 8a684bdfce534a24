"""What a report tells of a run before it is evaluated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.report.examples import TRAINED, cell, report
from trainer.evaluation.results import PERPLEXITY, Arm, Change, Drop
from trainer.evaluation.store import Share
from trainer.runs.config import RunConfig
from trainer.runs.descriptions import role
from trainer.runs.metrics_file import write_metrics
from trainer.runs.models import Candidate
from trainer.runs.parsing import parse
from trainer.runs.phases import phases_of
from trainer.runs.saved_state import Effect
from trainer.training.run import TrainedRun
from trainer.workflows import experiment_report
from trainer.workflows.experiment_report import _arm, _median_rate, make_report


@pytest.mark.parametrize(
    ("rates", "median"),
    [([], None), ([7.6], 8), ([3.4, 9.0, 1.0], 3), ([4.0, 9.0, 1.0, 2.0], 4)],
)
def test_the_rate_of_a_run_is_the_median_of_its_rows(tmp_path, rates, median):
    rows = [{"step": i, "loss": 1.0, "tokens_per_second": rate} for i, rate in enumerate(rates)]
    write_metrics(tmp_path / "metrics.csv", [*rows, {"step": 99}])
    assert _median_rate(tmp_path) == median


def made(tmp_path, rows, effects=None, state=None, **values):
    config = parse(RunConfig, {"run_dir": str(tmp_path), "trainer": {"max_steps": 20}, **values})
    write_metrics(tmp_path / "metrics.csv", rows)
    candidate = SimpleNamespace(name="Mine", parameters=123, state=state or {})
    return _arm(config, candidate, TrainedRun(config, Path("x"), effects or {}, 1.0))


REACH = {
    "step": 3, "dropped": False, "training_length": 32, "lengths": [32], "loss": [2.0],
    "retrieval": [], "edges": [0, 32], "losses": [2.0],
}  # fmt: skip
NOPE = {"positional": {"layers": ["nope"]}}
EFFECT = Effect(step=10, loss_before=2.0, loss_after=5.0, loss_end=2.1)
MILESTONE = {"step": 4, "dropped": False, "tokens": 9, "scores": {"a": 1.0}}
SHARE = Share(0, 2)


@pytest.fixture
def told(tmp_path, monkeypatch, tiny_decoder):
    """What a report of a run with two controls tells, and what was asked to measure them."""

    def of(**evaluation):
        asked, found, configs, runs = [], {}, {}, {}
        common = {"name": "demo", "trainer": {"max_steps": 20}, "evaluation": evaluation}
        drop = {"drop": {"at": 10}}
        for i, (name, own) in enumerate({"main": drop, "nope": NOPE, "rope": {}}.items()):
            config = parse(RunConfig, common | own | {"run_dir": str(tmp_path / name)})
            path = tmp_path / name / "checkpoints" / "step-000020"
            path.mkdir(parents=True)
            row = {"step": 20, "tokens_per_second": 10.0 * i, "skipped_steps": i // 2 * 2}
            write_metrics(tmp_path / name / "metrics.csv", [row])
            state = {"step": 20, "lengths": [REACH] * i, "benchmarks": [MILESTONE] * i}
            shape = tiny_decoder()
            found[str(path)] = Candidate(
                *(str(path), "x", path, None, shape.config, shape.layout, "0", config, None),
                *(role(config), state),
            )
            effects = {} if i else {phases_of(config)[1].name: EFFECT}
            configs[name], runs[name] = (
                config,
                TrainedRun(
                    config,
                    path,
                    effects,
                    i + 0.26 if i else None,  # resumed
                ),
            )

        def measured(name, candidates, config, text, *more):
            asked.append((name, [one.name for one in candidates], config, text.first.name, *more))
            losses = [
                cell(
                    [1.0], one.name, task=PERPLEXITY, length=factor * TRAINED, last_loss=i / factor
                )
                for i, one in enumerate(candidates)
                for factor in (1, 2)
            ]
            return report(*losses, name=name, notes=("measured",), tasks={PERPLEXITY: "loss"})

        def observed(report, candidates, drop, arms):
            assert {name: arm.name for name, arm in arms.items()} == {a: a for a in arms}
            assert report.arms == tuple(arms.values())
            assert drop == report.drop
            return report, [one.name for one in candidates]

        monkeypatch.setattr(experiment_report, "find_candidate", found.get)
        monkeypatch.setattr(experiment_report, "measure_models", measured)
        monkeypatch.setattr(experiment_report, "with_observations", observed)
        monkeypatch.setattr(experiment_report, "recoveries", lambda arms: [f"of {[*arms]}"])
        corpus = SimpleNamespace(held_out_fingerprint="0", train=[], validation=[], test=[])
        return asked, make_report(configs["main"], configs, runs, corpus, SHARE)

    return of


def test_what_arms_showed_stands_beside_what_was_measured(told, tmp_path, caplog):
    asked, (made, candidates) = told(lengths=[1, 2])
    names = ["RoPE", "DroPE", "NoPE"]
    (name, measured, config, first, *more) = asked[0]
    assert (name, measured, first) == ("demo", names, "DroPE")
    assert config.lengths == [1, 2]
    assert more == [tmp_path / "main" / "evaluation" / "cells", "auto", SHARE, True]
    assert candidates == names
    assert [(arm.name, arm.final_loss, arm.skipped) for arm in made.arms] == [
        ("DroPE", 1.0, 0), ("NoPE", 2.0, 0), ("RoPE", 0.0, 2),
    ]  # fmt: skip
    assert caplog.messages == [
        "RoPE: 2 of 20 updates were left out, because their loss or gradient was not finite."
    ]
    assert made.drop == Drop(10, 2.0, 5.0, 2.1)
    for measured_in_training in (made.milestones, made.reach):
        assert {name: len(history) for name, history in measured_in_training.items()} == {
            "DroPE": 0, "NoPE": 1, "RoPE": 2,
        }  # fmt: skip
    assert made.notes == ("measured", "of ['DroPE', 'NoPE', 'RoPE']")
    assert made.config["name"] == "demo"
    assert made.made["Of"].startswith(f"RoPE: {tmp_path}")
    assert made.timing["tokens_per_second"] == {
        "DroPE": 0, "NoPE": 10, "RoPE": 20,
    }  # fmt: skip
    assert made.timing["training_seconds"] == {
        "NoPE": 1.3, "RoPE": 2.3,
    }  # fmt: skip
    assert 0 <= made.timing["evaluation_seconds"] < 60


def test_without_an_evaluation_nothing_is_measured(told):
    asked, (made, _) = told(enabled=False)
    assert not asked
    assert made.name == "demo"
    assert not made.cells
    assert [arm.final_loss for arm in made.arms] == [None] * 3


def test_a_run_with_a_drop_and_a_longer_phase(tmp_path):
    phases = {
        "short": {"steps": 10},
        "long": {"steps": 6, "sequence_length": 256, "batch_size": 4},
        "dropped": {"steps": 4, "sequence_length": 256, "batch_size": 4, "drop": {}},
    }
    rows = [
        {"step": 5, "loss": 3.0, "skipped_steps": 1},
        {"step": 10},
        {"step": 20, "loss": 2.0, "skipped_steps": 7, "parameter_norm": 4.0},
    ]
    arm = made(
        tmp_path,
        rows,
        {
            "long": Effect(what="as it was kept", loss_before=2.5, loss_after=2.75),
            "dropped": Effect(loss_before=2.0, loss_after=5.0),
        },
        {},
        phases=phases,
        data={"sequence_length": 128},
        positional={"layers": ["rope", "nope", "rope"]},
        trainer={"batch_size": 8},
    )
    longer, change = arm.changes
    assert longer == Change(10, "as it was kept", 256, 2.5, 2.75, None)
    assert change == Change(16, change.what, 256, 2.0, 5.0, None)
    assert "drop" in change.what
    assert arm == Arm(
        name="Mine",
        encoding="rope + nope, dropped at step 16",
        parameters=123,
        steps=20,
        tokens=10 * 8 * 128 + 10 * 4 * 256,
        curve=((5, 3.0), (20, 2.0)),
        skipped=7,
        finite=True,
        changes=(longer, change),
    )
