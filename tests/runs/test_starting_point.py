"""Where a run begins, and what it must have in common with its checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lightning.test_run import checkpoint_of
from trainer.checkpoint import (
    read_state,
    regular_checkpoints,
    step_of,
)
from trainer.common.errors import UserError
from trainer.config import RunConfig
from trainer.data.corpus import Corpus, Part, prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.runs.directory import read_metrics
from trainer.runs.parsing import merged, parse
from trainer.runs.phases import phases_of
from trainer.runs.starting_point import (
    check_same_data,
    data_fingerprints,
    epochs_read,
    starting_point,
)


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


def test_a_new_run_begins_from_nothing(tmp_path):
    config = RunConfig(run_dir=str(tmp_path / "new"))
    start = starting_point(config, None)
    assert (start.checkpoint, start.state, start.step) == (None, {}, 0)
    assert (tmp_path / "new" / "checkpoints").is_dir()
    assert read_metrics(tmp_path / "new" / "metrics.csv") == []


def test_a_run_goes_on_from_its_newest_sound_checkpoint(copied):
    (checkpoint_of(copied) / "state.json").write_text("{}")
    start = starting_point(copied, None)
    assert (start.checkpoint, start.step) == (checkpoint_of(copied, 9), 9)
    assert start.state == read_state(checkpoint_of(copied, 9))
    assert steps_of(copied) == [3, 6, 9]
    rows = read_metrics(Path(copied.run_dir) / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]


def test_a_branch_begins_with_the_state_and_the_rows_of_its_run(copied, tmp_path):
    control = replace(copied, run_dir=str(tmp_path / "control"))
    branch = checkpoint_of(copied, 6)
    start = starting_point(control, branch)
    assert (start.checkpoint, start.step) == (branch, 6)
    rows = read_metrics(tmp_path / "control" / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert steps_of(copied) == [3, 6, 9, 12]


def test_the_order_of_a_phase_changes_with_the_weights_of_its_texts():
    """The corpus stays the same, with the weights that the run has."""
    texts = [SimpleNamespace(fingerprint=digit * 16) for digit in "12"]
    corpus = Corpus(None, 0, tuple(Part(n, 1.0, x) for n, x in zip("ab", texts, strict=True)))
    mixture = {"a": {"weight": 1.0}, "b": {"weight": 1.0}}

    def order(**weights):
        phases = {"first": {"steps": 2, "weights": weights or None}}
        config = parse(RunConfig, {"data": {"mixture": mixture}, "phases": phases})
        (first,) = phases_of(config)
        return data_fingerprints(corpus, first)

    assert order(a=1.0, b=1.0) == order()
    changed = order(a=3.0, b=1.0)
    assert {k for k, value in changed.items() if value != order()[k]} == {"order"}


def test_fingerprints_change_with_whatever_changes_the_samples(base, corpus):
    def order(**changes):
        config = parse(RunConfig, merged(base | {"run_dir": "x"}, changes))
        (first, *_) = phases_of(config)
        return data_fingerprints(corpus, first)

    plain = order()
    assert plain["texts"] == corpus.fingerprints
    assert order(trainer={"batch_size": 8}, data={"num_workers": 1}) == plain
    data = [
        {"sequence_length": 64},
        {"needles": {"weight": 3.0}},
    ]  # fmt: skip
    others = [order(seed=1), *(order(data=changes) for changes in data)]
    assert len({other["order"] for other in [plain, *others]}) == 4


def test_another_order_of_samples_is_refused(finished, corpus):
    config, _ = finished
    state = read_state(checkpoint_of(config))
    check_same_data(state, corpus, config)
    with pytest.raises(UserError, match=r"^data: the checkpoint was trained on other text, or in"):
        check_same_data(state, corpus, replace(config, seed=1))


def test_epochs_are_those_of_all_orders_of_samples_together(base, corpus):
    """Against a sum over steps: each reads its samples of the text's blocks of its length."""
    phases = {
        "a": {"steps": 3}, "b": {"steps": 2, "sequence_length": 64, "batch_size": 8},
        "c": {"steps": 4, "sequence_length": 64}, "d": {"steps": 2},
    }  # fmt: skip
    never = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    config = parse(RunConfig, merged(base, {"run_dir": "x", "phases": phases, **never}))
    trained = phases_of(config)
    read = epochs_read(corpus, trained)
    (name,) = read(0)
    times = 0.0
    for step in range(11):
        phase = next(p for p in trained if p.start <= step < p.end)
        order = TrainingSamples(corpus, phase.config.data, phase.seed)
        assert read(step)[name] == pytest.approx(times)
        times += order.epochs(phase.config.trainer.batch_size)[name]
    assert read(11)[name] == pytest.approx(times)
