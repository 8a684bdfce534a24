"""From plain values to a configuration: what is derived, and what a command line can say."""

from __future__ import annotations

import pytest

from trainer.common.errors import UserError
from trainer.config import TrainerConfig
from trainer.runs.parsing import merged, parse, runs_of
from trainer.runs.phases import drop_step


@pytest.mark.parametrize(
    ("changes", "result"),
    [
        ({}, {"a": 1, "g": {"b": 2, "c": {"d": 3}}}),
        ({"a": {"x": 1}}, {"a": {"x": 1}, "g": {"b": 2, "c": {"d": 3}}}),
        ({"g": None}, {"a": 1, "g": None}),
        ({"g": {"c": {"e": 4}}, "n": 5}, {"a": 1, "g": {"b": 2, "c": {"d": 3, "e": 4}}, "n": 5}),
        ({"g": {"c": 6}}, {"a": 1, "g": {"b": 2, "c": 6}}),
    ],
)
def test_changes_are_laid_over_what_they_name(changes, result):
    base = {"a": 1, "g": {"b": 2, "c": {"d": 3}}}
    assert merged(base, changes) == result
    assert base == {"a": 1, "g": {"b": 2, "c": {"d": 3}}}


def controlled(*, drop=None, **controls):
    values = {"run_dir": "runs/x", "trainer": {"max_steps": 10}}
    return values | {"drop": {"at": drop}, "controls": controls}


def test_a_control_is_the_run_with_its_changes_and_without_controls():
    values = controlled(drop=5, a={"branch": 3, "drop": {"at": 7}}, b={"seed": 4})
    config, control, other = runs_of(parse(values)).values()
    assert (control.run_dir, control.seed) == ("runs/x/controls/a", 0)
    assert (control.controls, drop_step(control), drop_step(config)) == ({}, 7, 5)
    assert other.seed == 4


def test_branches_are_possible_from_every_step_until_which_both_are_changed_alike():
    ends = {"a": {"branch": 1}, "b": {"branch": 5}, "c": {"branch": "drop"}, "d": {"branch": None}}
    parse(controlled(drop=5, **ends))
    parse(controlled(a={"branch": 10}))
    parse(controlled(drop=5, a={"branch": 6}))


def test_every_step_and_length_that_a_run_has_follows_from_its_groups():
    values = {"data": {"sequence_length": 64}, "trainer": {"batch_size": 3, "max_steps": 10}}
    config = parse({"run_dir": "x", **values, "drop": {"at": 2}})
    assert (config.tokens_per_step, config.training_length, drop_step(config)) == (192, 64, 2)
    phases = {
        "a": {"steps": 2, "sequence_length": 32}, "b": {"steps": 3, "sequence_length": 128},
        "c": {"steps": 4, "drop": {}}, "d": {"steps": 1, "drop": {"to": "alibi"}},
    }  # fmt: skip
    config = parse({"run_dir": "x", **values, "phases": phases})
    assert (config.training_length, drop_step(config)) == (64, 5)  # of the last phase


@pytest.mark.parametrize(
    ("control", "message"),
    [
        ({"strategy": {"name": "ddp"}}, "trains in the processes of its run"),
        ({"data": {"sequence_length": 24}}, "trains on 24 tokens, the run on"),
    ],
)
def test_a_control_that_cannot_be_compared_is_refused(control, message):
    with pytest.raises(UserError, match=rf"controls\.other.*{message}"):
        parse(controlled(other=control))


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "fits"),
    [(32, 2, 6, False), (32, None, 48, False), (48, 8, 4, False), (32, 2, 16, True),
     (32, None, 1, True), (6, None, 2, True), (5, None, 2, False)],
)  # fmt: skip
def test_batches_divide_among_ranks_or_are_refused(batch, micro, processes, fits):
    config = TrainerConfig(batch_size=batch, micro_batch_size=micro)
    if fits:
        assert config.accumulation(processes) * processes * (micro or batch // processes) == batch
        return
    with pytest.raises(UserError, match=f"{batch} sequences do not divide .* on {processes} ranks"):
        config.accumulation(processes)
