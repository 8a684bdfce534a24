"""What a checkpoint's description must hold, as a stranger may have written it."""

from __future__ import annotations

import copy
import json

import pytest

from tests.training.test_run import checkpoint_of
from trainer.common.errors import UserError
from trainer.runs.checkpoints import read_state
from trainer.runs.saved_state import callback_states, check_resumable, read_saved


@pytest.fixture(scope="module")
def state(finished):
    return read_state(checkpoint_of(finished[0]))


def changed(state, path, value):
    """A copy with the value at a path of keys; None of them: without it."""
    found = copy.deepcopy(state)
    *groups, last = path
    place = found
    for key in groups:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return found


def refusal(checkpoint, state):
    (checkpoint / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError) as error:
        read_saved(checkpoint)
    begins = f"checkpoint: state.json of {checkpoint.name!r} is damaged: "
    return str(error.value).removeprefix(begins)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["step"], -1, "step: Input should be greater than or equal to 0."),
        (["step"], 1.5, "step: "),
        (["step"], 10**15 + 1, "step: Input should be less than or equal to"),
        (["model"], ..., "model: Field required."),
        (["model", "vocab_size"], None, "model.vocab_size: expected a number."),
        (["model", "vocab_size"], 0, "model.vocab_size: expected a positive number, got 0."),
        (["model", "hidden_size"], 1 << 21, "model.hidden_size: expected at most 1,048,576, got"),
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
def test_what_is_wrong_is_named_by_its_place(state, tmp_path, path, value, said):
    assert refusal(tmp_path, changed(state, path, value)).startswith(said)


@pytest.mark.parametrize("content", [[], 3, None, "x"])
def test_what_is_no_description_is_said(tmp_path, content):
    assert refusal(tmp_path, content) == "layout: expected the encodings of all layers."


def test_a_sound_description_is_given_back_as_it_is(state, tmp_path):
    (tmp_path / "state.json").write_text(json.dumps(state))
    assert read_saved(tmp_path) == state
    # What an earlier version did not know, and this one need not.
    for key in ("format", "tokens", "loss", "versions", "data", "skips", "callbacks"):
        less = {k: v for k, v in state.items() if k != key}
        (tmp_path / "state.json").write_text(json.dumps(less))
        assert read_saved(tmp_path) == less


def test_what_training_needs_is_checked_where_it_goes_on(state, tmp_path):
    check_resumable(tmp_path / "step-000012", state)
    check_resumable(tmp_path / "before-drop", state)
    check_resumable(tmp_path / "step-1200000", changed(state, ["step"], 1_200_000))
    for place, found, said in (
        ("step-000013", state, "step: 12."),
        ("step-000012", changed(state, ["data"], None), "data: "),
        ("step-000012", changed(state, ["certificate", "samples"], "x"), "certificate.samples: "),
        ("before-drop", changed(state, ["tally"], ...), "tally: Field required."),
        ("before-drop", changed(state, ["callbacks", "Metrics"], ...), "callbacks.Metrics: "),
        ("step-000012", changed(state, ["tally", "_sums"], [[0.0, 1.0]]), "tally._sums: "),
    ):
        with pytest.raises(UserError) as error:
            check_resumable(tmp_path / place, found)
        begins = f"checkpoint: state.json of {place!r} is damaged: {said}"
        assert str(error.value).startswith(begins)


def test_what_earlier_versions_kept_of_the_one_drop_is_that_of_a_phase():
    drop = {"step": 6, "loss_before": 1.0}
    metrics = {"pending": {}}
    assert callback_states({"callbacks": {"Metrics": metrics, "Drop": drop}}) == {
        "Metrics": metrics, "Transitions": {"effects": {"recalibrate": drop}},
    }  # fmt: skip
    assert callback_states({"callbacks": {"Drop": {}}}) == {"Transitions": {"effects": {}}}
    todays = {"Transitions": {"effects": {"a": drop}}}
    assert callback_states({"callbacks": todays | {"Drop": {}}}) == todays
    given = {"callbacks": todays | {"Drop": drop}}
    assert callback_states(given) == todays
    assert "Drop" in given["callbacks"]  # left as it was
