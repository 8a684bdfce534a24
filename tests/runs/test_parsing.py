"""From plain values to a configuration: what is derived, and what a command line can say."""

from __future__ import annotations

import math
import re
from dataclasses import field
from typing import Any, Literal

import pytest

from trainer.common.errors import Problem, UserError
from trainer.common.fields import configuration, validated
from trainer.config import EvaluationConfig, EvaluationRequest, RunConfig
from trainer.runs.parsing import control_config, merged, parse


def test_a_run_may_leave_the_controls_of_its_experiment_out():
    assert parse(RunConfig, {"controls": None}).controls == {}


def test_only_pretrained_weights_may_drop_before_the_first_step():
    with pytest.raises(UserError, match=r"drop\.at: 0 is step 0, but the run has steps 1 to 999"):
        parse(RunConfig, {"drop": {"at": 0}})


def test_keys_of_groups_that_may_be_missing_or_are_listed_are_checked():
    values = {"text": {"sorce": "files"}, "evaluation": {"weighted_rope": [{"tua": 0.5}]}}
    _, problems = validated(EvaluationRequest, values)
    assert [*map(str, problems)][:2] == [
        "text.sorce: unknown key. Did you mean 'source'?",
        "evaluation.weighted_rope[0].tua: unknown key. Did you mean 'tau'?",
    ]


def test_keys_with_dots_are_shown_as_groups_of_keys():
    dotted = {"positional.layers": ["nope"], "model.softmax.sinks": True, "mode.x": 1}
    _, problems = validated(RunConfig, {"label": "a", **dotted})
    assert [*map(str, problems)][:2] == [
        "positional.layers: a key with dots; write positional: {layers: ...}.",
        "model.softmax.sinks: a key with dots; write model: {softmax: {sinks: ...}}.",
    ]
    assert str(problems[2]).startswith("mode.x: unknown key.")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schedule.peak", float("inf")),
        ("schedule.peak", "-inf"),  # as YAML reads it without a full stop before it
        ("optimizer.lr", float("nan")),
        ("optimizer.betas", [0.9, float("nan")]),
        ("drop.at", float("nan")),
        ("evaluation.lengths", [1, float("inf")]),
        ("positional.encodings.nope.temperature", float("nan")),
        ("callbacks.mine.thresholds", [[float("-inf")]]),
        ("controls.other.optimizer.lr", float("inf")),
    ],
)
def test_numbers_that_are_not_finite_are_refused_wherever_they_stand(key, value):
    *groups, last = key.split(".")
    values = {last: value}
    for group in reversed(groups):
        values = {group: values}
    with pytest.raises(UserError) as error:
        parse(RunConfig, {"run_dir": "runs/x", **values})
    (problem,) = error.value.problems
    assert re.sub(r"(\[\d+\])+$", "", problem.key) == key
    assert "finite number" in problem.message or isinstance(value, str)


def test_what_an_earlier_version_kept_of_evaluations_is_left_out():
    """A checkpoint's configuration is read for what it has in common with today's."""
    old = {"enabled": True, "lengths": [1, 2], "trials": 256, "needles": 4, "loss_windows": 96}
    old |= {"rescalings": ["pi"], "temperature_grid": [0.0], "fit_windows": 7, "seed": 1}
    config, problems = validated(RunConfig, {"seed": 5, "evaluation": old})
    assert (config.seed, config.evaluation.lengths, config.evaluation.fit_windows) == (5, [1, 2], 7)
    assert config.evaluation.needles == EvaluationConfig().needles
    assert problems


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
    ("values", "sentence"),
    [
        ({"numbr": 1}, ["numbr: unknown key. Did you mean 'number'?"]),
        ({"inner": {"siz": 1}}, ["inner.siz: unknown key. Did you mean 'size'?"]),
        ({"maybe": {"siz": 1}}, ["maybe.siz: unknown key. Did you mean 'size'?"]),
        ({"named": {"a": {"siz": 1}}}, ["named.a.siz: unknown key. Did you mean 'size'?"]),
        (
            {"listed": [{"siz": 1}, {"size": 2}]},
            ["listed[0].siz: unknown key. Did you mean 'size'?"],
        ),
        ({"inner": 3}, ["inner: expected a group of keys, got 3."]),
        ({"named": {"a": 3}}, ["named.a: expected a group of keys, got 3."]),
        ({"free": {"x": {"y": 1}}, "maybe": None, "either": [1]}, []),
        (
            {"kind": "somme"},
            "kind: expected one of some, other, got 'somme'. Did you mean 'some'?",
        ),
        (
            {"several": "a"},
            "several: expected a list in brackets, got 'a'. To give this one alone: "
            "'several=[a]'.",
        ),
        ({"several": {"a": 1}}, "several: expected a list in brackets, got {'a': 1}."),
        ({"several": [1]}, "several[0]: expected a text, got 1."),
    ],
)  # fmt: skip
def test_every_mistake_of_a_group_is_one_sentence(values, sentence):
    outcome, problems = validated(Outer, values)
    assert [*map(str, problems)] == ([sentence] if isinstance(sentence, str) else sentence)
    assert isinstance(outcome, Outer)


