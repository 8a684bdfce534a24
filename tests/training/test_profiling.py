"""Chosen steps are profiled; others cost nothing."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.training.test_run import assert_same_tensors, checkpoint_of, rows_of
from trainer.errors import UserError
from trainer.runs.mark import write_mark
from trainer.runs.ownership import overwrite_problems
from trainer.training import stretch


def test_a_trace_and_a_table_of_the_chosen_steps(run):
    config, _ = run(trainer={"profile_steps": [3, 4], "micro_batch_size": 2})
    directory = Path(config.run_dir) / "profile"
    assert sorted(p.name for p in directory.iterdir()) == [
        "steps-3-4-rank-0.json.gz",
        "steps-3-4-rank-0.txt",
    ]
    with gzip.open(directory / "steps-3-4-rank-0.json.gz") as file:
        names = [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]
    assert {name for name in names if name.startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }
    table = (directory / "steps-3-4-rank-0.txt").read_text()
    assert "Self CPU" in table
    assert "aten::mm" in table or "mkldnn" in table
    write_mark(Path(config.run_dir))
    assert not overwrite_problems(Path(config.run_dir))  # it may be replaced with the run


@pytest.mark.parametrize("steps", [[3], [0, 2], [4, 3], [11, 13], [1, 2, 3]])
def test_steps_that_are_none_of_the_run_are_refused(run, steps):
    with pytest.raises(UserError, match=r"profile_steps: expected .* steps 1 to 12, .* got \["):
        run(trainer={"profile_steps": steps})


def test_a_profiled_run_is_the_run_without(run, monkeypatch):
    profiled, _ = run("profiled", trainer={"profile_steps": [1, 1]})
    monkeypatch.setattr(stretch, "Profiling", pytest.fail)
    plain, _ = run("plain")
    assert rows_of(profiled) == rows_of(plain)
    assert_same_tensors(checkpoint_of(profiled), checkpoint_of(plain))
