"""Which methods do something to which models, and what is wrong is said for all at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.common.errors import UserError
from trainer.config import EvaluationConfig
from trainer.evaluation.methods import applicable


@pytest.fixture
def models(tiny_decoder):
    """Two that rotate, one of which transformers computes, and one without positions, of 32."""

    def made(name, program=None, **encoding):
        model = tiny_decoder(**encoding)
        return SimpleNamespace(
            name=name, config=model.config, layout=model.layout, computed_by=program
        )

    return [made("rope"), made("hf", "transformers"), made("nope", layers=["nope"])]


def test_each_model_has_the_methods_that_do_something_to_it(models):
    config = EvaluationConfig(methods=["none", "pi", "yarn", "window", "temperature"])
    found, notes = applicable(models, config)
    assert {name: [made.key for made in of] for name, of in found.items()} == {
        "rope": ["none", "pi", "yarn", "window"],
        "hf": ["none", "pi", "yarn"],
        "nope": ["none", "window", "temperature"],
    }
    assert notes == []  # every method changes some model


def test_a_method_that_changes_no_model_is_named_with_the_reasons(models):
    config = EvaluationConfig(methods=["none", "temperature"])
    _, notes = applicable(models[:2], config)
    (note,) = notes
    assert note.startswith("temperature: rope has positions")
    with pytest.raises(UserError, match=r"evaluation\.methods: dynamic_pi: hf is computed by"):
        applicable(models[1:], EvaluationConfig(methods=["dynamic_pi"]))


def test_layers_are_checked_before_anything_is_measured(models):
    with pytest.raises(UserError, match=r"evaluation\.layers: expected indices of 2 layers"):
        applicable(models, EvaluationConfig(methods=["none", "yarn"], layers=[1, 5]))
