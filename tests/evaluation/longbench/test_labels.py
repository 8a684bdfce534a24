"""Categories and buckets of lengths, at their edges."""

from __future__ import annotations

import pytest

from trainer.evaluation.longbench.labels import label


@pytest.mark.parametrize(
    ("words", "bucket"),
    [
        (0, "0–4K words"),
        (3999, "0–4K words"),
        (4000, "4–8K words"),
        (8000, "8–16K words"),
        (16000, "16–32K words"),
        (32000, "32K+ words"),
    ],
)
def test_buckets_of_words_begin_at_thousands(words, bucket):
    assert label("Code Completion", words, 0, 2048).split("|")[:2] == ["Code Completion", bucket]


@pytest.mark.parametrize(
    ("tokens", "bucket", "contexts"),
    [
        (4095, "0–4K tokens", "0–2× ctx"),
        (4096, "4–8K tokens", "2–4× ctx"),
        (8192, "8–16K tokens", "4–8× ctx"),
        (16384, "16–32K tokens", "8–16× ctx"),
        (32768, "32K+ tokens", "16×+ ctx"),
    ],
)
def test_buckets_of_tokens_are_drope_s_in_both_of_its_units(tokens, bucket, contexts):
    """The heads of Tables 9 and 10, of SmolLM with its 2,048 tokens."""
    assert label("QA", 0, tokens, 2048).split("|")[2:] == [bucket, contexts]


def test_contexts_are_those_of_the_model():
    assert label("QA", 0, 5000, 1024).endswith("4–8K tokens|4–8× ctx")
