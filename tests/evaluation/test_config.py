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
    DopeSettings,
    DynamicNtkSettings,
    LongRopeSettings,
    TemperatureSettings,
    WeightedRopeSettings,
)


def test_the_defaults_are_possible():
    assert EvaluationConfig().problems() == []
    assert EvaluationConfig(windows=1, last=1, batch_tokens=1).problems() == []


def test_every_impossible_number_is_told_at_once():
    assert [
        *map(str, EvaluationConfig(windows=0, last=0, batch_tokens=0, tasks=[]).problems())
    ] == [
        "evaluation.tasks: expected one or more, got none.",
        *(
            f"evaluation.{k}: expected 1 or more, got 0."
            for k in ("windows", "last", "batch_tokens")
        ),
    ]


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
        (
            {"methods": ["dope+weighted_rope"], "dope": DopeSettings(removal="zero")},
            "evaluation.methods: in 'dope+weighted_rope' both parts change the same heads",
        ),
        (
            {"methods": ["weighted_rope+dope"], "dope": DopeSettings(variant="by_gaussian")},
            "evaluation.methods: in 'weighted_rope+dope' both parts change the same heads",
        ),
        ({"choice": ChoiceSettings(length=0)}, "evaluation.choice.length: expected a positive"),
        ({"choice": ChoiceSettings(texts=0)}, "evaluation.choice.texts: expected 1 or more, got 0"),
    ],
)
def test_impossible_values_are_named(changes, said):
    (problem,) = map(str, EvaluationConfig(**changes).problems())
    assert said in problem


def test_statements_fit_the_shortest_length_where_they_are_asked_for():
    config = EvaluationConfig(needles=NeedleTaskSettings(needles=12), lengths=[0.5, 1])
    assert config.problems() == config.problems(128) == []
    (problem,) = map(str, config.problems(64))
    assert problem.startswith("evaluation.lengths: 0.5 of 64 tokens is 32, too few for 12 statemen")
    (problem,) = map(str, config.problems(32))
    assert problem.startswith("evaluation.needles.needles: 12 statements of 3 tokens do not fit 16")
    assert replace(config, tasks=["perplexity"]).problems(64) == []


def test_configurations_need_no_torch():
    """So that a mistake on the command line is told at once."""
    code = "import sys, trainer.runs.config, trainer.runs.parsing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


GRID = "evaluation.temperature.grid: expected one or more coefficients from 0 to 100, got"
BEYOND = (
    "evaluation.temperature.lengths: expected multiples of the training length above 1, or null "
    "for those evaluated, got"
)
SIGMA = (
    "evaluation.dope.sigma: expected a number from 0 on, or null for that of the retained heads, "
    "got"
)
WRONG = [
    *((TemperatureSettings(grid=g), f"{GRID} {g}.") for g in ([], [-0.1], [0.0, 100.1])),
    *((TemperatureSettings(lengths=given), f"{BEYOND} {given}.") for given in ([], [2.0, 1.0])),
    *(
        (
            TemperatureSettings(**{f"rope_id_{key}": value}),
            f"evaluation.temperature.rope_id_{key}: expected a number from 0 to {most}, got "
            f"{value}.",
        )
        for key, most in (("coefficient", 100), ("exponent", 10))
        for value in (-0.1, most + 0.1)
    ),
    *(
        (
            DynamicNtkSettings(alpha),
            "evaluation.dynamic_ntk.alpha: expected a number from 1 to 1,000,000, or null for the "
            f"length over the training length, got {alpha}.",
        )
        for alpha in (0.9, 1000001.0)
    ),
    *(
        (LongRopeSettings(**{key: 0}), f"evaluation.longrope.{key}: expected 1 or more, got 0.")
        for key in ("evaluations", "windows")
    ),
    (DopeSettings(r=0), "evaluation.dope.r: expected 1 or more, or null for all, got 0."),
    (DopeSettings(heads=-1), "evaluation.dope.heads: expected 0 or more, got -1."),
    (DopeSettings(seed=-1), "evaluation.dope.seed: expected 0 or more, got -1."),
    *((DopeSettings(sigma=sigma), f"{SIGMA} {sigma}.") for sigma in (-0.1, 1000001.0)),
    *(
        (
            WeightedRopeSettings(**{key: value}),
            f"evaluation.weighted_rope.{key}: expected a number from 0 to 1, got {value}.",
        )
        for key in ("tau", "alpha")
        for value in (-0.1, 1.1)
    ),
]


@pytest.mark.parametrize(("settings", "said"), WRONG)
def test_what_is_impossible_of_a_method_is_said_in_one_sentence(settings, said):
    assert [*map(str, settings.problems())] == [said]


@pytest.mark.parametrize(
    "settings",
    [
        TemperatureSettings(grid=[0, 100], lengths=[1.001], rope_id_coefficient=0),
        TemperatureSettings(rope_id_coefficient=100, rope_id_exponent=10),
        DynamicNtkSettings(),
        DynamicNtkSettings(1),
        DynamicNtkSettings(1e6),
        LongRopeSettings(evaluations=1, windows=1),
        DopeSettings(r=None, heads=0, sigma=0),
        DopeSettings(r=1, sigma=1e6),
        WeightedRopeSettings(tau=0, alpha=1),
        WeightedRopeSettings(tau=1, alpha=0),
    ],
)
def test_what_lies_just_within_the_bounds_is_possible(settings):
    assert settings.problems() == []


@pytest.mark.parametrize(
    ("changes", "length", "said"),
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
        ({"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"]}, 32, None),
        (
            {"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"]}, 31,
            "evaluation.needles.needles: 10 statements of 3 tokens do not fit 31 tokens.",
        ),
        (
            {"needles": NeedleTaskSettings(needles=10), "tasks": ["statements"], "lengths": [0.5]},
            60,
            "evaluation.lengths: 0.5 of 60 tokens is 30, too few for 10 statements of 3 tokens; "
            "expected 32 tokens or more, or fewer evaluation.needles.needles.",
        ),
    ],
)  # fmt: skip
def test_lengths_have_to_hold_what_is_asked_of_them(changes, length, said):
    assert [*map(str, EvaluationConfig(**changes).problems(length))] == ([said] if said else [])
