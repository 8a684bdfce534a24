"""Exports of runs: before and after the drop, with scaled logits, from published weights."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.small_runs import trained_in
from trainer.checkpoint import BEFORE_DROP, find_checkpoint
from trainer.config import (
    DropConfig,
    ExportRequest,
    PhaseConfig,
    RescaleConfig,
    RunConfig,
    TrainerConfig,
)
from trainer.data.tokenizer import SpecialTokens
from trainer.evaluation.saved_model import SavedModel
from trainer.runs.models import read_run
from trainer.workflows import export as workflow
from trainer.workflows.export import export_checkpoint


def export(checkpoint, to, **options):
    return export_checkpoint(ExportRequest(str(checkpoint), str(to), **options))


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """The directory of a run of four steps that drops after two."""
    place = tmp_path_factory.mktemp("run") / "tiny"
    steps = {"max_steps": 4, "checkpoint_every": 2}
    trained_in(place, base, drop={"at": 2}, trainer=steps)
    return place


CHANGES = {
    "drop": {"drop": DropConfig(at=6, layers=[0])},
    "rescale": {
        "phases": {"a": PhaseConfig(6), "b": PhaseConfig(6, rescale=RescaleConfig(factor=2.0))}
    },
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("step", "context"), [(0, 64), (5, 64), (6, 64), (7, 32), (12, 32)])
def test_a_change_ends_what_longer_sequences_taught_before(
    tiny_decoder, monkeypatch, change, step, context
):
    """The checkpoint of a change's own step is from before it."""
    model = tiny_decoder(training_length=32)
    saved = SavedModel(
        title="RoPE",
        name="tiny",
        reference="tiny",
        path=Path("tiny"),
        home=Path("tiny"),
        tokens=SpecialTokens(None, None, None, 0, frozenset()),
        layout=model.layout,
        read=lambda device, dtype: model,
        fingerprint="",
        parameters=1,
        longest_context=64,
        run=RunConfig(trainer=TrainerConfig(max_steps=12), **change),
        state={"step": step, "end_of_text": 0, "token_files": {}},
    )
    exported = []
    monkeypatch.setattr(workflow, "use_cores", lambda: None)
    monkeypatch.setattr(workflow, "find_model", lambda reference: saved)
    monkeypatch.setattr(workflow, "export_model", lambda *args, **options: exported.append(args[0]))
    export("tiny", "to")
    assert exported[0].layout.training_length == context


@pytest.mark.parametrize(
    ("layers", "is_dropped", "encoding", "context"),
    [
        (["rope"], False, "kept", 64),
        (["nope"], True, "dropped", 64),
        (["half_rope"], True, "changed", 32),
        (["alibi"], True, "changed", 32),
        (["rope", "nope"], True, "changed", 32),
    ],
)
def test_the_page_of_an_export_tells_what_became_of_the_encoding(
    tiny_decoder, monkeypatch, layers, is_dropped, encoding, context
):
    """Scores are multiplied in layers that see more than C; a model without positions reads on."""
    model = tiny_decoder(layers=layers, training_length=32, windows=[None, 16])
    model.layout = model.layout.map(lambda s: s.with_temperature(scale=1.5))
    at = 6 if is_dropped else None
    run = RunConfig(name="mine", trainer=TrainerConfig(max_steps=12), drop=DropConfig(at=at))
    run = replace(run, model=replace(run.model, from_run="runs/old" if is_dropped else None))
    saved = SimpleNamespace(
        run=run, state={"step": 10, "end_of_text": 0, "token_files": {}}, layout=model.layout,
        path="path", longest_context=64, is_dropped=is_dropped, parameters=123,
        tokens=SimpleNamespace(tokenizer=None), load=lambda: model,
    )  # fmt: skip
    exported = []
    monkeypatch.setattr(workflow, "find_model", lambda reference: saved)
    monkeypatch.setattr(workflow, "export_model", lambda *_, **options: exported.append(options))
    export("tiny", "to", logit_scale=2.0)
    assert exported[0]["card"] == {
        "title": "mine", "parameters": 123, "steps": 10, "encoding": encoding,
        "logit_scale": 2.0, "training_length": 32, "began_with": "old" if is_dropped else None,
    }  # fmt: skip
    assert model.layout.training_length == context
    scales = [layer.spectra[0].temperature.scale for layer in model.layout.layers]
    assert scales == [3.0, 1.5]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(("step", "kind"), [(None, "Qwen3"), (BEFORE_DROP, "Llama")])
def test_transformers_computes_a_run_s_logits_on_its_text(trained, tmp_path, step, kind):
    checkpoint = trained / "checkpoints" / step if step else find_checkpoint(str(trained))
    export(checkpoint, tmp_path / "out")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(hf).__name__ == f"{kind}ForCausalLM"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("Sentence 7", return_tensors="pt")["input_ids"]
    ours = read_run(checkpoint).decoder()(ids)
    torch.testing.assert_close(hf(ids).logits, ours, rtol=0, atol=1e-4)
    assert "# tiny" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
@torch.no_grad()
def test_an_export_may_multiply_its_attention_logits(trained, tmp_path):
    path = find_checkpoint(str(trained))
    export(path, tmp_path / "out", logit_scale=1.2)
    assert "times 1.2" in (tmp_path / "out" / "README.md").read_text()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours = read_run(path).decoder()
    ours.layout = ours.layout.map(lambda spectrum: spectrum.with_temperature(scale=1.2))
    ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drop", "length"), [({"at": None}, 32), ({"at": 0}, 32), ({"at": 0, "layers": [0]}, 24)]
)
def test_a_model_has_the_longest_context_that_it_was_trained_with(base, tmp_path, drop, length):
    """Engines refuse longer prompts. Where a drop leaves positions, its training length counts."""
    values = base | {"model": base["model"] | {"qk_norm": {"when": "never"}}}
    short = {"trainer": {"max_steps": 2}, "drop": {"at": None}}
    trained_in(tmp_path / "long", values, **short)
    export(tmp_path / "long", tmp_path / "published")
    start = {"from_pretrained": str(tmp_path / "published")}
    again = {"data": {"sequence_length": 24, "needles": {"share": 0.0}}, "model": start}
    trained_in(tmp_path / "short", values, **short | again | {"drop": drop})
    export(tmp_path / "short", tmp_path / "to")
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert written["max_position_embeddings"] == length
