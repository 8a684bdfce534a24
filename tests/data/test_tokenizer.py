"""When tokenizers count as the same."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from trainer.data.tokenizer import same_tokens, train_tokenizer

CUT = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
CHANGED = {
    "truncation": (CUT, True),
    "added_tokens": ([], False),
    "normalizer": ({"type": "Lowercase"}, False),
    "pre_tokenizer": ({"type": "Whitespace"}, False),
}
"""Keys of a tokenizer.json: another value, and whether ids stay the same."""


@pytest.mark.parametrize("key", CHANGED)
def test_tokenizers_are_the_same_if_all_that_makes_ids_is(key):
    first = train_tokenizer(["a text of a few words"], 300, [" zebra"])
    value, same = CHANGED[key]
    second = Tokenizer.from_str(json.dumps({**json.loads(first.to_str()), key: value}))
    assert same_tokens(first, second) == same
