"""Needle prompts for analyses: what they hold, and where."""

from __future__ import annotations

import re

import pytest
import torch

from trainer.data.tokenizer import train_tokenizer
from trainer.workflows.needle_prompts import needle_prompt


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_tokenizer([], 257, [])


def test_a_statement_stands_at_a_tenth_and_its_question_at_the_end(byte_tokenizer):
    words = byte_tokenizer.encode("So it goes. " * 200).ids
    ids = torch.tensor([words[:2000], words[12:2012]])
    made = needle_prompt(byte_tokenizer, ids, 1500)
    assert made.ids.shape == (2, 1500)
    for row in made.ids.tolist():
        statement = byte_tokenizer.decode(row[made.needle])
        found = re.fullmatch(r" One of the special magic numbers for (.+) is: \d{7}\.", statement)
        asked = f"\n\nThe special magic number for {found[1]} mentioned in the provided text is:"
        assert byte_tokenizer.decode(row).endswith(asked)
        text = 1500 - len(row[made.needle]) - len(byte_tokenizer.encode(asked).ids)
        assert abs(made.needle.start - 0.1 * text) <= 2


@pytest.mark.parametrize("seed", range(6))
def test_what_is_asked_for_is_what_was_stated(byte_tokenizer, seed):
    ids = torch.tensor([byte_tokenizer.encode("So it goes. " * 200).ids[:2000]])
    made = needle_prompt(byte_tokenizer, ids, 1500, seed)
    (row,) = made.ids.tolist()
    stated = byte_tokenizer.decode(row[made.needle])
    asked = byte_tokenizer.decode(row[-made.question :])
    pattern = r" One of the special magic numbers for (.+) is: \d{7}\."
    key = re.fullmatch(pattern, stated)[1]
    assert asked == f"\n\nThe special magic number for {key} mentioned in the provided text is:"
    # As long as it has to be at least, and not a token shorter.
    least = 5 * (made.needle.stop - made.needle.start + made.question)
    assert needle_prompt(byte_tokenizer, ids, least, seed) is not None
    assert needle_prompt(byte_tokenizer, ids, least - 1, seed) is None


def test_where_there_is_no_room_there_is_none(byte_tokenizer):
    ids = torch.zeros(1, 1000, dtype=torch.long)
    assert needle_prompt(byte_tokenizer, ids, 300) is None
    assert needle_prompt(byte_tokenizer, ids, 1001) is None


def test_a_statement_stands_also_at_the_very_beginning_and_end(byte_tokenizer):
    ids = torch.tensor([byte_tokenizer.encode("So it goes. " * 200).ids[:2000]])
    first = needle_prompt(byte_tokenizer, ids, 1500, depth=0.0)
    assert first.needle.start == 1
    last = needle_prompt(byte_tokenizer, ids, 1500, depth=1.0)
    asked = byte_tokenizer.decode(last.ids[0, -last.question :].tolist())
    assert asked.startswith("\n\nThe special magic number for")
    assert last.needle.stop == 1500 - last.question
