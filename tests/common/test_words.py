"""Counts, factors and fractions as words."""

import pytest

from trainer.common.words import factor_label


@pytest.mark.parametrize(
    ("factor", "label"),
    [(1, "1×"), (1.5, "1.5×"), (100 / 128, "0.781×"), (128.0, "128×"), (2048, "2048×")],
)
def test_factors_have_few_digits(factor, label):
    assert factor_label(factor) == label
