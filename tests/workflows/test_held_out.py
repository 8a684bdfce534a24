"""Held-out text of finished models: whose text, and in which tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.common.errors import Problem, UserError
from trainer.data.config import DataConfig, TokenizerConfig
from trainer.workflows import held_out
from trainer.workflows.held_out import held_out_corpus

OWN, GIVEN = DataConfig(sequence_length=7), DataConfig(sequence_length=9)
OF_RUN = TokenizerConfig(vocab_size=300)


@pytest.fixture
def opened(monkeypatch):
    """What text is prepared of, for a model of a run or of elsewhere; tokenizers are words."""

    def of(text, *, own=True, trained=False, state=None, found="the same", problem=None):
        asked = []

        def prepare(*given, **options):
            asked.append((given, options))
            if problem is not None:
                raise UserError(Problem(*problem.split(": ", 1)))
            return SimpleNamespace(tokenizer=found)

        monkeypatch.setattr(held_out, "prepare_corpus", prepare)
        monkeypatch.setattr(held_out, "same_tokens", lambda one, other: one == other)
        model = SimpleNamespace(is_trained=trained)
        run = SimpleNamespace(model=model, data=OWN, tokenizer=OF_RUN) if own else None
        candidate = SimpleNamespace(run=run, tokenizer="the same", state=state or {})
        held_out_corpus(text, candidate)
        return asked[0]

    return of


def test_a_model_is_read_the_text_of_its_run_as_the_run_has_read_it(opened):
    assert opened(None) == ((OWN, OF_RUN), {"wanted": None})
    state = {"data": {"texts": ["a directory"]}}
    assert opened(None, state=state) == ((OWN, OF_RUN), {"wanted": ["a directory"]})
    with pytest.raises(UserError, match="it was trained with another tokenizer than its text"):
        opened(None, found="another")


@pytest.mark.parametrize(
    ("text", "how", "source"),
    [
        (GIVEN, {}, GIVEN),
        (GIVEN, {"own": False}, GIVEN),
        (None, {"own": False}, DataConfig()),
        (None, {"trained": True}, OWN),  # with the tokenizer of the weights it began with
    ],
)
def test_other_text_is_read_in_the_models_own_tokens(opened, text, how, source):
    assert opened(text, **how) == ((source, TokenizerConfig(), "the same"), {})


def test_what_is_wrong_with_other_text_is_said_of_its_own_key(opened):
    said = "data.files: there is no file"
    with pytest.raises(UserError, match=r"^text\.files: there is no file$"):
        opened(GIVEN, problem=said)
    for own in (True, False):
        with pytest.raises(UserError, match=r"^data\.files: there is no file$"):
            opened(None, own=own, problem=said)
