"""From plain values to a configuration: what is derived, and what a command line can say."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

import pytest

from trainer.common.fields import configuration
from trainer.config import RunConfig
from trainer.runs.parsing import control_config, merged, parse


def test_a_run_may_leave_the_controls_of_its_experiment_out():
    assert parse(RunConfig, {"controls": None}).controls == {}


@configuration
class Inner:
    size: int = 1


@configuration
class Outer:
    number: int = 1
    kind: Literal["some", "other"] = "some"
    several: list[str] = field(default_factory=list)
    either: int | list[int] | None = None
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    listed: list[Inner] = field(default_factory=list)
    named: dict[str, Inner] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


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
    config = parse(RunConfig, values)
    control = control_config(values, "a")
    assert control == control_config(values, "a", weights=False)
    assert (control.run_dir, control.seed) == ("runs/x/controls/a", 0)
    assert (control.controls, control.drop_step, config.drop_step) == ({}, 7, 5)
    assert control_config(values, "b").seed == 4


def test_branches_are_possible_from_every_step_until_which_both_are_changed_alike():
    ends = {"a": {"branch": 1}, "b": {"branch": 5}, "c": {"branch": "drop"}, "d": {"branch": None}}
    parse(RunConfig, controlled(drop=5, **ends))
    parse(RunConfig, controlled(a={"branch": 10}))
    parse(RunConfig, controlled(drop=5, a={"branch": 6}))


@pytest.mark.parametrize(
    "values",
    [
        {"evaluation": {"methods": ["yarn"], "enabled": False}},
        {"evaluation": {"tasks": ["statements"], "enabled": False}},
        {"evaluation": {"tasks": ["statements"]}, "data": {"needles": {"share": 0.5}}},
        {"evaluation": {"methods": None}},
        {"model": {"attention_backend": "flash"}, "trainer": {"precision": "bf16"}},
        {"model": {"qk_norm": {"when": "after_drop"}}, "drop": {"at": 1}},
        {
            "model": {"qk_norm": {"when": "after_drop"}},
            "phases": {"a": {"steps": 1}, "b": {"steps": 1, "drop": {}}},
        },
        {"drop": {"to": "mine", "at": 1}, "positional": {"encodings": {"mine": {"type": "nope"}}}},
    ],
)
def test_what_is_possible_between_groups(values):
    parse(RunConfig, {"run_dir": "x", **values})


def test_every_step_and_length_that_a_run_has_follows_from_its_groups():
    values = {"data": {"sequence_length": 64}, "trainer": {"batch_size": 3, "max_steps": 10}}
    config = parse(RunConfig, {"run_dir": "x", **values, "drop": {"at": 2}})
    assert (config.tokens_per_step, config.training_length, config.drop_step) == (192, 64, 2)
    phases = {
        "a": {"steps": 2, "sequence_length": 32}, "b": {"steps": 3, "sequence_length": 128},
        "c": {"steps": 4, "drop": {}}, "d": {"steps": 1, "drop": {"to": "alibi"}},
    }  # fmt: skip
    config = parse(RunConfig, {"run_dir": "x", **values, "phases": phases})
    assert (config.training_length, config.drop_step) == (64, 5)  # of the last phase
