"""Where a run begins, and what it must have in common with its checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.comparing import checkpoint_of
from trainer.checkpoint import (
    read_state,
    regular_checkpoints,
    step_of,
)
from trainer.common.errors import UserError
from trainer.data.corpus import prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.runs.directory import read_metrics
from trainer.runs.parsing import merged, parse
from trainer.training.fit import starting_point
from trainer.training.rows import epochs_read


@pytest.fixture(scope="module")
def corpus(finished):
    config, _ = finished
    return prepare_corpus(config.data, config.tokenizer)


@pytest.fixture
def copied(finished, tmp_path):
    """The finished run, for a test that changes its directory."""
    config, _ = finished
    shutil.copytree(config.run_dir, tmp_path / "run")
    return replace(config, run_dir=str(tmp_path / "run"))


def steps_of(config):
    return [step_of(p) for p in regular_checkpoints(Path(config.run_dir) / "checkpoints")]


def test_a_new_run_begins_from_nothing(corpus, tmp_path):
    assert starting_point(tmp_path / "new", corpus, None) == (None, {"step": 0, "rows": 0})
    assert (tmp_path / "new" / "checkpoints").is_dir()
    assert read_metrics(tmp_path / "new" / "metrics.csv") == []


def test_a_run_goes_on_from_its_newest_sound_checkpoint(copied, corpus):
    (checkpoint_of(copied) / "state.json").write_text("{}")
    path, state = starting_point(Path(copied.run_dir), corpus, None)
    assert path == checkpoint_of(copied, 9)
    assert state == read_state(path)
    assert steps_of(copied) == [3, 6, 9]
    rows = read_metrics(Path(copied.run_dir) / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]


@pytest.mark.parametrize("lost", [2, 6, 8, None])
def test_rows_that_are_lost_before_the_checkpoint_are_said_once(copied, corpus, caplog, lost):
    path = Path(copied.run_dir) / "metrics.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(f"{lost},")))
    shutil.rmtree(checkpoint_of(copied))  # at step 12
    _, state = starting_point(Path(copied.run_dir), corpus, None)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    if lost is None:
        assert (warnings, state["rows"]) == ([], 4)
    else:
        assert warnings == [f"{path}: expected 4 rows up to step 9, got 3"]
        assert state["rows"] == 3


def test_a_branch_begins_with_the_state_and_the_rows_of_its_run(copied, corpus, tmp_path):
    branch = checkpoint_of(copied, 6)
    path, state = starting_point(tmp_path / "control", corpus, branch)
    assert (path, state["step"]) == (branch, 6)
    rows = read_metrics(tmp_path / "control" / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert steps_of(copied) == [3, 6, 9, 12]


def test_a_run_does_not_go_on_with_another_text(copied):
    other = SimpleNamespace(fingerprints=["another"])
    with pytest.raises(UserError, match=r"^data: the checkpoint was trained on another text"):
        starting_point(Path(copied.run_dir), other, None)


def test_epochs_are_those_of_all_orders_of_samples_together(base, corpus):
    """Against a sum over steps: each reads its samples of the text's blocks of its length."""
    phases = {
        "a": {"steps": 3}, "b": {"steps": 2, "sequence_length": 64, "batch_size": 8},
        "c": {"steps": 4, "sequence_length": 64}, "d": {"steps": 2},
    }  # fmt: skip
    never = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    trained = parse(merged(base, {"run_dir": "x", "phases": phases, **never})).phases
    read = epochs_read(corpus, trained)
    (name,) = read(0)
    times = 0.0
    for step in range(11):
        phase = next(p for p in trained if p.start <= step < p.end)
        order = TrainingSamples(corpus, phase.data, phase.seed)
        assert read(step)[name] == pytest.approx(times)
        times += order.epochs(phase.batch_size)[name]
    assert read(11)[name] == pytest.approx(times)
