"""What an export leaves behind is what transformers loads in a fresh process, or nothing."""

import json
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests import program
from tests.interchange.test_export import dynamic_ntk
from trainer.common.errors import UserError
from trainer.data.tokenizer import train_tokenizer
from trainer.interchange.export import directory as export_directory
from trainer.interchange.export import gate
from trainer.interchange.export.custom import modeling_unrope
from trainer.interchange.export.custom.modeling_unrope import UnropeForCausalLM
from trainer.interchange.export.directory import export_model, write_files
from trainer.interchange.export.plan import make_plan
from trainer.interchange.export.reload import answers
from trainer.model.config import SoftmaxConfig
from trainer.positional.rescaling import dynamic, ntk_aware


@pytest.fixture
def bilingual(tiny_decoder):
    """A decoder with a real tokenizer, of a vocabulary to match."""
    tokenizer = train_tokenizer(["some text and words "], 270, [])

    def build(**options):
        vocab = {"vocab_size": tokenizer.get_vocab_size()}
        return tiny_decoder(**options | {"model": vocab | options.get("model", {})}), tokenizer

    return build


@pytest.fixture
def forked(monkeypatch):
    """The gate's process has imported transformers already, which takes longer than the gate; it
    keeps code of models, which is for processes of their own, where the user has it."""

    def run(words, env, _):
        return program.run(*words[2:], cwd=Path.cwd(), **env)

    monkeypatch.setattr(gate, "_run", run)


def test_the_gate_loads_code_in_a_fresh_process(bilingual, tmp_path):
    model, tokenizer = bilingual(layers=["alibi"], heads={"rope_id": 0.5}, training_length=80)
    exported = export_model(model, tokenizer, 0, tmp_path / "a" / "out")
    assert not exported.plan.is_native
    assert 0 < exported.difference < 1e-4
    assert [p.name for p in tmp_path.rglob("*") if p.is_dir()] == ["a", "out"]
    written = Tokenizer.from_file(str(tmp_path / "a" / "out" / "tokenizer.json"))
    assert written.encode("some text").ids == [0, *tokenizer.encode("some text").ids]
    values = json.loads((tmp_path / "a" / "out" / "config.json").read_text())
    assert (values["bos_token_id"], values["eos_token_id"]) == (0, 0)


@pytest.mark.parametrize(
    "heads",
    [pytest.param({}, marks=dynamic_ntk, id="native"), pytest.param({"nope": 0.5}, id="custom")],
)
def test_frequencies_that_follow_the_length_are_compared_without_a_cache_beyond_it(
    bilingual, tmp_path, caplog, heads, request
):
    """Where transformers keeps keys as they were rotated when they were read."""
    if not heads:
        request.getfixturevalue("forked")
    model, tokenizer = bilingual(heads=heads)
    model.layout = model.layout.map(lambda s: dynamic(s, ntk_aware, 32, 2.0))
    with caplog.at_level("INFO"):
        exported = export_model(model, tokenizer, 0, tmp_path / "out")
    assert exported.plan.is_native == (not heads)
    assert 0 < exported.difference < 1e-5
    assert "Compared beyond 32 tokens without a cache only" in caplog.text


@pytest.mark.usefixtures("forked")
def test_a_gate_without_a_cache_still_sees_other_frequencies(bilingual, tmp_path, monkeypatch):
    model, tokenizer = bilingual()
    right = model.layout.map(lambda s: dynamic(s, ntk_aware, 32, 2.0))
    model.layout = model.layout.map(lambda s: dynamic(s, ntk_aware, 32, 4.0))

    def tampered(decoder, _, *others):
        with decoder.using(right):
            write_files(decoder, make_plan(decoder.config, right), *others)

    monkeypatch.setattr(export_directory, "write_files", tampered)
    with pytest.raises(UserError, match=r"differ by .*, more than tolerance=0.0001; nothing"):
        export_model(model, tokenizer, 0, tmp_path / "out")


