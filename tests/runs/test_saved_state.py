"""What a checkpoint's description must hold, as a stranger may have written it."""

from __future__ import annotations

import copy
import json

import pytest

from tests.training.test_run import checkpoint_of
from trainer.common.errors import UserError
from trainer.runs.checkpoints import read_state
from trainer.runs.saved_state import read_run_state, read_saved


@pytest.fixture(scope="module")
def state(finished):
    return read_state(checkpoint_of(finished[0]))


def changed(state, path, value):
    """A copy with the value at a path of keys; None of them: without it."""
    result = copy.deepcopy(state)
    *groups, last = path
    place = result
    for key in groups:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return result


def refusal(checkpoint, state):
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError) as error:
        read_saved(checkpoint)
    begins = f"checkpoint: state.json of {checkpoint.name!r} is damaged: "
    return str(error.value).removeprefix(begins)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["step"], -1, "step: Input should be greater than or equal to 0."),
        (["step"], 1.5, "step: "),
        (["step"], 10**15 + 1, "step: Input should be less than or equal to"),
        (["model"], ..., "model: Field required."),
        (["model", "vocab_size"], None, "model.vocab_size: expected a number."),
        (["model", "vocab_size"], 0, "model.vocab_size: Input should be greater than"),
        (["model", "hidden_size"], 1 << 21, "model.hidden_size: Input should be less than"),
        (["model", "num_hidden_layers"], 3, "layout: 2 layers for 3 of the model."),
        (
            ["model", "qk_norm", "when"], "never",
            "layout: query and key norms are on, and the model has none.",
        ),
        (["layout"], None, "layout: expected the encodings of all layers."),
        (["layout", "training_length"], 0, "layout.training_length: Input should be greater"),
        (["tokenizer"], "{", "tokenizer: "),
        (
            ["model", "vocab_size"], 405,
            "tokenizer: it has 406 tokens, the model 405 embeddings.",
        ),
        (["skips"], [[1, -1]], "skips.0.1: Input should be greater than or equal to 0."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_place(state, tmp_path, path, value, message):
    assert refusal(tmp_path, changed(state, path, value)).startswith(message)


@pytest.mark.parametrize("content", [[], 3, None, "x"])
def test_what_is_no_description_is_said(tmp_path, content):
    assert refusal(tmp_path, content) == "layout: expected the encodings of all layers."


def test_a_sound_description_is_given_back_as_it_is(state, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_saved(tmp_path) == state
    # What an earlier version did not know, and this one need not.
    unknown = "format", "tokens", "loss", "versions", "data", "skips", "rewinds", "lengths"
    for key in (*unknown, "benchmarks"):
        less = {k: v for k, v in state.items() if k != key}
        (tmp_path / "state.json").write_text(json.dumps(less))
        assert read_saved(tmp_path) == less


def test_what_training_needs_is_checked_where_it_goes_on(state, tmp_path):
    read_run_state(tmp_path / "step-000012", state)
    read_run_state(tmp_path / "before-drop", state)
    read_run_state(tmp_path / "step-1200000", changed(state, ["step"], 1_200_000))
    for place, values, message in (
        ("step-000013", state, "step: 12."),
        ("step-000012", changed(state, ["data"], None), "data: "),
        ("step-000012", changed(state, ["certificate", "samples"], "x"), "certificate.samples: "),
        ("before-drop", changed(state, ["tally"], ...), "tally: Field required."),
        ("before-drop", changed(state, ["pending_metrics"], ...), "pending_metrics: "),
        ("step-000012", changed(state, ["tally", "sums"], [[0.0, 1.0]]), "tally.sums: "),
        (
            "step-000012",
            changed(state, ["layout_before_drop"], {"spectra": []}),
            "layout_before_drop: Value error, training_length: Field required.",
        ),
    ):
        with pytest.raises(UserError) as error:
            read_run_state(tmp_path / place, values)
        begins = f"checkpoint: state.json of {place!r} is damaged: {message}"
        assert str(error.value).startswith(begins)


def in_first_format(state):
    """As format 1 wrote it: states by the names of classes, a tally by those of attributes."""
    old = {key: value for key, value in state.items() if key not in NEW}
    tally = {TALLY.get(key, key): value for key, value in state["tally"].items()}
    callbacks = {
        "Metrics": {"pending": state["pending_metrics"], "last_loss": state["loss"]},
        "Transitions": {"effects": state["effects"], "before": state["layout_before_drop"]},
        "Lengths": {"history": state["lengths"]},
        "Benchmarks": {"history": state["benchmarks"]},
        "Until": {"phase": "dropped", "losses": state["held_out_losses"]},
    }
    loggers = {"WandbLogger": state["wandb_id"]} if state["wandb_id"] else {}
    return {**old, "format": 1, "tally": tally, "callbacks": callbacks, "loggers": loggers}


NEW = {
    *("pending_metrics", "effects", "layout_before_drop", "held_out_losses"),
    *("lengths", "benchmarks", "wandb_id"),
}
TALLY = {
    **{"loss": "_loss", "steps": "_steps", "skipped": "_skipped"},
    **{"skipped_in_a_row": "_in_a_row", "sums": "_sums"},
}


@pytest.mark.parametrize("numbered", [True, False])
def test_the_first_format_is_read_as_today(state, tmp_path, numbered):
    state = {
        **state,
        "lengths": [{**REACH}],
        "benchmarks": [{"step": 4, "tokens": 512, "dropped": False, "scores": {"a": 0.5}}],
        "held_out_losses": [3.0, 2.5],
        "layout_before_drop": state["layout"],
        "pending_metrics": {"length/loss_1x": 2.0},
        "wandb_id": "1a2b3c4d",
    }
    old = in_first_format(state)
    if not numbered:
        del old["format"]
    (tmp_path / "state.json").write_text(json.dumps(old))
    result = read_saved(tmp_path)
    assert {**result, "format": 2} == state
    assert read_run_state(tmp_path, result) == read_run_state(tmp_path, state)


REACH = {
    "step": 4, "dropped": False, "training_length": 32, "lengths": [32], "loss": [2.0],
    "retrieval": [], "edges": [0, 32], "losses": [2.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("callbacks", "effects"),
    [
        ({"Drop": {"step": 6, "loss_before": 1.0}}, {"recalibrate": 6}),
        ({"Drop": {}}, {}),
        ({}, {}),
        # A program that knows phases writes no Drop; if both are there, phases count.
        ({"Drop": {"step": 6}, "Transitions": {"effects": {"a": {"step": 3}}}}, {"a": 3}),
    ],
)
def test_the_one_drop_of_versions_without_phases_is_that_of_a_phase(
    state, tmp_path, callbacks, effects
):
    old = in_first_format(state)
    old["callbacks"] = {"Metrics": {"pending": {}}, **callbacks}
    (tmp_path / "state.json").write_text(json.dumps(old))
    result = read_run_state(tmp_path, read_saved(tmp_path))
    assert {name: effect.step for name, effect in result.effects.items()} == effects
    assert (result.lengths, result.held_out_losses, result.layout_before_drop) == ([], [], None)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["callbacks"], 3, "callbacks: expected a dictionary."),
        (["callbacks", "Transitions"], 3, "callbacks.Transitions: expected a dictionary."),
        (["callbacks", "Lengths"], None, "callbacks.Lengths: expected a dictionary."),
        (["callbacks", "Lengths"], {"history": 3}, "lengths: Input should be a valid array."),
        (["loggers"], [], "loggers: expected a dictionary."),
    ],
)
def test_a_first_format_that_is_damaged_is_refused(state, tmp_path, path, value, message):
    assert refusal(tmp_path, changed(in_first_format(state), path, value)) == message