def test_keys_that_are_wrong_have_their_defaults_and_the_others_what_was_given():
    values = {"number": "x", "inner": {"size": "y"}, "several": ["a"], "either": "z", "named": 3}
    outcome, problems = validated(Outer, values)
    assert outcome == Outer(several=["a"])
    assert [problem.key for problem in problems] == ["number", "either", "inner.size", "named"]


def test_one_sentence_is_said_of_a_key_that_may_be_several_things():
    _, problems = validated(Outer, {"either": "z"})
    assert len(problems) == 1


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
    values = {"run_dir": "runs/x", "label": "Mine", "trainer": {"max_steps": 10}}
    return values | {"drop": {"at": drop}, "controls": controls}


def test_a_control_is_the_run_with_its_changes_and_without_controls():
    values = controlled(drop=5, a={"branch": 3, "drop": {"at": 7}}, b={"label": "b", "seed": 4})
    config = parse(RunConfig, values)
    control = control_config(values, "a")
    assert control == control_config(values, "a", weights=False)
    assert (control.run_dir, control.seed, control.label) == ("runs/x/controls/a", 0, None)
    assert (control.controls, control.drop_step, config.drop_step) == ({}, 7, 5)
    other = control_config(values, "b")
    assert (other.label, other.seed) == ("b", 4)


