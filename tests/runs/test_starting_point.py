"""Where a run begins, and what it must have in common with its checkpoint."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.training.test_run import checkpoint_of
from trainer.common.errors import UserError
from trainer.data.corpus import Corpus, Part, prepare_corpus
from trainer.data.dataset import TrainingSamples
from trainer.runs.checkpoints import read_state, regular_checkpoints, step_of
from trainer.runs.config import RunConfig
from trainer.runs.metrics_file import append_metrics, read_metrics
from trainer.runs.parsing import merged, parse
from trainer.runs.phase_config import PhaseConfig
from trainer.runs.phases import phases_of
from trainer.runs.starting_point import (
    check_same_data,
    data_fingerprints,
    epochs_read,
    rewind_run,
    say_other_numerics,
    starting_point,
    texts_read,
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


def test_a_run_without_a_checkpoint_begins_its_metrics_anew(tmp_path, caplog):
    config = RunConfig(run_dir=str(tmp_path / "new"))
    starting_point(config, None)
    append_metrics(tmp_path / "new" / "metrics.csv", {"step": 1, "loss": 2.0})
    append_metrics(tmp_path / "new" / "metrics.csv", {"step": 7, "loss": 1.0})
    starting_point(config, None)
    assert read_metrics(tmp_path / "new" / "metrics.csv") == []
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'new'} has no checkpoint: begins again from nothing, without the rows of "
        "metrics.csv until step 7"
    ]


def test_a_run_goes_on_from_its_newest_sound_checkpoint_and_sets_later_ones_aside(copied):
    damaged = checkpoint_of(copied) / ".metadata"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    start = starting_point(copied, None)
    assert (start.checkpoint, start.step) == (checkpoint_of(copied, 9), 9)
    assert start.state == read_state(checkpoint_of(copied, 9))
    assert steps_of(copied) == [3, 6, 9]
    assert (checkpoint_of(copied).with_name("unused-step-000012")).is_dir()
    rows = read_metrics(Path(copied.run_dir) / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6, 8]


def test_a_state_that_training_cannot_go_on_from_is_refused_but_not_one_of_before(
    copied, monkeypatch
):
    """Which its own sentence refuses, once its text is known."""
    asked = []

    def read_run_state(*arguments):
        asked.append(arguments)
        return "what training resumes from"

    monkeypatch.setattr("trainer.runs.starting_point.read_run_state", read_run_state)
    start = starting_point(copied, None)
    state = start.state
    assert asked == [(checkpoint_of(copied), state)]
    assert start.run_state == "what training resumes from"
    older = {key: value for key, value in state.items() if key != "certificate"}
    monkeypatch.setattr("trainer.runs.starting_point.read_state", lambda path: older)
    start = starting_point(copied, None)
    assert (start.state, start.run_state) == (older, None)
    assert len(asked) == 1


def test_a_branch_begins_with_the_state_and_the_rows_of_its_run(copied, tmp_path):
    control = replace(copied, run_dir=str(tmp_path / "control"))
    branch = checkpoint_of(copied, 6)
    start = starting_point(control, branch)
    assert (start.checkpoint, start.step) == (branch, 6)
    rows = read_metrics(tmp_path / "control" / "metrics.csv")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert steps_of(copied) == [3, 6, 9, 12]
    missing = branch.with_name("step-000007")
    with pytest.raises(UserError, match=r"^controls: '.*step-000007', where this run branches off"):
        starting_point(replace(copied, run_dir=str(tmp_path / "x")), missing)


@pytest.mark.parametrize(
    ("first_bad", "broken_at", "remaining", "skips"),
    [(10, 12, [3, 6, 9], [[9, 12]]), (9, 11, [3, 6, 9], [[9, 8]]), (2, 5, [], [[0, 20]])],
)
def test_a_run_that_diverged_leaves_out_what_it_read_since(
    copied, first_bad, broken_at, remaining, skips
):
    assert rewind_run(copied, first_bad, broken_at) == skips
    assert steps_of(copied) == remaining


@pytest.mark.parametrize(
    ("before", "skips"),
    [
        ([], [[9, 8]]),
        ([[3, 4]], [[3, 4], [9, 8]]),  # the checkpoint has read on since
        ([[9, 12]], [[9, 20]]),  # from the same checkpoint, which does not know of them
        ([[3, 4], [10, 4]], [[3, 4], [9, 12]]),
    ],
)
def test_a_second_rewind_leaves_out_what_the_first_did_too(copied, before, skips):
    assert rewind_run(copied, 9, 11, before) == skips


def test_a_control_without_a_checkpoint_goes_back_to_where_it_branched_off(copied, tmp_path):
    control, branch = replace(copied, run_dir=str(tmp_path / "control")), checkpoint_of(copied, 6)
    starting_point(control, branch)
    assert rewind_run(control, 8, 10, branch=branch) == [[6, 16]]


def test_a_rewind_over_a_change_of_the_order_leaves_out_samples_of_both(copied):
    """Of two phases of other lengths, which begin at steps 0 and 10; the last checkpoint is 9."""
    phases = {"a": PhaseConfig(steps=10), "b": PhaseConfig(steps=5, sequence_length=64)}
    config = replace(copied, phases=phases)
    assert rewind_run(config, 9, 12) == [[9, 4], [10, 8]]
    assert rewind_run(config, 9, 12, [[9, 1], [10, 2]]) == [[9, 5], [10, 10]]


def test_texts_are_those_of_the_newest_checkpoint_that_can_be_read(copied, corpus, tmp_path):
    assert texts_read(tmp_path / "nothing") is None
    (checkpoint_of(copied) / "state.json").write_text("{}")
    (checkpoint_of(copied, 9) / "state.json").write_text("[")
    assert texts_read(Path(copied.run_dir)) == corpus.fingerprints


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
    assert plain.keys() == {"corpus", "order", "texts"}
    assert (plain["corpus"], plain["texts"]) == (corpus.fingerprint, corpus.fingerprints)
    assert order(trainer={"batch_size": 8}, data={"num_workers": 1}) == plain
    data = [
        {"sequence_length": 64}, {"shuffle_group": 7}, {"packing": "best_fit"},
        {"needles": {"weight": 3.0}},
    ]  # fmt: skip
    others = [order(seed=1), *(order(data=changes) for changes in data)]
    assert len({other["order"] for other in [plain, *others]}) == 6


def test_other_text_another_order_and_other_samples_are_refused(finished, corpus):
    config, _ = finished
    state = read_state(checkpoint_of(config))
    check_same_data(state, corpus, config)
    with pytest.raises(UserError, match=r"^data: the checkpoint was trained on other text, or in"):
        check_same_data(state, corpus, replace(config, seed=1))
    changed = json.loads(json.dumps(state))
    changed["certificate"]["last_step"] = "0" * 16
    certificate = state["certificate"]["last_step"]
    message = (
        "^data: the last step of the checkpoint read samples 44 to 47 "
        rf".* {'0' * 16}, .* {certificate};"
    )
    with pytest.raises(UserError, match=message):
        check_same_data(changed, corpus, config)
    with pytest.raises(UserError, match=r"^data: .* read samples 50 to 53 with the certificate"):
        check_same_data(state | {"skips": [[6, 6]]}, corpus, config)
    unread = replace(config, drop=replace(config.drop, at=0))
    check_same_data(changed | {"step": 0}, corpus, unread)  # just before a drop at step 0
    del changed["certificate"]
    with pytest.raises(UserError, match=r"^checkpoint: an earlier version of this program"):
        check_same_data(changed, corpus, config)


@pytest.mark.parametrize(
    ("trained", "before", "now", "message"),
    [
        ("fp32", "float32", "fp32", ""),
        ("fp32", None, "fp32", ""),
        ("fp32", "float32", "bf16", "until there: float32"),
        ("bf16", None, "bf16", "until there: bf16 as an earlier version computed it"),
        ("bf16", None, "fp32", "in float32; until there: bf16 as an earlier version computed it"),
    ],
)
def test_other_types_of_numbers_are_told(trained, before, now, message, caplog):
    state = {"step": 7, "config": {"trainer": {"precision": trained}}}
    state |= {"numerics": before} if before else {}
    config = parse(RunConfig, {"run_dir": "x", "trainer": {"precision": now}})
    with caplog.at_level(logging.WARNING):
        say_other_numerics(state, config)
    assert bool(caplog.text) == bool(message)
    assert message in caplog.text
    assert not message or "Goes on from step 7 in " in caplog.text


def test_epochs_are_those_of_all_orders_of_samples_together(base, corpus):
    """Against a sum over steps: each reads its samples of the text's blocks of its length."""
    phases = {
        "a": {"steps": 3}, "b": {"steps": 2, "sequence_length": 64, "batch_size": 8},
        "c": {"steps": 4, "sequence_length": 64}, "d": {"steps": 2},
    }  # fmt: skip
    never = {"drop": {"at": None}, "model": {"qk_norm": {"when": "never"}}}
    config = parse(RunConfig, merged(base, {"run_dir": "x", "phases": phases, **never}))
    trained = phases_of(config)
    skips = [[4, 3], [10, 5]]
    read = epochs_read(corpus, trained, skips)
    (name,) = read(0)
    times = 0.0
    for step in range(11):
        phase = next(p for p in trained if p.start <= step < p.end)
        order = TrainingSamples(corpus, phase.config.data, phase.seed)
        times += order.epochs(sum(n for first, n in skips if first == step))[name]
        assert read(step)[name] == pytest.approx(times)
        times += order.epochs(phase.config.trainer.batch_size)[name]
    assert read(11)[name] == pytest.approx(times)
