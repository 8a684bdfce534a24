"""From plain values to a configuration: what is derived, and what a command line can say."""

from __future__ import annotations

import pytest

from trainer.errors import UserError
from trainer.runs.config import RunConfig
from trainer.runs.parsing import parse, validated
from trainer.workflows.length_request import LengthRequest


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
    _, problems = validated(LengthRequest, values)
    assert problems[:2] == [
        "text.sorce: unknown key. Did you mean 'source'?",
        "evaluation.weighted_rope.tua: unknown key. Did you mean 'tau'?",
    ]
