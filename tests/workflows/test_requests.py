"""Each key of a request reaches what it is said to change, and nothing else.

The keys are walked in the schema: a new one needs a line here.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.relations.leaves import leaves, other_value, with_value
from trainer.common.errors import UserError
from trainer.config import AnalysisConfig, ExportRequest, GenerationRequest, RunConfig
from trainer.interchange.export import Tokens
from trainer.workflows import analyze, export, generate


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


# generate


OF_GENERATION = {
    "checkpoint": "model",
    "prompts": "prompts texts",
    "max_new_tokens": "count",
    "temperature": "temperature",
    "top_p": "top-p",
    "stop": "stops texts",
    "seed": "seed",
}


def generated(request, monkeypatch):
    """What a request of a generation asks for; each text is continued with ``abcd``."""
    seen = {}

    class Words:
        def encode(self, text, add_special_tokens):
            return SimpleNamespace(ids=[*map(ord, text)])

        def decode(self, tokens):
            return "".join(map(chr, tokens))

    def find_model(reference):
        seen["model"] = reference
        tokens = SimpleNamespace(tokenizer=Words(), first=7, stops={9})
        return SimpleNamespace(tokens=tokens, for_inference=lambda device, dtype: None)

    def of_model(model, prompts, count, *, end_tokens, sampler, on_token):
        assert end_tokens == {9}
        seen["prompts"], seen["count"] = prompts, count
        seen["temperature"], seen["top-p"] = sampler.temperature, sampler.top_p
        seen["seed"] = sampler.seed
        new = [*map(ord, "abcd")]
        seen["stops"] = on_token and [on_token(0, new[:n]) for n in range(5)]
        return [new for _ in prompts]

    monkeypatch.setattr(generate, "find_model", find_model)
    monkeypatch.setattr(generate, "generate", of_model)
    seen["texts"] = generate.continue_prompts(request)
    return seen


@pytest.mark.parametrize("key", OF_GENERATION)
def test_a_generation_asks_for_what_its_request_says(monkeypatch, key):
    request = GenerationRequest("a", prompts=["x"], stop=["d"])
    before = generated(request, monkeypatch)
    assert (before["prompts"], before["texts"]) == ([[7, ord("x")]], ["abc"])
    assert before["stops"] == [False] * 4 + [True]
    other = ["c"] if key == "stop" else other_value(request, key)
    after = generated(with_value(request, key, other), monkeypatch)
    assert changed(before, after) == {*OF_GENERATION[key].split()}


# export


OF_EXPORTS = {
    "checkpoint": "model",
    "to": "to",
    "context": "context",
    "tolerance": "tolerance",
    "logit_scale": "layout",
}


def exported(request, decoder, monkeypatch):
    seen = {}

    def find_model(reference):
        seen["model"] = reference
        return SimpleNamespace(
            run=RunConfig(), state={"step": 5, "end_of_text": 3, "token_files": {"a": "b"}},
            path="path", layout=decoder.layout, longest_context=48, load=lambda: decoder,
            is_dropped=False, parameters=1, tokens=SimpleNamespace(tokenizer="words"),
        )  # fmt: skip

    def export_model(model, tokens, to, *, card, **options):
        assert tokens == Tokens("words", 3, {"a": "b"})
        seen.update(to=to, layout=model.layout, **options)

    monkeypatch.setattr(export, "find_model", find_model)
    monkeypatch.setattr(export, "export_model", export_model)
    layout = decoder.layout
    export.export_checkpoint(request)
    decoder.layout = layout
    return seen


@pytest.mark.parametrize("key", OF_EXPORTS)
def test_an_export_has_what_its_request_says(tiny_decoder, monkeypatch, key):
    request, decoder = ExportRequest("a", "b"), tiny_decoder()
    before = exported(request, decoder, monkeypatch)
    after = exported(with_value(request, key, other_value(request, key)), decoder, monkeypatch)
    assert changed(before, after) == {*OF_EXPORTS[key].split()}
    assert (before["context"], before["tolerance"]) == (None, 1e-4)


@pytest.mark.parametrize(
    ("request_", "table"), [(GenerationRequest, OF_GENERATION), (ExportRequest, OF_EXPORTS)]
)
def test_every_key_of_a_request_has_a_line(request_, table):
    assert {*leaves(request_())} == {*table}


# analyze


OF_TARGETS = {
    "dtype": "dtype",
    "method": "layout",
    "needle.depth": "prompt question",
    "needle.kind": "question",
}
"""Keys of an analysis that are read before its topics are; these read the others themselves."""


def target(config, decoder):
    dtypes = []

    def load(device, dtype):
        dtypes.append(dtype)
        return decoder

    words = SimpleNamespace(
        encode=lambda text, add_special_tokens=False: SimpleNamespace(
            ids=[1 + len(word) for word in text.replace(".", " .").split()]
        )
    )
    layout = decoder.layout
    saved = SimpleNamespace(
        name="tiny", layout=layout, load=load, training_length=layout.training_length,
        tokens=SimpleNamespace(tokenizer=words), computed_by=None,
    )  # fmt: skip
    made = analyze.target_of(saved, config, torch.zeros(2, 600, dtype=torch.long), None)
    seen = {"dtype": dtypes, "layout": made.model.layout}
    for name in ("prompt", "question"):
        of_name = getattr(made, name)
        seen[name] = of_name and (of_name.ids.tolist(), of_name.needle, of_name.question)
    decoder.layout = layout
    return seen


@pytest.mark.parametrize("key", leaves(AnalysisConfig()))
def test_a_target_has_what_its_analysis_says(tiny_decoder, key):
    decoder = tiny_decoder(training_length=300)
    config = AnalysisConfig(needle=replace(AnalysisConfig().needle, kind="question"))
    other = "yarn" if key == "method" else other_value(config, key)
    before, after = target(config, decoder), target(with_value(config, key, other), decoder)
    assert before["prompt"] is not None
    assert before["question"] is not None
    assert changed(before, after) == {*OF_TARGETS.get(key, "").split()}


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_lies_where_it_is_asked_for(depth, tiny_decoder):
    """In both prompts, within the training length and as long as a text."""
    decoder = tiny_decoder(training_length=300)
    needle = replace(AnalysisConfig().needle, kind="question", depth=depth)
    seen = target(AnalysisConfig(needle=needle), decoder)
    for name, length in (("prompt", 300), ("question", 600)):
        ids, place, question = seen[name]
        text = length - (place.stop - place.start) - question
        assert [len(row) for row in ids] == [length] * 2
        assert place.start == 1 + round(depth * (text - 1))


@pytest.mark.parametrize(("length", "chosen"), [(31, 1.0), (32, 1.0), (33, 33 / 32)])
def test_a_method_of_an_analysis_counts_from_the_training_length(tiny_decoder, length, chosen):
    decoder = tiny_decoder(training_length=32)
    saved = SimpleNamespace(
        name="tiny", layout=decoder.layout, training_length=32, computed_by=None
    )
    expected = decoder.layout
    if chosen > 1:
        from trainer.positional.rescaling import RESCALINGS

        expected = expected.rescaled(RESCALINGS["yarn"], chosen)
    analyze.use_method(decoder, saved, "yarn", length)
    assert decoder.layout == expected
    with pytest.raises(UserError, match=r"^analysis\.method"):
        analyze.use_method(decoder, saved, "dope", 64)  # fitted on text
