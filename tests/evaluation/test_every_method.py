"""What holds for all methods that extend the context, whoever registered them."""

from __future__ import annotations

from itertools import count

import pytest

from tests.evaluation.conftest import fit_text
from trainer.config import EvaluationConfig, LongRopeSettings, TemperatureSettings
from trainer.evaluation.fitting import FitText
from trainer.evaluation.method import far_layers, far_rotation
from trainer.evaluation.methods import known_methods, layouts_for

EXTENSIONS = [
    name for name, method in known_methods().items() if {far_layers, far_rotation} & {*method.needs}
]


@pytest.mark.parametrize("name", EXTENSIONS)
@pytest.mark.parametrize("layers", [[1], "all", None])
def test_an_extension_changes_the_chosen_layers_alone(tiny_decoder, monkeypatch, name, layers):
    """By default those that see more than the training length; here the last of two."""
    losses = count(0, -1)  # what is tried later is better
    monkeypatch.setattr(FitText, "loss", lambda *given: float(next(losses)))
    model = tiny_decoder(training_length=16, windows=[16, 17])
    config = EvaluationConfig(
        layers=layers,
        lengths=[4.0],
        longrope=LongRopeSettings(evaluations=4, windows=1),
        temperature=TemperatureSettings(models="all"),
    )
    text = fit_text([*range(1, 49)] * 2, count=2)
    given = config, lambda: model, text
    (layout,), _ = layouts_for(name, model.layout, [3.0], *given)
    before, after = model.layout.at(48).layers, layout.at(48).layers
    assert before[1] != after[1]
    assert (before[0] != after[0]) is (layers == "all")
