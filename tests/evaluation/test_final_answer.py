"""Final answers of solutions in MATH's notation."""

from __future__ import annotations

import pytest

from trainer.evaluation.final_answer import boxed, final_answer, normalised


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed{2}, of 3", "2"),
        (r"\boxed{\{1, {2}\}} {", r"\{1, {2}\}"),
        (r"12 + 5 = 17, no: -1,234.5", "-1,234.5"),
        (r"\boxed{7", "7"),
        ("I do not know.", ""),
    ],
)
def test_the_boxed_answer_or_else_the_last_number(text, answer):
    assert final_answer(text) == answer


def test_nothing_boxed():
    assert boxed("17") is None
    assert boxed(r"\boxed{7") is None


@pytest.mark.parametrize(
    "same",
    [
        (r"\dfrac{1}{2}", r"\frac{1}{2}", r" \tfrac{1} {2} "),
        (r"\left(1, 2\right)", "(1,2)"),
        ("1,234,567", "1234567", "1{,}234{,}567".replace("{,}", r"\!,")),
        (r"45^\circ", r"45^{\circ}", "45"),
        (r"50\%", "50%", r"50\,"),
        (r"\text{east}", "east", "east."),
        (r"\$5", "$5$", "5"),
    ],
)
def test_looks_do_not_matter(same):
    assert len({normalised(answer) for answer in same}) == 1


def test_values_matter():
    assert normalised("12") != normalised("1.2") != normalised("-1.2")
    assert normalised(r"\frac{1}{2}") != normalised(r"\frac{2}{1}")
