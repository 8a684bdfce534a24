"""Logits of other programs' models, which they computed once (tests/golden/models)."""

import json
import re
import shlex
import shutil
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.golden.files import GOLDEN
from tests.program import ROOT
from trainer.commands.composing import compose_words
from trainer.config import EvaluationRequest
from trainer.data.tokenizer import train_tokenizer
from trainer.interchange.adapted import AdaptedModel
from trainer.interchange.hf_config import ARCHITECTURES, TARGETS
from trainer.interchange.pretrained import read_pretrained
from trainer.runs.parsing import parse
from trainer.workflows import evaluate

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


@pytest.mark.weekly
def test_the_documented_command_has_rows_of_ruler_for_a_released_checkpoint(tmp_path, monkeypatch):
    """A golden model whose embeddings are repeated for a tokenizer of 1,024 tokens."""
    text = "\n\n".join(topics.values())
    (tmp_path / "text.txt").write_text(text)
    tokenizer = train_tokenizer([text], 1024, [])
    page = (ROOT / "docs" / "pretrained.md").read_text()
    (line,) = re.findall(r"python -m trainer (evaluate \S*DroPE \+evaluation=ruler .*)", page)
    words = shlex.split(line)[1:]
    directory = tmp_path / words[0].removeprefix("checkpoint=")
    directory.parent.mkdir()
    shutil.copytree(MODELS["drope_llama_qk_norm"], directory)
    values = config_of("drope_llama_qk_norm")
    values |= {"vocab_size": 1024, "max_position_embeddings": 2048}
    (directory / "config.json").write_text(json.dumps(values))
    tensors = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][torch.arange(1024) % 32].contiguous()
    save_file(tensors, directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evaluate, "write_renderings", lambda report, output: None)
    few = ["evaluation.lengths=[1]", "evaluation.ruler.trials=1", "evaluation.fit_windows=1"]
    data = "{source: files, files: [text.txt], validation: 0.3, test: 0.6, cache_dir: cache}"
    small = ["output=out", f"text={data}"]
    composed = compose_words([*words, *few, *small], "evaluate")
    report, _ = evaluate.evaluate_lengths(parse(EvaluationRequest, composed.values), "ruler")
    rows = {*zip(*(report.trials[key] for key in ("method", "task", "length")), strict=True)}
    asked = {"niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"}
    asked |= {"niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery"}
    asked |= {"vt", "cwe", "fwe"}
    assert rows == {(method, task, 2048) for method in ("none", "temperature") for task in asked}
    assert all("squad_file" in note or "hotpotqa_file" in note for note in report.notes[:2])
