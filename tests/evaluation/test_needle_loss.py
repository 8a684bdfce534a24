"""Needle-driven perplexity: exact lengths, all depths, and the loss of answers alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from trainer.common.errors import UserError
from trainer.evaluation.haystack import Haystack
from trainer.evaluation.needle_loss import AnsweredTexts, answer_loss, answered_texts

NEEDLE = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


@pytest.fixture
def haystack(corpus):
    documents = corpus.documents(corpus.validation, 1 << 20)
    return Haystack(corpus.tokenizer, documents, (corpus.end_of_text,))


def test_each_text_states_a_number_at_its_depth_and_ends_with_it(haystack):
    texts = answered_texts(haystack, 4, 400, seed=0)
    assert texts.tokens.shape == (4, 400)
    for number, (row, count) in enumerate(zip(texts.tokens, texts.answers, strict=True)):
        whole = haystack.tokenizer.decode(row.tolist())
        key, value = NEEDLE.search(whole).groups()
        assert whole.endswith(f"number for {key} mentioned in the provided text is: {value}")
        assert haystack.tokenizer.decode(row[-count:].tolist()).strip() == value
        assert row[0] == haystack.bos[0]
        begin, end = NEEDLE.search(whole).span()
        text = whole.rindex("\n\nThe special") - (end - begin)
        assert number / 4 - 0.1 <= begin / text <= (number + 1) / 4 + 0.1
    again = answered_texts(haystack, 4, 400, seed=0)
    assert (again.tokens == texts.tokens).all()
    assert (answered_texts(haystack, 4, 400, seed=1).tokens != texts.tokens).any()


@torch.no_grad()
def test_the_loss_is_of_the_answers_tokens_a_mean_for_each_text(tiny_decoder):
    """-log p of every token of an answer, its mean, and the mean of these (LongRoPE2)."""
    model = tiny_decoder()
    ids = np.random.default_rng(0).integers(0, 50, (3, 40))
    answers = np.array([2, 5, 1])
    log_p = F.log_softmax(model(torch.from_numpy(ids)).double(), dim=-1)
    expected = [
        np.mean([-log_p[row, t - 1, ids[row, t]].item() for t in range(40 - count, 40)])
        for row, count in enumerate(answers)
    ]
    for batch_tokens in (40, 1000):
        found = answer_loss(model, AnsweredTexts(ids, answers), batch_tokens)
        assert found == pytest.approx(np.mean(expected), rel=1e-5)


def test_an_encoding_that_follows_the_length_has_that_of_the_whole_text(tiny_decoder):
    """Also where the text is one token longer than the training length, and what is read is not."""
    model = tiny_decoder(training_length=39)
    asked = AnsweredTexts(np.random.default_rng(0).integers(0, 50, (2, 40)), np.array([2, 2]))
    with model.using(model.layout.map(lambda s: s.with_temperature(coefficient=3.0))):
        tempered = answer_loss(model, asked, 1000)
    assert tempered != pytest.approx(answer_loss(model, asked, 1000), rel=1e-6)


def test_a_length_without_room_is_named(haystack):
    with pytest.raises(UserError, match=r"evaluation.longrope.search: expected at least \d+ tok"):
        answered_texts(haystack, 1, 20, seed=0)
