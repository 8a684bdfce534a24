"""A run that has begun with another's weights, once those have gone."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace

import pytest

from tests.training.test_run import assert_same_state, checkpoint_of
from trainer.common.errors import UserError
from trainer.runs.config import RunConfig
from trainer.runs.directory import open_run_directory
from trainer.runs.parsing import merged, parse
from trainer.training.run import train
from trainer.workflows.training_text import open_corpus


@pytest.fixture
def begun(base, finished, tmp_path):
    """Values of a run that begins with a copy of another, and its end; three steps are undone."""
    shutil.copytree(finished[0].run_dir, tmp_path / "other")
    changes = {
        "run_dir": str(tmp_path / "run"),
        "model": {"from_run": str(tmp_path / "other"), "qk_norm": {"when": "never"}},
        "drop": {"at": None},
    }
    values = merged(base, changes)
    config = parse(RunConfig, values)
    open_run_directory(config)
    train(config, open_corpus(config))
    shutil.copytree(checkpoint_of(config), tmp_path / "end")
    shutil.rmtree(checkpoint_of(config))
    return values, config, tmp_path


def test_it_goes_on_from_its_own_checkpoint_where_the_other_run_has_gone(begun):
    values, config, place = begun
    shutil.rmtree(place / "other")
    again = parse(RunConfig, values)
    assert asdict(again) == asdict(config)
    other = parse(RunConfig, merged(values, {"model": {"attention_backend": "sdpa"}}))
    assert other.model == replace(config.model, attention_backend="sdpa")
    open_run_directory(again)
    train(again, open_corpus(again))
    assert_same_state(checkpoint_of(again), place / "end")


@pytest.mark.parametrize("case", ["another", "not begun", "overwrite"])
def test_whatever_still_needs_the_other_run_misses_it(begun, case):
    values, _, place = begun
    shutil.rmtree(place / "other")
    if case == "another":
        values = merged(values, {"model": {"from_run": "elsewhere"}})
    elif case == "not begun":
        shutil.rmtree(place / "run" / "checkpoints")
    else:
        values = {**values, "overwrite": True}
    with pytest.raises(UserError, match=r"^model\.from_run: '.*' is neither a run directory nor"):
        parse(RunConfig, values)
