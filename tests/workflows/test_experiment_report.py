"""What a report tells of a run before it is evaluated."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.report.results import Arm, Change
from trainer.runs.config import RunConfig
from trainer.runs.metrics_file import write_metrics
from trainer.runs.parsing import parse
from trainer.training.run import TrainedRun
from trainer.workflows.experiment_report import _arm, _median_rate, _milestones, _reach


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
        {"dropped": {"loss_before": 2.0, "loss_after": 5.0}},
        {"skips": [[3, 8], [5, 8]]},
        phases=phases,
        data={"sequence_length": 128},
        positional={"layers": ["rope", "nope", "rope"]},
        trainer={"batch_size": 8},
    )
    (change,) = arm.changes
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
        rewinds=2,
        finite=True,
        changes=(change,),
    )


def test_a_run_that_kept_nothing_and_one_that_diverged(tmp_path):
    arm = made(tmp_path, [])
    assert (arm.encoding, arm.curve, arm.skipped, arm.rewinds) == ("rope", (), 0, 0)
    assert arm.finite
    assert not arm.changes
    assert not made(tmp_path, [{"step": 1, "parameter_norm": math.nan}]).finite


def test_what_was_measured_while_training_is_in_its_state():
    for read in (_reach, _milestones):
        assert read(SimpleNamespace(state={"callbacks": {}})) == ()
    reach = {
        "step": 3, "dropped": False, "training_length": 32, "lengths": [32], "loss": [2.0],
        "retrieval": [], "edges": [0, 32], "losses": [2.0],
    }  # fmt: skip
    milestone = {"step": 4, "dropped": True, "tokens": 9, "scores": {}}
    state = {"Lengths": {"history": [reach]}, "Benchmarks": {"history": [milestone]}}
    candidate = SimpleNamespace(state={"callbacks": state})
    assert [one.step for one in _reach(candidate)] == [3]
    assert [one.step for one in _milestones(candidate)] == [4]
