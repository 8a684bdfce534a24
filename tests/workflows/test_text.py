"""Text of runs."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.data.conftest import write_texts
from trainer.common.errors import UserError
from trainer.data.tokenizer import SpecialTokens
from trainer.runs.parsing import parse
from trainer.workflows import text
from trainer.workflows.text import check_vocabularies, open_corpus, prepare_texts

PHASES = {"a": {"steps": 2}, "b": {"steps": 2, "sequence_length": 64},
          "c": {"steps": 2, "sequence_length": 32}}  # fmt: skip


@pytest.mark.parametrize(("phases", "length"), [({}, 32), (PHASES, 64)])
def test_text_must_hold_the_longest_sequences_of_any_run(phases, length, monkeypatch):
    monkeypatch.setattr(text, "prepare_corpus", lambda data, *_, **__: data)
    controls = {"other": {"phases": phases}}
    for keys in ({"phases": phases}, {"controls": controls}):
        run = parse({"run_dir": "x", "data": {"sequence_length": 32}, **keys})
        assert open_corpus(run) == replace(run.config.data, sequence_length=length)


def test_a_checkpoint_without_its_state_keeps_no_run_from_resuming(tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
    monkeypatch.setattr(text, "prepare_corpus", lambda *_, wanted, **__: wanted)
    assert open_corpus(parse({"run_dir": str(tmp_path)})) is None


def test_a_resumed_run_gets_the_text_of_its_newest_checkpoint(tmp_path, monkeypatch):
    for name in ("before-drop", "step-000002", "step-000011"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    monkeypatch.setattr(
        text, "regular_checkpoints", lambda d: [d / "step-000002", d / "step-000011"]
    )
    monkeypatch.setattr(text, "read_state", lambda path: {"texts": path.name})
    monkeypatch.setattr(text, "prepare_corpus", lambda *_, alone, wanted: (alone, wanted))
    run = parse({"run_dir": str(tmp_path)})
    assert open_corpus(run) == (True, "step-000011")
    assert open_corpus(parse({"run_dir": str(tmp_path), "overwrite": True})) == (True, None)
    monkeypatch.setattr(text, "regular_checkpoints", lambda _: [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert open_corpus(run) == (False, "before-drop")


def test_weights_bring_their_tokenizer_unless_another_is_configured():
    weights = SimpleNamespace(
        require_tokenizer=lambda: Tokenizer(WordLevel({"<eos>": 0}, unk_token="<eos>")),
        token_files={},
        end_of_text=None,
    )
    run = replace(parse({}), weights=weights)
    assert text.tokens_of_weights(run).end == 0
    other = replace(run.config, tokenizer=replace(run.config.tokenizer, path="tokenizer.json"))
    assert text.tokens_of_weights(replace(run, config=other)) is None
    assert text.tokens_of_weights(parse({})) is None


def test_a_model_has_an_embedding_for_every_token_of_its_own_tokenizer(monkeypatch):
    def tokenizer(word):
        return Tokenizer(WordLevel({word: 299}, unk_token=word))

    corpus = SimpleNamespace(tokenizer=tokenizer("a"))
    run = parse({})
    large, small = (parse({"model": {"vocab_size": size}}) for size in (300, 299))
    check_vocabularies({"main": large}, corpus)
    with pytest.raises(UserError, match="expected at least 300, got 299"):
        check_vocabularies({"main": run, "small": small}, corpus)
    own = SpecialTokens(tokenizer("b"), None, None, 0, frozenset())
    monkeypatch.setattr(text, "tokens_of_weights", lambda run: own)
    with pytest.raises(UserError, match="another tokenizer"):
        check_vocabularies({"main": run}, corpus)


def test_added_tokens_need_embeddings_in_texts_of_a_tokenizer_of_its_own_alone(monkeypatch):
    """Those of weights may be unused; a tokenizer that is trained has the words of statements."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(300)}, unk_token="w0"))
    tokenizer.add_tokens(["<pad>"])
    corpus = SimpleNamespace(tokenizer=tokenizer)
    run = parse({"model": {"vocab_size": 300}})
    tokens = [None]
    monkeypatch.setattr(text, "tokens_of_weights", lambda run: tokens[-1])
    for end, refused in ((None, True), (299, False), (300, True)):
        if end is not None:
            tokens.append(SpecialTokens(tokenizer, None, None, end, frozenset()))
        expected = nullcontext()
        if refused:
            expected = pytest.raises(UserError, match="expected at least 301, got 300")
        with expected:
            check_vocabularies({"main": run}, corpus)


MIXED = {"mixture": {"a": {"weight": 1, "revision": "1"}, "b": {"weight": 2, "revision": "2"}}}


@pytest.mark.parametrize(
    ("data", "changes", "said"),
    [
        ({}, {"optimizer": {"lr": 0.1}}, []),
        ({}, {"data": {"document_mask": True, "needles": {"share": 0.5}}}, []),
        ({}, {"data": {"source": "files", "files": ["other.txt"]}}, ["data"]),
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
    controls = {"other": changes}
    with pytest.raises(UserError) if said else nullcontext():
        parse({"run_dir": "x", "data": data, "controls": controls})


def test_all_texts_of_a_mixture_have_the_tokenizer_of_the_first(tmp_path):
    write_texts(tmp_path / "texts")
    mixture = {name: {"files": [str(tmp_path / "texts" / f"{name}.jsonl")]} for name in "01"}
    data = {"source": "files", "mixture": mixture, "cache_dir": str(tmp_path / "cache")}
    run = parse({"data": data, "tokenizer": {"vocab_size": 300}})
    first, second = lines = list(prepare_texts(run))
    for line in lines:
        assert re.fullmatch(r".*jsonl: \d+ documents, tokens train [\d,]+, val.*, test .*", line)
    places = [Path(line.rpartition(" in ")[2]) / "tokenizer.json" for line in (first, second)]
    assert places[0].read_text() == places[1].read_text()
    assert list(prepare_texts(run)) == lines
