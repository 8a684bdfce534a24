"""A run that begins with another's weights: what it takes over, and the other run's end."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.training.test_run import assert_same_state, checkpoint_of
from trainer.common.errors import UserError
from trainer.model.config import ModelConfig
from trainer.runs import starting_weights as module
from trainer.runs.checkpoint_files import MANIFEST, digests
from trainer.runs.checkpoints import load_decoder, read_state
from trainer.runs.config import RunConfig
from trainer.runs.directory import open_run_directory
from trainer.runs.parsing import merged, parse
from trainer.runs.starting_weights import encodings_of, normalizes, starting_weights
from trainer.training.run import train
from trainer.workflows.training_text import open_corpus


def test_a_run_begins_with_the_weights_of_another_to_the_bit(finished):
    path = checkpoint_of(finished[0])
    state = read_state(path)
    theirs = load_decoder(path, state)
    start = starting_weights(ModelConfig(from_run=str(path)))
    assert (start.name, start.layout, start.config) == (str(path), theirs.layout, theirs.config)
    assert start.require_tokenizer().to_str() == state["tokenizer"]
    assert normalizes(start.layout)
    read = dict(start.decoder().named_parameters())
    assert read.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(read[name], parameter)


def test_norms_that_still_wait_for_a_drop_are_no_part_of_the_weights(finished):
    before = starting_weights(ModelConfig(from_run=str(checkpoint_of(finished[0], 6))))
    assert not normalizes(before.layout)
    assert not [name for name in before.tensors if "q_norm" in name or "k_norm" in name]
    assert len(before.tensors) == len(dict(before.decoder().named_parameters())) - 4


def test_without_a_model_there_is_none_and_two_are_too_many():
    assert starting_weights(ModelConfig()) is None
    with pytest.raises(UserError, match=r"^model: from_pretrained and from_run are given;"):
        starting_weights(ModelConfig(from_run="a", from_pretrained="b"))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "",
            "model.from_run: expected a run directory or a checkpoint, got nothing; null begins "
            "from nothing.",
        ),
        ("no/where", "model.from_run: 'no/where' is neither a run directory nor a checkpoint."),
    ],
)
def test_what_is_no_run_is_said_of_its_key(reference, message):
    for find in (encodings_of, lambda reference: starting_weights(ModelConfig(from_run=reference))):
        with pytest.raises(UserError) as error:
            find(reference)
        assert tuple(map(str, error.value.problems)) == (message,)


@pytest.fixture
def described(finished, tmp_path):
    """A function that gives a checkpoint of the finished run another configuration and step."""
    source = checkpoint_of(finished[0])

    def as_if(step=20, **changes):
        place = tmp_path / "of" / "checkpoints" / "last"
        shutil.copytree(source, place)
        state = json.loads((place / "state.json").read_text())
        values = {"run_dir": "x", "trainer": {"max_steps": 20}, **changes}
        values["model"] = {"num_hidden_layers": 4, "num_key_value_heads": 9}
        config = parse(RunConfig, values)
        state |= {"step": step, "config": json.loads(json.dumps(config, default=vars))}
        (place / "state.json").write_text(json.dumps(state))
        (place / MANIFEST).write_text(json.dumps(digests(place) | digests(place, ".metadata")))
        return str(place)

    return as_if


def test_a_rank_reads_weights_without_the_others(finished, monkeypatch):
    """Which may not read the same ones at the same time."""
    asked, load = [], module.load
    monkeypatch.setattr(
        module,
        "load",
        lambda *arguments, alone=False: (asked.append(alone), load(*arguments, alone=alone)),
    )
    start = starting_weights(ModelConfig(from_run=finished[0].run_dir))
    start.decoder()
    assert asked == [True] * len(start.tensors) != []


TWO = {"layers": ["rope", "alibi"]}


@pytest.mark.parametrize(
    ("changes", "layers", "called"),
    [
        ({}, ["rope"], None),
        ({"label": "Mine"}, ["rope"], None),
        ({"positional": TWO}, ["rope", "alibi"], None),
        ({"drop": {"at": 10}}, ["nope"], "DroPE"),
        ({"drop": {"at": 10}, "label": "Mine"}, ["nope"], "Mine"),
        ({"drop": {"at": 10}, "step": 10}, ["rope"], None),
        ({"drop": {"at": 10}, "step": 11}, ["nope"], "DroPE"),
        ({"drop": {"at": 10, "to": "alibi"}}, ["alibi"], "DroPE"),
        (
            {"drop": {"at": 10, "layers": [-1, 0]}, "positional": TWO},
            ["nope", "alibi", "rope", "nope"], "DroPE",
        ),
        # What heads and pairs have left has no name.
        ({"drop": {"at": 10, "heads": [0]}}, ["rope"], "DroPE"),
        ({"drop": {"at": 10, "slower_than": 9.0}}, ["rope"], "DroPE"),
        (
            {
                "phases": {
                    "a": {"steps": 10}, "b": {"steps": 5, "drop": {"layers": [0]}},
                    "c": {"steps": 5, "drop": {"layers": [1], "to": "alibi"}},
                }
            },
            ["nope", "alibi", "rope", "rope"], "DroPE",
        ),
    ],
)  # fmt: skip
def test_encodings_are_those_that_the_drops_until_then_have_left(
    described, changes, layers, called
):
    positional, name = encodings_of(described(**changes))
    assert (positional.layers, name) == (layers, called)


def test_a_drop_of_all_layers_leaves_no_other_heads(described):
    positional, _ = encodings_of(described(drop={"at": 10}, positional={"heads": {"nope": 1 / 3}}))
    assert (positional.layers, positional.heads) == (["nope"], {})


def test_a_drop_of_some_layers_leaves_the_others_their_heads(described):
    heads = {"heads": {"nope": 1 / 3}, "layers": ["rope"]}
    some = {"at": 10, "layers": [0], "to": "alibi"}
    positional, _ = encodings_of(described(drop=some, positional=heads))
    assert positional.heads == {"nope": 1 / 3}


def test_a_run_has_the_shape_and_the_name_of_its_weights(finished):
    reference = str(checkpoint_of(finished[0]))
    config = parse(RunConfig, {"run_dir": "x", "model": {"from_run": reference}})
    saved = replace(finished[0].model, qk_norm=config.model.qk_norm, from_run=reference)
    assert config.model == replace(saved, vocab_size=config.model.vocab_size)
    assert config.model.qk_norm == replace(finished[0].model.qk_norm, when="always")
    assert (config.label, config.positional.layers) == ("DroPE", ["nope"])
    labelled = parse(RunConfig, {"run_dir": "x", "label": "Own", "model": {"from_run": reference}})
    assert labelled.label == "Own"
    before = str(checkpoint_of(finished[0], 6))
    values = {"run_dir": "x", "model": {"from_run": before, "qk_norm": {"when": "always"}}}
    with pytest.raises(UserError, match=r"^model\.qk_norm\.when: 'always', but the weights were"):
        parse(RunConfig, values)
    assert Path(before).name == "step-000006"


@pytest.fixture
def begun(base, finished, tmp_path):
    """Values of a run that begins with a copy of another, and its end; three steps are undone."""
    shutil.copytree(finished[0].run_dir, tmp_path / "other")
    changes = {
        "run_dir": str(tmp_path / "run"),
        "model": {"from_run": str(tmp_path / "other"), "qk_norm": {"when": "never"}},
        "drop": {"at": None},
    }
    values = merged(base, changes)
    config = parse(RunConfig, values)
    open_run_directory(config)
    train(config, open_corpus(config))
    shutil.copytree(checkpoint_of(config), tmp_path / "end")
    shutil.rmtree(checkpoint_of(config))
    return values, config, tmp_path


def test_it_goes_on_from_its_own_checkpoint_where_the_other_run_has_gone(begun):
    values, config, place = begun
    shutil.rmtree(place / "other")
    again = parse(RunConfig, values)
    assert asdict(again) == asdict(config)
    other = parse(RunConfig, merged(values, {"model": {"attention_backend": "sdpa"}}))
    assert other.model == replace(config.model, attention_backend="sdpa")
    open_run_directory(again)
    train(again, open_corpus(again))
    assert_same_state(checkpoint_of(again), place / "end")


@pytest.mark.parametrize("case", ["another", "not begun", "overwrite"])
def test_whatever_still_needs_the_other_run_misses_it(begun, case):
    values, _, place = begun
    shutil.rmtree(place / "other")
    if case == "another":
        values = merged(values, {"model": {"from_run": "elsewhere"}})
    elif case == "not begun":
        shutil.rmtree(place / "run" / "checkpoints")
    else:
        values = {**values, "overwrite": True}
    with pytest.raises(UserError, match=r"^model\.from_run: '.*' is neither a run directory nor"):
        parse(RunConfig, values)
