"""Problems of an evaluation's configuration, key by key, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.longbench import LongBenchSettings
from trainer.evaluation.many_shot import ManyShotSettings
from trainer.evaluation.method_config import (
    ChoiceSettings,
    DopeSettings,
    LongRopeSettings,
    TemperatureSettings,
)
from trainer.evaluation.needles import NeedleTaskSettings
from trainer.evaluation.ruler.tasks import RulerSettings


def test_the_defaults_are_possible():
    assert EvaluationConfig().problems() == []
    assert EvaluationConfig(windows=1, last=1, batch_tokens=1).problems() == []


def test_no_task_makes_more_than_its_limit():
    usual = EvaluationConfig(needles=NeedleTaskSettings(trials=50))
    limited = replace(usual, ruler=replace(usual.ruler, trials=3)).limited(9, 8)
    trials = limited.needles.trials, limited.ruler.trials, limited.many_shot.trials
    assert (*trials, limited.longbench.limit) == (9, 3, 9, 8)
    fewer = replace(usual, longbench=LongBenchSettings(limit=2)).limited(9, 8)
    assert fewer.longbench.limit == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "evaluation.lengths: expected one or more"),
        ({"tasks": []}, "evaluation.tasks: expected one or more"),
        ({"methods": []}, "evaluation.methods: expected one or more"),
        ({"methods": ["dopee"]}, "Did you mean 'dope'?"),
        ({"tasks": ["perplexty"]}, "Did you mean 'perplexity'?"),
        ({"temperature": TemperatureSettings(grid=[])}, "evaluation.temperature.grid"),
        (
            {"longrope": LongRopeSettings(factors="none.json")},
            "evaluation.longrope.factors: cannot read 'none.json'",
        ),
        ({"temperature": TemperatureSettings(lengths=[])}, "evaluation.temperature.lengths"),
        ({"choice": ChoiceSettings("standart")}, "Did you mean 'standard'?"),
        ({"choice": ChoiceSettings("file")}, "evaluation.choice.file: expected a file where"),
        ({"choice": ChoiceSettings("file", "no.txt")}, "there is no file 'no.txt'"),
        (
            {"methods": ["dope+weighted_rope"], "dope": DopeSettings(removal="zero")},
            "evaluation.methods: in 'dope+weighted_rope' both parts change the same heads",
        ),
        (
            {"methods": ["weighted_rope+dope"], "dope": DopeSettings(variant="by_gaussian")},
            "evaluation.methods: in 'weighted_rope+dope' both parts change the same heads",
        ),
        ({"layers": []}, "evaluation.layers: expected one layer or more, got none"),
        ({"methods": ["pi", "yarn", "pi"]}, "evaluation.methods: expected each one once, got 'pi'"),
        ({"tasks": ["standard"] * 2}, "evaluation.tasks: expected each one once, got 'standard' 2"),
        ({"ruler": RulerSettings([])}, "evaluation.ruler.tasks: expected one or more, got none"),
        ({"ruler": RulerSettings(["vt"] * 3)}, "evaluation.ruler.tasks: expected each one once"),
        ({"many_shot": ManyShotSettings([])}, "evaluation.many_shot.tasks: expected one or more"),
        ({"longbench": LongBenchSettings(tasks=[])}, "evaluation.longbench.tasks: expected one or"),
    ],
)
def test_impossible_values_are_named(changes, message):
    (problem,) = map(str, EvaluationConfig(**changes).problems())
    assert message in problem


def test_configurations_need_no_torch():
    """A mistake on the command line is then reported without the start-up time of torch."""
    code = "import sys, trainer.runs.config, trainer.runs.parsing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("changes", "length", "message"),
    [
        ({"lengths": [0.5], "tasks": ["perplexity"]}, 4, None),
        (
            {"lengths": [0.25, 1.0], "tasks": ["perplexity"]}, 4,
            "evaluation.lengths: expected multiples of the training length that make 2 to 2^31 - 1 "
            "tokens, got [0.25, 1.0] of 4.",
        ),
        (
            {"lengths": [1.0, 2.0], "tasks": ["perplexity"]}, 1 << 30,
            "evaluation.lengths: expected multiples of the training length that make 2 to 2^31 - 1 "
            f"tokens, got [1.0, 2.0] of {1 << 30}.",
        ),
        ({"last": 32, "lengths": [0.5, 2.0], "tasks": ["perplexity"]}, 64, None),
        (
            {"last": 33, "lengths": [0.5, 2.0], "tasks": ["perplexity"]}, 64,
            "evaluation.last: 33 tokens are more than the shortest length of 32 has; give that or "
            "less, or null.",
        ),
        ({"last": 33, "lengths": [0.5], "tasks": ["standard"]}, 64, None),
        (
            {"lengths": [1.0, 2.0, 2.01], "tasks": ["perplexity"]}, 32,
            "evaluation.lengths: expected each length once, got [1.0, 2.0, 2.01] times the "
            "training length of 32 tokens, more than one of which is 64 tokens.",
        ),
        ({"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"]}, 32, None),
        (
            {"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"], "lengths": [2.0]},
            16, None,
        ),
        (
            {"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"]}, 31,
            "evaluation.needles.needles: 10 statements of 3 tokens do not fit 31 tokens.",
        ),
        (
            {"needles": NeedleTaskSettings(needles=17), "tasks": ["statements"]}, 64,
            "evaluation.needles.needles: statements have 16 different names, got 17.",
        ),
        ({"needles": NeedleTaskSettings(needles=17), "tasks": ["standard"]}, 64, None),
        (
            {"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"], "lengths": [0.5]},
            60,
            "evaluation.lengths: 0.5 of 60 tokens is 30, too few for 10 statements of 3 tokens; "
            "expected 32 tokens or more, or fewer evaluation.needles.needles.",
        ),
    ],
)  # fmt: skip
def test_lengths_have_room_for_their_tasks(changes, length, message):
    assert [*map(str, EvaluationConfig(**changes).problems(length))] == (
        [message] if message else []
    )


def test_lengths_in_tokens_take_the_place_of_multiples():
    config = EvaluationConfig(tokens=[96, 64, 100], methods=["none"], tasks=["perplexity"])
    assert config.in_tokens(64) == [96, 64, 100]
    assert config.in_multiples(64).lengths == [1.5, 1.0, 1.5625]
    assert config.in_multiples(64) == replace(
        config, lengths=[1.5, 1.0, 1.5625], tokens=None, training_length=64
    )
    assert EvaluationConfig(lengths=[0.5, 2], training_length=32).in_tokens(64) == [16, 64]
    # Every length is the same number of tokens again, whatever C.
    for C in (3, 7, 63, 8192):
        every = list(range(2, 2000, 7))
        assert EvaluationConfig(tokens=every).in_multiples(C).in_tokens(C) == every


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": []}, "evaluation.tokens: expected one or more, got none."),
        ({"tokens": [64, 64]}, "evaluation.tokens: expected each length once, got [64, 64]."),
        ({"tokens": [8]}, "evaluation.tokens: 0.125 of 64 tokens is 8, too few for 4 statements"),
        ({"tokens": [32], "last": 33}, "evaluation.last: 33 tokens are more than the shortest"),
        (
            {"tokens": [4], "methods": ["weighted_rope"], "tasks": ["perplexity"]},
            "evaluation.choice.length: a text to choose on has 6 tokens or more",
        ),
    ],
)
def test_lengths_in_tokens_are_checked_under_evaluation_tokens(changes, message):
    (problem,) = map(str, EvaluationConfig(**changes).problems(64))
    assert problem.startswith(message)