@pytest.mark.usefixtures("forked")
def test_logits_that_a_soft_cap_bends_are_compared_behind_padding_too(bilingual, tmp_path):
    """Those of a head that training has made large: of fresh weights a cap changes nothing."""
    softmax = SoftmaxConfig(final_softcap=5.0)
    model, tokenizer = bilingual(model={"tie_word_embeddings": False, "softmax": softmax})
    with torch.no_grad():
        model.lm_head.weight.mul_(100)
        assert model(torch.tensor([[1, 2, 3]])).abs().max() > 4
    exported = export_model(model, tokenizer, 0, tmp_path / "out")
    assert exported.difference < 1e-4


@pytest.mark.usefixtures("forked")
def test_the_gate_compares_the_rounded_weights(bilingual, tmp_path):
    """Folded factors too, in another order: the logits are those of the weights in the file."""
    model, tokenizer = bilingual(encodings={"rope": {"rotary_fraction": 0.25}})
    model.layout = model.layout.map(
        lambda s: replace(s, rotary_scale=1.2).with_temperature(scale=1.3)
    )
    exported = export_model(model, tokenizer, 0, tmp_path / "out", dtype="bfloat16")
    assert exported.difference < 1e-4
    assert load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"].dtype == (
        torch.bfloat16
    )


@pytest.mark.usefixtures("forked")
def test_the_gate_keeps_nothing_that_differs(bilingual, tmp_path, monkeypatch):
    """Though it differs beyond the training length alone, by a temperature."""
    model, tokenizer = bilingual()
    plain = model.layout
    model.layout = plain.map(lambda s: s.with_temperature(coefficient=0.5))

    def tampered(decoder, _, *others):
        with decoder.using(plain):
            write_files(decoder, make_plan(decoder.config, plain), *others)

    monkeypatch.setattr(export_directory, "write_files", tampered)
    with pytest.raises(UserError, match=r"differ by .*, more than tolerance=0.0001; nothing"):
        export_model(model, tokenizer, 0, tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())


def test_the_gate_sees_padding_and_lengths_beyond_the_training(bilingual, tmp_path, monkeypatch):
    """A temperature that follows the length, in code that gets the length wrong."""
    model, tokenizer = bilingual(layers=["rope_id"], training_length=80)
    model.layout = model.layout.map(lambda s: s.with_temperature(reference=None))
    write_files(model, make_plan(model.config, model.layout), tokenizer, 0, tmp_path, "float32")
    theirs = UnropeForCausalLM.from_pretrained(tmp_path).eval()
    text_ids = tokenizer.encode(gate.TEXT).ids

    def answered_here(_, asked, count):
        return answers(theirs, asked) | {"text_ids": text_ids, "problems": ""}

    def difference():
        return gate.largest_difference(model.eval(), tmp_path, text_ids, custom=True)

    monkeypatch.setattr(gate, "_ask", answered_here)
    assert difference() < 1e-5

    forward = modeling_unrope.UnropeModel.forward

    def counts_padding(self, input_ids, cache=None, **others):
        past = 0 if cache is None else cache.get_seq_length()
        others["position_ids"] = torch.arange(past, past + input_ids.shape[1])[None]
        return forward(self, input_ids, cache=cache, **others)

    with monkeypatch.context() as wrong:
        wrong.setattr(modeling_unrope.UnropeModel, "forward", counts_padding)
        assert difference() > 1e-3

    table = modeling_unrope.table
    with monkeypatch.context() as wrong:
        wrong.setattr(
            modeling_unrope,
            "table",
            lambda s, f, w, C, positions: table(s, f, w, 10 * C, positions),
        )
        assert difference() > 1e-3


@pytest.mark.parametrize(
    ("stderr", "message"),
    [("first\nlast\n", "last"), ("", "no error message")],
)
def test_the_last_line_of_transformers_is_passed_on(
    tmp_path, monkeypatch, tiny_decoder, stderr, message
):
    monkeypatch.setattr(gate, "_run", lambda command, *_: CompletedProcess(command, 1, "", stderr))
    with pytest.raises(UserError) as error:
        gate.largest_difference(tiny_decoder(), tmp_path, [0], custom=False)
    assert str(error.value) == f"export: transformers cannot load what was written: {message}"
