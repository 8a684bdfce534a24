"""What an analysis needs, and which model stands beside the one that is analysed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models

from trainer.analysis.topic import Target
from trainer.common.errors import UserError
from trainer.config import AnalysisConfig, AnalysisRequest
from trainer.workflows import analyze


@pytest.mark.parametrize(
    ("kind", "words", "refusal"),
    [
        ("drop", ("a", "b"), None),
        ("offset_features", ("a", "b"), None),
        ("drop", ("a", "c"), "compare: expected a model of the same tokenizer"),
    ],
)
def test_a_model_beside_it_has_the_same_words(monkeypatch, kind, words, refusal):
    def candidate(name, words):
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
        return SimpleNamespace(name=name, reference=name, tokenizer=tokenizer)

    monkeypatch.setattr(analyze, "find_model", lambda given: candidate(given, words))
    request = AnalysisRequest("this", compare="that")
    if refusal is None:
        assert analyze._other(request, candidate("this", ("a", "b")), kind).reference == "that"
    else:
        with pytest.raises(UserError, match=f"^{refusal}"):
            analyze._other(request, candidate("this", ("a", "b")), kind)


def test_what_cannot_be_made_is_left_out_of_all_and_refused_alone(tiny_decoder):
    ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    model = tiny_decoder(layers=["nope"]).eval()

    def analyses(kind):
        return analyze.analyses_of(Target("tiny", model, ids, AnalysisConfig(kind)))

    with pytest.raises(UserError, match=r"^analysis.kind: offset_features: expected a model with"):
        analyses("offset_features")
    (results,) = analyses("synthetic")
    assert results.key == "synthetic"
    assert analyses("drop") == []
