"""What an evaluation refuses, key by key, before torch is there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from trainer.evaluation.config import EvaluationConfig
from trainer.evaluation.needles.task import NeedleTaskSettings
from trainer.evaluation.settings import (
    ChoiceSettings,
    DynamicNtkSettings,
    LongRopeSettings,
    TemperatureSettings,
)


def test_the_defaults_are_possible():
    assert EvaluationConfig().problems() == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lengths": []}, "evaluation.lengths: expected positive multiples"),
        ({"lengths": [1, -2]}, "evaluation.lengths: expected positive multiples"),
        ({"methods": []}, "evaluation.methods: expected one or more"),
        ({"methods": ["dopee"]}, "Did you mean 'dope'?"),
        ({"tasks": ["perplexty"]}, "Did you mean 'perplexity'?"),
        ({"windows": 0}, "evaluation.windows: expected 1 or more, got 0"),
        ({"temperature": TemperatureSettings(grid=[])}, "evaluation.temperature.grid"),
        (
            {"dynamic_ntk": DynamicNtkSettings(0.5)},
            "evaluation.dynamic_ntk.alpha: expected a number",
        ),
        (
            {"temperature": TemperatureSettings(rope_id_exponent=-1)},
            "evaluation.temperature.rope_id_exponent: expected",
        ),
        ({"longrope": LongRopeSettings(evaluations=0)}, "evaluation.longrope.evaluations"),
        (
            {"longrope": LongRopeSettings(factors="none.json")},
            "evaluation.longrope.factors: cannot read 'none.json'",
        ),
        ({"temperature": TemperatureSettings(lengths=[1.0])}, "evaluation.temperature.lengths"),
        ({"choice": ChoiceSettings("standart")}, "Did you mean 'standard'?"),
        ({"choice": ChoiceSettings("file")}, "evaluation.choice.file: expected a file where"),
        ({"choice": ChoiceSettings("file", "no.txt")}, "there is no file 'no.txt'"),
        ({"choice": ChoiceSettings(length=0)}, "evaluation.choice.length: expected a positive"),
        ({"choice": ChoiceSettings(texts=0)}, "evaluation.choice.texts: expected 1 or more, got 0"),
    ],
)
def test_impossible_values_are_named(changes, said):
    (problem,) = EvaluationConfig(**changes).problems()
    assert said in problem


def test_statements_fit_the_shortest_length_where_they_are_asked_for():
    config = EvaluationConfig(needles=NeedleTaskSettings(needles=12), lengths=[0.5, 1])
    assert config.problems() == config.problems(128) == []
    (problem,) = config.problems(64)
    assert problem.startswith("evaluation.lengths: 0.5 of 64 tokens is 32, too few for 12 statemen")
    (problem,) = config.problems(32)
    assert problem.startswith("evaluation.needles.needles: 12 statements of 3 tokens do not fit 16")
    assert replace(config, tasks=["perplexity"]).problems(64) == []


def test_configurations_need_no_torch():
    """So that a mistake on the command line is told at once."""
    code = "import sys, trainer.runs.config, trainer.runs.parsing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
