"""What cannot be made of a configuration of encodings, or dropped from it."""

import pytest

from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, TemperatureConfig
from trainer.recalibration.config import ChangeConfig
from trainer.runs.config import layout_problems

TEMPERED = PositionalConfig(temperature=TemperatureConfig(coefficient=0.1, reference=8))


@pytest.mark.parametrize("positional", [PositionalConfig(), TEMPERED])
@pytest.mark.parametrize("steps", [0, 5])
def test_an_encoding_is_dropped_in_one_step_or_several_with_any_temperature(positional, steps):
    change = {"drop": ChangeConfig(anneal_steps=steps)}
    assert layout_problems(positional, ModelConfig(), 64, change) == []


def test_an_encoding_that_does_not_rotate_is_not_dropped_in_steps():
    positional = PositionalConfig(layers=["alibi"])
    (problem,) = layout_problems(
        positional, ModelConfig(), 64, {"drop": ChangeConfig(anneal_steps=5)}
    )
    assert problem.key == "drop.anneal_steps"
