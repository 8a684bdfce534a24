"""Counts, factors and fractions as words."""

from pathlib import Path

import pytest

from trainer.common.words import REMEDIES, factor_label, remedy


@pytest.mark.parametrize(
    ("factor", "label"),
    [(1, "1×"), (1.5, "1.5×"), (100 / 128, "0.781×"), (128.0, "128×"), (2048, "2048×")],
)
def test_factors_have_few_digits(factor, label):
    assert factor_label(factor) == label


def test_remedies_are_headings_of_the_documentation():
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    headings = {line.removeprefix("## ") for line in page.read_text().splitlines() if "## " in line}
    assert {*REMEDIES.values()} <= headings
    assert remedy("nan") == "What to do: docs/troubleshooting.md, “NaN”."
