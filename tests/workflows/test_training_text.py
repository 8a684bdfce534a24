"""What a run reads, and which tokenizer it reads it with."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from trainer.common.errors import UserError
from trainer.config import RunConfig
from trainer.data.tokenizer import TextTokenizer
from trainer.runs.arms import arms_of, check_arms
from trainer.runs.parsing import parse
from trainer.workflows import training_text
from trainer.workflows.training_text import (
    check_evaluated_text,
    check_vocabularies,
    data_of_arms,
    tokenizer_of_weights,
    vocabulary_problems,
)

PHASES = {"a": {"steps": 2}, "b": {"steps": 2, "sequence_length": 64},
          "c": {"steps": 2, "sequence_length": 16}}  # fmt: skip


@pytest.mark.parametrize(("phases", "length"), [({}, 32), (PHASES, 64)])
def test_text_must_hold_the_longest_sequences_of_any_arm(phases, length):
    controls = {"other": {"phases": phases}}
    for keys in ({"phases": phases}, {"controls": controls}):
        config = parse(RunConfig, {"run_dir": "x", "data": {"sequence_length": 32}, **keys})
        assert data_of_arms(config) == replace(config.data, sequence_length=length)


@pytest.mark.parametrize(
    ("path", "own", "start", "found"),
    [
        (None, None, None, None),
        # The run's tokenizer may have been trained on another text.
        (None, "kept", "weights", TextTokenizer("of the run", (1,))),
        (None, None, "weights", TextTokenizer("of the weights", (2,))),
        ("a.json", "kept", "weights", None),
    ],
)
def test_weights_bring_their_tokenizer_where_no_other_is_given(
    monkeypatch, path, own, start, found
):
    def weights(model):
        return start and SimpleNamespace(require_tokenizer=lambda: "of the weights", eos=(2,))

    def read(place, hashed):
        assert (place, hashed) == ("kept", False)
        return {"tokenizer": "of the run", "end_of_text": 1}

    monkeypatch.setattr(training_text, "own_checkpoint", lambda config: own)
    monkeypatch.setattr(training_text, "starting_weights", weights)
    monkeypatch.setattr(training_text, "read_state", read)
    monkeypatch.setattr(training_text, "Tokenizer", SimpleNamespace(from_str=str))
    config = RunConfig()
    config = replace(config, tokenizer=replace(config.tokenizer, path=path))
    assert tokenizer_of_weights(config) == found


@pytest.mark.parametrize(("size", "fits"), [(256, False), (257, True), (None, True)])
def test_a_vocabulary_has_room_for_the_bytes_that_a_tokenizer_begins_with(size, fits):
    config = RunConfig()
    config = replace(config, model=replace(config.model, vocab_size=size))
    said = [
        f"model.vocab_size: {size} embeddings, but a tokenizer that is trained here has at least "
        "257 tokens; give more, or null."
    ]
    assert [*map(str, vocabulary_problems(config))] == ([] if fits else said)
    given = replace(config, tokenizer=replace(config.tokenizer, path="a.json"))
    assert [*map(str, vocabulary_problems(given))] == []


@pytest.mark.parametrize(("embeddings", "fits"), [(2400, True), (2401, False), (None, True)])
def test_a_tokenizer_that_is_trained_fills_the_embeddings(embeddings, fits):
    config = RunConfig()
    tokenizer = replace(config.tokenizer, vocab_size=300)
    model = replace(config.model, vocab_size=embeddings)
    config = replace(config, model=model, tokenizer=tokenizer)
    found = [*map(str, vocabulary_problems(config))]
    assert len(found) == (not fits)
    begins = "tokenizer.vocab_size: 300 tokens for a model with 2,401 embeddings"
    assert all(said.startswith(begins) and "=2401," in said for said in found)
    given = replace(config, tokenizer=replace(config.tokenizer, path="a.json"))
    assert [*map(str, vocabulary_problems(given))] == []


def test_what_an_evaluation_will_read_is_checked_on_one_of_each(monkeypatch):
    """Of all lengths and arms as they end, with the counts that take least time."""
    seen = {}

    def measured(text, asked, lengths, C):
        seen.update(text=text, few=asked, lengths=lengths, C=C)
        return ["task"], []

    monkeypatch.setattr(training_text, "make_tasks", measured)
    recipes = {"a": ["x"], "b": ["y"]}
    monkeypatch.setattr(
        training_text, "applicable", lambda of, few: seen.update(subjects=of) or (recipes, [])
    )
    monkeypatch.setattr(training_text, "check_prompts", lambda *given: seen.update(checked=given))
    monkeypatch.setattr(training_text, "fit_text", lambda *given: seen.update(fitted=given))
    config = parse(
        RunConfig,
        {
            "data": {"sequence_length": 32, "needles": {"share": 0.5, "mentions": [2, 4]}},
            "evaluation": {"lengths": [1, 2.5], "windows": 9, "needles": {"trials": 9}},
            "drop": {"at": 0.5},
        },
    )
    corpus = SimpleNamespace(first_token=5, test="test")
    check_evaluated_text({"main": config}, corpus)
    few, wanted = seen["few"], config.evaluation
    assert (few.windows, few.fit_windows, few.longbench.limit) == (1, 1, 1)
    assert {few.needles.trials, few.ruler.trials, few.many_shot.trials} == {1}
    assert (few.tasks, few.methods, few.lengths) == (wanted.tasks, wanted.methods, wanted.lengths)
    assert (seen["lengths"], seen["C"]) == ([32, 80], 32)
    assert [subject.layout.rotates for subject in seen["subjects"]] == [False]
    text = seen["text"]
    assert (text.corpus, text.split, text.bos_token, text.training_share) == (
        corpus, "test", 5, 0.5,
    )  # fmt: skip
    assert seen["checked"] == (["task"], [32, 80])
    assert seen["fitted"][:6] == (corpus, 5, few, ["x", "y"], [32, 80], 32)
    seen.clear()
    off = replace(config, evaluation=replace(wanted, enabled=False))
    check_evaluated_text({"main": off}, corpus)
    assert not seen


def test_a_model_has_an_embedding_for_every_token(monkeypatch):
    """Of the run and of a control."""
    corpus = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 299}))
    config = RunConfig()
    for size in (None, 300, 299):
        sized = replace(config, model=replace(config.model, vocab_size=size))
        for begin, arms in (
            ("", {"main": sized, "small": sized}),
            ("controls.small.", {"main": config, "small": sized}),
        ):
            if size == 299:
                with pytest.raises(UserError) as error:
                    check_vocabularies(arms, corpus)
                (problem,) = map(str, error.value.problems)
                assert problem.startswith(f"{begin}model.vocab_size: 299 embeddings, but the")
            else:
                check_vocabularies(arms, corpus)


def test_weights_of_other_tokens_are_refused(monkeypatch):
    def tokenizer(word):
        return Tokenizer(WordLevel({word: 0}, unk_token=word))

    own = {"main": None, "begun": "a"}
    monkeypatch.setattr(
        training_text,
        "tokenizer_of_weights",
        lambda arm: own[arm.name] and TextTokenizer(tokenizer(own[arm.name])),
    )
    arms = {name: RunConfig(name=name) for name in own}
    check_vocabularies(arms, SimpleNamespace(tokenizer=tokenizer("a")))
    with pytest.raises(UserError, match=r"^controls\.begun\.model: its weights came with another"):
        check_vocabularies(arms, SimpleNamespace(tokenizer=tokenizer("b")))


MIXED = {"mixture": {"a": {"weight": 1, "revision": "1"}, "b": {"weight": 2, "revision": "2"}}}


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        ({}, {"optimizer": {"lr": 0.1}}, []),
        ({}, {"data": {"document_mask": True, "needles": {"share": 0.5}}}, []),
        ({}, {"data": {"num_workers": 1}}, []),
        ({}, {"data": {"source": "files", "files": ["other.txt"]}}, ["data"]),
        ({}, {"data": {"revision": "other"}}, ["data"]),
        ({}, {"data": {"text_field": "t"}}, ["data"]),
        ({}, {"data": {"test": 0.2}}, ["data"]),
        ({}, {"data": {"prepared": "elsewhere"}}, ["data"]),
        ({}, {"tokenizer": {"vocab_size": 300}}, ["tokenizer"]),
        (MIXED, {"data": {"mixture": {"a": {"weight": 5}}}}, []),
        (MIXED, {"data": {"mixture": {"b": {"revision": "3"}}}}, ["data"]),
        (MIXED, {"data": {"mixture": {"c": {"weight": 1}}}}, ["data"]),
    ],
)
def test_a_control_of_other_text_than_its_run_is_refused(data, changes, said):
    """It would be trained on the run's."""
    controls = {"other": {**changes, "label": "Other"}}
    config = parse(RunConfig, {"run_dir": "x", "data": data, "controls": controls})
    with pytest.raises(UserError) if said else nullcontext():
        check_arms(arms_of(config))
