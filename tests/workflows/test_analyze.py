"""What an analysis needs, and which model stands beside the one that is analysed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models

from trainer.errors import UserError
from trainer.runs.memory import needed_memory
from trainer.workflows import analyze
from trainer.workflows.analysis_request import AnalysisRequest


def test_texts_that_do_not_fit_into_memory_are_named(tiny_decoder, monkeypatch):
    config, ids = tiny_decoder().config, torch.zeros(3, 1000, dtype=torch.long)
    needed = needed_memory(config, 3000, 2)
    monkeypatch.setattr(analyze, "free_memory", lambda device: needed)
    analyze._check_memory(config, ids, models=2, device="cpu")
    monkeypatch.setattr(analyze, "free_memory", lambda device: needed - 1)
    size = f"{needed / 2**30:.1f} GiB"
    with pytest.raises(UserError) as error:
        analyze._check_memory(config, ids, models=2, device="cpu")
    assert error.value.problems == (
        f"analysis.length: 3 x 1,000 tokens need about {size}, and {size} are free; take fewer or "
        "shorter texts.",
    )


@pytest.fixture
def beside(tiny_decoder, monkeypatch):
    """What stands beside a model, where another of these layers and words is named."""

    def found(kind, layers=("rope",), words=("a", "b")):
        def candidate(given, layers, words):
            tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
            layout = tiny_decoder(layers=list(layers)).layout
            return SimpleNamespace(given=given, tokenizer=tokenizer, layout=layout)

        monkeypatch.setattr(
            analyze, "find_candidate", lambda given, key: candidate(given, layers, words)
        )
        request = AnalysisRequest("this", compare="that")
        return analyze._other(request, candidate("this", ["rope"], ["a", "b"]), kind).given

    return found


def test_a_model_beside_it_has_the_same_words_and_for_offsets_a_rotation(beside):
    assert beside("drop", ["nope"]) == beside("all", ["nope"]) == "that"
    assert beside("offset_features", ["rope", "nope"]) == "that"  # in some layer
    for asked, said in (
        (
            ("sinks",),
            "compare: only for +analysis=drop, offset_features and all, not for 'sinks'.",
        ),
        (("drop", ["rope"], ["a", "c"]), "compare: 'that' has another tokenizer than the check"),
        (
            ("offset_features", ["nope"]),
            "compare: +analysis=offset_features expected a model with a rotary encoding, and "
            "'that' has no rotation in any head.",
        ),
    ):
        with pytest.raises(UserError) as error:
            beside(*asked)
        (problem,) = error.value.problems
        assert problem.startswith(said)
