"""Logits of other programs' models, which they computed once (tests/golden/models)."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from tests.golden.files import GOLDEN
from trainer.common.errors import UserError
from trainer.interchange.adapted import AdaptedModel
from trainer.interchange.hf_config import ARCHITECTURES, TARGETS
from trainer.interchange.pretrained import read_pretrained

MODELS = {path.name: path for path in sorted((GOLDEN / "models").iterdir())}
ADAPTED = ("olmo2",)
DROPE = [name for name in MODELS if name.startswith("drope")]


def config_of(name):
    return json.loads((MODELS[name] / "config.json").read_text())


def test_every_supported_architecture_has_a_golden_model():
    stored = {config_of(name)["architectures"][0] for name in MODELS}
    assert set(ARCHITECTURES) < stored
    assert {config_of(name)["attention_type"] for name in DROPE} == set(TARGETS)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_program_that_made_the_model(name):
    """1e-5: two computations in float32 with logits of O(1) differ by 3e-6 at most."""
    if name in ADAPTED:
        model = AdaptedModel(transformers.AutoModelForCausalLM.from_pretrained(MODELS[name]))
    else:
        model = read_pretrained(str(MODELS[name])).decoder()
    stored = np.load(MODELS[name] / "logits.npz")
    expected = torch.from_numpy(stored["logits"])
    assert 0.5 < expected.std() < 2
    torch.testing.assert_close(model(torch.from_numpy(stored["ids"])), expected, rtol=0, atol=1e-5)


def changed(name, directory, **changes):
    """A copy of a model with changes to its configuration; None removes a key."""
    copy = shutil.copytree(MODELS[name], directory / "model")
    values = config_of(name) | changes
    values = {key: value for key, value in values.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(values))
    return str(copy)


@pytest.mark.parametrize("name", DROPE)
def test_a_drope_checkpoint_may_name_its_type_alone_and_no_rotation(tmp_path, name):
    path = changed(name, tmp_path, architectures=None, rope_theta=None, rope_scaling={"a": 1})
    read, whole = read_pretrained(path), read_pretrained(str(MODELS[name]))
    assert (read.config, read.layout) == (whole.config, whole.layout)
    assert not any(spectrum.rotates for spectrum in read.layout.spectra)
    assert read.layout.training_length == 64


def test_a_drope_checkpoint_with_attention_of_another_type_is_refused(tmp_path):
    with pytest.raises(UserError, match="attention_type: expected"):
        read_pretrained(changed(DROPE[0], tmp_path, attention_type="other"))
