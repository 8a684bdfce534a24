"""What an older version wrote is read; what a newer one wrote is refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.training.test_run import assert_same_state, checkpoint_of, rows_of
from trainer.common.errors import UserError
from trainer.common.formats import check_format
from trainer.runs.checkpoints import (
    MANIFEST,
    STATE,
    damage,
    digests,
    find_checkpoint,
    read_state,
    step_name,
)
from trainer.runs.directory import MARK
from trainer.runs.models import find_candidate
from trainer.workflows.evaluate import evaluate_lengths
from trainer.workflows.export import export_checkpoint
from trainer.workflows.requests import EvaluationRequest, ExportRequest


def change_state(checkpoint, change):
    """Another ``state.json``, with a manifest that vouches for it."""
    state = json.loads((checkpoint / STATE).read_text())
    change(state)
    (checkpoint / STATE).write_text(json.dumps(state))
    files = digests(checkpoint) | digests(checkpoint, ".metadata")
    (checkpoint / MANIFEST).write_text(json.dumps(files))
    assert damage(checkpoint) is None


def test_a_run_that_began_before_there_were_formats_resumes_bit_for_bit(run, tmp_path):
    """The directory as version 0.1.0 left it: no mark, no formats, no callbacks key."""
    whole, _ = run("whole")
    old = tmp_path / "old"
    (old / "checkpoints").mkdir(parents=True)
    shutil.copytree(checkpoint_of(whole, 6), old / "checkpoints" / step_name(6))
    shutil.copy(Path(whole.run_dir) / "metrics.csv", old)
    change_state(old / "checkpoints" / step_name(6), lambda state: state.pop("format"))
    for path in Path(whole.data.cache_dir).glob("corpora/*/format.json"):
        path.unlink()
    resumed, _ = run("old")
    assert_same_state(checkpoint_of(resumed), checkpoint_of(whole))
    assert rows_of(resumed) == rows_of(whole)


@pytest.fixture
def newer(run):
    """A run whose last checkpoint is of a format that is not known yet."""
    config, _ = run()
    change_state(checkpoint_of(config), lambda state: state.update(format=3))
    return config


READERS = {
    "train": lambda config, run: run(),
    "evaluate": lambda config, run: evaluate_lengths(EvaluationRequest(config.run_dir)),
    "analyze, generate": lambda config, run: find_candidate(config.run_dir),
    "export": lambda config, run: export_checkpoint(
        ExportRequest(checkpoint=config.run_dir, to=f"{config.run_dir}/exported")
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_checkpoint_of_a_newer_format_is_refused_in_one_line(newer, run, reader):
    with pytest.raises(UserError) as error:
        READERS[reader](newer, run)
    (problem,) = map(str, error.value.problems)
    assert problem.startswith("checkpoint: ")
    assert f"{step_name(12)}' has format 3, this version of unrope reads up to 2;" in problem
    assert "install a newer one, or give a checkpoint that an older one wrote." in problem
    assert "\n" not in problem


def test_checkpoints_in_a_run_directory_of_a_newer_format_are_refused(run):
    config, _ = run()
    (Path(config.run_dir) / MARK).write_text('{"program": "unrope", "format": 2}')
    for read in (
        lambda: read_state(find_checkpoint(config.run_dir)),
        lambda: find_candidate(config.run_dir),
    ):
        with pytest.raises(UserError, match=r"checkpoint: .* has format 2, .*reads up to 1;"):
            read()


@pytest.mark.parametrize("number", [0, -1, "1", None, 1.5, True])
def test_what_is_no_number_of_a_format_is_damage(number):
    with pytest.raises(UserError, match="output: 'x' is damaged"):
        check_format(number, 1, "output", "'x'", "choose another")
