"""What a length evaluation refuses, key by key."""

from __future__ import annotations

import pytest

from trainer.evaluation.config import EvaluationConfig, LongRopeSettings, TemperatureSettings


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
        ({"longrope": LongRopeSettings(evaluations=0)}, "evaluation.longrope.evaluations"),
    ],
)
def test_impossible_values_are_named(changes, said):
    (problem,) = EvaluationConfig(**changes).problems()
    assert said in problem
