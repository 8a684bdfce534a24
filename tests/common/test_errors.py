"""Suggestions in place of wrong words."""

from __future__ import annotations

import pytest

from trainer.common.errors import nearest


@pytest.mark.parametrize(
    ("word", "choices", "choice"),
    [
        ("promt", ["prompts", "prompt", "stop"], "prompt"),
        ("yarn", ["rope"], None),
        ("yarn", [], None),
    ],
)
def test_the_choice_that_is_spelt_most_alike_is_suggested(word, choices, choice):
    assert nearest(word, choices) == choice
