"""What cannot be made of a configuration of encodings, or dropped from it."""

from trainer.model.config import ModelConfig
from trainer.positional.config import PositionalConfig, TemperatureConfig
from trainer.recalibration.config import ChangeConfig
from trainer.runs.config import layout_problems

TEMPERED = PositionalConfig(temperature=TemperatureConfig(coefficient=0.1, reference=8))


def test_an_encoding_beside_a_trained_temperature_is_dropped_at_once():
    assert layout_problems(TEMPERED, ModelConfig(), 64, {"drop": ChangeConfig()}) == []
    (problem,) = layout_problems(
        TEMPERED, ModelConfig(), 64, {"drop": ChangeConfig(anneal_steps=5)}
    )
    assert str(problem) == (
        "drop.anneal_steps: with positional.temperature an encoding is dropped at once; expected 0."
    )
    assert (
        layout_problems(
            PositionalConfig(), ModelConfig(), 64, {"drop": ChangeConfig(anneal_steps=5)}
        )
        == []
    )
