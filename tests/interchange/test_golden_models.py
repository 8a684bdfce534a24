"""Logits of other programs' models, which they computed once (tests/golden/models)."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

from tests.golden.files import GOLDEN
from trainer.common.errors import UserError
from trainer.interchange.adapted.model import AdaptedModel
from trainer.interchange.drope_config import TARGETS
from trainer.interchange.hf_config import ARCHITECTURES
from trainer.interchange.pretrained import read_pretrained

MODELS = {path.name: path for path in sorted((GOLDEN / "models").iterdir())}
ADAPTED = ("olmo2",)
DROPE = [name for name in MODELS if name.startswith("drope")]


def config_of(name):
    return json.loads((MODELS[name] / "config.json").read_text())


def test_each_architecture_that_is_read_is_there():
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
    found, whole = read_pretrained(path), read_pretrained(str(MODELS[name]))
    assert (found.config, found.layout) == (whole.config, whole.layout)
    assert not any(spectrum.rotates for spectrum in found.layout.spectra)
    assert found.layout.training_length == 64


def test_what_is_wrong_with_a_drope_checkpoint_is_named(tmp_path):
    path = changed(
        "drope_llama_nope", tmp_path, attention_type="rope", softmax_scale=-1, hidden_act="relu"
    )
    with pytest.raises(UserError) as error:
        read_pretrained(path)
    attention, scale, activation = map(str, error.value.problems)
    assert "attention_type: expected 'nope' or 'qk_norm_nope' or 'q_norm_nope'" in attention
    assert "softmax_scale: expected a number from 1e-06 to 1e+06, got -1." in scale
    assert "hidden_act='relu' is not supported" in activation


def test_a_norm_of_queries_is_missing_where_the_type_reads_it(tmp_path):
    path = changed("drope_llama_nope", tmp_path, attention_type="q_norm_nope")
    with pytest.raises(UserError, match=r"missing: 'model\.layers\.0\.self_attn\.q_norm\.weight'"):
        read_pretrained(path)


def test_norms_are_extra_where_no_type_has_them(tmp_path):
    path = changed("drope_llama_q_norm", tmp_path, attention_type="nope")
    with pytest.raises(UserError, match=r"no place for: .*k_norm\.weight"):
        read_pretrained(path)
