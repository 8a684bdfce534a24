"""Parts of a preparation, and its workers."""

from __future__ import annotations

import pytest

from trainer.workflows.requests import PrepareConfig


@pytest.mark.parametrize(
    ("part", "numbers"), [("1/1", (1, 1)), ("3/16", (3, 16)), ("16/16", (16, 16))]
)
def test_a_part_is_one_of_so_many(part, numbers):
    config = PrepareConfig(part, workers=1)
    assert config.problems() == []
    assert config.number_of == numbers


@pytest.mark.parametrize("part", ["0/1", "2/1", "1", 1, "1/x", "1/2/3", "-1/2", " 1/2", "1/0", ""])
def test_what_is_no_part_is_named(part):
    assert [*map(str, PrepareConfig(part).problems())] == [
        f"prepare.part: expected a part and how many there are, such as 3/16, got {part!r}."
    ]
