"""What a checkpoint's description must hold, as a stranger may have written it."""

from __future__ import annotations

import copy
import json

import pytest

from tests.training.test_run import checkpoint_of
from trainer.common.errors import UserError
from trainer.runs.checkpoints import read_state
from trainer.runs.saved_state import read_saved


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

    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_place(state, tmp_path, path, value, message):
    assert refusal(tmp_path, changed(state, path, value)).startswith(message)


@pytest.mark.parametrize("content", [[], 3, None, "x"])
def test_what_is_no_description_is_said(tmp_path, content):
    assert refusal(tmp_path, content) == "layout: expected the encodings of all layers."


NEW = {
    *("lengths", "benchmarks", "wandb_id"),
}
TALLY = {
    **{"loss": "_loss", "steps": "_steps", "skipped": "_skipped"},
    **{"skipped_in_a_row": "_in_a_row", "sums": "_sums"},
}


REACH = {
    "step": 4, "dropped": False, "training_length": 32, "lengths": [32], "loss": [2.0],
    "retrieval": [], "edges": [0, 32], "losses": [2.0],
}  # fmt: skip