BRANCH = "expected 'drop', a step or nothing, got"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (controlled(**{"a/b": {}}), "controls: 'a/b' names a directory in the run's; expected "
         "letters, digits and ._+- only."),
        (
            controlled(main={"seed": 1}),
            "controls.main: this is what the run itself is called; choose another name.",
        ),
        (controlled(a={"branch": "x"}), f"controls.a.branch: {BRANCH} 'x'."),
        (controlled(a={"branch": True}), f"controls.a.branch: {BRANCH} True."),
        (
            controlled(a={"branch": "drop"}),
            "controls.a.branch: the run has no drop to branch from; set drop.at, or leave it out.",
        ),
        (
            controlled(a={"branch": 0}),
            "controls.a.branch: expected a step from 1 to 10, the last, got 0.",
        ),
        (
            controlled(a={"branch": 11}),
            "controls.a.branch: expected a step from 1 to 10, the last, got 11.",
        ),
        (
            controlled(drop=5, a={"branch": 6, "drop": {"at": None}}),
            "controls.a.branch: after step 5 the run and the control are not changed alike, and "
            "step 6, from which the control goes on, is later.",
        ),
        (
            controlled(a={"trainer": {"keep_every": -1}}),
            "controls.a.trainer.keep_every: expected 1 or more, got -1.",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_control_is_one_sentence(values, sentence):
    with pytest.raises(UserError) as error:
        parse(RunConfig, values)
    assert tuple(map(str, error.value.problems)) == (sentence,)


def test_branches_are_possible_from_every_step_until_which_both_are_changed_alike():
    ends = {"a": {"branch": 1}, "b": {"branch": 5}, "c": {"branch": "drop"}, "d": {"branch": None}}
    parse(RunConfig, controlled(drop=5, **ends))
    parse(RunConfig, controlled(a={"branch": 10}))
    parse(RunConfig, controlled(drop=5, a={"branch": 6}))


def test_what_the_run_has_wrong_too_is_not_said_again_of_its_controls():
    values = controlled(a={"trainer": {"keep_every": -1}})
    values["trainer"]["log_every"] = 0
    for known in (), (Problem("before", "something."),):
        with pytest.raises(UserError) as error:
            parse(RunConfig, values, known)
        assert tuple(map(str, error.value.problems)) == (
            *map(str, known),
            "trainer.log_every: expected 1 or more, got 0.",
            "controls.a.trainer.keep_every: expected 1 or more, got -1.",
        )


@pytest.mark.parametrize("branch", ["x", "drop", 11])
def test_a_branch_is_judged_only_of_a_run_without_problems(branch):
    with pytest.raises(UserError) as error:
        parse(RunConfig, controlled(a={"branch": branch}), [Problem("before", "something.")])
    assert [problem.key for problem in error.value.problems] == ["before"]


NORM = "model.qk_norm.when: 'after_drop', but there is no drop; set drop.at, or choose 'never' or"
RUN = [
    (
        {"name": "a/b"},
        "name: 'a/b' names a directory under runs/; expected letters, digits and ._+- only "
        "(run_dir= may be any path).",
    ),
    (
        {"run_dir": ""},
        "run_dir: expected a directory, got nothing; leave it out for runs/NAME.",
    ),
    (
        {"evaluation": {"methods": ["yarn"]}},
        "evaluation.methods: expected 'none' among them; a run is reported as it is first.",
    ),
    (
        {"evaluation": {"tasks": ["statements"]}, "data": {"needles": {"share": 0.0}}},
        "evaluation.tasks: nothing but statements, which the training text does not carry; set "
        "data.needles.share, or add perplexity.",
    ),
    (
        {"model": {"attention_backend": "flash"}},
        "model.attention_backend: 'flash' computes in 16 bits only; set trainer.precision=bf16, or "
        "choose 'auto' or 'sdpa'.",
    ),
    ({"model": {"qk_norm": {"when": "after_drop"}}}, f"{NORM} 'always'."),
    (
        {"model": {"head_dim": 7}},
        "model.head_dim: 7 is odd, but channels rotate in pairs; use 8 or 6.",
    ),
    ({"drop": {"to": "rpe"}}, "drop.to: unknown encoding 'rpe'. Did you mean 'rope'?"),
]


@pytest.mark.parametrize(("values", "sentence"), RUN)
def test_what_is_impossible_between_groups_is_one_sentence(values, sentence):
    with pytest.raises(UserError) as error:
        parse(RunConfig, {"run_dir": "x", **values})
    assert tuple(map(str, error.value.problems)) == (sentence,)


@pytest.mark.parametrize(
    "values",
    [
        {"evaluation": {"methods": ["yarn"], "enabled": False}},
        {"evaluation": {"tasks": ["statements"], "enabled": False}},
        {"evaluation": {"tasks": ["statements"]}, "data": {"needles": {"share": 0.5}}},
        {"evaluation": {"methods": None}},
        {"model": {"attention_backend": "flash"}, "trainer": {"precision": "bf16"}},
        {"model": {"qk_norm": {"when": "after_drop"}}, "drop": {"at": 1}},
        {"model": {"qk_norm": {"when": "after_drop"}}, "drop": {"at": 1, "enabled": False}},
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
    config = parse(RunConfig, {"run_dir": "x", **values, "drop": {"at_tokens": 193}})
    assert (config.tokens_per_step, config.training_length, config.drop_step) == (192, 64, 2)
    phases = {
        "a": {"steps": 2, "sequence_length": 32}, "b": {"steps": 3, "sequence_length": 128},
        "c": {"steps": 4, "drop": {}}, "d": {"steps": 1, "drop": {"to": "alibi"}},
    }  # fmt: skip
    config = parse(RunConfig, {"run_dir": "x", **values, "phases": phases})
    assert (config.training_length, config.drop_step) == (64, 5)  # of the last phase


def test_numbers_that_nothing_goes_on_with_hide_no_other_mistake():
    wrong = {"optimizer": {"lr": math.nan}, "schedule": {"final": 2.0}, "seed": -1}
    with pytest.raises(UserError) as error:
        parse(RunConfig, wrong)
    assert tuple(map(str, error.value.problems)) == (
        "seed: expected 1 or more, got -1.",
        "optimizer.lr: expected a finite number, got nan.",
        "schedule.final: expected at most 1, got 2.0.",
    )


def test_what_depends_on_a_size_that_is_wrong_is_not_judged():
    sizes = {"hidden_size": 1 << 40, "num_attention_heads": 7}
    with pytest.raises(UserError) as error:
        parse(RunConfig, {"model": sizes, "drop": {"at": 0.5, "layers": [99]}, "name": "a/b"})
    size, name = map(str, error.value.problems)
    assert size.startswith("model.hidden_size: expected at most")
    assert name.startswith("name: 'a/b'")


def test_weights_that_are_missing_hide_no_other_mistake():
    wrong = {"model": {"from_pretrained": "/none/such"}, "optimizer": {"lr": 0}}
    with pytest.raises(UserError) as error:
        parse(RunConfig, wrong)
    rate, weights = map(str, error.value.problems)
    assert "there is no directory '/none/such'" in weights
    assert rate == "optimizer.lr: expected a positive number, got 0."


def test_without_weights_mistakes_are_found_all_the_same():
    values = {"model": {"from_pretrained": "/none/such", "num_hidden_layers": 7}}
    assert parse(RunConfig, values, weights=False).model.num_hidden_layers == 7
    wrong = values | {"optimizer": {"lr": 0}}
    with pytest.raises(UserError) as error:
        parse(RunConfig, wrong, [Problem("seed", "known.")], weights=False)
    assert tuple(map(str, error.value.problems)) == (
        "seed: known.",
        "optimizer.lr: expected a positive number, got 0.",
    )


@pytest.mark.parametrize(("plugins", "key"), [(["nowhere.py"], "plugins"), ([3], "plugins[0]")])
@pytest.mark.parametrize(
    "changes",
    [
        {"positional": {"layers": ["mine"]}},
        {"drop": {"at": 5, "to": "mine"}},
        {"phases": {"a": {"steps": 2}, "b": {"steps": 2, "drop": {"to": "mine"}}}},
        {"controls": {"x": {"positional": {"layers": ["mine"]}}}},
    ],
)
def test_no_name_is_unknown_while_a_plugin_that_may_add_it_is_missing(plugins, key, changes):
    with pytest.raises(UserError) as error:
        parse(RunConfig, {"run_dir": "x", "plugins": plugins, **changes})
    assert [problem.key for problem in error.value.problems] == [key]
