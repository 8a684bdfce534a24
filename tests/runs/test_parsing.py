"""From plain values to a configuration: what is derived, and what a command line can say."""

from __future__ import annotations

import re

import pytest

from trainer.errors import UserError
from trainer.evaluation.config import EvaluationConfig
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse, validated
from trainer.workflows.evaluation_request import EvaluationRequest


def test_a_length_in_tokens_becomes_steps_that_reach_it():
    values = {"trainer": {"max_tokens": 100_000, "batch_size": 8}, "data": {"sequence_length": 128}}
    config = parse(RunConfig, values)
    assert config.trainer.max_steps == 98  # 97 steps of 1,024 tokens are 99,328
    assert config.tokens_per_step * 98 >= 100_000 > config.tokens_per_step * 97


def test_a_run_may_leave_the_controls_of_its_experiment_out():
    assert parse(RunConfig, {"controls": None}).controls == {}


def test_only_pretrained_weights_may_drop_before_the_first_step():
    with pytest.raises(UserError, match=r"drop\.at: 0 is step 0, but the run has steps 1 to 999"):
        parse(RunConfig, {"drop": {"at": 0}})


def test_keys_of_groups_that_may_be_missing_or_are_listed_are_checked():
    values = {"text": {"sorce": "files"}, "evaluation": {"weighted_rope": [{"tua": 0.5}]}}
    _, problems = validated(EvaluationRequest, values)
    assert problems[:2] == [
        "text.sorce: unknown key. Did you mean 'source'?",
        "evaluation.weighted_rope.tua: unknown key. Did you mean 'tau'?",
    ]


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
    named = [problem for problem in error.value.problems if "expected a finite number" in problem]
    (place,) = (problem.split(": expected")[0] for problem in named)
    assert re.sub(r"(\[\d+\])+$", "", place.replace(": ", ".")) == key


def test_what_an_earlier_version_kept_of_evaluations_is_left_out():
    """A checkpoint's configuration is read for what it has in common with today's."""
    old = {"enabled": True, "lengths": [1, 2], "trials": 256, "needles": 4, "loss_windows": 96}
    old |= {"rescalings": ["pi"], "temperature_grid": [0.0], "fit_windows": 7, "seed": 1}
    config, problems = validated(RunConfig, {"seed": 5, "evaluation": old})
    assert (config.seed, config.evaluation.lengths, config.evaluation.fit_windows) == (5, [1, 2], 7)
    assert config.evaluation.needles == EvaluationConfig().needles
    assert problems
