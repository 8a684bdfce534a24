"""Suggestions in place of wrong words."""

from __future__ import annotations

from itertools import product

import pytest

from trainer.common.errors import edits, nearest


def by_definition(word: str, other: str) -> int:
    """Levenshtein's recursion."""
    if not word or not other:
        return len(word) + len(other)
    return min(
        by_definition(word[1:], other) + 1,
        by_definition(word, other[1:]) + 1,
        by_definition(word[1:], other[1:]) + (word[0] != other[0]),
    )


def test_edits_are_those_of_the_definition():
    words = ["".join(letters) for length in range(4) for letters in product("ab", repeat=length)]
    for word, other in product(words, words):
        assert edits(word, other) == by_definition(word, other)


@pytest.mark.parametrize(
    ("word", "choices", "choice"),
    [
        ("promt", ["prompts", "prompt", "stop"], "prompt"),
        ("abxcd", ["cdabx", "abcd"], "abcd"),
        ("yarn", ["rope"], None),
        ("yarn", [], None),
    ],
)
def test_the_nearest_choice_takes_the_fewest_edits(word, choices, choice):
    assert nearest(word, choices) == choice
