"""Suggestions in place of wrong words."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.common.errors import near_path, nearest


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


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("text.tx", "text.txt"),
        ("texts.txt", "text.txt"),
        ("missing.txt", None),
    ],
)
def test_files_are_suggested_if_their_names_are_alike_without_suffixes_too(
    tmp_path, monkeypatch, name, near
):
    monkeypatch.chdir(tmp_path)
    for present in ("bin.txt", "text.txt"):
        Path(present).touch()
    assert near_path(Path(name)) == ("" if near is None else f"Did you mean {near!r}?")
